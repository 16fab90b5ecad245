/*
 * A program that has merged memory and then does something out of the ordinary.
 *
 * `odd MODE` maps and offers memory, waits until a part of it is merged, does what MODE says, compares
 * all bytes, and ends with 0. It ends with 3 where a byte differs, with 4 where a call fails.
 * With -DEARLY this is a library that registers its fork handlers before the agent does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PAGES 8192ul

extern pthread_mutex_t early_mutex __attribute__((weak));
extern void *early_advised __attribute__((weak));

#ifdef EARLY
pthread_mutex_t early_mutex = PTHREAD_MUTEX_INITIALIZER;
void *early_advised;

static void prepare(void)
{
	pthread_mutex_lock(&early_mutex);
	if (early_advised)
		madvise(early_advised, PAGE, MADV_NORMAL);
}

static void release(void)
{
	pthread_mutex_unlock(&early_mutex);
}

__attribute__((constructor)) static void begin(void)
{
	pthread_atfork(prepare, release, release);
}
#else

static unsigned char *mem;

static void must(int worked, const char *what)
{
	if (worked)
		return;
	fprintf(stderr, "odd: %s: %s\n", what, strerror(errno));
	_exit(4);
}

static uint64_t word_of(size_t page, size_t i)
{
	/* Each content is in eight places. */
	return (page % (PAGES / 8) + 1) * 0x9e3779b97f4a7c15ull + i;
}

static void offer(void)
{
	mem = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(mem != MAP_FAILED, "mmap");
	for (size_t page = 0; page < PAGES; page++)
		for (size_t i = 0; i < PAGE / 8; i++)
			((uint64_t *)(mem + page * PAGE))[i] = word_of(page, i);
	must(madvise(mem, PAGES * PAGE, MADV_MERGEABLE) == 0, "madvise");
}

static void verify(void)
{
	for (size_t page = 0; page < PAGES; page++)
		for (size_t i = 0; i < PAGE / 8; i++)
			if (((uint64_t *)(mem + page * PAGE))[i] != word_of(page, i)) {
				fprintf(stderr, "odd: page %zu differs\n", page);
				_exit(3);
			}
}

static size_t stored(void)
{
	char line[512];
	unsigned long start, end;
	size_t pages = 0;
	FILE *maps = fopen("/proc/self/maps", "re");
	while (fgets(line, sizeof line, maps))
		if (strstr(line, "memfd:pageone-store") && sscanf(line, "%lx-%lx", &start, &end) == 2)
			pages += (end - start) / PAGE;
	fclose(maps);
	return pages;
}

static void wait_merged(size_t pages)
{
	/* The list is read in parts, and mappings come and go meanwhile: what was seen once may not be seen the next time. */
	for (int i = 0; i < 60000; i++) {
		if (stored() >= pages)
			return;
		usleep(1000);
	}
	must(0, "nothing was merged");
}

/* ---- fork, while another thread holds what a handler wants, and advises ---- */

static volatile int stopping;

static void *advise_with_the_mutex(void *arg)
{
	(void)arg;
	while (!stopping) {
		pthread_mutex_lock(&early_mutex);
		for (size_t page = 0; page < 64; page++)
			madvise(mem + page * PAGE, PAGE, MADV_NORMAL);
		pthread_mutex_unlock(&early_mutex);
		sched_yield();
	}
	return NULL;
}

static void fork_handlers(void)
{
	pthread_t thread;
	must(&early_mutex != NULL, "the early library is loaded");
	early_advised = mem;
	must(pthread_create(&thread, NULL, advise_with_the_mutex, NULL) == 0, "pthread_create");
	for (int i = 0; i < 100; i++) {
		int status;
		pid_t child = fork();
		if (child == 0) {
			verify();
			_exit(0);
		}
		must(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child");
	}
	stopping = 1;
	pthread_join(thread, NULL);
}

/* ---- ends of threads that libc does not see ---- */

static void *exit_raw(void *arg)
{
	(void)arg;
	usleep(100000);
	verify();
	syscall(SYS_exit, 0);
	return NULL;
}

static void raw_exit(void)
{
	pthread_t thread;
	must(pthread_create(&thread, NULL, exit_raw, NULL) == 0, "pthread_create");
	syscall(SYS_exit, 0);
}

/* ---- everything this process has is offered, the agent's own memory too ---- */

static void offer_all(void)
{
	static char line[512];
	static struct { unsigned long start, end; } all[4096];
	for (int round = 0; round < 100; round++) {
		size_t n = 0;
		char perms[8];
		FILE *maps = fopen("/proc/self/maps", "re");
		while (n < 4096 && fgets(line, sizeof line, maps))
			if (sscanf(line, "%lx-%lx %7s", &all[n].start, &all[n].end, perms) == 3 && perms[0] == 'r')
				n++;
		fclose(maps);
		for (size_t i = 0; i < n; i++)
			madvise((void *)all[i].start, all[i].end - all[i].start, MADV_MERGEABLE);
		usleep(10000);
		if (round % 20 == 0)
			verify();
	}
}

/* ---- a sandbox that knows threads only as libc makes them, as libvirt has QEMU set up ---- */

static void sandbox(void)
{
	const unsigned thread = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
				CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
#define NUMBER offsetof(struct seccomp_data, nr)
#define LOW_HALF offsetof(struct seccomp_data, args[0])
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, NUMBER),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 8, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fork, 6, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_vfork, 5, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 4, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 2),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW_HALF),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, thread, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
	must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0, "seccomp");
}

/* ---- a process of the same memory, which outlives the one that has the agent ---- */

static int survive(void *arg)
{
	pid_t parent = *(pid_t *)arg;
	while (getppid() == parent)
		usleep(1000);
	usleep(20000);
	verify();
	printf("survived\n");
	fflush(stdout);
	_exit(0);
}

static void sibling(void)
{
	static char stack[256 << 10] __attribute__((aligned(16)));
	static pid_t parent;
	parent = getpid();
	must(clone(survive, stack + sizeof stack, CLONE_VM | SIGCHLD, &parent) > 0, "clone");
	/* Dies in the middle of merging, now earlier, now later. */
	wait_merged(1);
	usleep((unsigned)(getpid() * 7919 % 40000));
	kill(parent, SIGKILL);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	if (strcmp(mode, "sandbox") == 0)
		sandbox();
	offer();
	if (strcmp(mode, "sibling") == 0)
		sibling();
	wait_merged(PAGES / 2);
	if (strcmp(mode, "fork-handlers") == 0)
		fork_handlers();
	else if (strcmp(mode, "raw-exit") == 0)
		raw_exit();
	else if (strcmp(mode, "offer-all") == 0)
		offer_all();
	verify();
	return 0;
}
#endif

/*
 * A program that knows nothing of PageONE, to which an agent comes while it works. Its answers are checked by itself: it says `wrong` and ends
 * when something is not as it should be.
 *
 * attached [MIB] [THREADS] [WORDS]: memory of that size with content that other such processes have too, verified all the time. The words:
 * `offer`: it is offered to the kernel's KSM. `work`: some of it is rewritten, threads come and go, allocate, take signals. `fork`: children
 * verify it as well; what a process shared with a child once stays where it is until it is written. Other threads sleep in a call that begins again;
 * `nap`: in one that begins again by restart_syscall.
 * `vfork`: its only thread waits for a child that never ends. `huge`: the memory is to be of huge pages.
 *
 * What it gives up when its threads run, in this order: `jail`: its root, for an empty directory that is gone. `pit`: its root, for the folder
 * of the fourth argument. `user`: root's rights, for user 61004. `bound`: more rights by an exec (no_new_privs). `secret`: that others of its user
 * may see its memory; `open`: it lets them again. `tight`: all calls but those of a list, as OpenSSH's server before a login.
 *
 * attached MIB THREADS WORDS [NUMBER ACTION]: with a seccomp filter that does ACTION, a number as in BPF, for the call NUMBER, and allows all
 * others; without them it allows everything. With `docker` it allows calls of a list instead, as Docker's default profile has it without
 * CAP_SYS_NICE. `policy`: some memory has nodes of its own before; `mine`: the first thread has. One of the words says when: `filter`: all threads have it from the start. `lonely`: one
 * thread alone. `later`: all threads, by itself, so many microseconds after a number and a line have been read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/mempolicy.h>
#include <linux/seccomp.h>
#include <pthread.h>
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
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul

static unsigned char *memory;
static size_t pages;
static volatile unsigned long rounds, signals;
static int quiet[2], naps;

static void wrong(const char *what)
{
	printf("wrong %s: errno %d\n", what, errno);
	fflush(stdout);
	_exit(1);
}

static void fill(unsigned char *at, size_t page, unsigned long version)
{
	uint64_t seed = page * 0x9e3779b97f4a7c15ull + version;
	for (size_t i = 0; i < PAGE; i += 8) {
		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		memcpy(at + i, &seed, 8);
	}
}

static void check(const unsigned char *at, size_t page, unsigned long version)
{
	unsigned char wanted[PAGE];
	fill(wanted, page, version);
	if (memcmp(at, wanted, PAGE))
		wrong("content");
}

static void took(int signal)
{
	(void)signal;
	signals++;
}

/* Threads that make no more of the calls with which a thread begins. */
static volatile int started;

static void *churn(void *arg)
{
	__atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST);
	unsigned seed = (unsigned)(uintptr_t)arg;
	for (;;) {
		size_t len = (rand_r(&seed) % 64 + 1) * PAGE * 16;
		unsigned char *block = malloc(len);
		if (!block)
			wrong("malloc");
		memset(block, (int)seed, len);
		block = realloc(block, len * 2);
		if (!block || block[len - 1] != (unsigned char)seed)
			wrong("realloc");
		free(block);
		struct timespec moment = { 0, 200000 };
		while (nanosleep(&moment, &moment))
			if (errno != EINTR)
				wrong("nanosleep");
		rounds++;
	}
	return NULL;
}

static void *rest(void *arg)
{
	char byte;
	__atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST);
	struct timespec hour = { 3600, 0 };
	if (naps && nanosleep(&hour, NULL))
		wrong("nap");
	/* Begun again whatever interrupts it. */
	if (read(quiet[0], &byte, 1) != 1)
		wrong("read");
	return arg;
}

static void *nothing(void *arg)
{
	return arg;
}

static void fork_once(void)
{
	pid_t child = fork();
	if (child < 0)
		wrong("fork");
	if (child == 0) {
		for (size_t page = 0; page < pages; page += 7)
			if (page % 16)
				check(memory + page * PAGE, page, 0);
		_exit(7);
	}
	int status;
	while (waitpid(child, &status, 0) != child)
		if (errno != EINTR)
			wrong("waitpid");
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 7)
		wrong("child");
}

static int refused = -1;
static unsigned long action = SECCOMP_RET_ALLOW;

static void install_filter(unsigned flags)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)refused, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, (unsigned)action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = 4, .filter = code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program))
		wrong("filter");
}

#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* Close to what OpenSSH allows (sandbox-seccomp-filter.c), and what this program does from here on. Another call ends the process. */
static void install_list(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(brk), ALLOW(mmap), ALLOW(munmap), ALLOW(mremap), ALLOW(madvise),
		ALLOW(futex), ALLOW(getpid), ALLOW(getppid), ALLOW(gettid), ALLOW(clock_gettime), ALLOW(nanosleep),
		ALLOW(clock_nanosleep), ALLOW(restart_syscall), ALLOW(poll), ALLOW(rt_sigprocmask), ALLOW(rt_sigreturn),
		ALLOW(exit), ALLOW(exit_group),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { .len = sizeof code / sizeof *code, .filter = code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
		wrong("list");
}

/*
 * The part of Docker's default profile (a list of calls to allow; others fail with EPERM) that programs such as this one make, and agents.
 * As there, clone makes no namespaces, clone3 is unknown to the kernel, and no call for memory's nodes is on the list, nor userfaultfd
 * and pidfd_getfd.
 */
static void install_docker(unsigned flags)
{
	const unsigned namespaces = 0x7e020000;
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, namespaces, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		ALLOW(accept4), ALLOW(bind), ALLOW(brk), ALLOW(clock_gettime), ALLOW(clock_nanosleep), ALLOW(close), ALLOW(close_range),
		ALLOW(connect), ALLOW(dup), ALLOW(dup3), ALLOW(epoll_wait), ALLOW(execve), ALLOW(exit), ALLOW(exit_group), ALLOW(fcntl),
		ALLOW(fgetxattr), ALLOW(fork), ALLOW(fstat), ALLOW(ftruncate), ALLOW(futex), ALLOW(getdents64), ALLOW(getegid),
		ALLOW(geteuid), ALLOW(getgid), ALLOW(getpid), ALLOW(getppid), ALLOW(getrandom), ALLOW(get_robust_list),
		ALLOW(getsockopt), ALLOW(gettid), ALLOW(getuid), ALLOW(getxattr), ALLOW(ioctl), ALLOW(kill), ALLOW(listen), ALLOW(lseek),
		ALLOW(madvise), ALLOW(memfd_create), ALLOW(mincore), ALLOW(mlock), ALLOW(mlock2), ALLOW(mmap), ALLOW(mprotect),
		ALLOW(mremap), ALLOW(msync), ALLOW(munlock), ALLOW(munmap), ALLOW(nanosleep), ALLOW(newfstatat), ALLOW(open),
		ALLOW(openat), ALLOW(pause), ALLOW(pidfd_open), ALLOW(pipe2), ALLOW(poll), ALLOW(ppoll), ALLOW(prctl), ALLOW(pread64),
		ALLOW(prlimit64), ALLOW(pwrite64), ALLOW(read), ALLOW(readlink), ALLOW(readlinkat), ALLOW(recvmsg),
		ALLOW(restart_syscall), ALLOW(rseq), ALLOW(rt_sigaction), ALLOW(rt_sigprocmask), ALLOW(rt_sigreturn), ALLOW(sched_yield),
		ALLOW(seccomp), ALLOW(sendmsg), ALLOW(set_robust_list), ALLOW(set_tid_address), ALLOW(sigaltstack), ALLOW(signalfd4),
		ALLOW(socket), ALLOW(tgkill), ALLOW(uname), ALLOW(vfork), ALLOW(wait4), ALLOW(write), ALLOW(writev),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
	};
	struct sock_fprog program = { .len = sizeof code / sizeof *code, .filter = code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program))
		wrong("docker");
}

static int said(const char *words, const char *word)
{
	return words && strstr(words, word) != NULL;
}

/* As daemons do that listen as root and work as another user. */
static void give_up(const char *words, const char *folder)
{
	const unsigned somebody = 61004;
	char empty[] = "/tmp/pageone-jail-XXXXXX";
	if (said(words, "jail") && (!mkdtemp(empty) || chdir(empty) || rmdir(empty) || chroot(".")))
		wrong("jail");
	if (said(words, "pit") && (!folder || chroot(folder) || chdir("/")))
		wrong("pit");
	if (said(words, "user") && (setgroups(0, NULL) || setgid(somebody) || setuid(somebody)))
		wrong("user");
	if (said(words, "bound") && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		wrong("bound");
	if (said(words, "secret") && prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
		wrong("secret");
	if (said(words, "open") && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
		wrong("open");
	if (said(words, "tight"))
		install_list();
}

static void *lonely(void *arg)
{
	install_filter(0);
	__atomic_add_fetch(&started, 1, __ATOMIC_SEQ_CST);
	for (;;)
		pause();
	return arg;
}

/* Installs it at a moment that the test chooses. */
static void *later(void *arg)
{
	char line[32] = "";
	if (read(0, line, sizeof(line) - 1) <= 0)
		return arg;
	struct timespec moment = { 0, strtol(line, NULL, 10) * 1000 };
	nanosleep(&moment, NULL);
	install_filter(SECCOMP_FILTER_FLAG_TSYNC);
	(void)!write(1, "installed\n", 10);
	return arg;
}

static unsigned char *lost;

/* Makes a call by an instruction, past libc. */
static long unseen(long call, void *at, size_t len, size_t new_len, long flags, void *to)
{
	register long r10 __asm__("r10") = flags;
	register void *r8 __asm__("r8") = to;
	__asm__ volatile("syscall" : "+a"(call) : "D"(at), "S"(len), "d"(new_len), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
	return call;
}

/* Unmaps memory past libc when the test says so, or with an argument moves it, and looks at it when the test says so again. */
static void *lose(void *moves)
{
	char word;
	size_t len = 2ul << 20;
	if (read(0, &word, 1) <= 0)
		return NULL;
	if (!moves) {
		long told = unseen(SYS_munmap, lost, len, 0, 0, NULL);
		(void)!write(1, told ? "error\n" : "gone\n", told ? 6 : 5);
		return NULL;
	}
	unsigned char *to = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (size_t at = 0; at < len; at += PAGE)
		if (unseen(SYS_mremap, lost + at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + at) < 0)
			wrong("mremap");
	(void)!write(1, "moved\n", 6);
	if (read(0, &word, 1) <= 0)
		return NULL;
	for (size_t page = 0; page < 512; page++)
		check(to + page * PAGE, page, 0);
	(void)!write(1, "same\n", 5);
	return NULL;
}

int main(int argc, char **argv)
{
	size_t mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 4;
	int threads = argc > 2 ? atoi(argv[2]) : 0;
	int work = argc > 3 && strstr(argv[3], "work") != NULL;
	naps = argc > 3 && strstr(argv[3], "nap") != NULL;
	int forks = argc > 3 && strstr(argv[3], "fork") != NULL;
	pages = (mib << 20) / PAGE;
	memory = mmap(NULL, pages * PAGE + (2ul << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || pipe(quiet))
		wrong("mmap");
	memory = (unsigned char *)(((uintptr_t)memory + (2ul << 20) - 1) & ~((2ul << 20) - 1));
	for (size_t page = 0; page < pages; page++)
		fill(memory + page * PAGE, page, 0);
	if (argc > 3 && strstr(argv[3], "offer") && madvise(memory, pages * PAGE, MADV_MERGEABLE) && errno != EINVAL)
		wrong("madvise");
	if (argc > 3 && strstr(argv[3], "huge") && madvise(memory, pages * PAGE, MADV_HUGEPAGE))
		wrong("huge");
	if (argc > 5) {
		refused = atoi(argv[4]);
		action = strtoul(argv[5], NULL, 0);
	}
	struct sigaction action = { .sa_handler = took, .sa_flags = SA_RESTART };
	sigaction(SIGUSR1, &action, NULL);
	pthread_t thread;
	for (int i = 0; i < threads; i++)
		if (pthread_create(&thread, NULL, i % 4 || !work ? rest : churn, (void *)(uintptr_t)(i + 1)))
			wrong("pthread_create");
	struct timespec begin = { 0, 1000000 };
	while (started < threads)
		nanosleep(&begin, NULL);
	if (argc > 3)
		give_up(argv[3], argc > 4 ? argv[4] : NULL);
	if (argc > 3 && strstr(argv[3], "lonely")) {
		if (pthread_create(&thread, NULL, lonely, NULL))
			wrong("pthread_create");
		while (started <= threads)
			nanosleep(&begin, NULL);
	}
	void *moves = argc > 3 ? strstr(argv[3], "stray") : NULL;
	if (moves || (argc > 3 && strstr(argv[3], "lose"))) {
		lost = mmap(NULL, 2ul << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		for (size_t page = 0; page < 512; page++)
			fill(lost + page * PAGE, page, 0);
		if (madvise(lost, 2ul << 20, MADV_MERGEABLE) || pthread_create(&thread, NULL, lose, moves))
			wrong("lose");
	}
	if (argc > 3 && strstr(argv[3], "later") && pthread_create(&thread, NULL, later, NULL))
		wrong("pthread_create");
	unsigned long node = 1;
	if (argc > 3 && strstr(argv[3], "policy") && syscall(SYS_mbind, memory, 16 * PAGE, MPOL_BIND, &node, 64, 0))
		wrong("policy");
	if (argc > 3 && strstr(argv[3], "mine") && syscall(SYS_set_mempolicy, MPOL_BIND, &node, 64))
		wrong("mine");
	if (argc > 3 && strstr(argv[3], "docker"))
		install_docker(SECCOMP_FILTER_FLAG_TSYNC);
	if (argc > 3 && strstr(argv[3], "filter"))
		install_filter(SECCOMP_FILTER_FLAG_TSYNC);
	/* No call but this one: the filter may refuse another. */
	(void)!write(1, "ready\n", 6);
	if (argc > 3 && strstr(argv[3], "vfork") && vfork() == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	if (argc > 3 && strstr(argv[3], "leave"))
		pthread_exit(NULL);
	unsigned long version = 0;
	for (unsigned long round = 0;; round++) {
		/* Every sixteenth page is rewritten, round by round; the others stay. */
		for (size_t page = 0; page < pages; page++) {
			unsigned long now = page % 16 ? 0 : version;
			check(memory + page * PAGE, page, now);
		}
		if (work) {
			version++;
			for (size_t page = 0; page < pages; page += 16)
				fill(memory + page * PAGE, page, version);
			if (pthread_create(&thread, NULL, nothing, &round) || pthread_join(thread, NULL))
				wrong("thread");
			kill(getpid(), SIGUSR1);
			if (forks && round % 4 == 0)
				fork_once();
		}
		rounds++;
		struct timespec moment = { 0, 1000000 };
		nanosleep(&moment, NULL);
		if (getppid() == 1)
			return 0;
	}
}

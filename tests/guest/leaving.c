/*
 * Detached threads, on stacks of 4 KiB if that may be, end one after another; and libc's calls that do more than enter the kernel. It
 * says `wrong` when something is not as it should be, and ends with its input.
 */
#define _GNU_SOURCE
#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN (4ul << 20)

static volatile unsigned ended;
static unsigned char *memory;

static void *leave(void *arg)
{
	__atomic_add_fetch(&ended, 1, __ATOMIC_RELAXED);
	return arg;
}

static int child(void *arg)
{
	return memory[*(size_t *)arg] != 7;
}

static void wrong(const char *of)
{
	printf("wrong %s\n", of);
	fflush(stdout);
	_exit(1);
}

int main(void)
{
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN > 4096 ? PTHREAD_STACK_MIN : 4096);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		wrong("memory");
	memset(memory, 7, LEN);
	puts("ready");
	fflush(stdout);
	struct pollfd input = { .fd = 0, .events = POLLIN };
	static unsigned char stack[64 * 1024];
	for (size_t round = 0; poll(&input, 1, 0) == 0; round++) {
		unsigned before = ended, made = 0;
		for (pthread_t thread; made < 2; made++)
			if (pthread_create(&thread, &attributes, leave, NULL))
				wrong("thread");
		while (ended - before < made)
			sched_yield();
		size_t at = round * 4096 % LEN;
		int status;
		pid_t pid = clone(child, stack + sizeof stack, SIGCHLD, &at);
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
			wrong("clone");
		if (round % 8 == 0 && geteuid() == 0 && initgroups("root", 0))
			wrong("initgroups");
		usleep(1000);
	}
	return 0;
}

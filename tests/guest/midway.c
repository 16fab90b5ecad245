/*
 * A program whose first thread stands in the middle of libc's munmap, for as long as it likes: it goes through it step by step, and the
 * handler of these steps stays, once the number of the call is in its register and before the call is made. It says `midway` there, and goes on
 * with a byte from its input. Then it says `done`, and stays for another byte.
 *
 * midway thread: it is another thread that does so.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define TRAP 0x100ull

static volatile int passed;

static void say(const char *word)
{
	if (write(1, word, strlen(word)) < 0)
		_exit(2);
}

static void stay(void)
{
	char byte;
	ssize_t got;
	while ((got = read(0, &byte, 1)) < 0 && errno == EINTR)
		;
	if (got != 1)
		_exit(0);
}

static void step(int signal, siginfo_t *info, void *context)
{
	ucontext_t *at = context;
	greg_t *registers = at->uc_mcontext.gregs;
	const unsigned char *code = (const unsigned char *)registers[REG_RIP];
	(void)signal;
	(void)info;
	if (code[0] == 0x0f && code[1] == 0x05 && registers[REG_RAX] == 11) {
		registers[REG_EFL] &= ~TRAP;
		passed = 1;
		say("midway\n");
		stay();
	}
}

static void *work(void *memory)
{
	__asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
	int result = munmap(memory, 4096);
	if (result || !passed)
		_exit(3);
	return NULL;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = step, .sa_flags = SA_SIGINFO | SA_RESTART };
	void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t thread;
	(void)argv;
	if (memory == MAP_FAILED || sigaction(SIGTRAP, &action, NULL))
		return 1;
	munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096); /* the loader has found it */
	if (argc > 1) {
		if (pthread_create(&thread, NULL, work, memory) || pthread_join(thread, NULL))
			return 1;
	} else {
		work(memory);
	}
	say("done\n");
	stay();
	return 0;
}

/*
 * A guest whose agent is to die in a window, and what lives on: another process that
 * shares its memory ("process"), or the rest of the process ("thread").
 *
 * sibling process|thread PAGES: prints "ready" when the memory is offered; what
 * lives on compares all pages again and again, and prints "ok" when the agent has been
 * gone for three rounds, or "bad PAGE".
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mix.h"
#include "threads.h"

#define PAGE 4096ul
#define ROUNDS 3
/* A test that failed leaves nothing behind: seconds. */
#define LONGEST 240

static unsigned char *mem;
static size_t pages;
static uint64_t own;

/* Word `i` of page `page`: some pages are zeros, some this process's alone, most like all others'. */
static uint64_t word(size_t page, size_t i)
{
	if (page % 16 == 5)
		return 0;
	return mix((page % 8 == 3 ? own : 1) * 1000003 + page * 512 + i);
}

static void fill(void)
{
	for (size_t page = 0; page < pages; page++)
		for (size_t i = 0; i < PAGE / 8; i++)
			((uint64_t *)(mem + page * PAGE))[i] = word(page, i);
}

static void say(const char *text, size_t page)
{
	char line[64];
	int len = snprintf(line, sizeof line, "%s %zu\n", text, page);
	if (write(1, line, (size_t)len) != len)
		_exit(2);
}

static void compare(void)
{
	for (size_t page = 0; page < pages; page++)
		for (size_t i = 0; i < PAGE / 8; i++)
			if (((volatile uint64_t *)(mem + page * PAGE))[i] != word(page, i)) {
				say("bad", page);
				_exit(1);
			}
}

static int live_on(void *parent)
{
	alarm(LONGEST);
	for (int rounds = 0; rounds < ROUNDS;) {
		compare();
		rounds += getppid() != (pid_t)(intptr_t)parent;
	}
	say("ok", pages);
	_exit(0);
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	alarm(LONGEST);
	int process = strcmp(argv[1], "process") == 0;
	pages = strtoul(argv[2], NULL, 10);
	own = mix((uint64_t)getpid());
	mem = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		return 2;
	fill();
	if (process) {
		char *stack = malloc(1 << 16);
		intptr_t parent = getpid();
		if (!stack || clone(live_on, stack + (1 << 16), CLONE_VM | SIGCHLD, (void *)parent) < 0)
			return 2;
	}
	if (madvise(mem, pages * PAGE, MADV_MERGEABLE) != 0)
		return 2;
	say("ready", pages);
	while (process)
		pause();
	while (own_threads() < 2)
		usleep(1000);
	while (own_threads() > 1)
		compare();
	for (int rounds = 0; rounds < ROUNDS; rounds++)
		compare();
	/* The calls that wait for the agent's lock go on without the agent. */
	if (munmap(mem, pages * PAGE) != 0)
		return 2;
	say("ok", pages);
	return 0;
}

/* Children, each of which looks at what it inherited, changes it, and looks again. */
#include "model.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

void forget_memory(void);

static void live(size_t first, size_t count, unsigned content)
{
	unsigned char *at = (unsigned char *)ARENA + first * PAGE;
	say(" in the child:");
	forget_memory();
	/* The driver waits for its parent. */
	close(0);
	close(1);
	say_everything();
	for (size_t i = 0; i < count; i += 3)
		say(" %d", write_page(at + i * PAGE, content));
	for (size_t i = 1; i < count; i += 3)
		say(" %d", madvise(at + i * PAGE, PAGE, MADV_DONTNEED) ? errno : 0);
	say("\n  afterwards:");
	say_contents((uintptr_t)at, (uintptr_t)at + count * PAGE);
	/* New memory has what a child's has, and no lock of the parent's. */
	say_everything();
}

/* A child made by vfork has its parent's memory: it changes nothing but a page. */
static void live_for_a_moment(size_t first, unsigned content)
{
	say(" %d", write_page((unsigned char *)ARENA + first * PAGE, content));
}

static pid_t vforked(size_t first, unsigned content)
{
	pid_t child = vfork();
	if (child == 0) {
		live_for_a_moment(first, content);
		_exit(0);
	}
	return child;
}

static pid_t bare(void)
{
	return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

void family(const char *kind, size_t first, size_t count, unsigned content)
{
	pid_t child;
	int status = 0;
	if (strcmp(kind, "vfork") == 0)
		child = vforked(first, content);
	else if (strcmp(kind, "clone") == 0)
		child = bare();
	else if (strcmp(kind, "_Fork") == 0)
		child = _Fork();
	else
		child = fork();
	if (child == 0) {
		live(first, count, content);
		say("\n");
		_exit(0);
	}
	if (child > 0)
		waitpid(child, &status, 0);
	say("\n  child: %d, status %x", child > 0 ? 1 : -errno, (unsigned)status);
}

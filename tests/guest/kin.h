/*
 * A process that shares all memory with this one, and is no thread of it: it counts in pages for as long as it is let, and
 * compares what it finds with what it has written.
 */
#include <sched.h>

static struct kin {
	_Atomic int stop, running;
	size_t first, count;
	uint64_t rounds, lost;
	pid_t pid;
} kin;

/* Not of libc's: its thread's control block is the maker's. */
static int count_on(void *unused)
{
	(void)unused;
	uint64_t wanted = 0;
	while (!kin.stop) {
		for (size_t p = kin.first; p < kin.first + kin.count; p++) {
			volatile uint64_t *word = (volatile uint64_t *)(mem + p * PAGE) + 1;
			if (*word != wanted && kin.rounds)
				kin.lost++;
			*word = wanted + 1;
		}
		wanted++;
		kin.rounds++;
		kin.running = 1;
	}
	return 0;
}

static long start_kin(size_t first, size_t count)
{
	static unsigned char stack[16 * 4096];
	kin = (struct kin){ .first = first, .count = count };
	kin.pid = clone(count_on, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, NULL);
	if (kin.pid < 0)
		return -errno;
	while (!kin.running)
		sched_yield();
	return 0;
}

/* How much of what it wrote was lost. What it leaves counts as known. */
static long stop_kin(void)
{
	kin.stop = 1;
	if (waitpid(kin.pid, NULL, 0) != kin.pid)
		return -errno;
	for (size_t p = kin.first; p < kin.first + kin.count; p++)
		memcpy(shadow + p * PAGE, mem + p * PAGE, PAGE);
	return kin.rounds > 1 ? (long)kin.lost : -EAGAIN;
}

static int lock_on(void *unused)
{
	(void)unused;
	return mlock(mem + kin.first * PAGE, kin.count * PAGE) ? 1 : 0;
}

/* Has such a process lock pages, which makes them whole. The signal that killed it, or 0. */
static long lock_by_kin(size_t first, size_t count)
{
	static unsigned char stack[64 * 4096];
	int status;
	kin = (struct kin){ .first = first, .count = count };
	pid_t pid = clone(lock_on, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, NULL);
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -errno;
	return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

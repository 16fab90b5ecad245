/*
 * A library for tests: offers all private memory of the program that loads it, as it comes.
 *
 * A thread looks at the mappings and calls madvise(MADV_MERGEABLE) for each that is private, anonymous,
 * writable and not small; whose memory that is it does not ask. So the agent's own memory is offered as well. A mapping
 * that lies inside one that it offered is not offered anew for a while: each offer begins the time anew in which
 * pages must rest before they are merged.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../guest/maps.h"

#define LEAST (64ul << 10)

#define MOST 4096
#define PAUSE_US 50000
#define ROUNDS 60

static struct { unsigned long start, end; } offered[MOST];
static size_t count;

static int is_offered(unsigned long start, unsigned long end)
{
	for (size_t i = 0; i < count; i++)
		if (offered[i].start <= start && end <= offered[i].end)
			return 1;
	return 0;
}

static void offer(unsigned long start, unsigned long end)
{
	if (is_offered(start, end) || madvise((void *)start, end - start, MADV_MERGEABLE) != 0 || count == MOST)
		return;
	offered[count].start = start;
	offered[count++].end = end;
}

static void *offer_again(void *arg)
{
	for (unsigned round = 0;; round++) {
		/* What took the place of another mapping looks like it. */
		if (round % ROUNDS == 0)
			count = 0;
		each_anonymous(LEAST, offer);
		usleep(PAUSE_US);
	}
	return arg;
}

static void begin(void)
{
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	if (pthread_create(&thread, NULL, offer_again, NULL) == 0)
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

__attribute__((constructor)) static void load(void)
{
	begin();
	pthread_atfork(NULL, NULL, begin);
}

/*
 * A library with a lock of its own, like an allocator's: it is taken before a fork and given back after it,
 * by handlers that are registered before those of the library preloaded in front of this one. So at a fork it is taken
 * after that library's handler ran.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void take(void)
{
	pthread_mutex_lock(&lock);
}

static void give(void)
{
	pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void)
{
	pthread_atfork(take, give, give);
}

int early_advise(void *at, size_t len, int advice)
{
	take();
	int result = madvise(at, len, advice);
	give();
	return result;
}

/*
 * A library that starts a thread when it is loaded, as some of numerical libraries do: before main, and before the constructor of a
 * library preloaded in front of this one.
 */
#include <pthread.h>
#include <unistd.h>

static void *sleep_on(void *unused)
{
	for (;;)
		pause();
	return unused;
}

__attribute__((constructor)) static void begin(void)
{
	pthread_t thread;
	pthread_create(&thread, NULL, sleep_on, NULL);
}

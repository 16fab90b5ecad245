/*
 * A thread that has all descriptors to itself: it knows which number is the lowest that is free, closes all from there on, and
 * finds what it opened. Another makes calls over the region meanwhile.
 */
#include <sys/stat.h>

static struct {
	atomic_int ends;
	int lowest;
	unsigned long rounds;
	/* Which of its expectations failed, a bit each. */
	long bad;
} storm;

static int is_file(int fd, ino_t inode)
{
	struct stat seen;
	return fstat(fd, &seen) == 0 && seen.st_ino == inode;
}

static long storm_once(void)
{
	struct stat made, null;
	int fd = memfd_create("storm", 0), low = storm.lowest;
	long bad = fd != low;
	if (fd < 0 || fstat(fd, &made))
		return 2;
	for (int i = 1; i < 4; i++)
		bad |= dup2(fd, low + i) == low + i ? 0 : 4;
	for (int i = 0; i < 100; i++)
		bad |= is_file(low + i % 4, made.st_ino) ? 0 : 8;
	bad |= close_range((unsigned)low, ~0u, 0) ? 16 : 0;
	for (int i = 0; i < 4; i++)
		bad |= close(low + i) == 0 ? 32 : 0;
	fd = open("/dev/null", O_RDWR);
	bad |= fd == low ? 0 : 1;
	stat("/dev/null", &null);
	for (int i = 0; i < 100; i++)
		bad |= is_file(fd, null.st_ino) ? 0 : 64;
	bad |= close(fd) ? 128 : 0;
	return bad;
}

static void *storm_on(void *arg)
{
	while (!atomic_load(&storm.ends)) {
		storm.bad |= storm_once();
		storm.rounds++;
	}
	return arg;
}

/* Calls over pages far from each other: most are discarded, some are made whole. */
static long calls_in_storm(size_t first, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		size_t page = first + i * 61 % count;
		unsigned char *at = mem + page * PAGE;
		if (i % 8 == 7) {
			if (mlock(at, PAGE) || munlock(at, PAGE))
				return -errno;
		} else {
			if (madvise(at, PAGE, MADV_DONTNEED))
				return -errno;
			memset(shadow + page * PAGE, 0, PAGE);
		}
	}
	return 0;
}

/* Says what was wrong with descriptors, or with the calls. */
static long run_storm(size_t first, size_t count)
{
	pthread_t thread;
	int lowest = dup(2);
	if (lowest < 0 || close(lowest))
		return -errno;
	storm.lowest = lowest;
	storm.bad = 0;
	storm.rounds = 0;
	atomic_store(&storm.ends, 0);
	if (pthread_create(&thread, NULL, storm_on, NULL))
		return -EAGAIN;
	while (storm.rounds < 2)
		usleep(100);
	long result = calls_in_storm(first, count);
	atomic_store(&storm.ends, 1);
	pthread_join(thread, NULL);
	return result ? result : storm.bad;
}

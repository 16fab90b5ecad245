/*
 * Address space that the program gives back and takes again at the same place, as allocators do that align by mapping, unmapping
 * and mapping: nothing else of the program comes there meanwhile.
 */
static unsigned char *hole;
static size_t hole_len;
static pthread_t hole_user;
static atomic_int hole_in_use;
static atomic_ulong hole_rounds, hole_lost;

static void *use_hole(void *arg);

static long make_hole(size_t mebibytes)
{
	/* Its stack must not come to lie there. */
	int error = pthread_create(&hole_user, NULL, use_hole, NULL);
	if (error)
		return -error;
	hole_len = mebibytes << 20;
	hole = mmap(NULL, hole_len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return hole == MAP_FAILED ? -errno : errno_of(munmap(hole, hole_len));
}

/* Whether it is still free, all of it. */
static long try_hole(void)
{
	void *at = mmap(hole, hole_len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	return at == MAP_FAILED ? -errno : errno_of(munmap(at, hole_len));
}

static void *use_hole(void *arg)
{
	const size_t step = 16 * PAGE;
	while (!atomic_load(&hole_in_use))
		usleep(1000);
	while (atomic_load(&hole_in_use) == 1) {
		unsigned long round = atomic_fetch_add(&hole_rounds, 1);
		unsigned char *at = mmap(hole, hole_len, PROT_READ | PROT_WRITE,
					 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		if (at == MAP_FAILED)
			break;
		for (size_t i = 0; i < hole_len; i += step)
			*(volatile uint64_t *)(at + i) = mix(round + i);
		for (size_t i = 0; i < hole_len; i += step)
			if (*(volatile uint64_t *)(at + i) != mix(round + i))
				atomic_fetch_add(&hole_lost, 1);
		munmap(at, hole_len);
		usleep(300);
	}
	return arg;
}

/* From here a thread takes it, uses it and gives it back, again and again. */
static long start_hole(void)
{
	atomic_store(&hole_in_use, 1);
	return 0;
}

static long stop_hole(void)
{
	atomic_store(&hole_in_use, 2);
	pthread_join(hole_user, NULL);
	return atomic_load(&hole_lost) ? -EILSEQ : (long)atomic_load(&hole_rounds);
}

/*
 * What calls cost. Others want the processors as well, so a time is the median of many, or CPU time.
 */

#define MOST_TIMES (1ul << 18)
static uint64_t times[MOST_TIMES];

static int by_number(const void *a, const void *b);
static uint64_t now_ns(void);

static uint64_t median(uint64_t *of, size_t n)
{
	qsort(of, n, sizeof *of, by_number);
	return n ? of[n / 2] : 0;
}

#define TIMED(to, call) do { uint64_t begin = now_ns(); call; (to) = now_ns() - begin; } while (0)

/* CPU time of the calling thread: what others take from it does not count. */
static uint64_t own_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static long discard_each(unsigned char *at, size_t step, size_t count)
{
	long failed = 0;
	for (size_t i = 0; i < count; i++)
		failed |= madvise(at + i * step * PAGE, PAGE, MADV_DONTNEED);
	return failed;
}

/* Discards `count` pages of the region one by one, every `step`-th, in turns with pages that are plain and touched. Says
 * the CPU time a page, of the region's and of the others. */
static void cost_of_discards(size_t first, size_t step, size_t count)
{
	const size_t turn = 64;
	unsigned char *plain = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t took[2] = { 0, 0 };
	long failed = plain == MAP_FAILED;
	if (!failed) {
		madvise(plain, count * PAGE, MADV_NOHUGEPAGE);
		memset(plain, 1, count * PAGE);
	}
	for (size_t i = 0; i < count && !failed; i += turn) {
		size_t n = count - i < turn ? count - i : turn;
		uint64_t begin = own_ns();
		failed |= discard_each(mem + (first + i * step) * PAGE, step, n);
		uint64_t middle = own_ns();
		failed |= discard_each(plain + i * PAGE, 1, n);
		took[0] += middle - begin;
		took[1] += own_ns() - middle;
		for (size_t page = i; page < i + n; page++)
			memset(shadow + (first + page * step) * PAGE, 0, PAGE);
	}
	printf("%s %lu %lu\n", failed ? "bad" : "ok", took[0] / count, took[1] / count);
	fflush(stdout);
	if (plain != MAP_FAILED)
		munmap(plain, count * PAGE);
}

/* A place that was never offered, between two that are, so that it lies inside their bounds. */
static unsigned char *never_offered(void)
{
	static unsigned char *place;
	if (place)
		return place;
	unsigned char *area = mmap(NULL, 16 * HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		return NULL;
	unsigned char *offers[2] = { area, area + 15 * HUGE_PAGE };
	for (int i = 0; i < 2; i++)
		if (mprotect(offers[i], HUGE_PAGE, PROT_READ | PROT_WRITE) || madvise(offers[i], HUGE_PAGE, MADV_MERGEABLE))
			return NULL;
	place = area + 8 * HUGE_PAGE;
	return mprotect(place, 16 * PAGE, PROT_READ | PROT_WRITE) ? NULL : place;
}

/* The median times of madvise, mprotect, mremap, mmap and munmap over memory that was never offered. */
static void cost_of_calls(size_t count)
{
	unsigned char *at = never_offered(), *other = at + HUGE_PAGE;
	long failed = !at || count > MOST_TIMES;
	printf("%s", failed ? "bad" : "ok");
	for (int kind = 0; kind < 5 && !failed; kind++) {
		for (size_t i = 0; i < count; i++) {
			uint64_t *took = &times[i];
			int rw = PROT_READ | PROT_WRITE, fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
			if (kind == 0)
				TIMED(*took, failed |= madvise(at, PAGE, MADV_DONTNEED));
			else if (kind == 1)
				TIMED(*took, failed |= mprotect(at, 16 * PAGE, rw));
			else if (kind == 2)
				TIMED(*took, failed |= mremap(at, 16 * PAGE, 16 * PAGE, 0) != at);
			else if (kind == 3) {
				TIMED(*took, failed |= mmap(other, PAGE, rw, fixed, -1, 0) != other);
				munmap(other, PAGE);
			} else {
				failed |= mmap(other, PAGE, rw, fixed, -1, 0) != other;
				TIMED(*took, failed |= munmap(other, PAGE));
			}
		}
		printf(" %lu", median(times, count));
	}
	printf("%s\n", failed ? " failed" : "");
	fflush(stdout);
}

/* Reads a byte of each page of the region, in order, and says the CPU time a page. */
static void cost_of_reads(size_t first, size_t count)
{
	volatile unsigned char byte;
	uint64_t begin = own_ns();
	for (size_t page = first; page < first + count; page++)
		byte = mem[page * PAGE];
	(void)byte;
	printf("ok %lu\n", (own_ns() - begin) / (count ? count : 1));
	fflush(stdout);
}

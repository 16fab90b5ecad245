/*
 * Memory that libc maps and unmaps by itself: large blocks of malloc, the heap that brk grows, thread stacks.
 */
#include <malloc.h>

static unsigned char *block;

static long use_block(size_t count)
{
	pages = count;
	shadow = mmap(NULL, SHADOW_PAGES * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!block || shadow == MAP_FAILED)
		return -ENOMEM;
	mem = (unsigned char *)(((uintptr_t)block + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	return (long)mem;
}

/* A block of malloc with room for `count` pages: a mapping of its own, or by brk. */
static long heap(size_t count, int by_brk)
{
	if (by_brk)
		(mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TOP_PAD, 0)); /* freed, it all goes */
	block = malloc(count * PAGE + HUGE_PAGE);
	return use_block(count);
}

static long free_block(void)
{
	free(block);
	memset(absent, 1, pages);
	return 0;
}

/* The block with room for `count` pages, perhaps at another place. */
static long resize_block(size_t count)
{
	size_t offset = (size_t)(mem - block), kept = pages < count ? pages : count;
	block = realloc(block, count * PAGE + HUGE_PAGE);
	if (!block)
		return -ENOMEM;
	mem = block + offset;
	memset(absent + kept, 1, count - kept);
	pages = count;
	return (long)mem;
}

static long nonzero_pages(const unsigned char *at, size_t count)
{
	long found = 0;
	for (size_t p = 0; p < count; p++)
		found += at[p * PAGE] != 0 || memcmp(at + p * PAGE, at + p * PAGE + 1, PAGE - 1) != 0;
	return found;
}

/* A block of calloc, which counts on new heap being zeros; gives how many pages are not. */
static long fresh_block(size_t count)
{
	unsigned char *made = calloc(1, count * PAGE);
	long found = nonzero_pages(made, count);
	free(made);
	return made ? found : -ENOMEM;
}

/* Memory of its own where the region was, and never offered. */
static long map_fresh(void)
{
	void *at = mmap(mem, pages * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (at == MAP_FAILED)
		return -errno;
	memset(shadow, 0, pages * PAGE);
	memset(absent, 0, pages);
	return nonzero_pages(mem, pages);
}

/* A file mapped and shared where the region was, discarded; gives how many pages are not the file's afterwards. */
static long map_file(const char *path)
{
	static unsigned char page[PAGE];
	long bad = 0;
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	for (size_t p = 0; p < pages; p++) {
		pattern(page, 31 + p);
		if (pwrite(fd, page, PAGE, (off_t)(p * PAGE)) != (ssize_t)PAGE)
			return -EIO;
	}
	void *at = mmap(mem, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
	if (at == MAP_FAILED || madvise(mem, pages * PAGE, MADV_DONTNEED))
		return -errno;
	for (size_t p = 0; p < pages; p++) {
		pattern(page, 31 + p);
		bad += memcmp(mem + p * PAGE, page, PAGE) != 0;
		mem[p * PAGE] ^= 0xff;
		unsigned char byte = 0;
		bad += pread(fd, &byte, 1, (off_t)(p * PAGE)) != 1 || byte != mem[p * PAGE];
	}
	close(fd);
	return bad;
}

static pthread_t stacked;
static atomic_int stack_ready, stack_done;

/* libc keeps the end of a thread's stack, PTHREAD_STACK_MIN and its own frames: the region is far below it. */
#define STACK_END (1 << 16)

static void *use_stack(void *arg)
{
	size_t size = (size_t)arg * PAGE + HUGE_PAGE + STACK_END;
	block = __builtin_alloca(size);
	use_block((size_t)arg);
	atomic_store(&stack_ready, 1);
	while (!atomic_load(&stack_done))
		usleep(1000);
	return block;
}

/* A thread with `count` pages of its stack as the region. */
static long start_stack(size_t count)
{
	if (pthread_create(&stacked, NULL, use_stack, (void *)count))
		return -EAGAIN;
	while (!atomic_load(&stack_ready))
		usleep(1000);
	return (long)mem;
}

/* Ends it; libc keeps the stack for the next thread, and discards what was on it. */
static long end_stack(void)
{
	atomic_store(&stack_done, 1);
	pthread_join(stacked, NULL);
	return nonzero_pages(mem, pages);
}

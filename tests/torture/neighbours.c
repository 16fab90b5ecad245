/*
 * Memory of other kinds in the middle of the region, for a moment. It is offered, discarded and compared like the rest, and
 * must stay what it is: a file's, malloc's, the heap, a stack.
 */
#include "guest.h"
#include "../guest/brk.h"

#include <alloca.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static unsigned char *at(struct run run)
{
	return mem + run.first * PAGE;
}

/* The region's own memory is there again. */
static void end_of_stay(struct run run)
{
	map_at(run);
	if (draw(4))
		offer_run(run);
}

/* A shared mapping of a file. */
void foreign_for_now(void)
{
	static unsigned char page[PAGE];
	struct run run = draw_run(48);
	uint64_t content = draw_content();
	int fd = memfd_create("foreign", MFD_CLOEXEC);
	must(fd >= 0 && ftruncate(fd, (off_t)(run.count * PAGE)) == 0, "memfd_create");
	unpin(run);
	must(mmap(at(run), run.count * PAGE, READ_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == at(run), "mmap");
	for (size_t i = 0; i < run.count; i++)
		pattern(at(run) + i * PAGE, content + i);
	if (draw(2))
		offer();
	if (draw(2))
		must(madvise(at(run), run.count * PAGE, MADV_DONTNEED) == 0, "madvise(DONTNEED)");
	usleep((unsigned)draw(40000));
	for (size_t i = 0; i < run.count; i++) {
		pattern(page, content + i);
		errno = 0;
		must(memcmp(at(run) + i * PAGE, page, PAGE) == 0, "MISMATCH: a page of a foreign mapping");
		at(run)[i * PAGE] ^= 0x5a;
		must(pread(fd, page, 1, (off_t)(i * PAGE)) == 1 && page[0] == at(run)[i * PAGE],
		     "MISMATCH: a write to a foreign mapping did not reach its file");
	}
	close(fd);
	end_of_stay(run);
}

/* A file that holds a run's contents, for as long as it is open or mapped. */
static int file_of(size_t count, uint64_t content)
{
	static unsigned char page[PAGE];
	int fd = memfd_create("foreign", MFD_CLOEXEC);
	must(fd >= 0, "memfd_create");
	for (size_t i = 0; i < count; i++) {
		pattern(page, content + i);
		must(pwrite(fd, page, PAGE, (off_t)(i * PAGE)) == (ssize_t)PAGE, "pwrite");
	}
	return fd;
}

/* A private mapping of a file: what was written is the guest's until it is discarded, and never reaches the file. */
void private_file_for_now(void)
{
	static unsigned char page[PAGE];
	struct run run = draw_run(48);
	uint64_t content = draw_content(), written = draw_content();
	int fd = file_of(run.count, content), discarded = draw(2) == 0;
	unpin(run);
	must(mmap(at(run), run.count * PAGE, READ_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == at(run), "mmap");
	for (size_t i = 0; i < run.count; i += 3)
		pattern(at(run) + i * PAGE, written + i);
	if (draw(2))
		offer();
	if (discarded)
		must(madvise(at(run), run.count * PAGE, MADV_DONTNEED) == 0, "madvise(DONTNEED)");
	usleep((unsigned)draw(40000));
	for (size_t i = 0; i < run.count; i++) {
		pattern(page, (i % 3 == 0 && !discarded ? written : content) + i);
		errno = 0;
		must(memcmp(at(run) + i * PAGE, page, PAGE) == 0, "MISMATCH: a page of a private mapping of a file");
		pattern(page, content + i);
		must(pread(fd, at(run) + i * PAGE, PAGE, (off_t)(i * PAGE)) == (ssize_t)PAGE, "pread");
		must(memcmp(at(run) + i * PAGE, page, PAGE) == 0, "MISMATCH: a private write reached its file");
	}
	close(fd);
	end_of_stay(run);
}

/* Compares memory that lies in the region and is not in the shadow; offers it with all before it, perhaps. */
static void stays(unsigned char *memory, size_t count, uint64_t content)
{
	static unsigned char page[PAGE];
	if (draw(2))
		offer_run((struct run){ 0, ((size_t)(memory - mem) + PAGE - 1) / PAGE + count });
	usleep((unsigned)draw(40000));
	for (size_t i = 0; i < count; i++) {
		pattern(page, content + i);
		errno = 0;
		must(memcmp(memory + i * PAGE, page, PAGE) == 0, "MISMATCH: a page of a stack, the heap, a block or huge pages");
	}
}

/*
 * A block of malloc's, moved into the region: a large one is a mapping of its own, which free unmaps by what stands in front of
 * the block. It shrinks before it goes, perhaps.
 */
void block_for_now(void)
{
	enum { FRONT = 16, LEAST = 40 };
	struct run run = { 0, LEAST + draw(32) };
	run.first = draw(pages - run.count + 1);
	uint64_t content = draw_content();
	unsigned char *block = malloc(run.count * PAGE - 2 * FRONT), *begin = block - FRONT;
	must(block && ((uintptr_t)begin & (PAGE - 1)) == 0, "malloc");
	unpin(run);
	size_t len = run.count * PAGE;
	must(mremap(begin, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, at(run)) == at(run), "mremap");
	block = at(run) + FRONT;
	unsigned char *first = at(run) + PAGE;
	/* The last page is not the block's to its end. */
	size_t count = run.count - 2;
	for (size_t i = 0; i < count; i++)
		pattern(first + i * PAGE, content + i);
	stays(first, count, content);
	if (draw(2)) {
		count = LEAST - 2;
		must(realloc(block, LEAST * PAGE - 2 * FRONT) == block, "realloc");
		stays(first, count, content);
	}
	free(block);
	end_of_stay(run);
}

/* Huge pages of the machine's instead of a chunk of the region, where it has any. */
void huge_pages_for_now(void)
{
	struct run run = { draw(pages / CHUNK_PAGES) * CHUNK_PAGES, CHUNK_PAGES };
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_FIXED;
	uint64_t content = draw_content();
	unpin(run);
	/* Else the place is lost, too, or is no place for one. */
	if (((uintptr_t)mem & (CHUNK - 1)) == 0 && mmap(at(run), CHUNK, READ_WRITE, flags, -1, 0) == at(run)) {
		for (size_t i = 0; i < run.count; i++)
			pattern(at(run) + i * PAGE, content + i);
		stays(at(run), run.count, content);
	}
	end_of_stay(run);
}

/* The heap: it grows, is offered, shrinks and grows again. */
void heap_for_now(void)
{
	struct run run = draw_run(48);
	struct prctl_mm_map before;
	uint64_t content = draw_content();
	/* The kernel keeps a page free behind it. */
	size_t count = run.count - 1, kept = count / 2;
	if (count == 0)
		return;
	unpin(run);
	must(brk_map(&before), "/proc/self/stat");
	must(munmap(at(run), run.count * PAGE) == 0, "munmap");
	must(brk_begins(at(run), at(run)) == 0, "prctl(PR_SET_MM)");
	must(brk(at(run) + count * PAGE) == 0, "brk");
	for (size_t i = 0; i < count; i++)
		pattern(at(run) + i * PAGE, content + i);
	stays(at(run), count, content);
	must(brk(at(run) + kept * PAGE) == 0 && brk(at(run) + count * PAGE) == 0, "brk");
	stays(at(run), kept, content);
	for (size_t i = kept * PAGE; i < count * PAGE; i++)
		must(at(run)[i] == 0, "MISMATCH: the heap grows by old bytes");
	must(prctl(PR_SET_MM, PR_SET_MM_MAP, &before, sizeof before, 0) == 0, "prctl(PR_SET_MM)");
	/* libc remembers where the heap ends. */
	must(brk((void *)(uintptr_t)before.brk) == 0, "brk");
	end_of_stay(run);
}

static struct {
	uint64_t content;
	size_t count;
} on_stack;

static void *live_on_stack(void *arg)
{
	unsigned char *area = alloca((on_stack.count + 1) * PAGE);
	unsigned char *first = (unsigned char *)(((uintptr_t)area + PAGE - 1) & ~(PAGE - 1));
	(void)arg;
	for (size_t i = 0; i < on_stack.count; i++)
		pattern(first + i * PAGE, on_stack.content + i);
	stays(first, on_stack.count, on_stack.content);
	return NULL;
}

/* The stack of a thread. */
void stack_for_now(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	struct run run = { 0, 64 };
	run.first = draw(pages - run.count + 1);
	unpin(run);
	map_at(run);
	on_stack.content = draw_content();
	on_stack.count = run.count / 2;
	pthread_attr_init(&attributes);
	must(pthread_attr_setstack(&attributes, at(run), run.count * PAGE) == 0, "pthread_attr_setstack");
	must(pthread_create(&thread, &attributes, live_on_stack, NULL) == 0, "pthread_create");
	pthread_attr_destroy(&attributes);
	pthread_join(thread, NULL);
	end_of_stay(run);
}

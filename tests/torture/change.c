/* Writes, discards, moves and protections. */
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static unsigned char *at(struct run run)
{
	return mem + run.first * PAGE;
}

/* Part of the operations compare what they are about to overwrite. */
static struct run draw_written(size_t most)
{
	struct run run = draw_run(most);
	if (draw(2))
		verify(run);
	writable(run);
	return run;
}

void write_bytes(void)
{
	for (size_t n = 1 + draw(6); n > 0; n--) {
		size_t page = draw(pages);
		writable((struct run){ page, 1 });
		set_byte(page * PAGE + draw(PAGE), (unsigned char)draw(256));
	}
}

void write_pages(void)
{
	struct run run = draw_written(64);
	uint64_t content = draw_content();
	for (size_t i = 0; i < run.count; i++)
		set_page(run.first + i, content + i);
}

void copy_pages(void)
{
	struct run to = draw_run(32);
	struct run from = { draw(pages - to.count + 1), to.count };
	writable(from);
	writable(to);
	verify(from);
	memmove(at(to), at(from), to.count * PAGE);
	memmove(shadow + to.first * PAGE, shadow + from.first * PAGE, to.count * PAGE);
	/* What was read is settled only in the shadow of a page that is not freed lazily. */
	memmove(state + to.first, state + from.first, to.count);
	COUNT(written, to.count);
}

void zero_pages(void)
{
	struct run run = draw_written(48);
	memset(at(run), 0, run.count * PAGE);
	zeroed(run);
	COUNT(written, run.count);
}

void map_at(struct run run)
{
	must(mmap(at(run), run.count * PAGE, READ_WRITE, PRIVATE | MAP_FIXED, -1, 0) == at(run), "mmap");
	memset(protection + run.first, WRITABLE, run.count);
	zeroed(run);
	COUNT(discarded, run.count);
}

void offer_run(struct run run)
{
	must(madvise(at(run), run.count * PAGE, MADV_MERGEABLE) == 0, "madvise(MERGEABLE)");
}

/* Fresh memory over a whole chunk, full of what others have as well: work for the engine. */
void renew_chunk(void)
{
	struct run run = { draw(pages / CHUNK_PAGES) * CHUNK_PAGES, CHUNK_PAGES };
	unpin(run);
	map_at(run);
	uint64_t content = draw_content();
	for (size_t i = 0; i < run.count; i++) {
		if (i % 32 == 0)
			content = draw(8) ? draw_content() : 0;
		set_page(run.first + i, content ? content + i % 32 : 0);
	}
	offer_run(run);
}

void read_pages(void)
{
	verify(draw_run(128));
}

void discard(void)
{
	struct run run = draw_run(64);
	unpin(run);
	must(madvise(at(run), run.count * PAGE, MADV_DONTNEED) == 0, "madvise(DONTNEED)");
	zeroed(run);
	COUNT(discarded, run.count);
	if (draw(2))
		verify(run);
}

void free_lazily(void)
{
	struct run run = draw_run(32);
	unpin(run);
	/* Merged pages answer with zeros, others with their content until the memory is wanted. */
	must(madvise(at(run), run.count * PAGE, MADV_FREE) == 0, "madvise(FREE)");
	memset(state + run.first, EITHER, run.count);
	COUNT(discarded, run.count);
	if (draw(2))
		verify(run);
}

void map_anew(void)
{
	struct run run = draw_run(128);
	unpin(run);
	if (draw(2)) {
		must(munmap(at(run), run.count * PAGE) == 0, "munmap");
		if (draw(2))
			usleep(200);
	}
	map_at(run);
	if (draw(4))
		offer_run(run);
}

void offer(void)
{
	offer_run((struct run){ 0, pages });
}

void withdraw(void)
{
	struct run run = draw_run(256);
	must(madvise(at(run), run.count * PAGE, MADV_UNMERGEABLE) == 0, "madvise(UNMERGEABLE)");
	verify(run);
	if (draw(4))
		offer_run(run);
}

void protect(void)
{
	static const int prot[] = { READ_WRITE, PROT_READ, PROT_NONE };
	struct run run = draw_run(96);
	/* Mostly open: what is closed cannot be compared. */
	enum access access = draw(5) ? draw(2) : CLOSED;
	must(mprotect(at(run), run.count * PAGE, prot[access]) == 0, "mprotect");
	memset(protection + run.first, access, run.count);
	verify(run);
	COUNT(protected, run.count);
}

/* Asks the kernel, not the processor, whether a page is as closed as it was made. */
void probe(void)
{
	int fds[2];
	must(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
	unsigned char byte;
	for (int i = 0; i < 16; i++) {
		size_t page = draw(pages);
		unsigned char *here = mem + page * PAGE + draw(PAGE);
		if (protection[page] == CLOSED) {
			must(write(fds[1], here, 1) < 0 && errno == EFAULT, "a closed page was read");
		} else if (protection[page] == READABLE) {
			must(write(fds[1], here, 1) == 1, "an open page was not read");
			must(read(fds[0], here, 1) < 0 && errno == EFAULT, "a read-only page was written");
			/* The byte may be consumed or not. */
			while (read(fds[0], &byte, 1) == 1)
				;
		}
	}
	close(fds[0]);
	close(fds[1]);
}

void lock_for_now(void)
{
	struct run run = draw_run(32);
	writable(run);
	if (mlock(at(run), run.count * PAGE))
		return; /* the limit of locked memory is this machine's affair */
	verify(run);
	usleep(500);
	verify(run);
	must(munlock(at(run), run.count * PAGE) == 0, "munlock");
}

void huge(void)
{
	struct run run = { draw(pages / CHUNK_PAGES) * CHUNK_PAGES, CHUNK_PAGES };
	int advice = draw(2) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
	/* EINVAL: a kernel without huge pages. */
	must(madvise(at(run), run.count * PAGE, advice) == 0 || errno == EINVAL, "madvise(HUGEPAGE)");
	verify(run);
}

/* A fresh place for the region, where a chunk of the kernel's begins. */
static unsigned char *fresh_place(void)
{
	size_t span = (MAX_PAGES + CHUNK_PAGES) * PAGE;
	unsigned char *area = mmap(NULL, span, PROT_NONE, PRIVATE, -1, 0);
	must(area != MAP_FAILED && munmap(area, span) == 0, "mmap");
	return (unsigned char *)(((uintptr_t)area + CHUNK - 1) & ~(CHUNK - 1));
}

/*
 * mremap(2) wants memory of one kind, which this guest's own discards and advice may have split:
 * what the kernel refuses for that (EFAULT) is copied, so that the same seed goes the same way. So is what may be
 * pinned, which does not grow (ENOMEM, docs/memory-calls.md).
 */
static void *remap(unsigned char *old, size_t from, size_t to, int flags, void *target)
{
	void *place = mremap(old, from * PAGE, to * PAGE, flags, target);
	int pinned = errno == ENOMEM && to > from && pins_memory();
	if (place != MAP_FAILED || (errno != EFAULT && !pinned))
		return place;
	size_t kept = from < to ? from : to;
	int fixed = flags & MREMAP_FIXED ? MAP_FIXED : 0;
	place = mmap(fixed ? target : NULL, to * PAGE, READ_WRITE, PRIVATE | fixed, -1, 0);
	must(place != MAP_FAILED, "mmap");
	memcpy(place, old, kept * PAGE);
	must(munmap(old, from * PAGE) == 0, "munmap");
	return place;
}

static void resize(size_t count, int flags, void *target)
{
	struct run all = { 0, pages };
	unpin(all);
	must(mprotect(mem, pages * PAGE, READ_WRITE) == 0, "mprotect");
	memset(protection, WRITABLE, MAX_PAGES);
	void *place = remap(mem, pages, count, flags, target);
	must(place != MAP_FAILED, "mremap");
	mem = place;
	if (count > pages)
		zeroed((struct run){ pages, count - pages });
	COUNT(moved, pages);
	pages = count;
	verify_all();
}

void grow(void)
{
	size_t count = pages + 1 + draw(CHUNK_PAGES);
	if (count <= MAX_PAGES)
		resize(count, MREMAP_MAYMOVE, NULL);
}

void shrink(void)
{
	size_t count = pages - draw(CHUNK_PAGES);
	if (count >= MIN_PAGES)
		resize(count, MREMAP_MAYMOVE, NULL);
}

void move_region(void)
{
	resize(pages, MREMAP_MAYMOVE | MREMAP_FIXED, fresh_place());
}

/* One part of the region over another, and fresh memory where it was. */
void move_run(void)
{
	struct run from = draw_run(64);
	struct run to = { draw(pages - from.count + 1), from.count };
	size_t apart = from.first > to.first ? from.first - to.first : to.first - from.first;
	if (apart < from.count)
		return;
	unpin(from);
	unpin(to);
	verify(from);
	/* Each kind of protection must arrive. */
	static const int prot[] = { READ_WRITE, PROT_READ, PROT_NONE };
	enum access access = draw(3);
	must(mprotect(at(from), from.count * PAGE, prot[access]) == 0, "mprotect");
	if (access == WRITABLE || mremap(at(from), from.count * PAGE, from.count * PAGE,
					  MREMAP_MAYMOVE | MREMAP_FIXED, at(to)) == MAP_FAILED) {
		must(access == WRITABLE || errno == EFAULT, "mremap");
		must(mprotect(at(from), from.count * PAGE, READ_WRITE) == 0, "mprotect");
		access = WRITABLE;
		int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
		must(remap(at(from), from.count, from.count, flags, at(to)) == at(to), "mremap");
	}
	memcpy(shadow + to.first * PAGE, shadow + from.first * PAGE, from.count * PAGE);
	memcpy(state + to.first, state + from.first, from.count);
	memset(protection + to.first, access, to.count);
	COUNT(moved, from.count);
	map_at(from);
	verify(to);
}

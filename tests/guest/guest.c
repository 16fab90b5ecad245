/*
 * A guest for tests: does with one region of memory what a line on standard
 * input says, keeps a shadow copy that is never offered, and compares.
 *
 * Each command answers with one line: "ok ..." or "bad ...". Pages are counted
 * from the start of the region. Content comes from a seed and the page's
 * distance from the first one filled, so that equal commands make equal pages.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../crates/agent/include/pageone.h"
#include "rights.h"
#include "ring.h"

#define PAGE 4096ul
#define HUGE_PAGE (2ul << 20)
#define MAX_PAGES (1ul << 20)
/* How many pages the shadow has: the environment may say fewer, for all of it is locked with the rest. */
#define SHADOW_PAGES (getenv("GUEST_SHADOW_PAGES") ? strtoul(getenv("GUEST_SHADOW_PAGES"), NULL, 10) : MAX_PAGES)

#pragma weak pageone_register
#pragma weak pageone_unregister
#pragma weak pageone_recycle
#pragma weak pageone_served
#pragma weak pageone_sees_libc

static unsigned char *mem, *shadow;
static size_t pages;
/* What a page should hold: the shadow's bytes, or nothing that can be said. */
static unsigned char absent[MAX_PAGES];

static long errno_of(long result)
{
	return result < 0 ? -errno : result;
}

#include "calls.h"
#include "kin.h"
#include "costs.h"
#include "maps.h"
#include "mix.h"

static void pattern(void *page, uint64_t seed)
{
	uint64_t *word = page;
	for (size_t i = 0; i < PAGE / 8; i++)
		word[i] = mix(seed * 1000003 + i);
}

static int differs(size_t page)
{
	return !absent[page] && memcmp(mem + page * PAGE, shadow + page * PAGE, PAGE) != 0;
}

/* ---- threads that read and write at random ---- */

static atomic_int stopping;
static atomic_ulong operations, mismatches;
static size_t writers, running, discards_too;
static pthread_t threads[64];

static void *writer(void *arg)
{
	size_t id = (size_t)arg;
	uint64_t state = mix(id + 77);
	unsigned long done = 0;
	while (!atomic_load_explicit(&stopping, memory_order_relaxed)) {
		state = mix(state + 1);
		size_t page = (state >> 20) % (pages / writers) * writers + id;
		unsigned kind = state % 100;
		if (absent[page])
			continue;
		if (differs(page))
			atomic_fetch_add(&mismatches, 1);
		if (kind < 30) {
			size_t at = page * PAGE + (state >> 40) % (PAGE / 8) * 8;
			*(volatile uint64_t *)(mem + at) = state;
			*(uint64_t *)(shadow + at) = state;
		} else if (kind < 40) {
			pattern(mem + page * PAGE, state % 7);
			pattern(shadow + page * PAGE, state % 7);
		} else if (kind < 42 && discards_too) {
			if (madvise(mem + page * PAGE, PAGE, MADV_DONTNEED) == 0)
				memset(shadow + page * PAGE, 0, PAGE);
		}
		done++;
	}
	atomic_fetch_add(&operations, done);
	return NULL;
}

#include "heap.h"
#include "storm.h"

/* ---- a thread that reads a file into the region past the page cache ---- */

static size_t direct_first, direct_count;
static char direct_path[512];
static pthread_t direct_thread;

static void *direct(void *arg)
{
	(void)arg;
	int fd = open(direct_path, O_RDWR | O_CREAT | O_DIRECT | O_TRUNC, 0600);
	unsigned char *source = aligned_alloc(PAGE, direct_count * PAGE);
	uint64_t round = 0;
	if (fd < 0 || !source)
		atomic_fetch_add(&mismatches, 1000000);
	while (fd >= 0 && !atomic_load_explicit(&stopping, memory_order_relaxed)) {
		for (size_t i = 0; i < direct_count; i++)
			pattern(source + i * PAGE, round % 3);
		ssize_t len = (ssize_t)(direct_count * PAGE);
		if (pwrite(fd, source, len, 0) != len ||
		    pread(fd, mem + direct_first * PAGE, len, 0) != len ||
		    memcmp(mem + direct_first * PAGE, source, len) != 0)
			atomic_fetch_add(&mismatches, 1);
		memcpy(shadow + direct_first * PAGE, source, len);
		atomic_fetch_add(&operations, 1);
		round++;
		usleep(2000);
	}
	free(source);
	close(fd);
	return NULL;
}

/* ---- a buffer pinned for io_uring ---- */

static struct ring ring = { .fd = -1 };

static int pin(size_t first, size_t count)
{
	return ring_open(&ring, mem + first * PAGE, count * PAGE);
}

/* Reads `count` pages of the file into the pinned buffer, through the pin. */
static int read_fixed(const char *path, size_t first, size_t count)
{
	int fd = open(path, O_RDONLY);
	if (fd < 0)
		return -errno;
	int result = ring_do(&ring, IORING_OP_READ_FIXED, fd, mem + first * PAGE, count * PAGE);
	close(fd);
	return result;
}

/* Reads new content into the pinned buffer, through the pin, and tells whether it is in the memory then. */
static long transfer(size_t first, size_t count)
{
	static unsigned char content;
	unsigned char *expected = shadow + first * PAGE;
	int fd = memfd_create("content", MFD_CLOEXEC);
	memset(expected, ++content, count * PAGE);
	if (fd < 0 || write(fd, expected, count * PAGE) != (ssize_t)(count * PAGE))
		return -EIO;
	int result = ring_do(&ring, IORING_OP_READ_FIXED, fd, mem + first * PAGE, count * PAGE);
	close(fd);
	if (result != (int)(count * PAGE))
		return result < 0 ? result : -EIO;
	return memcmp(mem + first * PAGE, expected, count * PAGE) ? -EILSEQ : 0;
}

/* ---- a fork child that compares when told ---- */

static int to_child = -1, from_child = -1;
static pid_t child;

static void child_main(int in, int out)
{
	char command;
	while (read(in, &command, 1) == 1) {
		unsigned char bad = 0;
		if (command == 'w')
			for (size_t p = 0; p < pages; p += 3)
				if (!absent[p]) {
					mem[p * PAGE + 5] ^= 0x5a;
					shadow[p * PAGE + 5] ^= 0x5a;
				}
		if (command == 'o')
			bad |= madvise(mem, pages * PAGE, MADV_MERGEABLE) != 0;
		for (size_t p = 1; command == 'd' && p < pages; p += 3) {
			if (absent[p])
				continue;
			if (madvise(mem + p * PAGE, PAGE, MADV_DONTNEED) == 0)
				memset(shadow + p * PAGE, 0, PAGE);
			else
				bad = 1;
		}
		if (command == 'o')
			bad |= madvise(mem, pages * PAGE, MADV_MERGEABLE) != 0;
		for (size_t p = 0; p < pages; p++)
			bad |= differs(p);
		if (write(out, &bad, 1) != 1)
			break;
	}
	_exit(0);
}

static int do_fork(int bare)
{
	int down[2], up[2];
	if (pipe(down) || pipe(up))
		return -errno;
	child = bare ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
	if (child == 0) {
		close(down[1]);
		close(up[0]);
		child_main(down[0], up[1]);
	}
	close(down[0]);
	close(up[1]);
	to_child = down[1];
	from_child = up[0];
	return child < 0 ? -errno : 0;
}

static int ask_child(char command)
{
	unsigned char bad = 1;
	if (write(to_child, &command, 1) != 1 || read(from_child, &bad, 1) != 1)
		return -EPIPE;
	return bad;
}

#include "forks.h"
#include "ground.h"
#include "hole.h"
#include "keys.h"

/* ---- commands ---- */

static void say(long result)
{
	if (result < 0)
		printf("bad %s\n", strerror((int)-result));
	else
		printf("ok %ld\n", result);
	fflush(stdout);
}

static long map(size_t count)
{
	if (count > MAX_PAGES)
		return -EINVAL;
	pages = count;
	size_t span = count * PAGE + HUGE_PAGE;
	size_t shadowed = SHADOW_PAGES;
	if (count > shadowed)
		return -EINVAL;
	unsigned char *area = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	shadow = mmap(NULL, shadowed * PAGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED || shadow == MAP_FAILED)
		return -errno;
	mem = (unsigned char *)(((uintptr_t)area + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	return (long)mem;
}

static long fill(size_t first, size_t count, uint64_t seed)
{
	for (size_t i = 0; i < count; i++) {
		pattern(mem + (first + i) * PAGE, seed + i);
		memcpy(shadow + (first + i) * PAGE, mem + (first + i) * PAGE, PAGE);
	}
	return 0;
}

/* Fills pages that are all equal. */
static long same(size_t first, size_t count, uint64_t seed)
{
	for (size_t i = 0; i < count; i++) {
		pattern(mem + (first + i) * PAGE, seed);
		memcpy(shadow + (first + i) * PAGE, mem + first * PAGE, PAGE);
	}
	return 0;
}

static int by_number(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Writes a byte that is there already, and returns how long that took. */
static uint64_t timed_write(size_t page)
{
	volatile unsigned char *at = mem + page * PAGE;
	unsigned char byte = shadow[page * PAGE];
	uint64_t begin = now_ns();
	*at = byte;
	return now_ns() - begin;
}

/* Writes random pages for `ms`, every `pause` µs, or without `ms` every page once, and says how many
 * writes there were and how long they took, in ns: p50, p99, p99.9, the longest. */
static void probe(uint64_t ms, uint64_t pause)
{
	size_t room = 1u << 20, n = 0;
	uint64_t *took = malloc(room * sizeof *took), state = now_ns(), end = state + ms * 1000000u;
	if (ms == 0)
		for (size_t p = 0; p < pages && n < room; p++)
			took[n++] = timed_write(p);
	while (ms && n < room && now_ns() < end) {
		state = mix(state + n);
		took[n++] = timed_write(state % pages);
		usleep(pause);
	}
	qsort(took, n, sizeof *took, by_number);
	printf("ok %zu %lu %lu %lu %lu\n", n, took[n / 2], took[n - 1 - n / 100], took[n - 1 - n / 1000],
	       took[n - 1]);
	fflush(stdout);
	free(took);
}

static long zero(size_t first, size_t count)
{
	memset(mem + first * PAGE, 0, count * PAGE);
	memset(shadow + first * PAGE, 0, count * PAGE);
	return 0;
}

static long check(void)
{
	for (size_t p = 0; p < pages; p++)
		if (differs(p)) {
			printf("bad page %zu differs\n", p);
			fflush(stdout);
			return -1;
		}
	return 0;
}

static void offer_mapping(unsigned long start, unsigned long end)
{
	(void)!madvise((void *)start, end - start, MADV_MERGEABLE);
}

static long advise(size_t first, size_t count, int advice)
{
	long result = errno_of(madvise(mem + first * PAGE, count * PAGE, advice));
	/* MADV_DONTNEED_LOCKED; MADV_GUARD_INSTALL, whose pages are zeros when the guard is gone. */
	if (result == 0 && (advice == MADV_DONTNEED || advice == 24 || advice == 102))
		memset(shadow + first * PAGE, 0, count * PAGE);
	if (result == 0 && advice == MADV_FREE)
		for (size_t p = first; p < first + count; p++) {
			/* Zeros or the old content: take what is there, once. */
			int zero = mem[p * PAGE] == 0 && !memcmp(mem + p * PAGE, mem + p * PAGE + 1, PAGE - 1);
			if (zero)
				memset(shadow + p * PAGE, 0, PAGE);
			mem[p * PAGE] = shadow[p * PAGE] = 1; /* a write cancels the rest of the promise */
		}
	return result;
}

/* MADV_FREE of merged pages, which are zeros at once. */
static long free_merged(size_t first, size_t count)
{
	long result = errno_of(madvise(mem + first * PAGE, count * PAGE, MADV_FREE));
	if (result == 0)
		memset(shadow + first * PAGE, 0, count * PAGE);
	return result;
}

/* A shared mapping of a file, by a call that nothing in libc sees. */
static long map_unseen_file(size_t first, size_t count, const char *path)
{
	int fd = open(path, O_RDWR);
	if (fd < 0)
		return -errno;
	long result = map_unseen(mem + first * PAGE, count * PAGE, fd);
	close(fd);
	if (result == 0)
		memcpy(shadow + first * PAGE, mem + first * PAGE, count * PAGE);
	return result;
}

/* Discards what lies in a file's mapping: its bytes stay. */
static long discard_of_file(size_t first, size_t count)
{
	long result = errno_of(madvise(mem + first * PAGE, count * PAGE, MADV_DONTNEED));
	if (result == 0 && memcmp(mem + first * PAGE, shadow + first * PAGE, count * PAGE))
		result = -EILSEQ;
	return result;
}

static long recycle(size_t first, size_t count)
{
	long result = errno_of(pageone_recycle(mem + first * PAGE, count * PAGE));
	if (result == 0)
		memset(shadow + first * PAGE, 0, count * PAGE);
	return result;
}

static long map_over(size_t first, size_t count)
{
	void *at = mmap(mem + first * PAGE, count * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (at == MAP_FAILED)
		return -errno;
	memset(shadow + first * PAGE, 0, count * PAGE);
	memset(absent + first, 0, count);
	return 0;
}

static long unmap(size_t first, size_t count)
{
	if (munmap(mem + first * PAGE, count * PAGE))
		return -errno;
	memset(absent + first, 1, count);
	return 0;
}

static long remap(size_t count, int flags)
{
	unsigned char *target = NULL;
	if (flags & MREMAP_FIXED)
		target = mmap(NULL, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char *at = mremap(mem, pages * PAGE, count * PAGE, flags, target);
	if (at == MAP_FAILED)
		return -errno;
	if (count > pages)
		memset(shadow + pages * PAGE, 0, (count - pages) * PAGE);
	mem = at;
	pages = count;
	return (long)mem;
}

/* Asks for a place that only five levels of page tables have; what stays behind is unmapped. */
static long move_beyond(void)
{
	unsigned char *old = mem;
	const int flags = MREMAP_MAYMOVE | 4; /* MREMAP_DONTUNMAP */
	unsigned char *at = mremap(old, pages * PAGE, pages * PAGE, flags, (void *)(1ul << 50));
	if (at == MAP_FAILED)
		return -errno;
	mem = at;
	return errno_of(munmap(old, pages * PAGE));
}

/* Moves all memory past libc, each time to the same place; with `anew` other memory takes its place, and is written. */
static long stray(size_t anew)
{
	static unsigned char *to;
	size_t len = pages * PAGE, room = 2ul << 20;
	if (!to) {
		to = mmap(NULL, len + 2 * room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (to == MAP_FAILED)
			return -errno;
		to = (unsigned char *)(((uintptr_t)to + room) & ~(room - 1));
	}
	long result = move_unseen(mem, len, to);
	if (result == 0 && anew) {
		result = map_unseen(mem, len, -1);
		memset(mem, 1, len);
	}
	mem = to;
	return result ? result : (long)mem;
}

/* A call that fails may have discarded a part: a page that is zeros counts as discarded. */
static long settle(size_t first, size_t count)
{
	for (size_t p = first; p < first + count; p++) {
		const unsigned char *page = mem + p * PAGE;
		if (page[0] == 0 && memcmp(page, page + 1, PAGE - 1) == 0)
			memset(shadow + p * PAGE, 0, PAGE);
	}
	return 0;
}

/* Moves pages to another place and back; gives the first error, and all are at home afterwards. */
static long shuttle(size_t first, size_t count)
{
	unsigned char *home = mem + first * PAGE;
	size_t len = count * PAGE;
	unsigned char *away = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (away == MAP_FAILED)
		return -errno;
	long result = 0;
	if (mremap(home, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, away) == MAP_FAILED) {
		result = -errno;
		munmap(away, len);
		return result;
	}
	for (int i = 0; i < 16; i++) {
		if (mremap(away, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, home) == home)
			return result;
		result = -errno;
	}
	/* It may fail for ever: then the bytes go home. */
	if (mmap(home, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != home)
		return -errno;
	memcpy(home, away, len);
	munmap(away, len);
	return result;
}

/* Puts pages on a node, those that are there too, and the others when they are touched. */
static long bind_to(size_t first, size_t count, unsigned node)
{
	unsigned long mask[16] = { 0 };
	mask[node / 64] = 1ul << node % 64;
	const int bind = 2, move = 2, strict = 1; /* MPOL_BIND, MPOL_MF_MOVE, MPOL_MF_STRICT */
	return errno_of(syscall(SYS_mbind, mem + first * PAGE, count * PAGE, bind, mask, 1024ul, move | strict));
}

/* Takes back where pages are to be. */
static long unbind(size_t first, size_t count)
{
	return errno_of(syscall(SYS_mbind, mem + first * PAGE, count * PAGE, 0 /* MPOL_DEFAULT */, NULL, 0ul, 0ul));
}

/* Moves what this process maps on one node to another, also what others map: migratepages(8). */
static long migrate(unsigned from, unsigned to)
{
	unsigned long old[16] = { 0 }, new[16] = { 0 };
	old[from / 64] = 1ul << from % 64;
	new[to / 64] = 1ul << to % 64;
	return errno_of(syscall(SYS_migrate_pages, 0, 1024ul, old, new));
}

/* Uses up the mappings this process may have, but for `spare` of them; gives how many it took. */
static long crowd(size_t spare)
{
	static unsigned char *area;
	static size_t next;
	size_t span = 140000 * PAGE, before = next;
	if (!area)
		area = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED)
		return -errno;
	/* Each open page between closed ones takes two mappings. */
	while (next * 2 * PAGE < span && mprotect(area + (next * 2 + 1) * PAGE, PAGE, PROT_READ) == 0)
		next++;
	for (size_t given = 0; given < spare && next > 0; given += 2) {
		next--;
		if (mprotect(area + (next * 2 + 1) * PAGE, PAGE, PROT_NONE))
			return -errno;
	}
	return next > before ? (long)(next - before) * 2 : 0;
}

/* The writer number i of count writes every count-th page from i on. With `only`, just that one runs. */
static long start_writers(size_t count, size_t discards, size_t only)
{
	atomic_store(&stopping, 0);
	atomic_store(&operations, 0);
	atomic_store(&mismatches, 0);
	writers = count;
	running = 0;
	discards_too = discards;
	for (size_t i = only; i < (only ? only + 1 : count); i++)
		if (pthread_create(&threads[running++], NULL, writer, (void *)i))
			return -EAGAIN;
	return 0;
}

static void stop(void)
{
	atomic_store(&stopping, 1);
	for (size_t i = 0; i < running; i++)
		pthread_join(threads[i], NULL);
	if (direct_count)
		pthread_join(direct_thread, NULL);
	writers = running = direct_count = 0;
	printf("%s %lu operations %lu mismatches\n", atomic_load(&mismatches) ? "bad" : "ok",
	       atomic_load(&operations), atomic_load(&mismatches));
	fflush(stdout);
}

static long start_direct(size_t first, size_t count, const char *path)
{
	atomic_store(&stopping, 0);
	atomic_store(&operations, 0);
	atomic_store(&mismatches, 0);
	snprintf(direct_path, sizeof direct_path, "%s", path);
	direct_first = first;
	direct_count = count;
	return -pthread_create(&direct_thread, NULL, direct, NULL);
}

/* A thread with a descriptor table of its own, in which alone a file is open for direct I/O. */
static void *open_apart(void *done)
{
	int fd = unshare(CLONE_FILES) ? -1 : open(direct_path, O_RDONLY | O_DIRECT);
	*(long *)done = fd < 0 ? -errno : 1;
	pause();
	return NULL;
}

static long start_apart(const char *path)
{
	static volatile long done;
	snprintf(direct_path, sizeof direct_path, "%s", path);
	if (pthread_create(&direct_thread, NULL, open_apart, (void *)&done))
		return -EAGAIN;
	while (!done)
		sched_yield();
	return done < 0 ? done : 0;
}

static void *idle(void *unused)
{
	pause();
	return unused;
}

static long start_idle(void)
{
	pthread_t thread;
	return -pthread_create(&thread, NULL, idle, NULL);
}

/* Whether the kernel counts the first thread as ended. */
static int first_has_ended(void)
{
	char text[256] = "";
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	close(fd);
	return got > 0 && strstr(text, ") Z") != NULL;
}

static void *serve(void *first)
{
	static char line[1024], word[64], path[512];
	for (int i = 0; first && i < 1000 && !first_has_ended(); i++)
		usleep(1000);
	if (first)
		say(first_has_ended() ? 0 : -EBUSY);
	while (fgets(line, sizeof line, stdin)) {
		unsigned long a = 0, b = 0, c = 0;
		word[0] = path[0] = 0;
		sscanf(line, "%63s %lu %lu %lu", word, &a, &b, &c);
		sscanf(line, "%*s %*u %*u %511s", path);
#define COMMAND(name) else if (strcmp(word, name) == 0)
		if (word[0] == 0)
			continue;
		COMMAND("map") say(map(a));
		COMMAND("fill") say(fill(a, b, c));
		COMMAND("same") say(same(a, b, c));
		COMMAND("probe") probe(a, b);
		COMMAND("zero") say(zero(a, b));
		COMMAND("check") { if (check() == 0) say(0); }
		COMMAND("advise") say(advise(a, b, (int)c));
		COMMAND("adviselow") say(errno_of(madvise((void *)HUGE_PAGE, a, (int)b)));
		COMMAND("strictexit") {
			prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0);
			syscall(SYS_exit, 7);
		}
		COMMAND("offerall") { each_anonymous(1, offer_mapping); say(0); }
		COMMAND("register") say(errno_of(pageone_register(mem + a * PAGE, b * PAGE)));
		COMMAND("unregister") say(errno_of(pageone_unregister(mem + a * PAGE, b * PAGE)));
		COMMAND("recycle") say(recycle(a, b));
		COMMAND("freemerged") say(free_merged(a, b));
		COMMAND("served") say(pageone_served ? pageone_served() : 0);
		COMMAND("unmap") say(unmap(a, b));
		COMMAND("mapover") say(map_over(a, b));
		COMMAND("remap") say(remap(a, (int)b));
		COMMAND("beyond") say(move_beyond());
		COMMAND("stray") say(stray(a));
		COMMAND("protect") say(errno_of(mprotect(mem + a * PAGE, b * PAGE, (int)c)));
		COMMAND("lock") say(errno_of(mlock(mem + a * PAGE, b * PAGE)));
		COMMAND("unlock") say(errno_of(munlock(mem + a * PAGE, b * PAGE)));
		COMMAND("lockfuture") say(errno_of(mlockall(MCL_FUTURE)));
		COMMAND("lockcurrent") say(errno_of(mlockall(MCL_CURRENT)));
		COMMAND("unlockall") say(errno_of(munlockall()));
		COMMAND("notsc") say(errno_of(prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0)));
		COMMAND("offerodd") say(offer_by_odd_thread(mem + a * PAGE, b * PAGE));
		COMMAND("badstructures") say(give_bad_structures());
		COMMAND("name") say(errno_of(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, mem + a * PAGE, b * PAGE, "named")));
		COMMAND("settle") say(settle(a, b));
		COMMAND("shuttle") say(shuttle(a, b));
		COMMAND("unbind") say(unbind(a, b));
		COMMAND("bind") say(bind_to(a, b, (unsigned)c));
		COMMAND("migrate") say(migrate((unsigned)a, (unsigned)b));
		COMMAND("crowd") say(crowd(a));
		COMMAND("writers") say(start_writers(a, b, c));
		COMMAND("direct") say(start_direct(a, b, path));
		COMMAND("apart") { sscanf(line, "%*s %511s", path); say(start_apart(path)); }
		COMMAND("idle") say(start_idle());
		COMMAND("stop") stop();
		COMMAND("kin") say(start_kin(a, b));
		COMMAND("endkin") say(stop_kin());
		COMMAND("kinlock") say(lock_by_kin(a, b));
		COMMAND("behind") say(lose_behind(a, b));
		COMMAND("wishksm") say(errno_of(prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0)));
		COMMAND("late") say(start_late());
		COMMAND("endlate") say(end_late());
		COMMAND("pin") say(pin(a, b));
		COMMAND("readfixed") {
			int got = read_fixed(path, a, b);
			for (size_t p = a; got > 0 && p < a + b; p++)
				memcpy(shadow + p * PAGE, mem + p * PAGE, PAGE);
			say(got);
		}
		COMMAND("provide") {
			memset(mem + a * PAGE, 0, PAGE);
			memset(shadow + a * PAGE, 0, PAGE);
			say(ring_provide(&ring, mem + a * PAGE));
		}
		COMMAND("take") {
			/* What lies outside the region is no matter here. */
			static char buffer[64];
			int got = ring_take(&ring, mem + a * PAGE, buffer, sizeof buffer);
			memcpy(shadow + a * PAGE, mem + a * PAGE, PAGE);
			say(got == 8 && memcmp(buffer, "provided", 8) ? -EILSEQ : got);
		}
		COMMAND("transfer") say(transfer(a, b));
		COMMAND("unpin") { ring_close(&ring); say(0); }
		COMMAND("fork") say(do_fork((int)a));
		COMMAND("heap") say(heap(a, (int)b));
		COMMAND("free") say(free_block());
		COMMAND("realloc") say(resize_block(a));
		COMMAND("calloc") say(fresh_block(a));
		COMMAND("fresh") say(map_fresh());
		COMMAND("mapfile") { sscanf(line, "%*s %511s", path); say(map_file(path)); }
		COMMAND("stack") say(start_stack(a));
		COMMAND("hole") say(make_hole(a));
		COMMAND("tryhole") say(try_hole());
		COMMAND("usehole") say(start_hole());
		COMMAND("endhole") say(stop_hole());
		COMMAND("standing") say(call_from_within(a, b, (int)c));
		COMMAND("depth") say(depth_of_call(a, (int)b));
		COMMAND("lazystack") say(call_on_lazy_stack(a, (int)b));
		COMMAND("childstanding") say(call_in_child(a, b, (int)c));
		COMMAND("key") say(give_key(mem + a * PAGE, b * PAGE, c));
		COMMAND("unseenkey") say(give_key_unseen(mem + a * PAGE, b * PAGE));
		COMMAND("close") say(close_key((unsigned)a));
		COMMAND("touch") say(touch(mem + a * PAGE, (int)b));
		COMMAND("keyedstack") say(call_on_keyed_stack((int)a));
		COMMAND("endstack") say(end_stack());
		COMMAND("seeslibc") say(pageone_sees_libc ? pageone_sees_libc() : 0);
		COMMAND("forks") say(make_forks(a));
		COMMAND("cycle") say(start_cycle(a));
		COMMAND("stopcycle") say(stop_cycle());
		COMMAND("rawexit") raw_exit(a, b);
		COMMAND("childcheck") say(ask_child('c') ? -EILSEQ : 0);
		COMMAND("childwrite") say(ask_child('w') ? -EILSEQ : 0);
		COMMAND("childoffer") say(ask_child('o') ? -EILSEQ : 0);
		COMMAND("childdiscard") say(ask_child('d') ? -EILSEQ : 0);
		COMMAND("childexit") { close(to_child); say(waitpid(child, NULL, 0) == child ? 0 : -ECHILD); }
		COMMAND("rights") say(rights(line));
		COMMAND("pid") say(getpid());
		COMMAND("byte") say(mem[a * PAGE + b]);
		COMMAND("padvise") {
			long told = advise_by_descriptor(mem + a * PAGE, b * PAGE, (int)c);
			if (told > 0 && c == MADV_DONTNEED)
				memset(shadow + a * PAGE, 0, (size_t)told);
			say(told);
		}
		COMMAND("nadvise") {
			long told = syscall(SYS_madvise, mem + a * PAGE, b * PAGE, c);
			if (told == 0 && c == MADV_DONTNEED)
				memset(shadow + a * PAGE, 0, b * PAGE);
			say(told);
		}
		COMMAND("uadvise") say(advise_unseen(mem + a * PAGE, b * PAGE, (int)c));
		COMMAND("vast") say_vast(mem + a * PAGE);
		COMMAND("unseenfile") { sscanf(line, "%*s %*s %*s %511s", path); say(map_unseen_file(a, b, path)); }
		COMMAND("discardfile") say(discard_of_file(a, b));
		COMMAND("unseen") {
			memset(shadow + a * PAGE, 0, b * PAGE);
			say(map_unseen(mem + a * PAGE, b * PAGE, -1));
		}
		COMMAND("segment") {
			memset(shadow + a * PAGE, 0, b * PAGE);
			say(map_segment(mem + a * PAGE, b * PAGE));
		}
		COMMAND("watch") say(watch(mem + a * PAGE, b * PAGE));
		COMMAND("unwatch") say(unwatch(mem + a * PAGE, b * PAGE));
		COMMAND("page") {
			memset(shadow + a * PAGE, 0, b * PAGE);
			memset(absent + a, strcmp(path, "unmap") == 0 || strcmp(path, "move") == 0, b);
			say(page(mem + a * PAGE, b * PAGE, 32 * PAGE, mem, path));
		}
		COMMAND("moveout") {
			long moved = move_out(mem + a * PAGE, b * PAGE, shadow + a * PAGE);
			memset(shadow + a * PAGE, 0, b * PAGE);
			say(moved);
		}
		COMMAND("scatter") say(scatter(mem, shadow, a, (int)b));
		COMMAND("room") say(has_room());
		COMMAND("incore") say(in_core(mem + a * PAGE, b));
		COMMAND("storm") say(run_storm(a, b));
		COMMAND("discards") cost_of_discards(a, b, c);
		COMMAND("calls") cost_of_calls(a);
		COMMAND("reads") cost_of_reads(a, b);
		COMMAND("endfirst") {
			pthread_t other;
			if (pthread_create(&other, NULL, serve, mem) == 0)
				syscall(SYS_exit, 0);
			say(-EAGAIN);
		}
		COMMAND("quit") exit(0);
		else say(-ENOSYS);
	}
	exit(0);
}

int main(void)
{
	serve(NULL);
}

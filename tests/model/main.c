/* The list, the threads that carry it out, and the calls on the arena. */
#include "model.h"
#include "../guest/mix.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Linux 6.1; not in every libc's headers. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define THREADS 3
#define WORDS 8

/* Optional: absent without PageONE. */
int pageone_register(void *, size_t) __attribute__((weak));
int pageone_unregister(void *, size_t) __attribute__((weak));

struct file files[3];
static int trace = -1;
int plain;

/* ---- the trace ---- */

void say(const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	int len = vsnprintf(text, sizeof text, format, args);
	va_end(args);
	must(write(trace, text, (size_t)len) == len, "write");
}

void must(int worked, const char *call)
{
	if (worked)
		return;
	fprintf(stderr, "model: %s: %s\n", call, strerror(errno));
	_exit(4);
}

static void say_result(long result)
{
	int error = errno;
	if (result < 0)
		say(" %s", strerrorname_np(error));
	else
		say(" %ld", result);
}

/* A result that is an address: within the arena it is compared, elsewhere only that it is. */
static void say_place(void *place)
{
	uintptr_t at = (uintptr_t)place;
	if (place == MAP_FAILED)
		say_result(-1);
	else if (at >= ARENA && at < ARENA + ARENA_PAGES * PAGE)
		say(" at %lu", (at - ARENA) / PAGE);
	else
		say(" elsewhere");
}

/* ---- loads and stores, whose signals are results ---- */

static _Thread_local sigjmp_buf escape;
static _Thread_local volatile sig_atomic_t guarded;

static void on_fault(int signal)
{
	if (guarded)
		siglongjmp(escape, signal);
	say("\n  died of signal %d\n", signal);
	_exit(5);
}

static int guard_begin(void)
{
	guarded = 1;
	return 0;
}

#define GUARDED(statement) ({ \
	int signal_ = sigsetjmp(escape, 1); \
	if (signal_ == 0) { guard_begin(); statement; } \
	guarded = 0; \
	signal_; })

void fill_page(void *page, unsigned content)
{
	uint64_t *word = page;
	for (size_t i = 0; i < PAGE / 8; i++)
		word[i] = content ? mix(content * 1000003ull + i) : 0;
}

int write_page(unsigned char *page, unsigned content)
{
	static _Thread_local unsigned char wanted[PAGE];
	fill_page(wanted, content);
	return GUARDED(memcpy(page, wanted, PAGE));
}

int write_byte(unsigned char *at, unsigned char value)
{
	return GUARDED(*(volatile unsigned char *)at = value);
}

int read_page(const unsigned char *page, unsigned char *into)
{
	return GUARDED(memcpy(into, page, PAGE));
}

/* ---- the calls ---- */

struct call {
	const char *name, *kind;
	size_t first, count; /* pages of the arena */
	long a, b, c;
};

static unsigned char *at(const struct call *call)
{
	return (unsigned char *)ARENA + call->first * PAGE;
}

static size_t len(const struct call *call)
{
	return call->count * PAGE;
}

static const struct kind kinds[] = {
	{ "private", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1 },
	{ "readable", PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1 },
	{ "closed", PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1 },
	{ "code", PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1 },
	{ "noreserve", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1 },
	{ "locked", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1 },
	{ "populated", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1 },
	{ "growsdown", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1 },
	{ "stack", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1 },
	{ "shared", PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1 },
	{ "file", PROT_READ | PROT_WRITE, MAP_SHARED, 0 },
	{ "privatefile", PROT_READ | PROT_WRITE, MAP_PRIVATE, 1 },
	{ "memfd", PROT_READ | PROT_WRITE, MAP_SHARED, 2 },
	{ "privatememfd", PROT_READ | PROT_WRITE, MAP_PRIVATE, 2 },
	{ "huge", PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1 },
};

void *map_kind(const char *name, void *place, size_t len, int flags, long file_page)
{
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		const struct kind *kind = &kinds[i];
		if (strcmp(kind->name, name))
			continue;
		int file = kind->file < 0 ? -1 : files[kind->file].fd;
		long offset = kind->file < 0 ? 0 : file_page * (long)PAGE;
		return mmap(place, len, kind->prot, kind->flags | flags, file, offset);
	}
	must(0, name);
	return MAP_FAILED;
}

/* a: more flags; b: the page of the file. */
static void do_map(const struct call *call)
{
	void *place = map_kind(call->kind, at(call), len(call), (int)call->a, call->b);
	say_place(place);
	/* Not in the arena: it goes back at once. */
	if (place != MAP_FAILED && place != at(call))
		munmap(place, len(call));
}

static void do_munmap(const struct call *call)
{
	say_result(munmap(at(call), len(call)));
}

/* Past libc, where no hook is. */
static void do_raw_munmap(const struct call *call)
{
	long result;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(SYS_munmap), "D"(at(call)), "S"(len(call))
			 : "rcx", "r11", "memory");
	say(" %ld", result);
}

/* a: the first page's content; b: how far the next one's is from it. */
static void do_fill(const struct call *call)
{
	int last = 0, run = 0;
	for (size_t i = 0; i < call->count; i++, run++) {
		unsigned content = (unsigned)(call->a + (long)i * call->b) % (CONTENTS + 1);
		int signal = write_page(at(call) + i * PAGE, content);
		if (signal != last && run) {
			say(" %d*%d", last, run);
			run = 0;
		}
		last = signal;
	}
	say(" %d*%d", last, run);
}

static void do_poke(const struct call *call)
{
	say(" %d", write_byte(at(call) + call->a % (long)PAGE, (unsigned char)call->b));
}

static void do_touch_below(const struct call *call)
{
	say(" %d", write_byte(at(call) - 1, 7));
}

/*
 * KSM's flag divides mappings, and an offer to PageONE does not: of the bytes that were taken it goes again where there would be an agent.
 * An offer that fails is the kernel's, and leaves the flag where it came before it failed.
 */
static void offered_to_ksm(const struct call *call, long taken)
{
	if (plain && agent_is_in() && call->a == MADV_MERGEABLE && taken > 0)
		madvise(at(call), (size_t)taken, MADV_UNMERGEABLE);
}

/* Whether a huge page can be made depends on the frames that are free, on which are shared, and on where mappings are divided. */
static void say_advised(const struct call *call, long result)
{
	if (call->a != MADV_COLLAPSE)
		say_result(result);
}

static void do_advise(const struct call *call)
{
	long result = madvise(at(call), len(call), (int)call->a);
	say_advised(call, result);
	offered_to_ksm(call, result ? 0 : (long)len(call));
}

/* Each page has its old content or zeros; which of them is the kernel's affair. Then it is written. */
static void do_free(const struct call *call)
{
	static unsigned char before[ARENA_PAGES][PAGE], now[PAGE], zeros[PAGE];
	size_t wrong = 0;
	if (!is_writable((uintptr_t)at(call), (uintptr_t)at(call) + len(call), 0)) {
		say(" left out");
		return;
	}
	for (size_t i = 0; i < call->count; i++)
		read_page(at(call) + i * PAGE, before[i]);
	say_result(madvise(at(call), len(call), MADV_FREE));
	for (size_t i = 0; i < call->count; i++) {
		int signal = read_page(at(call) + i * PAGE, now);
		wrong += !signal && memcmp(now, before[i], PAGE) && memcmp(now, zeros, PAGE);
	}
	say(" wrong %zu", wrong);
	do_fill(call);
}

/* process_madvise(2) on oneself, in two pieces. */
static void do_process_advise(const struct call *call)
{
	int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
	size_t half = call->count / 2 * PAGE;
	struct iovec parts[2] = { { at(call), half }, { at(call) + half, len(call) - half } };
	long result = process_madvise(self, half ? parts : parts + 1, half ? 2 : 1, (int)call->a, 0);
	say_advised(call, result);
	close(self);
	offered_to_ksm(call, result);
}

static void do_register(const struct call *call)
{
	if (pageone_register)
		pageone_register(at(call), len(call));
}

static void do_unregister(const struct call *call)
{
	if (pageone_unregister)
		pageone_unregister(at(call), len(call));
}

static void do_protect(const struct call *call)
{
	say_result(mprotect(at(call), len(call), (int)call->a));
}

static void do_key(const struct call *call)
{
	static int key = -2;
	if (key == -2)
		key = pkey_alloc(0, 0);
	say_result(pkey_mprotect(at(call), len(call), (int)call->a, call->b ? key : -1));
}

static void do_lock(const struct call *call)
{
	say_result(mlock(at(call), len(call)));
}

static void do_lock_on_fault(const struct call *call)
{
	say_result(mlock2(at(call), len(call), MLOCK_ONFAULT));
}

static void do_unlock(const struct call *call)
{
	say_result(munlock(at(call), len(call)));
}

static void do_lock_all(const struct call *call)
{
	say_result(call->a ? mlockall((int)call->a) : munlockall());
}

/* Unlocks a range beyond its holes, too: munlock ends at the first. */
static void unlock_all(unsigned char *from, unsigned char *end)
{
	while (from < end) {
		unsigned char *to = from;
		while (to < end && msync(to, PAGE, MS_ASYNC) == 0)
			to += PAGE;
		if (to > from)
			munlock(from, (size_t)(to - from));
		from = to + PAGE;
	}
}

/* a: flags, b: pages afterwards, c: the target's page. */
static void do_remap(const struct call *call)
{
	unsigned char *target = (unsigned char *)ARENA + call->c * (long)PAGE;
	size_t bytes = (size_t)call->b * PAGE;
	/* It unlocks what stays: all of the mapping, though only a part of it moves, and merging divides mappings. */
	if (call->a & MREMAP_DONTUNMAP)
		unlock_all(at(call), at(call) + len(call));
	unsigned char *place = mremap(at(call), len(call), bytes, (int)call->a, target);
	int error = errno;
	say_place(place);
	size_t kept = len(call) < bytes ? len(call) : bytes;
	if (place == MAP_FAILED && error == EFAULT && is_alike((uintptr_t)at(call), (uintptr_t)at(call) + kept))
		say(" divided");
	if (place == MAP_FAILED || (place >= (unsigned char *)ARENA && place < (unsigned char *)ARENA + ARENA_PAGES * PAGE))
		return;
	say_mappings((uintptr_t)place, (uintptr_t)place + bytes);
	say_contents((uintptr_t)place, (uintptr_t)place + bytes);
	say("\n  back");
	munmap(place, bytes);
}

/* A move that the kernel alone refused. */
static void do_divided(const struct call *call)
{
	(void)call;
	say(" EFAULT divided");
}

/* The same calls through syscall(2); a: advice or protection. */
static void do_by_number(const struct call *call)
{
	static const struct {
		const char *kind;
		long number;
	} numbers[] = {
		{ "madvise", SYS_madvise }, { "mprotect", SYS_mprotect }, { "munmap", SYS_munmap },
		{ "mlock", SYS_mlock }, { "munlock", SYS_munlock },
	};
	long result = 0;
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (strcmp(numbers[i].kind, call->kind) == 0)
			say_result(result = syscall(numbers[i].number, at(call), len(call), call->a));
	if (strcmp(call->kind, "madvise") == 0)
		offered_to_ksm(call, result ? 0 : (long)len(call));
}

/* Which of two errors a range has that deserves both depends on how its memory is divided. */
static void do_bind(const struct call *call)
{
	unsigned long nodes[16] = { 1 };
	int empty = call->a == 0 || call->a == 4; /* MPOL_DEFAULT, MPOL_LOCAL */
	long result = syscall(SYS_mbind, at(call), len(call), call->a, empty ? NULL : nodes, empty ? 0ul : 1024ul, call->b);
	if (result < 0 && (errno == EIO || errno == EFAULT) && has_hole((uintptr_t)at(call), (uintptr_t)at(call) + len(call)))
		say(" EFAULT or EIO");
	else
		say_result(result);
}

static void do_home_node(const struct call *call)
{
	const long set_mempolicy_home_node = 450;
	say_result(syscall(set_mempolicy_home_node, at(call), len(call), call->a, 0ul));
}

/* a, b: the nodes from which and to which, a bit each. */
static void do_migrate(const struct call *call)
{
	unsigned long from[16] = { (unsigned long)call->a }, to[16] = { (unsigned long)call->b };
	say_result(syscall(SYS_migrate_pages, 0, 1024ul, from, to));
}

/* a: the flags of a move to the first node, or 0 for a question. Which pages are there, and which are zeros, is not told. */
static void do_move_pages(const struct call *call)
{
	static void *pages[ARENA_PAGES];
	static int nodes[ARENA_PAGES], status[ARENA_PAGES];
	for (size_t i = 0; i < call->count; i++) {
		pages[i] = at(call) + i * PAGE;
		nodes[i] = 0;
	}
	say_result(syscall(SYS_move_pages, 0, call->count, pages, call->a ? nodes : NULL, status, call->a));
	for (size_t i = 0; i < call->count; i++)
		if (status[i] && status[i] != -ENOENT && status[i] != -EFAULT)
			say(" %zu:%d", i, status[i]);
}

static void do_policy(const struct call *call)
{
	unsigned long nodes[16] = { 1 };
	int empty = call->a == 0 || call->a == 4;
	say_result(syscall(SYS_set_mempolicy, call->a, empty ? NULL : nodes, empty ? 0ul : 1024ul));
}

static void do_seal(const struct call *call)
{
	const long mseal = 462;
	say_result(syscall(mseal, at(call), len(call), 0));
}

static void do_remap_file(const struct call *call)
{
	say_result(remap_file_pages(at(call), len(call), 0, (size_t)call->a, 0));
}

static void do_sync(const struct call *call)
{
	say_result(msync(at(call), len(call), (int)call->a));
}

/* The kernel as writer and as reader of the pages. */
static void do_read(const struct call *call)
{
	static unsigned char page[PAGE];
	int fds[2];
	must(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
	fill_page(page, (unsigned)call->a);
	for (size_t i = 0; i < call->count && i < 8; i++) {
		must(write(fds[1], page, PAGE) == (ssize_t)PAGE, "write");
		say_result(read(fds[0], at(call) + i * PAGE, PAGE));
		/* What did not arrive. */
		while (read(fds[0], page, PAGE) > 0)
			;
		fill_page(page, (unsigned)call->a);
	}
	close(fds[0]);
	close(fds[1]);
}

static void do_write(const struct call *call)
{
	int fds[2];
	must(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
	say_result(write(fds[1], at(call), len(call) < 8 * PAGE ? len(call) : 8 * PAGE));
	close(fds[0]);
	close(fds[1]);
}

/* Each thread works on pages of its own at the same time. */
struct share {
	const struct call *call;
	size_t number;
};

static void *storm(void *arg)
{
	const struct share *share = arg;
	for (size_t round = 0; round < 4; round++)
		for (size_t i = share->number; i < share->call->count; i += THREADS) {
			unsigned char *page = at(share->call) + i * PAGE;
			if ((i / THREADS + round) % 3 == 0)
				madvise(page, PAGE, MADV_DONTNEED);
			else
				write_page(page, (unsigned)(share->call->a + (long)(i + round)) % CONTENTS);
		}
	return NULL;
}

static void do_storm(const struct call *call)
{
	pthread_t threads[THREADS];
	struct share shares[THREADS];
	/* Two places of a file may be the same page. */
	if (!is_writable((uintptr_t)at(call), (uintptr_t)at(call) + len(call), 1)) {
		say(" left out");
		return;
	}
	for (size_t i = 0; i < THREADS; i++) {
		shares[i] = (struct share){ call, i };
		must(pthread_create(&threads[i], NULL, storm, &shares[i]) == 0, "pthread_create");
	}
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
}

static void do_settle(const struct call *call)
{
	(void)call;
	if (!plain && agent_is_in())
		settle();
}

static void do_check(const struct call *call)
{
	(void)call;
	say_everything();
}

static void do_look(const struct call *call)
{
	(void)call;
	say_mappings(ARENA, ARENA + ARENA_PAGES * PAGE);
}

/* Nothing is offered any more: the memory has all that it would have without PageONE. */
static void do_take_back(const struct call *call)
{
	(void)call;
	madvise((void *)ARENA, ARENA_PAGES * PAGE, MADV_UNMERGEABLE);
	nothing_merged = 1;
	say_everything();
	nothing_merged = 0;
}

static void do_family(const struct call *call) { family(call->kind, call->first, call->count, (unsigned)call->a); }
static void do_stores(const struct call *call)
{
	uintptr_t start = (uintptr_t)at(call);
	say(" %zu", stored(start, start + len(call)));
}

static void do_block_stores(const struct call *call) { block_stores(call->first); }
static void do_block_becomes_file(const struct call *call) { block_becomes_file(call->first); }
static void do_malloc(const struct call *call) { block_malloc(call->first, call->count * PAGE, (unsigned)call->a); }
static void do_realloc(const struct call *call) { block_realloc(call->first, call->count * PAGE); }
static void do_dealloc(const struct call *call) { block_free(call->first); }
static void do_block_offer(const struct call *call) { block_offer(call->first); }
/* Malloc keeps enough at its top: it would move brk itself else, in calls that the run without PageONE does not make. */
static void do_trim(const struct call *call) { (void)call; malloc_trim(1 << 20); }
static void do_heap(const struct call *call) { heap_move(call->a); }
static void do_heap_fill(const struct call *call) { heap_fill(call->first, call->count, (unsigned)call->a); }
static void do_heap_advise(const struct call *call) { heap_advise(call->first, call->count, (int)call->a); }
static void do_heap_here(const struct call *call) { heap_here(at(call)); }
static void do_loose(const struct call *call) { loose_begin(call->first, call->kind, call->count, (unsigned)call->a); }
static void do_loose_end(const struct call *call) { loose_end(call->first); }
static void do_name(const struct call *call) { name_memory(at(call), len(call), (int)call->a); }
static void do_segment(const struct call *call) { segment_begin(at(call), call->count, (unsigned)call->a); }
static void do_segment_end(const struct call *call) { (void)call; segment_end(); }
static void do_userfault(const struct call *call) { userfault(at(call), len(call), call->a); }
static void do_move_away(const struct call *call) { move_pages_away(at(call), call->count, call->a); }
static void do_pin(const struct call *call) { pin(call->first, call->count); }
static void do_unpin(const struct call *call) { (void)call; unpin(); }
static void do_fixed_read(const struct call *call) { fixed(1, call->first, call->count, call->a); }
static void do_fixed_write(const struct call *call) { fixed(0, call->first, call->count, call->a); }
static void do_attach(const struct call *call) { (void)call; agent_comes(); }
static void do_detach(const struct call *call) { (void)call; agent_goes(); }
static void do_stack_begin(const struct call *call) { stack_begin(call->first, (unsigned)call->a); }
static void do_stack_end(const struct call *call) { stack_end(call->first); }

static const struct {
	const char *name;
	void (*run)(const struct call *);
} calls[] = {
	{ "map", do_map }, { "munmap", do_munmap }, { "raw-munmap", do_raw_munmap }, { "fill", do_fill }, { "poke", do_poke },
	{ "below", do_touch_below }, { "madvise", do_advise }, { "free-lazily", do_free },
	{ "process_madvise", do_process_advise }, { "register", do_register }, { "unregister", do_unregister },
	{ "mprotect", do_protect }, { "pkey_mprotect", do_key }, { "mlock", do_lock },
	{ "mlock-onfault", do_lock_on_fault }, { "munlock", do_unlock }, { "mlockall", do_lock_all },
	{ "mremap", do_remap }, { "by-number", do_by_number }, { "divided", do_divided }, { "mbind", do_bind }, { "set_mempolicy", do_policy }, { "mseal", do_seal },
	{ "remap_file_pages", do_remap_file }, { "msync", do_sync }, { "read", do_read }, { "write", do_write },
	{ "userfaultfd", do_userfault }, { "storm", do_storm }, { "settle", do_settle }, { "check", do_check },
	{ "look", do_look }, { "take-back", do_take_back }, { "stores", do_stores }, { "block-stores", do_block_stores },
	{ "block-becomes-file", do_block_becomes_file }, { "family", do_family }, { "malloc", do_malloc }, { "realloc", do_realloc },
	{ "dealloc", do_dealloc }, { "block-offer", do_block_offer }, { "trim", do_trim }, { "brk", do_heap },
	{ "heap-fill", do_heap_fill }, { "heap-madvise", do_heap_advise }, { "stack-begin", do_stack_begin },
	{ "stack-end", do_stack_end }, { "heap-here", do_heap_here }, { "loose", do_loose }, { "loose-end", do_loose_end },
	{ "home-node", do_home_node }, { "migrate_pages", do_migrate }, { "move_pages", do_move_pages }, { "pin", do_pin },
	{ "unpin", do_unpin }, { "attach", do_attach }, { "detach", do_detach }, { "fixed-read", do_fixed_read }, { "fixed-write", do_fixed_write },
	{ "name", do_name }, { "shmat", do_segment }, { "shmdt", do_segment_end }, { "move-away", do_move_away },
};

/* ---- the threads: a line is one thread's, and the next line begins when it is done ---- */

static struct call next_call;
static size_t next_thread, done_lines, given_lines;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t given = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;

static void run(const struct call *call)
{
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		if (strcmp(calls[i].name, call->name) == 0) {
			calls[i].run(call);
			return;
		}
	must(0, call->name);
}

static void *thread(void *arg)
{
	size_t number = (size_t)arg, seen = 0;
	pthread_mutex_lock(&mutex);
	for (;;) {
		while (seen == given_lines || next_thread != number) {
			seen = given_lines;
			pthread_cond_wait(&given, &mutex);
		}
		seen = given_lines;
		pthread_mutex_unlock(&mutex);
		run(&next_call);
		pthread_mutex_lock(&mutex);
		done_lines = given_lines;
		pthread_cond_signal(&done);
	}
	return NULL;
}

static void give(size_t number)
{
	if (number % THREADS == 0) {
		run(&next_call);
		return;
	}
	pthread_mutex_lock(&mutex);
	next_thread = number % THREADS;
	given_lines++;
	pthread_cond_broadcast(&given);
	while (done_lines != given_lines)
		pthread_cond_wait(&done, &mutex);
	pthread_mutex_unlock(&mutex);
}

static void open_file(size_t i, const char *folder, const char *name)
{
	static unsigned char page[PAGE];
	char path[512];
	snprintf(path, sizeof path, "%s/%s", folder, name);
	int memfd = strcmp(name, "memory") == 0;
	files[i].name = name;
	files[i].fd = memfd ? memfd_create("memory", MFD_CLOEXEC) : open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	for (size_t p = 0; p < FILE_PAGES; p++) {
		fill_page(page, (unsigned)(p / 16) % (CONTENTS + 1));
		must(pwrite(files[i].fd, page, PAGE, (off_t)(p * PAGE)) == (ssize_t)PAGE, "pwrite");
	}
}

int main(int argc, char **argv)
{
	static char line[512], name[64], kind[64];
	if (argc != 5)
		return 2;
	FILE *list = fopen(argv[1], "re");
	trace = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
	must(list && trace >= 0, "open");
	plain = atoi(argv[4]);
	agent_by(list);
	/* Large blocks are mappings of their own, always; and what brk moves is not malloc's, which has enough. */
	mallopt(M_TOP_PAD, 4 << 20);
	mallopt(M_MMAP_THRESHOLD, 64 << 10);
	mallopt(M_TRIM_THRESHOLD, 64 << 10);
	free(malloc(32 << 10));
	open_file(0, argv[3], "file");
	open_file(1, argv[3], "private");
	open_file(2, argv[3], "memory");
	struct sigaction fault = { .sa_handler = on_fault };
	sigaction(SIGSEGV, &fault, NULL);
	sigaction(SIGBUS, &fault, NULL);
	pthread_t threads[THREADS];
	for (size_t i = 1; i < THREADS; i++)
		must(pthread_create(&threads[i], NULL, thread, (void *)i) == 0, "pthread_create");
	for (size_t number = 1; fgets(line, sizeof line, list); number++) {
		size_t who = 0;
		struct call call = { .name = name, .kind = kind };
		strcpy(kind, "-");
		sscanf(line, "%zu %63s %63s %zu %zu %ld %ld %ld", &who, name, kind, &call.first, &call.count, &call.a, &call.b,
		       &call.c);
		line[strcspn(line, "\n")] = 0;
		say("%zu %s =", number, line);
		next_call = call;
		give(who);
		say("\n");
	}
	say("end\n");
	return 0;
}

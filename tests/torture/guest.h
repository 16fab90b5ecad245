/*
 * A guest that torments its own memory: what its files share.
 *
 *   main.c    the loop: a step is one operation, drawn from (seed, guest, step)
 *   model.c   the region, its shadow, and the comparison of the two
 *   change.c  writes, discards, moves, protections
 *   neighbours.c  memory of other kinds in the middle of the region
 *   io.c      system calls and devices that write to the region
 *   family.c  threads and processes
 *
 * The region is offered; the shadow never is. Whatever an operation means by
 * its manual page is done to the shadow as well, so each byte of the region can
 * be told at any time. A byte that differs ends the process with a report.
 *
 * Draws depend on nothing but seed, guest and step: the same seed makes the same
 * operations, at other times. What the engine does in between is not replayed.
 */
#ifndef TORTURE_GUEST_H
#define TORTURE_GUEST_H

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../guest/mix.h"

#define PAGE 4096ul
#define CHUNK_PAGES 512ul
#define CHUNK (CHUNK_PAGES * PAGE)
#define MIN_PAGES CHUNK_PAGES
#define MAX_PAGES (5 * CHUNK_PAGES)
/* What a process ends with when a byte differs. */
#define EXIT_MISMATCH 3
/* What it ends with when a call fails that must not. */
#define EXIT_BROKEN 4

#define PRIVATE (MAP_PRIVATE | MAP_ANONYMOUS)
#define READ_WRITE (PROT_READ | PROT_WRITE)

/* Counters of a guest and all its children, in a file that outlives them. Pages, unless named. */
struct counts {
	atomic_ulong steps; /* operations begun */
	atomic_ulong written;
	atomic_ulong compared;
	atomic_ulong discarded;
	atomic_ulong moved;
	atomic_ulong protected;
	atomic_ulong direct; /* through O_DIRECT or io_uring */
	atomic_ulong forks; /* children made */
	atomic_ulong increments; /* atomic additions of threads */
	atomic_ulong mismatches; /* processes that found a wrong byte */
	atomic_ulong failures; /* calls that failed, children that crashed */
};

enum state { KNOWN, EITHER /* MADV_FREE: as before, or zeros */ };
enum access { WRITABLE, READABLE, CLOSED };

/* ---- model.c ---- */
extern unsigned char *mem, *shadow;
extern size_t pages;
extern unsigned char state[MAX_PAGES], protection[MAX_PAGES];
extern struct counts *counts;
extern uint64_t seed;
extern unsigned guest, generation;
extern unsigned long step;
extern const char *operation;

struct run {
	size_t first, count;
};

/* Begins the draws of a step; `draw(n)` gives a number below n. */
void draws_of(unsigned long number);
uint64_t draw(uint64_t below);
struct run draw_run(size_t most);

void open_region(size_t count);
void pattern(void *page, uint64_t content);
uint64_t draw_content(void);
void verify(struct run run);
void verify_all(void);
/* Makes the pages writable, if they are not. */
void writable(struct run run);
void set_page(size_t page, uint64_t content);
void set_byte(size_t at, unsigned char value);
/* The region's pages are zeros now. */
void zeroed(struct run run);
void wrong(size_t page);
/* Ends the process when a call that cannot fail failed. */
void must(int worked, const char *call);
#define COUNT(name, n) atomic_fetch_add_explicit(&counts->name, (n), memory_order_relaxed)

/* change.c: fresh memory over a run of the region; and an offer of it. */
void map_at(struct run run);
void offer_run(struct run run);

/* ---- the operations ---- */
void write_bytes(void), write_pages(void), copy_pages(void), zero_pages(void), renew_chunk(void);
void read_pages(void), discard(void), free_lazily(void), map_anew(void);
void offer(void), withdraw(void), protect(void), probe(void), lock_for_now(void), foreign_for_now(void), huge(void);
void private_file_for_now(void), block_for_now(void), huge_pages_for_now(void), heap_for_now(void), stack_for_now(void);
int pins_memory(void);
void grow(void), shrink(void), move_region(void), move_run(void);
void direct_write(void), direct_read(void), buffered_read(void), piped_read(void);
void pin(void), fixed_read(void), fixed_write(void);
void fork_child(void), fork_storm(void), fork_exec(void), run_threads(void);

/* io.c: gives the pinned buffer up when it touches the run, or in a child. */
void unpin(struct run run);
void forget_pin(void);
/* io.c: opens a file of this process in a folder. */
void open_file(const char *folder);

/* family.c: looks after children that ended; `all`: waits for them. */
void reap(int all);

/* main.c: the loop of a child. */
void live(unsigned long steps);
void name_process(const char *role);

#endif

/*
 * A program that makes memory calls as a list says, and writes down what it sees.
 *
 *   main.c    the list, the threads, the calls
 *   view.c    the mappings and the bytes of the arena, as text
 *   blocks.c  malloc's memory, brk, thread stacks
 *   loose.c   mappings where the kernel puts them, beside libc's
 *   pins.c    memory that an io_uring keeps
 *   rare.c    names, segments of System V, userfaultfds of the program's own
 *   family.c  children
 *   agent.c   the agent's coming and going, if that is in the list
 *
 * `model LIST TRACE FOLDER PLAIN` runs a list; the same list runs twice, without PageONE and
 * under it, and crates/pageone/tests/model compares the two traces line by line. So a trace holds nothing that
 * may differ: no address outside the arena, no time, no count of resident pages.
 *
 * A line of a list: THREAD NAME ARGUMENT...; its line of the trace: NUMBER NAME RESULT.
 */
#ifndef MODEL_H
#define MODEL_H

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#ifndef __GLIBC__
#include "musl.h"
#endif

#define PAGE 4096ul
#define CHUNK_PAGES 512ul
/* The arena: where the list's calls go. It begins with a chunk of PageONE's, and nothing else lies near. */
#define ARENA 0x200000000000ul
#define ARENA_PAGES (3 * CHUNK_PAGES)
#define FILE_PAGES 256ul
/* The stack of a thread in the arena, which no line touches; its bytes are compared by the thread alone. */
#define STACK_FIRST 1408ul
#define STACK_PAGES 80ul

/* Contents of pages: 0 is zeros. */
#define CONTENTS 6u

void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fill_page(void *page, unsigned content);
/* Writes a page as a thread does; gives the signal that hit it, or 0. */
int write_page(unsigned char *page, unsigned content);
int write_byte(unsigned char *at, unsigned char value);
/* Reads a page as a thread does; gives the signal that hit it, or 0. */
int read_page(const unsigned char *page, unsigned char *into);
void must(int worked, const char *call);

/* main.c */
struct kind {
	const char *name;
	int prot, flags, file; /* file: -1 none */
};
/* Maps memory of a kind. */
void *map_kind(const char *name, void *place, size_t len, int flags, long file_page);

/* view.c */
struct file {
	const char *name;
	int fd;
};
extern struct file files[3];
/* Set when all is taken back: then more of the flags is compared. */
extern int nothing_merged;
/* Says the mappings of a range, merged where only PageONE's division keeps them apart. */
void say_mappings(uintptr_t start, uintptr_t end);
/* Says the contents of the mapped pages of a range. */
void say_contents(uintptr_t start, uintptr_t end);
void say_files(void);
void say_bytes(const void *bytes, size_t len);
void say_everything(void);
/* How many pages of a range lie in mappings of a store. */
size_t stored(uintptr_t start, uintptr_t end);
/* How many mappings the kernel's KSM may merge; `take_back`: it may no longer. */
size_t ksm_mappings(int take_back);
/* Waits until merging has come to rest: no page more lies in a store. */
void settle(void);
/* Whether all of a range is mapped and may be written; `anonymous`: and belongs to no file. */
int is_writable(uintptr_t start, uintptr_t end, int anonymous);
/* Whether something of a range is not mapped. */
int has_hole(uintptr_t start, uintptr_t end);
/* Whether all of a range is anonymous memory of which the kernel tells the same. */
int is_alike(uintptr_t start, uintptr_t end);

/* blocks.c */
void block_malloc(size_t id, size_t len, unsigned content);
void block_realloc(size_t id, size_t len);
void block_free(size_t id);
void block_offer(size_t id);
/* Says how much of a block lies in a store: of one that is not offered, nothing. */
void block_stores(size_t id);
/* Frees a block and maps a file where it was. */
void block_becomes_file(size_t id);
void say_blocks(void);
void say_heap(void);
/* From now on the heap begins there, if the kernel lets this process say so. */
void heap_here(unsigned char *place);
void heap_move(long pages);
void heap_fill(size_t first, size_t count, unsigned content);
void heap_advise(size_t first, size_t count, int advice);
void stack_begin(size_t id, unsigned content);
void stack_end(size_t id);

/* loose.c */
void loose_begin(size_t id, const char *kind, size_t pages, unsigned content);
void loose_end(size_t id);
void say_loose(void);

/* agent.c */
/* Without PageONE. */
extern int plain;
/* Reads a list through for the lines by which the agent comes and goes. */
void agent_by(FILE *list);
/* Whether the agent is in this process, or would be if this were not the run without PageONE. */
int agent_is_in(void);
void agent_comes(void);
void agent_goes(void);

/* pins.c */
void pin(size_t first, size_t count);
void unpin(void);
/* Between a page of a file and the first page of the run that is pinned, past the page tables. */
void fixed(int read, size_t first, size_t count, long file_page);

/* rare.c */
void name_memory(unsigned char *at, size_t len, int unnamed);
/* Shared memory over what lies there, each page with this content. */
void segment_begin(unsigned char *at, size_t pages, unsigned content);
/* Takes the last one out. */
void segment_end(void);
/* Registers memory with a userfaultfd for a moment. */
void userfault(unsigned char *at, size_t len, long mode);
/* Moves pages out by UFFDIO_MOVE, and writes them where they were. */
void move_pages_away(unsigned char *at, size_t pages, long mode);

/* family.c */
void family(const char *kind, size_t first, size_t count, unsigned content);

#endif

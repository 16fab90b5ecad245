/* Memory that libc hands out: large blocks of malloc, the heap behind brk, stacks of threads. */
#include "model.h"
#include "../guest/brk.h"

#include <alloca.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BLOCKS 12
#define STACKS 6

static struct block {
	unsigned char *at;
	size_t len;
} blocks[BLOCKS];

/* The whole pages inside a block. */
static unsigned char *first_page(const struct block *block)
{
	return (unsigned char *)(((uintptr_t)block->at + PAGE - 1) & ~(PAGE - 1));
}

static size_t page_count(const struct block *block)
{
	uintptr_t end = ((uintptr_t)block->at + block->len) & ~(PAGE - 1), start = (uintptr_t)first_page(block);
	return block->at && end > start ? (end - start) / PAGE : 0;
}

/* The same 16 bytes again and again: where in its page a block begins is malloc's affair. */
static void fill_block(struct block *block, unsigned content)
{
	for (size_t i = 0; i < block->len; i++)
		block->at[i] = (unsigned char)(content * 37 + i % 16);
}

void block_malloc(size_t id, size_t len, unsigned content)
{
	struct block *block = &blocks[id % BLOCKS];
	if (!block->at) {
		block->at = malloc(len);
		block->len = len;
		must(block->at != NULL, "malloc");
		fill_block(block, content);
	}
}

void block_realloc(size_t id, size_t len)
{
	struct block *block = &blocks[id % BLOCKS];
	size_t old = block->len;
	if (!block->at)
		return;
	block->at = realloc(block->at, len);
	must(block->at != NULL, "realloc");
	block->len = len;
	if (len > old)
		memset(block->at + old, 0x55, len - old);
}

void block_free(size_t id)
{
	struct block *block = &blocks[id % BLOCKS];
	free(block->at);
	block->at = NULL;
	block->len = 0;
}

void block_offer(size_t id)
{
	struct block *block = &blocks[id % BLOCKS];
	size_t pages = page_count(block);
	if (pages)
		say(" %d", madvise(first_page(block), pages * PAGE, MADV_MERGEABLE));
}

void block_stores(size_t id)
{
	uintptr_t start = (uintptr_t)first_page(&blocks[id % BLOCKS]);
	say(" %zu", stored(start, start + page_count(&blocks[id % BLOCKS]) * PAGE));
}

void block_becomes_file(size_t id)
{
	struct block *block = &blocks[id % BLOCKS];
	unsigned char *at = first_page(block);
	size_t len = page_count(block) * PAGE;
	block_free(id);
	if (mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, files[0].fd, 0) != at) {
		say(" the place is taken");
		return;
	}
	say(" %d", madvise(at, len, MADV_DONTNEED));
	say_mappings((uintptr_t)at, (uintptr_t)at + len);
	say_contents((uintptr_t)at, (uintptr_t)at + len);
	munmap(at, len);
}

void say_blocks(void)
{
	for (size_t i = 0; i < BLOCKS; i++) {
		uint64_t hash = 1;
		for (size_t at = 0; at < blocks[i].len; at++)
			hash = (hash ^ blocks[i].at[at]) * 0x100000001b3ull;
		if (blocks[i].at)
			say("\n  block %zu: %zu %lx", i, blocks[i].len, hash);
	}
}

/* ---- the heap: what brk moves, while malloc keeps away from it ---- */

static unsigned char *heap;
static size_t heap_pages;

void heap_here(unsigned char *place)
{
	int error = -brk_begins(place, place);
	say(" %d", error);
	if (!error)
		heap = place;
}

void heap_move(long pages)
{
	unsigned char *end = sbrk(0);
	if (!heap)
		heap = (unsigned char *)(((uintptr_t)end + PAGE - 1) & ~(PAGE - 1));
	if (pages < 0 && (size_t)-pages > heap_pages)
		pages = -(long)heap_pages;
	int result = brk(heap + ((long)heap_pages + pages) * (long)PAGE);
	say(" %d %d", result, result ? errno : 0);
	if (result == 0)
		heap_pages = (size_t)((long)heap_pages + pages);
}

static int in_heap(size_t *first, size_t *count)
{
	if (heap_pages == 0)
		return 0;
	*first %= heap_pages;
	if (*first + *count > heap_pages)
		*count = heap_pages - *first;
	return 1;
}

void heap_fill(size_t first, size_t count, unsigned content)
{
	for (size_t i = 0; in_heap(&first, &count) && i < count; i++)
		say(" %d", write_page(heap + (first + i) * PAGE, content));
}

void heap_advise(size_t first, size_t count, int advice)
{
	if (in_heap(&first, &count)) {
		int result = madvise(heap + first * PAGE, count * PAGE, advice);
		say(" %d %d", result, result ? errno : 0);
	}
}

void say_heap(void)
{
	if (heap_pages) {
		uintptr_t start = (uintptr_t)heap, end = start + heap_pages * PAGE;
		say("\n  heap:");
		say_mappings(start, end);
		say_contents(start, end);
	}
}

/* ---- stacks: each thread offers a part of its own, and sleeps until it is asked ---- */

#define DEEP (64 * PAGE)

static struct stack {
	pthread_t thread;
	int begun, wrong;
	unsigned content, garbage;
	pthread_barrier_t ready, end;
} stacks[STACKS];

static void *on_stack(void *arg)
{
	struct stack *stack = arg;
	unsigned char *area = alloca(DEEP);
	unsigned char *first = (unsigned char *)(((uintptr_t)area + PAGE - 1) & ~(PAGE - 1));
	size_t pages = DEEP / PAGE - 8;
	static _Thread_local unsigned char page[PAGE];
	/* A thread's stack may have been another's: libc has given its pages back, or it was mapped anew. */
	for (size_t i = 0; i < pages * PAGE; i++)
		stack->garbage += first[i] != 0;
	for (size_t i = 0; i < pages; i++)
		fill_page(first + i * PAGE, stack->content);
	madvise(first, pages * PAGE, MADV_MERGEABLE);
	pthread_barrier_wait(&stack->ready);
	pthread_barrier_wait(&stack->end);
	fill_page(page, stack->content);
	for (size_t i = 0; i < pages; i++)
		stack->wrong += memcmp(first + i * PAGE, page, PAGE) != 0;
	return NULL;
}

/* The first of these stacks lies in the arena, as a program may wish: beside the list's memory. */
static void *stack_in_arena(void)
{
	unsigned char *at = (unsigned char *)ARENA + STACK_FIRST * PAGE;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_FIXED;
	must(mmap(at, STACK_PAGES * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) == at, "mmap");
	return at;
}

void stack_begin(size_t id, unsigned content)
{
	struct stack *stack = &stacks[id % STACKS];
	if (stack->begun)
		return;
	*stack = (struct stack){ .begun = 1, .content = content };
	pthread_barrier_init(&stack->ready, NULL, 2);
	pthread_barrier_init(&stack->end, NULL, 2);
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	if (id % STACKS == 0)
		pthread_attr_setstack(&attributes, stack_in_arena(), STACK_PAGES * PAGE);
	int error = pthread_create(&stack->thread, &attributes, on_stack, stack);
	pthread_attr_destroy(&attributes);
	stack->begun = error == 0;
	if (error == 0)
		pthread_barrier_wait(&stack->ready);
	say(" %d garbage %u", error, stack->garbage);
}

void stack_end(size_t id)
{
	struct stack *stack = &stacks[id % STACKS];
	if (!stack->begun)
		return;
	pthread_barrier_wait(&stack->end);
	pthread_join(stack->thread, NULL);
	stack->begun = 0;
	say(" wrong %d", stack->wrong);
}

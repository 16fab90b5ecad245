/* The region, its shadow, and the comparison of the two. */
#include "guest.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

unsigned char *mem, *shadow;
size_t pages;
unsigned char state[MAX_PAGES], protection[MAX_PAGES];
struct counts *counts;
uint64_t seed;
unsigned guest, generation;
unsigned long step;
const char *operation = "start";

/* Contents that guests share; content 0 is a page of zeros. */
#define POOL 384

static uint64_t stream;

void draws_of(unsigned long number)
{
	stream = mix(mix(mix(seed + 1) + guest) + ((uint64_t)generation << 40)) + mix(number + 1);
}

uint64_t draw(uint64_t below)
{
	stream += 0x9e3779b97f4a7c15ull;
	return mix(stream) % below;
}

struct run draw_run(size_t most)
{
	size_t count = 1 + draw(most < pages ? most : pages);
	return (struct run){ draw(pages - count + 1), count };
}

void pattern(void *page, uint64_t content)
{
	uint64_t *word = page;
	for (size_t i = 0; i < PAGE / 8; i++)
		word[i] = content ? mix(content * 1000003 + i) : 0;
}

/* The first content of a run: runs of one guest are found in others too. */
uint64_t draw_content(void)
{
	return 1 + draw(POOL / 64) * 64;
}

void open_region(size_t count)
{
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	char *area = mmap(NULL, (MAX_PAGES + CHUNK_PAGES) * PAGE, prot, flags, -1, 0);
	shadow = mmap(NULL, MAX_PAGES * PAGE, prot, flags, -1, 0);
	must(area != MAP_FAILED && shadow != MAP_FAILED, "mmap");
	mem = (unsigned char *)(((uintptr_t)area + CHUNK - 1) & ~(CHUNK - 1));
	pages = count;
	must(munmap(mem + pages * PAGE, (MAX_PAGES - pages) * PAGE) == 0, "munmap");
}

void must(int worked, const char *call)
{
	if (worked)
		return;
	fprintf(stderr, "torture: %s: %s: seed %lu guest %u generation %u step %lu %s\n", call,
		strerror(errno), seed, guest, generation, step, operation);
	COUNT(failures, 1);
	_exit(EXIT_BROKEN);
}

/* What a wrong page holds instead, for the search of the cause. */
static void describe(const unsigned char *page, char *text, size_t len)
{
	static unsigned char known[PAGE];
	for (uint64_t content = 0; content <= POOL + 64; content++) {
		pattern(known, content);
		if (memcmp(page, known, PAGE) == 0) {
			snprintf(text, len, "the page is content %lu", content);
			return;
		}
	}
	snprintf(text, len, "the page is of no known content");
}

void wrong(size_t page)
{
	static unsigned char found[PAGE];
	char text[64];
	unsigned char *at = mem + page * PAGE, *expected = shadow + page * PAGE;
	memcpy(found, at, PAGE);
	size_t byte = 0, differing = 0;
	for (size_t i = PAGE; i-- > 0;)
		if (found[i] != expected[i]) {
			byte = i;
			differing++;
		}
	describe(found, text, sizeof text);
	COUNT(mismatches, 1);
	fprintf(stderr,
		"torture: MISMATCH: seed %lu guest %u generation %u pid %d step %lu %s: address %p "
		"(page %zu, byte %zu): expected %02x, found %02x; %zu bytes differ, %s; now it %s\n",
		seed, guest, generation, getpid(), step, operation, (void *)(at + byte), page, byte,
		expected[byte], found[byte], differing, text,
		memcmp(at, expected, PAGE) ? "is still wrong" : "is right");
	_exit(EXIT_MISMATCH);
}

static int all_zero(const unsigned char *page)
{
	return page[0] == 0 && memcmp(page, page + 1, PAGE - 1) == 0;
}

void verify(struct run run)
{
	size_t done = 0;
	for (size_t p = run.first; p < run.first + run.count; p++) {
		if (protection[p] == CLOSED)
			continue;
		done++;
		if (memcmp(mem + p * PAGE, shadow + p * PAGE, PAGE) == 0)
			continue;
		if (state[p] != EITHER || !all_zero(mem + p * PAGE))
			wrong(p);
		memset(shadow + p * PAGE, 0, PAGE);
		state[p] = KNOWN;
	}
	COUNT(compared, done);
}

void verify_all(void)
{
	verify((struct run){ 0, pages });
}

void writable(struct run run)
{
	size_t end = run.first + run.count, p = run.first;
	while (p < end && protection[p] == WRITABLE)
		p++;
	if (p == end)
		return;
	int prot = PROT_READ | PROT_WRITE;
	must(mprotect(mem + run.first * PAGE, run.count * PAGE, prot) == 0, "mprotect");
	memset(protection + run.first, WRITABLE, run.count);
}

void set_page(size_t page, uint64_t content)
{
	pattern(shadow + page * PAGE, content);
	memcpy(mem + page * PAGE, shadow + page * PAGE, PAGE);
	state[page] = KNOWN;
	COUNT(written, 1);
}

void set_byte(size_t at, unsigned char value)
{
	size_t page = at / PAGE;
	mem[at] = value;
	if (state[page] == EITHER) {
		/* The write settles which of the two it is. */
		unsigned char *p = mem + page * PAGE, *s = shadow + page * PAGE;
		s[at % PAGE] = value;
		if (memcmp(p, s, PAGE) != 0) {
			memset(s, 0, PAGE);
			s[at % PAGE] = value;
		}
		state[page] = KNOWN;
	}
	shadow[at] = value;
	COUNT(written, 1);
}

void zeroed(struct run run)
{
	memset(shadow + run.first * PAGE, 0, run.count * PAGE);
	memset(state + run.first, KNOWN, run.count);
}

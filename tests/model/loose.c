/* Mappings of each kind where the kernel puts them: beside libc's blocks, its libraries and stacks of threads. */
#include "model.h"

#include <sys/mman.h>

#define LOOSE 8

static struct loose {
	unsigned char *at;
	size_t len;
} all[LOOSE];

static int is_there(const struct loose *loose)
{
	return loose->len != 0;
}

void loose_begin(size_t id, const char *kind, size_t pages, unsigned content)
{
	struct loose *loose = &all[id % LOOSE];
	if (is_there(loose))
		return;
	void *place = map_kind(kind, NULL, pages * PAGE, 0, 0);
	say(" %d", place != MAP_FAILED);
	if (place == MAP_FAILED)
		return;
	*loose = (struct loose){ place, pages * PAGE };
	for (size_t i = 0; i < pages; i++)
		say(" %d", write_page(loose->at + i * PAGE, (content + (unsigned)i) % (CONTENTS + 1)));
	say(" %d", madvise(loose->at, loose->len, MADV_MERGEABLE));
}

/* Only its bytes: the kernel joins it with a neighbour, which is another under PageONE. */
static void say_one(const struct loose *loose)
{
	static unsigned char page[PAGE];
	for (size_t at = 0; at < loose->len; at += PAGE) {
		int signal = read_page(loose->at + at, page);
		signal ? say(" signal%d", signal) : say_bytes(page, PAGE);
	}
}

void loose_end(size_t id)
{
	struct loose *loose = &all[id % LOOSE];
	if (!is_there(loose))
		return;
	say_one(loose);
	say(" %d", munmap(loose->at, loose->len));
	*loose = (struct loose){ 0 };
}

void say_loose(void)
{
	for (size_t i = 0; i < LOOSE; i++)
		if (is_there(&all[i])) {
			say("\n  loose %zu:", i);
			say_one(&all[i]);
		}
}

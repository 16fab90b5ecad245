/* What a guest may do with the descriptor of its store: map it, as often and as far as it likes. */
#include "hostile.h"

static void *map_store(int store, uint64_t at, uint64_t bytes, uint64_t offset)
{
	int fixed = at ? MAP_FIXED_NOREPLACE : 0;
	return mmap((void *)at, bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE | fixed, store, (off_t)offset);
}

/* A child that maps the first part of the store so many times, one mapping beside the other. */
static void map_often(int store, long count, int done)
{
	if (child() != 0)
		return;
	for (long i = 0; i < count; i++)
		if (map_store(store, 0, 64 * CHUNK, 0) == MAP_FAILED)
			break;
	if (write(done, "", 1) != 1)
		_exit(1);
	for (;;)
		pause();
}

/* store-maps PROCESSES COUNT: so many processes map the store so many times; meanwhile its pages die and come again. */
void store_maps(const char *path, char **args)
{
	static struct session s;
	struct offers offers = { .first = 0x30000000000ul, .chunks = 4 };
	int processes = atoi(args[0]), done[2];
	char byte, *region = map_at(offers.first, offers.chunks * 512);
	if (pipe(done))
		fail("pipe");
	while (join(&s, path, "") != 0)
		rest(50);
	if (watch(&s, offers.first, offers.chunks * CHUNK, 0) < 0)
		fail("userfaultfd");
	for (int i = 0; i < processes; i++)
		map_often(s.stores[0], atol(args[1]), done[1]);
	for (int i = 0; i < processes; i++)
		if (read(done[0], &byte, 1) != 1)
			fail("read");
	unsigned before = 0, said = 0;
	for (uint64_t seed = 1; ; seed++) {
		struct pollfd end = { 0, POLLIN, 0 };
		for (uint64_t i = 0; i < offers.chunks; i++) {
			fill(region + i * CHUNK, 256, seed * 100 + i);
			memcpy(region + i * CHUNK + CHUNK / 2, region + i * CHUNK, CHUNK / 2);
		}
		for (int i = 0; i < 20 && s.socket >= 0 && s.merges == before; i++)
			serve(&s, 1, &offers, 100);
		before = s.merges;
		serve(&s, 1, &offers, 300);
		if (!said && s.merges > 0)
			said = 1, say("ready, %u merges", s.merges);
		if (poll(&end, 1, 0))
			hold();
	}
}

/* claims: its store lies in 64 TiB of its addresses, behind the store's end, and at offsets that no slot has; it says that it
 * merged all of this before, comes, and leaves without a word more. */
void claims(const char *path, char **args)
{
	(void)args;
	static struct session s;
	struct offers offers = { .first = 0x100000000000ul, .chunks = 20000, .stored = 1 };
	memset(offers.pages, 0xff, sizeof offers.pages);
	while (join(&s, path, "") != 0)
		rest(50);
	if (map_store(s.stores[0], offers.first, 64ul << 40, 0) == MAP_FAILED)
		fail("map 64 TiB");
	for (uint64_t i = 0; i < 30000; i++)
		if (map_store(s.stores[0], 0, PAGE, (1ul << 60) + 2 * i * PAGE) == MAP_FAILED)
			fail("map far behind the end");
	for (int silent = 0;; silent = !silent) {
		static int said;
		struct pollfd end = { 0, POLLIN, 0 };
		if (s.socket >= 0) {
			serve(&s, 1, silent ? NULL : &offers, 500);
			if (s.socket >= 0)
				close(s.socket);
		}
		if (!said++)
			say("ready");
		if (poll(&end, 1, 20))
			hold();
		if (join(&s, path, "") != 0)
			s.socket = -1;
	}
}

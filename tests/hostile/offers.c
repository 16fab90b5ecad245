/* What a guest may offer, and how much work that makes. */
#include "hostile.h"

/* chunk-flood CHUNKS PAGES: of each word of pages these, else one page of each chunk: so every one needs a table of its
 * own. No memory is there. */
void chunk_flood(const char *path, char **args)
{
	static struct session s;
	struct offers offers = { .first = 0x10000000000ul, .pages = { 1 } };
	offers.chunks = args[0] ? strtoull(args[0], NULL, 0) : 1 << 20;
	for (int i = 0; args[0] && args[1] && i < 8; i++)
		offers.pages[i] = strtoull(args[1], NULL, 0);
	int joined = join(&s, path, "");
	say("ready, %d", joined);
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;) {
		if (joined == 0)
			serve(&s, 1, &offers, 500);
		/* Dropped: it comes back with the same. */
		if (joined != 0 || s.socket < 0)
			joined = join(&s, path, "");
		rest(100);
	}
	hold();
}

/* endless-offer CHUNKS: one entry says that a whole range is offered: 16 GiB of bait, or all there is. */
void endless_offer(const char *path, char **args)
{
	static struct session s;
	struct offers offers = { .first = args[1] ? strtoull(args[1], NULL, 0) : 0 };
	offers.chunks = args[0] ? strtoull(args[0], NULL, 0) : 1ul << 26;
	offers.again = 1;
	for (;;) {
		int joined = join(&s, path, "");
		static int said;
		if (!said++)
			say("ready, %d", joined);
		if (joined == 0)
			serve(&s, 1, &offers, 1000);
		struct pollfd end = { 0, POLLIN, 0 };
		if (poll(&end, 1, 200))
			hold();
		if (joined == 0 && s.socket >= 0)
			close(s.socket);
	}
}

/* sync-storm: 20000 chunks that are known, then packet after packet that says of each entry: all of them, whole. */
void sync_storm(const char *path, char **args)
{
	static struct session s;
	uint64_t chunks = args[0] ? strtoull(args[0], NULL, 0) : 20000;
	struct offers known = { .first = 0x10000000000ul, .chunks = chunks, .pages = { 1 } };
	int joined = join(&s, path, "");
	if (joined == 0)
		for (int i = 0; i < 100 && s.syncs == 0; i++)
			serve(&s, 1, &known, 20);
	say("ready, %d", joined);
	/* Each answer: as many whole entries as fit, and four packets of them. */
	static unsigned char packet[MAX_MESSAGE];
	unsigned char *at = packet + 20;
	packet[0] = 6, packet[1] = 1, packet[18] = MAX_ENTRIES, packet[19] = 0;
	for (int i = 0; i < MAX_ENTRIES; i++, at += 13) {
		uint32_t count = (uint32_t)chunks;
		at[0] = 1;
		memcpy(at + 1, &known.first, 8);
		memcpy(at + 9, &count, 4);
	}
	struct pollfd waits[] = { { s.socket, POLLIN, 0 }, { 0, POLLIN, 0 } };
	unsigned char question[MAX_MESSAGE];
	while (joined == 0 && poll(waits, 2, -1) > 0 && !waits[1].revents) {
		if (recv(s.socket, question, sizeof question, MSG_DONTWAIT) <= 0)
			break;
		for (int part = 0; part < 4; part++) {
			packet[1] = part < 3;
			if (send(s.socket, packet, (size_t)(at - packet), MSG_NOSIGNAL) < 0)
				break;
		}
	}
	hold();
}

/* fill-store N: pairs of equal pages in so many chunks, all of which it says it has merged. It keeps every page of the store. */
void fill_store(const char *path, char **args)
{
	static struct session s;
	struct offers offers = { .first = 0x30000000000ul, .chunks = (uint64_t)atoi(args[0]) };
	char *region = map_at(offers.first, offers.chunks * 512);
	for (uint64_t i = 0; i < offers.chunks; i++) {
		char *chunk = region + i * CHUNK;
		fill(chunk, 256, i + 1000);
		memcpy(chunk + CHUNK / 2, chunk, CHUNK / 2);
	}
	while (join(&s, path, "") != 0)
		rest(50);
	if (watch(&s, offers.first, offers.chunks * CHUNK, 0) < 0)
		fail("userfaultfd");
	/* Until nothing more is merged, for want of pages or of room. */
	for (unsigned before = 0, quiet = 0, all = 0; quiet < 10 && all < 200; all++) {
		serve(&s, 1, &offers, 100);
		quiet = s.merges > 0 && s.merges == before ? quiet + 1 : 0;
		before = s.merges;
	}
	say("ready, %u merges", s.merges);
	serve(&s, 1, &offers, -1);
}

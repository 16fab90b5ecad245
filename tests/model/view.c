/* What a program can see of its memory, as text. */
#include "model.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TEXT (16ul << 20)
#define MAPPINGS 8192

/*
 * One mapping. What is left out on purpose:
 *   mg  a guest's offer is the agent's affair; without PageONE it is KSM's
 *   uw, um, ui  PageONE tracks writes with a userfaultfd, and holds pages with another
 *   sd  the kernel sets and clears it as it likes
 *   ac  counted as used where memory is promised strictly: pages that may not be written count when they may
 *   gu  may hold guards: said of a whole mapping, however it was divided; guards are seen by their signals
 *   lf  locked memory that was merged is locked on fault
 *   hg, nh  come back with the anonymous memory: compared at the end, when nothing is merged any more
 *   the memory policy  merged memory shows none, and has it again with the anonymous memory: compared at the end
 *   counts of resident, shared and swapped pages: to change these is PageONE's purpose
 * A mapping of a store stands for the anonymous memory that the guest offered.
 */
struct mapping {
	uintptr_t start, end;
	char attributes[192]; /* permissions, flags, key, policy, file */
	unsigned long offset; /* in pages; of a file of the program's own */
	int is_file, is_store;
};

static char text[TEXT], policies[TEXT];
static struct mapping found[2][MAPPINGS];
int nothing_merged;

static size_t read_text(const char *path, char *into)
{
	size_t len = 0;
	ssize_t got;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return into[0] = 0;
	while ((got = read(fd, into + len, TEXT - 1 - len)) > 0)
		len += (size_t)got;
	close(fd);
	into[len] = 0;
	return len;
}

/* The memory policy of the mapping that begins at `start`, without the counts behind it. */
static void add_policy(struct mapping *m, const char *line)
{
	unsigned long start;
	char policy[48] = "default";
	for (; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
		if (sscanf(line, "%lx %47s", &start, policy) == 2 && start == m->start)
			break;
	if (!line || !*line)
		strcpy(policy, "default");
	snprintf(m->attributes + strlen(m->attributes), 64, " %s", policy);
}

static void add_flags(struct mapping *m, char *flags)
{
	static const char *left_out[] = { "mg", "uw", "um", "ui", "sd", "ac", "gu", "lf", "hg", "nh" };
	size_t count = sizeof left_out / sizeof *left_out - (nothing_merged ? 2 : 0);
	for (char *flag = strtok(flags, " "); flag; flag = strtok(NULL, " ")) {
		int keep = 1;
		for (size_t i = 0; i < count; i++)
			keep &= strcmp(flag, left_out[i]) != 0;
		if (keep && strlen(m->attributes) < 120)
			strcat(strcat(m->attributes, " "), flag);
	}
}

static void begin_mapping(struct mapping *m, char *line, const char *perms, unsigned long offset)
{
	const char *path = strchr(line, '/');
	m->is_store = path && strncmp(path, "/memfd:pageone-", 15) == 0;
	m->is_file = path && !m->is_store;
	m->offset = offset / PAGE;
	const char *name = m->is_file ? strrchr(path, '/') + 1 : "anonymous";
	snprintf(m->attributes, sizeof m->attributes, "%s %.24s", perms, name);
	m->attributes[strcspn(m->attributes, "\n")] = 0;
}

static size_t read_mappings(struct mapping *into, uintptr_t from, uintptr_t to)
{
	size_t n = 0;
	struct mapping *m = NULL;
	read_text("/proc/self/numa_maps", policies);
	read_text("/proc/self/smaps", text);
	for (char *line = text, *next; line && *line; line = next) {
		unsigned long start, end, offset;
		char perms[8];
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		if (sscanf(line, "%lx-%lx %7s %lx", &start, &end, perms, &offset) == 4) {
			m = NULL;
			if (end <= from || start >= to || n == MAPPINGS)
				continue;
			m = &into[n++];
			m->start = start;
			m->end = end;
			begin_mapping(m, line, perms, offset);
			if (nothing_merged)
				add_policy(m, policies);
			if (start < from) {
				m->offset += (from - start) / PAGE;
				m->start = from;
			}
			m->end = end < to ? end : to;
		} else if (m && strncmp(line, "ProtectionKey:", 14) == 0) {
			snprintf(m->attributes + strlen(m->attributes), 16, " key%d", atoi(line + 14));
		} else if (m && strncmp(line, "VmFlags:", 8) == 0) {
			add_flags(m, line + 8);
		}
	}
	return n;
}

static int continues(const struct mapping *a, const struct mapping *b)
{
	if (a->end != b->start || strcmp(a->attributes, b->attributes))
		return 0;
	return !a->is_file || a->offset + (a->end - a->start) / PAGE == b->offset;
}

/* One mapping for what only PageONE's division keeps apart. */
static size_t join(struct mapping *all, size_t n)
{
	size_t kept = 0;
	for (size_t i = 0; i < n; i++) {
		if (kept && continues(&all[kept - 1], &all[i]))
			all[kept - 1].end = all[i].end;
		else
			all[kept++] = all[i];
	}
	return kept;
}

static int equal(const struct mapping *a, size_t n, const struct mapping *b, size_t m)
{
	if (n != m)
		return 0;
	for (size_t i = 0; i < n; i++)
		if (a[i].start != b[i].start || a[i].end != b[i].end || strcmp(a[i].attributes, b[i].attributes))
			return 0;
	return 1;
}

/* Two looks that agree: the text of smaps is not made in one step. */
static size_t look(uintptr_t start, uintptr_t end)
{
	size_t n = join(found[0], read_mappings(found[0], start, end));
	for (int i = 0; i < 20; i++) {
		usleep(500);
		size_t m = join(found[1], read_mappings(found[1], start, end));
		int same = equal(found[0], n, found[1], m);
		memcpy(found[0], found[1], m * sizeof *found[0]);
		n = m;
		if (same)
			break;
	}
	return n;
}

void say_mappings(uintptr_t start, uintptr_t end)
{
	size_t n = look(start, end);
	for (size_t i = 0; i < n; i++) {
		struct mapping *m = &found[0][i];
		say("\n  %lu-%lu %s", (m->start - start) / PAGE, (m->end - start) / PAGE, m->attributes);
		if (m->is_file)
			say(" @%lu", m->offset);
	}
}

/* The name of a content; `?` and a hash for one that no call of the list writes. */
static void name_of(const unsigned char *page, char *name, size_t len)
{
	static unsigned char known[CONTENTS + 1][PAGE];
	if (known[1][0] == 0 && known[1][8] == 0)
		for (unsigned c = 0; c <= CONTENTS; c++)
			fill_page(known[c], c);
	for (unsigned c = 0; c <= CONTENTS; c++)
		if (memcmp(page, known[c], PAGE) == 0) {
			snprintf(name, len, "%u", c);
			return;
		}
	uint64_t hash = 1;
	for (size_t i = 0; i < PAGE; i++)
		hash = (hash ^ page[i]) * 0x100000001b3ull;
	snprintf(name, len, "?%08x", (unsigned)(hash >> 32));
}

static int memory = -1;

/* A page as any reader may find it: by a load where that is allowed, else as a debugger would. */
static void content_of(uintptr_t at, int readable, char *name, size_t len)
{
	static unsigned char page[PAGE];
	int signal = readable ? read_page((void *)at, page) : 0;
	if (signal)
		snprintf(name, len, "signal%d", signal);
	else if (!readable && pread(memory, page, PAGE, (off_t)at) != (ssize_t)PAGE)
		strcpy(name, "-");
	else
		name_of(page, name, len);
}

static void say_run(const char *name, size_t count)
{
	if (count)
		say(count > 1 ? " %s*%zu" : " %s", name, count);
}

void say_contents(uintptr_t start, uintptr_t end)
{
	char last[32] = "", name[32];
	size_t run = 0, n = look(start, end);
	uintptr_t behind = 0; /* the end of the last mapping: how they are divided is said elsewhere */
	if (memory < 0)
		memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
	for (size_t i = 0; i < n; i++) {
		struct mapping m = found[0][i];
		for (uintptr_t at = m.start; at < m.end; at += PAGE) {
			content_of(at, m.attributes[0] == 'r', name, sizeof name);
			if (strcmp(name, last) || at != behind) {
				say_run(last, run);
				run = 0;
			}
			if (at != behind)
				say("\n  %lu:", (at - start) / PAGE);
			strcpy(last, name);
			behind = at + PAGE;
			run++;
		}
	}
	say_run(last, run);
}

/* A child must not look through its parent's descriptor. */
void forget_memory(void)
{
	close(memory);
	memory = -1;
}

void say_bytes(const void *bytes, size_t len)
{
	char last[32] = "", name[32];
	size_t run = 0;
	for (size_t at = 0; at + PAGE <= len; at += PAGE) {
		name_of((const unsigned char *)bytes + at, name, sizeof name);
		if (strcmp(name, last)) {
			say_run(last, run);
			run = 0;
		}
		strcpy(last, name);
		run++;
	}
	say_run(last, run);
}

void say_files(void)
{
	static unsigned char content[FILE_PAGES * PAGE];
	for (size_t i = 0; i < 3; i++) {
		memset(content, 0xee, sizeof content);
		ssize_t len = pread(files[i].fd, content, sizeof content, 0);
		say("\n  %s %ld:", files[i].name, (long)len);
		say_bytes(content, sizeof content);
	}
}

void say_everything(void)
{
	say_mappings(ARENA, ARENA + ARENA_PAGES * PAGE);
	say_contents(ARENA, ARENA + STACK_FIRST * PAGE);
	say_contents(ARENA + (STACK_FIRST + STACK_PAGES) * PAGE, ARENA + ARENA_PAGES * PAGE);
	say_files();
	say_blocks();
	say_loose();
	say_heap();
}

size_t stored(uintptr_t from, uintptr_t to)
{
	size_t pages = 0;
	unsigned long start, end;
	read_text("/proc/self/maps", text);
	for (char *line = text, *next; line && *line; line = next) {
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		if (!strstr(line, "/memfd:pageone-store") || sscanf(line, "%lx-%lx", &start, &end) != 2)
			continue;
		start = start < from ? from : start;
		end = end > to ? to : end;
		pages += end > start ? (end - start) / PAGE : 0;
	}
	return pages;
}

size_t ksm_mappings(int take_back)
{
	size_t count = 0;
	unsigned long start = 0, end = 0, at, behind;
	char perms[8];
	read_text("/proc/self/smaps", text);
	for (char *line = text, *next; line && *line; line = next) {
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		if (sscanf(line, "%lx-%lx %7s", &at, &behind, perms) == 3) {
			start = at;
			end = behind;
		} else if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " mg")) {
			count++;
			if (take_back)
				madvise((void *)start, end - start, MADV_UNMERGEABLE);
		}
	}
	return count;
}

void settle(void)
{
	size_t last = 0, same = 0;
	/* A few periods of merging without change; longer while there is nothing yet. */
	for (int i = 0; i < 40 && same < (last ? 4 : 12); i++) {
		usleep(20000);
		size_t now = stored(0, UINTPTR_MAX);
		same = now == last ? same + 1 : 0;
		last = now;
	}
	/* For the driver, which must know that there was something to test; not compared. */
	say(" stored=%zu", last);
}

int is_writable(uintptr_t start, uintptr_t end, int anonymous)
{
	size_t n = look(start, end);
	uintptr_t at = start;
	for (size_t i = 0; i < n; i++) {
		struct mapping *m = &found[0][i];
		if (m->start != at || m->attributes[1] != 'w' || (anonymous && m->is_file))
			return 0;
		at = m->end;
	}
	return at == end;
}

int has_hole(uintptr_t start, uintptr_t end)
{
	size_t n = look(start, end);
	uintptr_t at = start;
	for (size_t i = 0; i < n && found[0][i].start == at; i++)
		at = found[0][i].end;
	return at < end;
}

int is_alike(uintptr_t start, uintptr_t end)
{
	nothing_merged = 1;
	size_t n = look(start, end);
	nothing_merged = 0;
	struct mapping *m = found[0];
	return n == 1 && !m->is_file && m->start == start && m->end == end;
}

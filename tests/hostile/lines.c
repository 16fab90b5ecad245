/* Locks and pins on the files by which the daemon learns that a guest is gone: its lifeline, its domain's tie. */
#include "hostile.h"
#include <sys/uio.h>

#define REGION 0x20000000000ul
#define HALF 128ul

struct writer {
	int file;
	void *from;
};

/* The kernel holds the file's lock while it waits for the page it is to copy. */
static int write_for_ever(void *arg)
{
	struct writer *writer = arg;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (pwrite(writer->file, writer->from, PAGE, 0) < 0)
		_exit(1);
	return 0;
}

/* A session some of whose pages are merged, so that its lines are asked for when it is gone. */
static void merge_some(struct session *s, const char *path, const char *domain, uint64_t seed)
{
	char *region = map_at(REGION, CHUNK / PAGE);
	struct offers offers = { .first = REGION, .chunks = 1 };
	fill(region, HALF, seed);
	memcpy(region + HALF * PAGE, region, HALF * PAGE);
	while (join(s, path, domain) != 0)
		rest(50);
	if (watch(s, REGION, CHUNK, 0) < 0)
		fail("userfaultfd");
	for (int i = 0; i < 400 && s->merges == 0; i++)
		serve(s, 1, &offers, 50);
	if (s->merges == 0)
		fail("nothing was merged");
}

/* hung-write: writes to its lifeline and its tie from a page whose fault no process answers, and leaves the session. */
void hung_write(const char *path, char **args)
{
	(void)args;
	static struct session s;
	merge_some(&s, path, "", 7);
	static struct writer writers[2];
	int files[] = { s.line, s.tie };
	for (int i = 0; i < 2; i++) {
		writers[i] = (struct writer){ files[i], map_at(0, 1) };
		if (watch(&s, (uint64_t)writers[i].from, PAGE, 1) < 0)
			fail("userfaultfd");
		beside(write_for_ever, &writers[i]);
	}
	rest(100);
	shutdown(s.socket, SHUT_RDWR); /* the writers have it, too */
	say("ready");
	hold();
}

/* Keeps the page in a pipe, and nothing else of it. */
static void pin(void *page)
{
	int ends[2];
	struct iovec part = { page, PAGE };
	*(volatile char *)page = 1;
	if (pipe(ends) || vmsplice(ends[1], &part, 1, 0) != PAGE)
		fail("pin a page");
	munmap(page, PAGE);
}

/* pinned-lines N: N domains whose lifeline and tie are mapped by no process and pinned by pipes. */
void pinned_lines(const char *path, char **args)
{
	int most = atoi(args[0]), done[2], go[2];
	char byte = 0;
	if (pipe(done) || pipe(go))
		fail("pipe");
	for (int i = 0; i < most; i++) {
		if (child() != 0)
			continue;
		static struct session s;
		char domain[16];
		snprintf(domain, sizeof domain, "pins%d", i);
		merge_some(&s, path, domain, (uint64_t)i + 100);
		if (write(done[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1)
			_exit(1);
		pin(s.line_map), pin(s.tie_map);
		close(s.line), close(s.tie), close(s.socket);
		if (write(done[1], &byte, 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	/* All have merged before the first one pins, for pins may make merging slow. */
	for (int steps = 0; steps < 2; steps++) {
		for (int i = 0; i < most; i++)
			if (read(done[0], &byte, 1) != 1)
				fail("read");
		for (int i = 0; i < most && steps == 0; i++)
			if (write(go[1], &byte, 1) != 1)
				fail("write");
	}
	say("ready");
	hold();
}

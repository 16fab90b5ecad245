/* Processes of odd shapes: with all the mappings there may be, stopped in the handshake, without a first thread; and one that
 * never stops asking for a merge. */
#include "hostile.h"

static struct session own;

/* So many mappings: every second page has another protection. */
static void take_mappings(long count)
{
	char *at = map_at(0, (size_t)count);
	for (long i = 0; i < count; i += 2)
		if (mprotect(at + i * (long)PAGE, PAGE, PROT_READ))
			fail("mprotect");
}

static void serve_bait(const char *path)
{
	struct offers bait = offer_bait();
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	while (join(&own, path, "") != 0)
		rest(200);
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, 1, &bait, 3600 * 1000);
	_exit(0);
}

/* many-maps PROCESSES COUNT: guests with so many mappings each. */
void many_maps(const char *path, char **args)
{
	for (int i = atoi(args[0]); i > 0; i--)
		if (child() == 0) {
			take_mappings(atol(args[1]));
			serve_bait(path);
		}
	rest(1500);
	say("ready");
}

/* map-storm COUNT: with so many mappings it joins again and again. */
void map_storm(const char *path, char **args)
{
	take_mappings(atol(args[0]));
	say("ready");
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;) {
		if (join(&own, path, "") != 0) {
			rest(5);
			continue;
		}
		serve(&own, 1, NULL, 150);
		close(own.socket), close(own.line), close(own.tie), close(own.device);
		for (int i = 0; i < own.store_count; i++)
			close(own.stores[i]);
		munmap(own.line_map, PAGE), munmap(own.tie_map, PAGE);
	}
}

/* stops-early N: processes that stop, one after another step of the handshake each. */
void stops_early(const char *path, char **args)
{
	for (int i = atoi(args[0]); i > 0; i--)
		if (child() == 0) {
			int to = dial(path);
			if (i % 3 > 0)
				say_hello(to, "");
			if (i % 3 > 1 && take_welcome(&own, to, 3000) == 0)
				say_ready(&own);
			raise(SIGSTOP);
			_exit(0);
		}
	rest(1000);
	say("ready");
}

static const char *served_at;

static void *serve_after_the_first(void *ignored)
{
	(void)ignored;
	rest(50);
	serve_bait(served_at);
	return NULL;
}

/* headless N: guests whose first thread has ended. */
void headless(const char *path, char **args)
{
	served_at = path;
	for (int i = atoi(args[0]); i > 0; i--)
		if (child() == 0) {
			pthread_t thread;
			pthread_create(&thread, NULL, serve_after_the_first, NULL);
			syscall(SYS_exit, 0);
		}
	rest(1500);
	say("ready");
}

/* merge-storm N [brief]: so many threads ask without pause to have the memory merged at once, or a part of it. */
#define WISH(more) "{\"merge\":{\"pids\":[],\"start\":0,\"end\":140737488355328" more "}}"
static const char *wish = WISH("");

static void *wish_on(void *path)
{
	unsigned char hello[1 + 2 + 1 + 1 + 63] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 };
	static __thread unsigned char reply[MAX_MESSAGE];
	for (;;) {
		int to = dial(path);
		if (to < 0)
			continue;
		send(to, hello, sizeof hello, MSG_NOSIGNAL);
		send(to, wish, strlen(wish), MSG_NOSIGNAL);
		recv(to, reply, sizeof reply - 1, 0);
		close(to);
	}
	return NULL;
}

void merge_storm(const char *path, char **args)
{
	struct offers bait = offer_bait();
	pthread_t thread;
	if (args[1] && strcmp(args[1], "brief") == 0)
		wish = WISH(",\"brief\":true");
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	while (join(&own, path, "") != 0)
		rest(200);
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, 1, &bait, 300);
	for (int i = atoi(args[0]); i > 0; i--)
		pthread_create(&thread, NULL, wish_on, (void *)path);
	say("ready");
	serve(&own, 1, &bait, 3600 * 1000);
}

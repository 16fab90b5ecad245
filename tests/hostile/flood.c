/* Many of something: connections, sessions, processes, domains, stopped or lying agents. Each takes its number. */
#include "hostile.h"

#define MOST 8192
static struct session all[MOST];
static int sockets[MOST];

static int number(char **args, int otherwise)
{
	return args[0] ? atoi(args[0]) : otherwise;
}

/* silent N: hello, and not a word more. */
void silent(const char *path, char **args)
{
	int count = 0, most = number(args, 400);
	for (int i = 0; i < most; i++) {
		sockets[i] = dial(path);
		if (sockets[i] >= 0 && say_hello(sockets[i], "") == 0)
			count++;
	}
	say("ready, %d of %d hellos", count, most);
	hold();
}

/* dumb N: connections without a hello, and another for each that ends. */
void dumb(const char *path, char **args)
{
	int most = number(args, 300);
	for (int i = 0; i < most; i++)
		sockets[i] = dial(path);
	say("ready");
	struct pollfd waits[MOST];
	for (;;) {
		for (int i = 0; i < most; i++)
			waits[i] = (struct pollfd){ sockets[i], POLLIN, 0 };
		waits[most] = (struct pollfd){ 0, POLLIN, 0 };
		poll(waits, (nfds_t)most + 1, 1000);
		if (waits[most].revents)
			hold();
		for (int i = 0; i < most; i++)
			if (sockets[i] < 0 || waits[i].revents) {
				close(sockets[i]);
				sockets[i] = dial(path);
			}
		rest(20);
	}
}

/* sessions N: as many as it gets, all of one process. */
void sessions(const char *path, char **args)
{
	int count = 0, most = number(args, 5000);
	for (int i = 0; i < most; i++)
		if (join(&all[count], path, "") == 0)
			count++;
		else if (i - count > 50)
			break;
	say("ready, %d sessions", count);
	serve(all, count, NULL, -1);
}

/* many-processes N: a session each. */
void many_processes(const char *path, char **args)
{
	int most = number(args, 500);
	for (int i = 0; i < most; i++) {
		if (child() != 0)
			continue;
		while (join(&all[0], path, "") != 0)
			rest(1000);
		serve(all, 1, NULL, 3600 * 1000);
		_exit(0);
	}
	rest(800);
	say("ready");
	hold();
}

/* domains N: a session in each of so many domains, which the default policy lets a user have. */
void domains(const char *path, char **args)
{
	int count = 0, most = number(args, 1000);
	char name[32];
	for (int i = 0; i < most; i++) {
		snprintf(name, sizeof name, "d%d", i);
		if (join(&all[count], path, name) == 0)
			count++;
		else if (i - count > 50)
			break;
	}
	say("ready, %d domains", count);
	serve(all, count, NULL, -1);
}

/* late N CHUNKS MS: processes with a session and so many chunks each, which answer a merge after MS. */
void late(const char *path, char **args)
{
	int most = number(args, 200), ms = atoi(args[2]);
	/* Two equal pages in each chunk. */
	struct offers offers = { .first = 0x30000000000ul, .chunks = (uint64_t)atoi(args[1]), .pages = { 1, 0, 0, 0, 1 } };
	for (int i = 0; i < most; i++) {
		if (child() != 0)
			continue;
		for (uint64_t c = 0; c < offers.chunks; c++) {
			char *chunk = map_at(offers.first + c * CHUNK, CHUNK / PAGE);
			madvise(chunk, CHUNK, MADV_NOHUGEPAGE);
			fill(chunk, 1, (uint64_t)i * offers.chunks + c + 7);
			memcpy(chunk + CHUNK / 2, chunk, PAGE);
		}
		while (join(&all[0], path, "") != 0)
			rest(200);
		watch(&all[0], offers.first, offers.chunks * CHUNK, 0);
		all[0].late = ms;
		serve(all, 1, &offers, 3600 * 1000);
		_exit(0);
	}
	rest(1000);
	say("ready");
	hold();
}

/* stopped N: processes with a session each, which stop. */
void stopped(const char *path, char **args)
{
	int most = number(args, 60);
	struct offers bait = offer_bait();
	pid_t pids[MOST];
	for (int i = 0; i < most; i++)
		if ((pids[i] = child()) == 0) {
			fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
			if (join(&all[0], path, "") == 0) {
				watch(&all[0], SECRET_AT, CHUNK, 0);
				serve(all, 1, &bait, 3600 * 1000);
			}
			_exit(0);
		}
	rest(1000);
	for (int i = 0; i < most; i++)
		kill(pids[i], SIGSTOP);
	say("ready");
	hold();
}

/* One wrong answer of many kinds. */
static void lie(int socket, uint64_t random)
{
	unsigned char packet[MAX_MESSAGE];
	size_t len = 1 + random % 2000;
	for (size_t i = 0; i < len; i++)
		packet[i] = (unsigned char)((random * (i + 1)) >> 13);
	switch (random >> 60) {
	case 0: packet[0] = 4; len = 4; break;                   /* failed, somehow */
	case 1: packet[0] = 8; len = 1 + 16 + 512; memset(packet + 17, 1, 512); break;
	case 2: packet[0] = 10; len = 73; memset(packet + 9, 0xff, 64); break;
	case 3: packet[0] = 6; packet[1] = 1; memset(packet + 2, 0xff, 16); packet[18] = packet[19] = 0; len = 20; break;
	case 4: packet[0] = 3; len = 1; break;
	case 5: len = 0; break;
	case 6: len = MAX_MESSAGE; break;
	case 7: packet[0] = 6; packet[1] = 0; len = 20 + 13; packet[18] = 1; packet[19] = 0; packet[20] = 1;
		memset(packet + 21, 0, 8); memset(packet + 29, 0xff, 4); break; /* everything */
	default: packet[0] = (unsigned char)(random % 12); break;
	}
	send(socket, packet, len, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* liar: joins, answers a little while rightly, then wrongly, and begins again. */
void liar(const char *path, char **args)
{
	(void)args;
	struct offers bait = offer_bait();
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	say("ready");
	uint64_t random = 88172645463325252u;
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;) {
		struct session s;
		if (join(&s, path, "") != 0) {
			rest(50);
			continue;
		}
		random ^= random << 13, random ^= random >> 7, random ^= random << 17;
		int watcher = watch(&s, SECRET_AT, CHUNK, 0);
		serve(&s, 1, &bait, (int)(random % 400));
		for (int i = 0; i < 4; i++)
			lie(s.socket, random * (uint64_t)(2 * i + 1));
		rest(20);
		close(watcher), close(s.socket), close(s.line), close(s.tie), close(s.device);
		for (int i = 0; i < s.store_count; i++)
			close(s.stores[i]);
		munmap(s.line_map, PAGE), munmap(s.tie_map, PAGE);
	}
}

/* slow-reader N: asks for the status again and again, and never takes a reply. */
void slow_reader(const char *path, char **args)
{
	int most = number(args, 200), tiny = 1;
	unsigned char hello[1 + 2 + 1 + 1 + 63] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 };
	for (int i = 0; i < most; i++) {
		sockets[i] = dial(path);
		setsockopt(sockets[i], SOL_SOCKET, SO_RCVBUF, &tiny, sizeof tiny);
		if (sockets[i] < 0)
			continue;
		send(sockets[i], hello, sizeof hello, MSG_NOSIGNAL);
		for (int repeat = 0; repeat < 20; repeat++)
			send(sockets[i], "\"status\"", 8, MSG_NOSIGNAL | MSG_DONTWAIT);
	}
	say("ready");
	hold();
}

/* So many threads do the same without end. */
static void storm(void *(*does)(void *), const char *path, int threads)
{
	pthread_t thread;
	for (int i = threads; i > 0; i--)
		pthread_create(&thread, NULL, does, (void *)path);
	rest(300);
	say("ready");
	hold();
}

/* ask-storm N: so many threads ask for the status without pause; each second one goes before the reply. */
static void *ask_on(void *path)
{
	unsigned char hello[1 + 2 + 1 + 1 + 63] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 };
	static __thread unsigned char reply[MAX_MESSAGE];
	for (unsigned asked = 0;; asked++) {
		int to = dial(path);
		if (to < 0)
			continue;
		send(to, hello, sizeof hello, MSG_NOSIGNAL);
		send(to, "\"status\"", 8, MSG_NOSIGNAL);
		if (asked % 2)
			recv(to, reply, sizeof reply, 0);
		close(to);
	}
	return NULL;
}

void ask_storm(const char *path, char **args)
{
	storm(ask_on, path, number(args, 8));
}

/* hello-storm N: so many threads connect, say hello and go, as fast as they can. */
static void *say_and_go(void *path)
{
	for (;;) {
		int to = dial(path);
		if (to < 0)
			continue;
		say_hello(to, "");
		close(to);
	}
	return NULL;
}

void hello_storm(const char *path, char **args)
{
	storm(say_and_go, path, number(args, 2));
}

/* Descriptors of every kind, sent along with each packet; clients of the command line that stop in the middle; agents that do not let
 * root take them out. */
#include "hostile.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

/* ---- every kind of descriptor ---- */

#define MOST_KINDS 40

static int kinds[MOST_KINDS], kind_count;

static void kind(int fd)
{
	if (fd >= 0 && kind_count < MOST_KINDS)
		kinds[kind_count++] = fd;
}

static int memory_file(unsigned flags, int seals)
{
	int fd = (int)syscall(SYS_memfd_create, "kind", flags);
	if (fd >= 0 && ftruncate(fd, 2 << 20) == 0 && seals)
		fcntl(fd, F_ADD_SEALS, seals);
	return fd;
}

/* A userfaultfd of another process, for pages whose faults no process answers. */
static int anothers_userfaultfd(void)
{
	int ends[2], fd = -1;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		return -1;
	pid_t pid = child();
	if (pid == 0) {
		int own = watch(&(struct session){ .device = -1 }, (uint64_t)map_at(0, 16), 16 * PAGE, 1);
		dprintf(ends[1], "%d\n", own);
		for (;;)
			pause();
	}
	char text[16] = "";
	if (read(ends[0], text, sizeof text - 1) > 0 && atoi(text) >= 0) {
		int process = (int)syscall(SYS_pidfd_open, pid, 0);
		kind(process);
		fd = (int)syscall(SYS_pidfd_getfd, process, atoi(text), 0);
	}
	return fd;
}

static void make_kinds(void)
{
	int pair[2];
	sigset_t all;
	unsigned char ring[120] = { 0 }; /* struct io_uring_params */
	sigfillset(&all);
	if (pipe(pair) == 0)
		kind(pair[0]), kind(pair[1]);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0)
		kind(pair[0]), kind(pair[1]);
	kind(socket(AF_INET, SOCK_STREAM, 0));
	kind(epoll_create1(0));
	kind(eventfd(0, 0));
	kind(timerfd_create(CLOCK_MONOTONIC, 0));
	kind(signalfd(-1, &all, 0));
	kind(inotify_init1(0));
	kind(memory_file(0, 0));
	kind(memory_file(MFD_ALLOW_SEALING, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	kind(memory_file(MFD_HUGETLB, 0));
	kind((int)syscall(SYS_io_uring_setup, 4, ring));
	kind(anothers_userfaultfd());
	kind(open("/dev/userfaultfd", O_RDWR));
	kind(open("/dev/fuse", O_RDWR));
	kind(open("/dev/null", O_RDWR));
	kind(open("/dev/zero", O_RDWR));
	kind(open("/", O_PATH));
	kind(open("/", O_RDONLY | O_DIRECTORY));
	kind(open("/proc/self/mem", O_RDWR));
	kind(open("/proc/self/pagemap", O_RDONLY));
	kind(open("/proc/self/ns/mnt", O_RDONLY));
}

/* Sends them one by one, and all together, with a hello, a request, a ready and an answer. */
static void send_kinds(const char *path)
{
	static const unsigned char answer_to_none[20] = { 6 };
	for (int i = 0; i <= kind_count; i++) {
		const int *fds = i < kind_count ? kinds + i : kinds;
		int count = i < kind_count ? 1 : kind_count;
		for (unsigned char role = 0; role < 2; role++) {
			unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, role };
			int to = dial(path);
			send_with(to, hello, sizeof hello, fds, count);
			send_with(to, "\"status\"", 8, fds, count);
			close(to);
			to = dial(path);
			send(to, hello, sizeof hello, MSG_NOSIGNAL);
			send_with(to, "\"status\"", 8, fds, count);
			close(to);
		}
		struct session s = { .socket = -1 };
		int to = dial(path), wait = i % 8 == 0 ? 300 : 20;
		if (to < 0 || say_hello(to, "") || take_welcome(&s, to, wait)) {
			close(to);
			continue;
		}
		unsigned char ready[26] = { 3 };
		if (i % 2)
			send_with(to, ready, sizeof ready, fds, count);
		else if (say_ready(&s) == 0)
			send_with(to, answer_to_none, sizeof answer_to_none, fds, count);
		serve(&s, 1, NULL, 20);
		close(to), close(s.line), close(s.tie), close(s.device);
		for (int n = 0; n < s.store_count; n++)
			close(s.stores[n]);
		munmap(s.line_map, PAGE), munmap(s.tie_map, PAGE);
	}
}

/* every-kind: again and again. */
void every_kind(const char *path, char **args)
{
	(void)args;
	make_kinds();
	send_kinds(path);
	say("ready, %d kinds", kind_count);
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;)
		send_kinds(path);
}

/* ---- clients that stop ---- */

/* stopping-clients PROGRAM: the command's own clients, each stopped some milliseconds after its start, sixty at a time; between them
 * raw ones that stop after each packet. */
void stopping_clients(const char *path, char **args)
{
	static const char *const verbs[][4] = {
		{ "status" }, { "status", "--json" }, { "set", "run=1" }, { "merge", "1" }, { "top" },
		{ "history" }, { "analyze", "self" }, { "detach", "1" }, { "run", "--", "true" },
	};
	enum { MOST = 60 };
	pid_t stopped[MOST] = { 0 };
	setenv("PAGEONE_SOCKET", path, 1);
	struct pollfd end = { 0, POLLIN, 0 };
	for (unsigned n = 0; poll(&end, 1, 0) == 0; n++) {
		pid_t *place = &stopped[n % MOST];
		if (*place)
			kill(*place, SIGKILL), waitpid(*place, NULL, 0);
		const char *const *verb = verbs[n % (sizeof verbs / sizeof *verbs)];
		*place = child();
		if (*place == 0 && n % 4 == 3) {
			int to = dial(path);
			unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 };
			if (n % 3)
				send(to, hello, sizeof hello, MSG_NOSIGNAL);
			if (n % 3 == 2)
				send(to, "\"status\"", 8, MSG_NOSIGNAL);
			for (;;)
				pause();
		}
		if (*place == 0) {
			int null = open("/dev/null", O_RDWR);
			dup2(null, 0), dup2(null, 1), dup2(null, 2);
			execl(args[0], "pageone", verb[0], verb[1], verb[1] ? verb[2] : NULL, NULL);
			_exit(1);
		}
		rest((int)(n * 7 % 40));
		kill(*place, SIGSTOP);
		if (n == 2 * MOST)
			say("ready");
	}
}

/* ---- an agent that does not end ---- */

/* never-lets-go: writes a jump to itself over the function by which root ends the agent that he has put here. The note names it. */
void never_lets_go(const char *path, char **args)
{
	char line[512];
	uint64_t note[10] = { 0 }, start, end;
	(void)path, (void)args;
	second_thread();
	say("ready");
	read(0, line, 1);
	FILE *maps = fopen("/proc/self/maps", "r");
	int memory = open("/proc/self/mem", O_RDWR);
	while (memcmp(note, "P1attach", 8) && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx", &start, &end) != 2 || end - start > 64ul << 20)
			continue;
		for (uint64_t at = start; at < end && memcmp(note, "P1attach", 8); at += PAGE)
			if (pread(memory, note, sizeof note, (off_t)at) != sizeof note)
				break;
	}
	if (memcmp(note, "P1attach", 8) || pwrite(memory, "\xeb\xfe", 2, (off_t)note[6]) != 2)
		fail("no note");
	say("it never ends");
}

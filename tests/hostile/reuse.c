/* A number that another process has by now. Root forces it, in a PID namespace in which it is to be tried. */
#include "hostile.h"

static struct session pair[2];
static int sockets[2];
static atomic_int *stage;

static void wait_for_stage(int wanted)
{
	while (atomic_load(stage) < wanted)
		rest(2);
}

static void force_next(pid_t pid)
{
	char text[32];
	int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY), len = snprintf(text, sizeof text, "%d", pid - 1);
	if (fd < 0 || write(fd, text, (size_t)len) != len)
		fail("ns_last_pid");
	close(fd);
}

/* A process of another user with this number, and with the secret of FILE where the bait was. */
static int victim(pid_t pid, const char *file)
{
	char secret[64] = { 0 };
	int fd = open(file, O_RDONLY);
	if (fd < 0 || read(fd, secret, sizeof secret) <= 0)
		fail("secret");
	close(fd);
	for (int tries = 0; tries < 200; tries++) {
		force_next(pid);
		pid_t got = child();
		if (got == 0) {
			char *at = map_at(SECRET_AT, CHUNK / PAGE);
			for (size_t place = 0; place < SECRET_PAGES * PAGE; place += sizeof secret)
				memcpy(at + place, secret, sizeof secret);
			for (size_t page = 0; page < SECRET_PAGES; page++)
				memcpy(at + page * PAGE + 64, &page, sizeof page);
			become(61003);
			/* Its own agent watches its memory. */
			struct session own = { .device = open("/dev/userfaultfd", O_RDWR) };
			if (watch(&own, SECRET_AT, CHUNK, 0) < 0)
				fail("watch");
			atomic_store(stage, 2);
			for (;;)
				pause();
		}
		if (got == pid)
			return 0;
		kill(got, SIGKILL);
		waitpid(got, NULL, 0);
	}
	return -1;
}

static void prepare(void)
{
	stage = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* reused-before FILE: a process connects twice and dies; when its number is another's, a child says hello. */
void reused_before(const char *path, char **args)
{
	prepare();
	uid_t uid = (uid_t)atoi(getenv("HOSTILE_UID"));
	pid_t first = fork();
	if (first == 0) {
		become(uid);
		sockets[0] = dial(path), sockets[1] = dial(path);
		if (fork() != 0)
			_exit(0);
		struct offers bait = offer_bait();
		wait_for_stage(2);
		rest(50);
		int count = 0;
		for (int i = 0; i < 2; i++)
			if (say_hello(sockets[i], "") == 0 && take_welcome(&pair[count], sockets[i], 1000) == 0 &&
			    say_ready(&pair[count]) == 0)
				count++;
		say("ready, %d sessions", count);
		serve(pair, count, &bait, -1);
	}
	waitpid(first, NULL, 0);
	if (victim(first, args[0]))
		say("failed: the number could not be had");
	pause();
}

static int keep_serving(void *arg)
{
	(void)arg;
	struct offers bait = offer_bait();
	for (uint64_t seed = 1; atomic_load(stage) < 1; seed++) {
		fill((void *)SECRET_AT, SECRET_PAGES, seed);
		serve(pair, 2, &bait, 20);
		if (pair[0].syncs > 2)
			atomic_store(stage, 1);
	}
	/* The bait settles while the number goes to another process. */
	for (uint64_t seed = 100; atomic_load(stage) < 2; seed++) {
		fill((void *)SECRET_AT, SECRET_PAGES, seed);
		serve(pair, 2, &bait, 5);
	}
	serve(pair, 2, &bait, 500);
	say("ready");
	serve(pair, 2, &bait, -1);
	return 0;
}

/* reused-after FILE: a process joins, dies, and leaves its memory to a sibling; its number becomes another's. */
void reused_after(const char *path, char **args)
{
	prepare();
	uid_t uid = (uid_t)atoi(getenv("HOSTILE_UID"));
	pid_t first = fork();
	if (first == 0) {
		become(uid);
		map_at(SECRET_AT, CHUNK / PAGE);
		int joined = 0;
		for (int i = 0; i < 2; i++)
			joined += join(&pair[i], path, "") == 0;
		if (joined == 0) {
			say("ready, refused");
			_exit(0);
		}
		if (joined == 1)
			pair[1] = pair[0];
		watch(&pair[0], SECRET_AT, CHUNK, 0);
		beside(keep_serving, NULL);
		wait_for_stage(1);
		syscall(SYS_exit_group, 0);
	}
	waitpid(first, NULL, 0);
	if (victim(first, args[0]))
		say("failed: the number could not be had");
	pause();
}

/* The attackers' front door: one program, a verb an attack. */
#include "hostile.h"
#include <grp.h>

static const struct { const char *name; verb *run; int stays_root; } verbs[] = {
	{ "deputy", deputy, 0 }, { "zombie-deputy", zombie_deputy, 0 }, { "early-deputy", early_deputy, 0 }, { "su-deputy", su_deputy, 0 },
	{ "reused-before", reused_before, 1 }, { "reused-after", reused_after, 1 },
	{ "twice", twice, 0 }, { "passed", passed, 0 }, { "ids-differ", ids_differ, 1 },
	{ "undumpable", undumpable, 0 }, { "turns-secret", turns_secret, 0 },
	{ "turns-root", turns_root, 1 },
	{ "inside-userns", inside_userns, 0 },
	{ "silent", silent, 0 }, { "late", late, 0 }, { "dumb", dumb, 0 }, { "sessions", sessions, 0 },
	{ "many-processes", many_processes, 0 }, { "domains", domains, 0 }, { "stopped", stopped, 0 },
	{ "liar", liar, 0 }, { "slow-reader", slow_reader, 0 }, { "hello-storm", hello_storm, 0 },
	{ "ask-storm", ask_storm, 0 },
	{ "chunk-flood", chunk_flood, 0 }, { "endless-offer", endless_offer, 0 }, { "sync-storm", sync_storm, 0 },
	{ "fill-store", fill_store, 0 },
	{ "store-maps", store_maps, 0 }, { "claims", claims, 0 },
	{ "linger", linger, 0 }, { "nested", nested, 0 }, { "bundles", bundles, 0 },
	{ "descriptor-bomb", descriptor_bomb, 0 },
	{ "stall", stall, 0 }, { "hung-fuse", hung_fuse, 1 }, { "fuse-pages", fuse_pages, 1 },
	{ "fuse-libc", fuse_libc, 1 }, { "fuse-flush", fuse_flush, 1 },
	{ "hung-write", hung_write, 0 }, { "pinned-lines", pinned_lines, 0 },
	{ "file-locks", file_locks, 0 }, { "pidfd-locks", pidfd_locks, 0 }, { "text-locks", text_locks, 0 },
	{ "leases", leases, 0 },
	{ "many-maps", many_maps, 0 }, { "map-storm", map_storm, 0 }, { "stops-early", stops_early, 0 },
	{ "headless", headless, 0 }, { "merge-storm", merge_storm, 0 },
	{ "many-threads", many_threads, 1 }, { "thread-storm", thread_storm, 0 }, { "rights-storm", rights_storm, 1 },
	{ "busy", busy, 0 },
	{ "vfork-deputy", vfork_deputy, 0 }, { "mounts", mounts, 0 }, { "long-maps", long_maps, 0 },
	{ "tamper", tamper, 0 }, { "lock-folder", lock_folder, 0 }, { "forge", forge, 0 },
	{ "fake-server", fake_server, 0 },
	{ "every-kind", every_kind, 0 }, { "stopping-clients", stopping_clients, 0 }, { "never-lets-go", never_lets_go, 0 },
	{ "long-mounts", long_mounts, 0 },
	{ "lying-note", lying_note, 0 }, { "false-entry", false_entry, 0 }, { "exec-when-traced", exec_when_traced, 0 },
	{ "exec-beside", exec_beside, 0 },
};

void say(const char *format, ...)
{
	char line[4096];
	va_list args;
	va_start(args, format);
	int len = vsnprintf(line, sizeof line - 1, format, args);
	va_end(args);
	line[len++] = '\n';
	if (write(1, line, (size_t)len) != len)
		_exit(0);
}

void fail(const char *what)
{
	say("failed: %s: %s", what, strerror(errno));
	_exit(1);
}

void rest(int ms)
{
	usleep((useconds_t)ms * 1000);
}

/* Pages that no other process has: splitmix64 of seed and place. */
void fill(void *at, size_t pages, uint64_t seed)
{
	uint64_t *words = at;
	for (size_t i = 0; i < pages * PAGE / 8; i++) {
		uint64_t z = seed * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
		words[i] = z ^ (z >> 31);
	}
}

void *map_at(uint64_t at, size_t pages)
{
	int fixed = at ? MAP_FIXED_NOREPLACE : 0;
	void *got = mmap((void *)at, pages * PAGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
	if (got == MAP_FAILED)
		fail("map");
	return got;
}

/* A process that shares the caller's memory and outlives its exec and its end. */
pid_t beside(int (*run)(void *), void *arg)
{
	char *stack = map_at(0, 64);
	pid_t pid = clone(run, stack + 64 * PAGE, CLONE_VM | SIGCHLD, arg);
	if (pid < 0)
		fail("clone");
	return pid;
}

static void *sleep_for_ever(void *ignored)
{
	for (;;)
		pause();
	return ignored;
}

/* So many threads that sleep. Their stacks are small, and have room for what each thread has of the sessions' buffers. */
void take_threads(long count)
{
	pthread_attr_t small;
	pthread_t thread;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 96 * 1024);
	for (long i = 0; i < count; i++)
		if ((errno = pthread_create(&thread, &small, sleep_for_ever, NULL)))
			fail("threads");
}

/* A child that ends with its parent; 0 in the child. */
pid_t child(void)
{
	pid_t parent = getpid(), pid = fork();
	if (pid < 0)
		fail("fork");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(0);
	}
	return pid;
}

void become(uid_t uid)
{
	if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
		fail("become a user");
	prctl(PR_SET_DUMPABLE, 1);
}

/* Keeps what the attack holds until the test lets go. */
void hold(void)
{
	char byte;
	while (read(0, &byte, 1) > 0)
		;
	_exit(0);
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	struct rlimit files = { 1 << 18, 1 << 18 };
	setrlimit(RLIMIT_NOFILE, &files);
	uid_t uid = (uid_t)atoi(argv[1]);
	for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
		if (strcmp(argv[2], verbs[i].name))
			continue;
		setenv("HOSTILE_UID", argv[1], 1);
		if (!verbs[i].stays_root)
			become(uid);
		verbs[i].run(argv[3], argv + 4);
		hold();
	}
	return 2;
}

/* Processes that are dear to look at, and rights that never rest: tens of thousands of threads or groups, ids that change all the
 * time, threads that wait for a child for ever, mounts over /proc, files with long names. */
#include "hostile.h"
#include <grp.h>
#include <linux/capability.h>
#include <sys/fsuid.h>
#include <sys/mount.h>

static struct session own;

static void serve_bait(const char *path)
{
	struct offers bait = offer_bait();
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	while (join(&own, path, "") != 0)
		rest(100);
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, 1, &bait, 3600 * 1000);
	_exit(0);
}

static void take_groups(long count)
{
	gid_t *groups = calloc((size_t)count + 1, sizeof *groups);
	for (long i = 0; i < count; i++)
		groups[i] = 4000000000u + (gid_t)i;
	if (setgroups((size_t)count, groups))
		fail("setgroups");
	free(groups);
}

static void become_with_groups(uid_t uid, long groups)
{
	take_groups(groups);
	if (setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
		fail("become a user");
	prctl(PR_SET_DUMPABLE, 1);
}

/* many-threads PROCESSES THREADS GROUPS: so many guests with so many threads, each in so many groups. */
void many_threads(const char *path, char **args)
{
	uid_t uid = (uid_t)atoi(getenv("HOSTILE_UID"));
	become_with_groups(uid, atol(args[2]));
	for (int i = atoi(args[0]); i > 0; i--)
		if (child() == 0) {
			take_threads(atol(args[1]));
			serve_bait(path);
		}
	rest(1500);
	say("ready");
}

/* thread-storm THREADS PROGRAM: says hello, syncs, executes a program and ends, with so many threads, again and again. */
void thread_storm(const char *path, char **args)
{
	say("ready");
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;) {
		pid_t pid = child();
		if (pid == 0) {
			take_threads(atol(args[0]));
			if (join(&own, path, "") == 0)
				serve(&own, 1, NULL, 150);
			execl(args[1], args[1], "nothing", NULL);
			_exit(0);
		}
		waitpid(pid, NULL, 0);
	}
}

/* ---- threads that never rest ---- */

static void *compute(void *ignored)
{
	for (volatile unsigned long turn = 0;; turn++)
		;
	return ignored;
}

/* busy THREADS: so many threads want a CPU all the time. */
void busy(const char *path, char **args)
{
	pthread_t thread;
	(void)path;
	for (int i = atoi(args[0]); i > 0; i--)
		pthread_create(&thread, NULL, compute, NULL);
	say("ready");
	pause();
}

/* ---- ids that never rest ---- */

static uid_t person;
static int was_root;

/* Of the calling thread alone: libc would have all threads change. */
static void *change_on(void *ignored)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct caps[2];
	gid_t groups[64];
	for (unsigned i = 0; i < 64; i++)
		groups[i] = 1000 + i;
	for (unsigned long turn = 0;; turn++) {
		prctl(PR_SET_DUMPABLE, turn % 3 != 0);
		if (was_root) {
			syscall(SYS_setresuid, -1, 0, -1);
			syscall(SYS_setgroups, turn % 64, groups);
			syscall(SYS_setresgid, -1, turn % 2 ? 0 : person, -1);
			syscall(SYS_setfsuid, 0);
			syscall(SYS_setresgid, person, person, -1);
			syscall(SYS_setresuid, person, person, -1);
		} else {
			syscall(SYS_setresuid, person, person, person);
			syscall(SYS_setresgid, person, person, person);
		}
		if (syscall(SYS_capget, &head, caps) == 0) {
			caps[0].effective = turn % 2 ? caps[0].permitted : 0;
			caps[0].inheritable = 0;
			syscall(SYS_capset, &head, caps);
		}
	}
	return ignored;
}

/* rights-storm THREADS ROOT: so many threads change their ids, groups and capabilities all the time, in a process that root began
 * and that can become root again, or in an ordinary one; another one of it joins again and again. */
void rights_storm(const char *path, char **args)
{
	struct offers bait = offer_bait();
	pthread_t thread;
	person = (uid_t)atoi(getenv("HOSTILE_UID"));
	was_root = atoi(args[1]);
	if (setgroups(0, NULL) || setresgid(person, person, was_root ? 0 : person) ||
	    setresuid(person, person, was_root ? 0 : person))
		fail("become a user");
	prctl(PR_SET_DUMPABLE, 1);
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	second_thread();
	for (int i = atoi(args[0]); i > 0; i--)
		pthread_create(&thread, NULL, change_on, NULL);
	say("ready");
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 0) == 0;) {
		if (join(&own, path, "") != 0) {
			rest(2);
			continue;
		}
		watch(&own, SECRET_AT, CHUNK, 0);
		serve(&own, 1, &bait, 500);
		close(own.socket), close(own.line), close(own.tie), close(own.device);
		for (int i = 0; i < own.store_count; i++)
			close(own.stores[i]);
		munmap(own.line_map, PAGE), munmap(own.tie_map, PAGE);
	}
}

/* ---- parents that wait for a child that shares their memory ---- */

static char **then_exec;
static atomic_int in_vfork;

/* Their parent thread ends with the exec, so its end is no signal: the test ends them. */
static int stay_in_child(void *arg)
{
	struct offers bait = offer_bait();
	(void)arg;
	atomic_store(&in_vfork, 1);
	/* Written again after the exec, so that it is read again. */
	for (uint64_t seed = 4; seed < 40; seed++) {
		fill((void *)SECRET_AT, SECRET_PAGES, seed);
		serve(&own, 1, &bait, 20);
	}
	serve(&own, 1, &bait, 300);
	say("ready");
	serve(&own, 1, &bait, -1);
	_exit(0);
}

static int sleep_in_child(void *arg)
{
	(void)arg;
	for (;;)
		pause();
	return 0;
}

static void *wait_in_vfork(void *run)
{
	char *stack = map_at(0, 64);
	clone((int (*)(void *))run, stack + 64 * PAGE, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
	return NULL;
}

static void *witness_in_vfork(void *number)
{
	atomic_store((atomic_uint *)number, (unsigned)gettid());
	while (!own.line_map)
		rest(1);
	return wait_in_vfork((void *)sleep_in_child);
}

/* vfork-deputy PROGRAM: joins by the word of a thread that waits in vfork for a child which never ends. The child answers for it,
 * while another thread of it executes the setuid program in a second vfork, and the first one in its own place. */
void vfork_deputy(const char *path, char **args)
{
	static atomic_uint number;
	pthread_t thread;
	struct offers bait = offer_bait();
	then_exec = args;
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	pthread_create(&thread, NULL, witness_in_vfork, &number);
	while (number == 0)
		rest(1);
	int socket = dial(path);
	if (socket < 0 || say_hello(socket, "") || take_welcome(&own, socket, 3000)) {
		say("ready, refused");
		hold();
	}
	unsigned char packet[1 + 4 + 4 + 8 + 8] = { 3 };
	uint32_t witness = number;
	uint64_t line = (uint64_t)own.line_map;
	memcpy(packet + 1, &witness, 4);
	memcpy(packet + 9, &line, 8);
	send(socket, packet, sizeof packet, MSG_NOSIGNAL);
	rest(50); /* the witness waits by now */
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, 1, &bait, 500);
	if (own.socket < 0 || own.syncs == 0) {
		say("ready, not served");
		hold();
	}
	pid_t deputy = vfork();
	if (deputy == 0) {
		execv(then_exec[0], then_exec);
		_exit(1);
	}
	serve(&own, 1, &bait, 200);
	pthread_create(&thread, NULL, wait_in_vfork, (void *)stay_in_child);
	while (!atomic_load(&in_vfork))
		rest(1);
	rest(100);
	execv(then_exec[0], then_exec);
	fail("exec");
}

/* ---- mounts ---- */

static void map_one(const char *file, const char *format, uid_t id)
{
	char text[64];
	int fd = open(file, O_WRONLY), len = snprintf(text, sizeof text, format, id);
	if (fd < 0 || write(fd, text, (size_t)len) != len)
		fail(file);
	close(fd);
}

/* Root of a namespace of users and one of mounts; where there are none, the attack is none. */
static void enter_own_namespaces(void)
{
	uid_t uid = getuid();
	gid_t gid = getgid();
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) {
		say("ready, no namespaces");
		hold();
	}
	map_one("/proc/self/setgroups", "deny", 0);
	map_one("/proc/self/uid_map", "0 %u 1", uid);
	map_one("/proc/self/gid_map", "0 %u 1", gid);
}

static void bind_over(const char *from, const char *to)
{
	if (mount(from, to, NULL, MS_BIND, NULL))
		say("not mounted: %s over %s: %s", from, to, strerror(errno));
}

/* mounts PID FOLDER COUNT: in namespaces of its own it mounts the files in /proc of process PID over its own, an empty file system
 * over the socket's folder, and so many more, whose names act; its root is below them. */
void mounts(const char *path, char **args)
{
	static const char *const names[] = { "status", "maps", "comm", "cgroup", "mountinfo", "stat" };
	char from[256], to[256];
	int socket_folder = open(args[1], O_PATH | O_DIRECTORY), to_daemon = dial(path);
	if (to_daemon < 0 || socket_folder < 0)
		fail("dial");
	enter_own_namespaces();
	second_thread();
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(from, sizeof from, "/proc/%s/%s", args[0], names[i]);
		snprintf(to, sizeof to, "/proc/%d/%s", getpid(), names[i]);
		bind_over(from, to);
		snprintf(to, sizeof to, "/proc/%d/task/%u/%s", getpid(), second_thread(), names[i]);
		bind_over(from, to);
	}
	if (mount("none", args[1], "tmpfs", 0, NULL) || chdir(args[1]))
		fail("mount over the socket's folder");
	for (int i = atoi(args[2]); i > 0; i--) {
		snprintf(to, sizeof to, "forged\n%d - tmpfs none rw", i);
		if (mkdir(to, 0777) || mount("none", to, "tmpfs", 0, NULL))
			break;
	}
	if (chdir(to) || chroot("."))
		fail("chroot");
	int shared = open("file", O_RDWR | O_CREAT | O_DIRECT, 0666);
	(void)shared;
	int joined = say_hello(to_daemon, "") || take_welcome(&own, to_daemon, 3000) || say_ready(&own);
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	struct offers bait = offer_bait();
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, joined == 0, &bait, 300);
	say("ready, %s", joined == 0 && own.syncs > 0 ? "served" : "refused");
	serve(&own, joined == 0, &bait, -1);
}

/* long-mounts FOLDER COUNT: so many file systems in a namespace of its own, each of which is a line of 13 KiB in the table that the
 * daemon reads for a descriptor which may pin pages. */
void long_mounts(const char *path, char **args)
{
	char name[240];
	struct offers bait = offer_bait();
	enter_own_namespaces();
	memset(name, '\n', sizeof name - 1);
	name[sizeof name - 1] = 0;
	if (mount("none", args[0], "tmpfs", 0, NULL) || chdir(args[0]))
		fail("mount");
	for (int i = 0; i < 14; i++)
		if (mkdir(name, 0777) || chdir(name))
			fail("a deep folder");
	for (int i = atoi(args[1]); i > 0; i--) {
		snprintf(name, sizeof name, "%d", i);
		if (mkdir(name, 0777) || mount("none", name, "tmpfs", 0, NULL))
			break;
	}
	strcat(name, "/file");
	int shared = open(name, O_RDWR | O_CREAT, 0666);
	(void)shared;
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	int joined = join(&own, path, "");
	watch(&own, SECRET_AT, CHUNK, 0);
	serve(&own, joined == 0, &bait, 500);
	say("ready, %s", joined == 0 && own.syncs > 0 ? "served" : "refused");
	serve(&own, joined == 0, &bait, -1);
}

/* ---- names ---- */

/* A file below as many folders as a path may have, whose names the kernel has to escape. */
static int deep_file(const char *folder)
{
	if (chdir(folder))
		fail(folder);
	for (int i = 0; i < 1900; i++)
		if (mkdir("\n", 0777) || chdir("\n"))
			break;
	return open("\n", O_RDWR | O_CREAT, 0666);
}

/* long-maps PROCESSES COUNT FOLDER: guests with so many mappings of a file whose path is long, each of which is a line of 16 KiB. */
void long_maps(const char *path, char **args)
{
	int file = deep_file(args[2]);
	long count = atol(args[1]);
	if (file < 0 || ftruncate(file, (off_t)PAGE))
		fail("a deep file");
	for (int i = atoi(args[0]); i > 0; i--)
		if (child() == 0) {
			for (long n = 0; n < count; n++)
				if (mmap(NULL, PAGE, PROT_READ, MAP_SHARED, file, 0) == MAP_FAILED)
					break;
			serve_bait(path);
		}
	rest(2000);
	say("ready");
}

/* POSIX locks: the kernel lets a process take millions on a file that it may read, and walks them at each close of the file by
 * any process, under a spin lock. And leases: to open a file on which its owner has one takes 45 s. */
#include "hostile.h"

/* Every second byte, in a child that keeps them. One lock is cut from its end, which takes the kernel no search. */
static void take_locks(int file, long count, int go)
{
	struct flock lock = { .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 2 * count };
	char byte;
	if (child() != 0)
		return;
	if (fcntl(file, F_SETLK, &lock))
		fail("lock");
	lock.l_type = F_UNLCK;
	lock.l_len = 1;
	for (long i = count - 1; i > 0; i--) {
		lock.l_start = 2 * i;
		if (fcntl(file, F_SETLK, &lock))
			fail("cut the lock");
	}
	if (write(go, "", 1) != 1)
		_exit(1);
	while (read(go, &byte, 1) >= 0)
		pause();
	_exit(0);
}

/* So many locks on each file, all at once. */
static void lock_all(const int *files, int all, long count)
{
	int pair[2];
	char byte;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		fail("socketpair");
	for (int i = 0; i < all; i++) {
		if (files[i] < 0)
			fail("open");
		take_locks(files[i], count, pair[1]);
	}
	for (int locked = 0; locked < all; locked++)
		if (read(pair[0], &byte, 1) != 1)
			fail("read");
}

/* The files by which the engine looks at this process: as it names them, for each name is a file of its own. */
static int own_files(int *files)
{
	static const char *const names[] = { "/proc/%u/mem", "/proc/%u/pagemap", "/proc/%u/maps" };
	unsigned thread = second_thread();
	char name[64];
	for (int i = 0; i < 3; i++) {
		snprintf(name, sizeof name, names[i], thread);
		files[i] = open(name, O_RDONLY | O_CLOEXEC);
	}
	snprintf(name, sizeof name, "/proc/%d/task/%u/comm", getpid(), thread);
	files[3] = open(name, O_RDONLY | O_CLOEXEC);
	return 4;
}

/* Serves for so many milliseconds, leaves and joins again, until the test lets go. */
static void come_and_go(struct session *s, const char *path, int ms)
{
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 20) == 0;) {
		if (s->socket >= 0) {
			serve(s, 1, NULL, ms);
			close(s->socket);
		}
		if (join(s, path, "") != 0)
			s->socket = -1;
	}
	hold();
}

/* file-locks COUNT FILES...: so many locks on its pidfd, its line, its tie, its store, what the engine reads of it, and these
 * files; then it comes and goes. */
void file_locks(const char *path, char **args)
{
	static struct session s;
	while (join(&s, path, "") != 0)
		rest(50);
	int files[64] = { (int)syscall(SYS_pidfd_open, getpid(), 0), s.line, s.tie, s.stores[0] };
	int all = 4;
	all += own_files(files + all);
	for (char **name = args + 1; *name && all < 64; name++)
		files[all++] = open(*name, O_RDONLY | O_CLOEXEC);
	lock_all(files, all, atol(args[0]));
	int guarded = watch(&s, (uint64_t)map_at(0, 1), PAGE, 0);
	if (guarded < 0)
		fail("userfaultfd");
	userfaultfd_said = (unsigned)guarded;
	say("ready, %d files", all);
	come_and_go(&s, path, 100);
}

/* pidfd-locks COUNT PIDS...: so many locks on the pidfds of others, which every user may open. */
void pidfd_locks(const char *path, char **args)
{
	int files[64], all = 0;
	(void)path;
	for (char **pid = args + 1; *pid && all < 64; pid++)
		files[all++] = (int)syscall(SYS_pidfd_open, atoi(*pid), 0);
	lock_all(files, all, atol(args[0]));
	say("ready, %d pidfds", all);
	hold();
}

/* text-locks COUNT FILES...: so many locks on each of these files. */
void text_locks(const char *path, char **args)
{
	int files[64], all = 0;
	(void)path;
	for (char **name = args + 1; *name && all < 64; name++)
		files[all++] = open(*name, O_RDONLY | O_CLOEXEC);
	lock_all(files, all, atol(args[0]));
	say("ready, %d files", all);
	hold();
}

/* Takes a lease on each file that tells of the parent, and takes it again whenever it was broken. */
static void keep_leases(pid_t of, unsigned thread, int go)
{
	static const char *const names[] = { "stat", "comm", "cgroup", "status", "maps", "auxv", "mountinfo", "cmdline", "statm",
		"smaps", "mem", "pagemap", "uid_map", "environ", "coredump_filter", "ksm_stat", "setgroups" };
	static const char *const of_threads[] = { "stat", "comm", "status", "maps" };
	char name[64];
	int files[64], all = 0, leases = 0;
	if (child() != 0)
		return;
	signal(SIGIO, SIG_IGN);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(name, sizeof name, "/proc/%d/%s", of, names[i]);
		files[all++] = open(name, O_RDONLY | O_CLOEXEC);
	}
	for (size_t i = 0; i < 2 * sizeof of_threads / sizeof *of_threads; i++) {
		snprintf(name, sizeof name, "/proc/%d/task/%u/%s", of, i % 2 ? thread : (unsigned)of, of_threads[i / 2]);
		files[all++] = open(name, O_RDONLY | O_CLOEXEC);
	}
	for (int i = 0; i < all; i++)
		leases += files[i] >= 0 && fcntl(files[i], F_SETLEASE, F_WRLCK) == 0;
	if (write(go, &leases, sizeof leases) != sizeof leases)
		_exit(1);
	for (;; rest(1))
		for (int i = 0; i < all; i++)
			fcntl(files[i], F_SETLEASE, F_WRLCK);
}

/* leases: one on each file by which the daemon may look at this process, a guest that comes and goes. */
void leases(const char *path, char **args)
{
	static struct session s;
	int pair[2], count = 0;
	(void)args;
	while (join(&s, path, "") != 0)
		rest(50);
	serve(&s, 1, NULL, 300);
	if (pipe(pair))
		fail("pipe");
	keep_leases(getpid(), second_thread(), pair[1]);
	if (read(pair[0], &count, sizeof count) != sizeof count || count == 0)
		fail("leases");
	serve(&s, 1, NULL, 300);
	say("ready, %d leases", count);
	come_and_go(&s, path, 1000);
}

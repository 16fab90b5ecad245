/* What can be done with the descriptors of a session, with the socket's folder, and with names. */
#include "hostile.h"
#include <sys/file.h>

static int went_through;

static void tried(const char *what, const char *thing, long result)
{
	if (result < 0)
		return;
	went_through++;
	say("went through: %s %s", what, thing);
}

static void try_mapping(const char *what, const char *thing, int fd, int protection, int flags)
{
	void *at = mmap(NULL, PAGE, protection, flags, fd, 0);
	/* To map it in order to read is what it is for. */
	if (protection & PROT_WRITE)
		tried(what, thing, at == MAP_FAILED ? -1 : 0);
	if (at == MAP_FAILED)
		return;
	tried("mprotect to write", thing, mprotect(at, PAGE, PROT_READ | PROT_WRITE));
	munmap(at, PAGE);
}

static void reopen(const char *thing, int fd)
{
	char path[64];
	const int ways[] = { O_RDWR, O_WRONLY, O_RDWR | O_TRUNC, O_WRONLY | O_APPEND, O_RDONLY | O_TRUNC, O_RDONLY };
	for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++)
		for (int dir = 0; dir < 2; dir++) {
			snprintf(path, sizeof path, "/proc/%s/fd/%d", dir ? "thread-self" : "self", fd);
			int again = open(path, ways[i]);
			tried("open again", thing, again);
			if (again >= 0)
				close(again);
		}
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	tried("truncate(path)", thing, truncate(path, 0));
	tried("chmod(path)", thing, chmod(path, 0666));
	tried("link", thing, linkat(AT_FDCWD, path, AT_FDCWD, "/tmp/hostile-link", AT_SYMLINK_FOLLOW));
}

/* Everything that could change the file behind `fd`, its size, its mode or its seals. */
static void abuse(const char *thing, int fd)
{
	static char bytes[PAGE];
	struct timespec times[2] = { { 1, 0 }, { 1, 0 } };
	off_t at = 0;
	tried("write", thing, pwrite(fd, bytes, PAGE, 0));
	tried("append", thing, pwrite(fd, bytes, PAGE, 1l << 40));
	tried("truncate", thing, ftruncate(fd, 0));
	tried("grow", thing, ftruncate(fd, 1l << 40));
	tried("punch", thing, fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE));
	tried("allocate", thing, fallocate(fd, 0, 0, PAGE));
	tried("seal", thing, fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
	tried("seal for good", thing, fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL));
	tried("chmod", thing, fchmod(fd, 0666));
	tried("chown", thing, fchown(fd, getuid(), getgid()));
	tried("times", thing, futimens(fd, times));
	tried("attribute", thing, syscall(SYS_fsetxattr, fd, "user.x", "y", 1, 0));
	tried("copy into", thing, copy_file_range(fd, &at, fd, NULL, PAGE, 0));
	tried("set flags", thing, fcntl(fd, F_SETFL, O_DIRECT) < 0 ? -1 : -1);
	tried("lease", thing, fcntl(fd, F_SETLEASE, F_WRLCK));
	try_mapping("map shared and writable", thing, fd, PROT_READ | PROT_WRITE, MAP_SHARED);
	try_mapping("map shared", thing, fd, PROT_READ, MAP_SHARED);
	reopen(thing, fd);
}

/* tamper: the stores first, then the lifeline and the tie, of which a guest may write the page. */
void tamper(const char *path, char **args)
{
	(void)args;
	struct session s;
	if (join(&s, path, "")) {
		say("ready, refused");
		return;
	}
	serve(&s, 1, NULL, 300);
	for (int i = 0; i < s.store_count; i++)
		abuse("store", s.stores[i]);
	int of_stores = went_through;
	abuse("lifeline", s.line);
	abuse("tie", s.tie);
	say("ready, %d of the store", of_stores);
	serve(&s, 1, NULL, -1);
}

/* lock-folder FOLDER: locks it, and the socket, in every way there is. */
void lock_folder(const char *path, char **args)
{
	int locked = 0;
	const char *all[] = { args[0], path };
	for (int i = 0; i < 2; i++) {
		int fd = open(all[i], O_RDONLY | O_NONBLOCK);
		locked += fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
	}
	say("ready, %d locks", locked);
	hold();
}

#define LINE "x\n2026-01-01T00:00:00Z ERROR forged: a line of my own\x1b[2J\x1b[31m"

/* forge FOLDER: names that would write lines of their own into a log or onto a terminal. */
void forge(const char *path, char **args)
{
	char file[512];
	mkdir(args[0], 0700);
	snprintf(file, sizeof file, "%s/" LINE, args[0]);
	for (char *at = file + strlen(args[0]) + 1; *at; at++)
		if (*at == '/')
			*at = '_';
	int fd = open(file, O_RDWR | O_CREAT | O_DIRECT, 0600);
	prctl(PR_SET_NAME, "x\n\x1b[31mforged");
	static struct session s;
	struct offers bait = offer_bait();
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	/* Names of domains, right ones and forged ones, and a hello that is none. */
	const char *names[] = { LINE, "a\nb", "\x1b[2J", "../../x", "\xff\xfe", "ok" };
	for (unsigned i = 0; i < 6; i++) {
		struct session other;
		if (join(&other, path, names[i]) == 0)
			close(other.socket);
	}
	int joined = join(&s, path, "");
	if (joined == 0)
		watch(&s, SECRET_AT, CHUNK, 0);
	say("ready, %d %d", fd, joined);
	serve(&s, joined == 0, &bait, -1);
}

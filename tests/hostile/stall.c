/* Reads that do not return: pages under a userfaultfd that is never answered, pages of a file system that hangs. */
#include "hostile.h"
#include <linux/fuse.h>
#include <sys/mount.h>

#define REGION 0x20000000000ul
#define REGION_CHUNKS 8ul

/* Takes pages away at random, so that some are gone between the engine's scan and its read. */
static int take_away(void *arg)
{
	char *region = arg;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (uint64_t random = 88172645463325252u;;) {
		random ^= random << 13, random ^= random >> 7, random ^= random << 17;
		madvise(region + random % (REGION_CHUNKS * 512) * PAGE, PAGE, MADV_DONTNEED);
		if (random % 4 == 0)
			usleep(200);
	}
	return 0;
}

/* stall N: processes with a session each, whose pages vanish under a userfaultfd that no process answers. */
void stall(const char *path, char **args)
{
	int most = args[0] ? atoi(args[0]) : 16;
	struct offers offers = { .first = REGION, .chunks = REGION_CHUNKS };
	for (int i = 0; i < most; i++) {
		if (child() != 0)
			continue;
		static struct session s;
		char *region = map_at(REGION, REGION_CHUNKS * 512);
		fill(region, REGION_CHUNKS * 512, (uint64_t)i + 1);
		while (join(&s, path, "") != 0)
			rest(200);
		watch(&s, REGION, REGION_CHUNKS * CHUNK, 1);
		serve(&s, 1, &offers, 150);
		beside(take_away, region);
		serve(&s, 1, &offers, 3600 * 1000);
		_exit(0);
	}
	rest(800);
	say("ready");
	hold();
}

/* ---- a file system that hangs ---- */

static int fuse = -1;

static void reply(uint64_t unique, int error, const void *body, size_t len)
{
	char packet[1024];
	struct fuse_out_header head = { (uint32_t)(sizeof head + len), error, unique };
	memcpy(packet, &head, sizeof head);
	memcpy(packet + sizeof head, body, len);
	if (write(fuse, packet, sizeof head + len) < 0)
		fail("fuse");
}

static struct fuse_attr attributes(uint64_t node)
{
	return (struct fuse_attr){ .ino = node, .mode = node == 1 ? S_IFDIR | 0777 : S_IFREG | 0666, .nlink = 1,
				   .size = node == 1 ? 0 : 1 << 20, .blksize = 4096 };
}

/* Answers requests until a statfs arrives, or with `reads` set a read; then never again. */
static void serve_fuse(int hangs)
{
	static char packet[1 << 20];
	for (;;) {
		ssize_t len = read(fuse, packet, sizeof packet);
		if (len < 0 && errno == ENODEV)
			_exit(0);
		if (len < 0)
			continue;
		struct fuse_in_header *in = (void *)packet;
		struct fuse_init_out init = { .major = 7, .minor = 31, .max_write = 1 << 16 };
		struct fuse_attr_out attr = { .attr_valid = 0, .attr = attributes(in->nodeid) };
		struct fuse_open_out open = { .fh = 1 };
		struct fuse_entry_out entry = { .nodeid = 2, .attr = attributes(2) };
		if ((int)in->opcode == hangs)
			for (;;)
				pause();
		switch (in->opcode) {
		case FUSE_INIT: reply(in->unique, 0, &init, sizeof init); break;
		case FUSE_GETATTR: reply(in->unique, 0, &attr, sizeof attr); break;
		case FUSE_LOOKUP: reply(in->unique, 0, &entry, sizeof entry); break;
		case FUSE_OPEN:
		case FUSE_OPENDIR: reply(in->unique, 0, &open, sizeof open); break;
		case FUSE_FORGET:
		case FUSE_BATCH_FORGET: break;
		default: reply(in->unique, -ENOSYS, NULL, 0); break;
		}
	}
}

static void mount_unserved(const char *folder)
{
	char options[128];
	fuse = open("/dev/fuse", O_RDWR);
	snprintf(options, sizeof options, "fd=%d,rootmode=40777,user_id=0,group_id=0,allow_other", fuse);
	if (fuse < 0 || mount("hostile", folder, "fuse", MS_NOSUID | MS_NODEV, options))
		fail("mount");
}

static void mount_fuse(const char *folder, int hangs)
{
	mount_unserved(folder);
	if (child() == 0)
		serve_fuse(hangs);
	/* With its server the file system ends. */
	close(fuse);
}

/* hung-fuse FOLDER: mounts a file system there that does not answer statfs. An honest guest holds a folder of it. */
void hung_fuse(const char *path, char **args)
{
	(void)path;
	mount_fuse(args[0], FUSE_STATFS);
	say("ready");
	hold();
}

/* Mounts a file system whose reads hang, and maps a file of it as the attacker. */
static void map_hanging_file(const char *folder, const char *name, int access)
{
	char file[256];
	mount_fuse(folder, FUSE_READ);
	become((uid_t)atoi(getenv("HOSTILE_UID")));
	snprintf(file, sizeof file, "%s/%s", folder, name);
	int fd = open(file, O_RDONLY);
	if (fd < 0)
		fail("open");
	if (mmap((void *)REGION, CHUNK / 2, access, MAP_PRIVATE | MAP_FIXED_NOREPLACE, fd, 0) == MAP_FAILED)
		fail("map a file");
}

/* fuse-libc FOLDER: maps a file of such a system as if it were another libc that is executed, below the true one. */
void fuse_libc(const char *path, char **args)
{
	(void)path;
	map_hanging_file(args[0], "libc.so.6", PROT_READ | PROT_EXEC);
	say("ready");
	hold();
}

/*
 * fuse-flush FOLDER: says that a file of a system that does not answer when it is closed is its userfaultfd. The server is the parent: with it the
 * file system ends, and who waits for it.
 */
void fuse_flush(const char *path, char **args)
{
	mount_unserved(args[0]);
	if (child() == 0) {
		char file[256];
		static struct session s;
		close(fuse);
		become((uid_t)atoi(getenv("HOSTILE_UID")));
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		snprintf(file, sizeof file, "%s/file", args[0]);
		int fd = open(file, O_RDONLY);
		if (fd < 0)
			fail("open");
		userfaultfd_said = (unsigned)fd;
		struct offers offers = { .first = REGION, .chunks = 1 };
		int joined = join(&s, path, "");
		say("ready, %d", joined);
		serve(&s, joined == 0, &offers, -1);
		for (;;)
			pause();
	}
	serve_fuse(FUSE_FLUSH);
}

/* fuse-pages FOLDER: offers pages of a file of such a system. */
void fuse_pages(const char *path, char **args)
{
	map_hanging_file(args[0], "file", PROT_READ);
	static struct session s;
	struct offers offers = { .first = REGION, .chunks = 1 };
	int joined = join(&s, path, "");
	say("ready, %d", joined);
	serve(&s, joined == 0, &offers, -1);
}

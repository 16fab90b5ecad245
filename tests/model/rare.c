/* Calls that few programs make: names of memory, segments of System V, userfaultfds of the program's own. */
#include "model.h"
#include "../guest/uffdio_move.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux 5.17; not in every libc's headers. */
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

static void say_done(long result)
{
	say(" %s", result < 0 ? strerrorname_np(errno) : "0");
}

/* The name itself is lost when a page is merged, and is not compared. A kernel without names (CONFIG_ANON_VMA_NAME) says EINVAL. */
void name_memory(unsigned char *at, size_t len, int unnamed)
{
	say_done(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, at, len, unnamed ? NULL : "model"));
}

/* ---- segments of System V: the last one that came into the arena may be taken out again ---- */

static unsigned char *segment;

void segment_begin(unsigned char *at, size_t pages, unsigned content)
{
	int id = shmget(IPC_PRIVATE, pages * PAGE, IPC_CREAT | 0600);
	must(id >= 0, "shmget");
	void *place = shmat(id, at, SHM_REMAP);
	say_done(place == at ? 0 : -1);
	/* It lives for as long as a process has it. */
	shmctl(id, IPC_RMID, NULL);
	if (place != at)
		return;
	segment = at;
	for (size_t i = 0; i < pages; i++)
		write_page(at + i * PAGE, content);
}

void segment_end(void)
{
	if (segment)
		say_done(shmdt(segment));
	segment = NULL;
}

/* ---- userfaultfds ---- */

/* One that can do what is asked for, or -1. */
static int userfaultfd(uint64_t features)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
		close(fd);
		return -1;
	}
	return fd;
}

void userfault(unsigned char *at, size_t len, long mode)
{
	int fd = userfaultfd(0);
	struct uffdio_register wanted = { .range = { (uintptr_t)at, len }, .mode = (uint64_t)mode };
	if (fd < 0) {
		say(" none");
		return;
	}
	say_done(ioctl(fd, UFFDIO_REGISTER, &wanted));
	close(fd);
}

/* Moves what can be moved; which pages can depends on who else has them. Tells whether the kernel knows such moves. */
static int move_away(unsigned char *from, unsigned char *to, size_t len, long mode)
{
	int fd = userfaultfd(UFFD_FEATURE_MOVE);
	struct uffdio_register wanted = { .range = { (uintptr_t)to, len }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_move move = { .dst = (uintptr_t)to, .src = (uintptr_t)from, .len = len, .mode = (uint64_t)mode };
	int is_known = fd >= 0;
	if (is_known && ioctl(fd, UFFDIO_REGISTER, &wanted) == 0)
		ioctl(fd, UFFDIO_MOVE, &move);
	/* From here on a page that is not there reads as zeros. */
	close(fd);
	return is_known;
}

/* Each page is where it was, or where it went. Then all are where they were. */
void move_pages_away(unsigned char *at, size_t pages, long mode)
{
	static unsigned char before[ARENA_PAGES][PAGE];
	size_t len = pages * PAGE, lost = 0;
	int is_open = is_writable((uintptr_t)at, (uintptr_t)at + len, 1);
	/* A guard shows in no mapping. */
	for (size_t i = 0; i < pages && is_open; i++)
		is_open = read_page(at + i * PAGE, before[i]) == 0;
	if (!is_open) {
		say(" left out");
		return;
	}
	unsigned char *away = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(away != MAP_FAILED, "mmap");
	int is_known = move_away(at, away, len, mode);
	for (size_t i = 0; i < pages; i++) {
		if (memcmp(at + i * PAGE, before[i], PAGE) == 0)
			continue;
		lost += memcmp(away + i * PAGE, before[i], PAGE) != 0;
		memcpy(at + i * PAGE, before[i], PAGE);
	}
	munmap(away, len);
	say(" %s, lost %zu", is_known ? "moved" : "none", lost);
}

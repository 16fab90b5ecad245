/*
 * Calls that few programs make over memory of their own: by a process descriptor, past libc, with a userfaultfd.
 */
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/shm.h>
#include <sys/uio.h>

/* Advice to oneself, in two pieces where there is more than one page. */
static long advise_by_descriptor(unsigned char *at, size_t len, int advice)
{
	size_t first = len > PAGE ? PAGE : len;
	struct iovec parts[2] = { { at, first }, { at + first, len - first } };
	int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
	if (self < 0)
		return -errno;
	long told = process_madvise(self, parts, len > first ? 2 : 1, advice, 0);
	long result = told < 0 ? -errno : told;
	close(self);
	return result;
}

#define TOLD(call) ((call) == -1 ? -(long)errno : 0l)

/* Calls with lengths that no memory has: tells what each says. The kernel refuses them, or has nothing to do. */
static void say_vast(unsigned char *at)
{
	static const int advices[] = { MADV_DONTNEED, MADV_FREE, MADV_REMOVE, MADV_DONTFORK, MADV_WIPEONFORK, MADV_HUGEPAGE,
				       MADV_UNMERGEABLE, MADV_MERGEABLE, 22, 25, 102 };
	static const size_t lengths[] = { -1ul, -PAGE, -10 * PAGE };
	unsigned long mask[16] = { 1 };
	printf("ok");
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		size_t len = lengths[i];
		struct iovec parts[2] = { { at, PAGE }, { i ? at : (void *)-1l, i ? len : PAGE } };
		for (size_t j = 0; j < sizeof advices / sizeof *advices; j++)
			printf(" %ld", TOLD(madvise(at, len, advices[j])));
		printf(" %ld %ld %ld", TOLD(mlock(at, len)), TOLD(munlock(at, len)), TOLD(munmap(at, len)));
		printf(" %ld", TOLD(mprotect(at, len, PROT_READ | PROT_WRITE)));
		printf(" %ld", TOLD(pkey_mprotect(at, len, PROT_READ | PROT_WRITE, -1)));
		printf(" %ld", TOLD(syscall(SYS_mbind, at, len, 2, mask, 1024ul, 0)));
		printf(" %ld", TOLD(syscall(462 /* mseal */, at, len, 0)));
		printf(" %ld", TOLD(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, at, len, "vast")));
		printf(" %ld", TOLD(mremap(at, len, len, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0));
		printf(" %ld", TOLD(mremap(at, PAGE, len, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0));
		printf(" %ld", TOLD(process_madvise(-10000, parts, 2, MADV_DONTNEED, 0)));
	}
	printf("\n");
	fflush(stdout);
}

/* Maps memory, or with a descriptor a shared file, over some pages so that only the kernel sees it. */
static long map_unseen(unsigned char *at, size_t len, int fd)
{
	register long r10 __asm__("r10") = (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_FIXED;
	register long r8 __asm__("r8") = fd;
	register long r9 __asm__("r9") = 0;
	long result = SYS_mmap;
	__asm__ volatile("syscall"
			 : "+a"(result)
			 : "D"(at), "S"(len), "d"(PROT_READ | PROT_WRITE), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result < 0 ? result : 0;
}

/* Gives advice that only the kernel hears. */
static long advise_unseen(unsigned char *at, size_t len, int advice)
{
	long result = SYS_madvise;
	__asm__ volatile("syscall" : "+a"(result) : "D"(at), "S"(len), "d"((long)advice) : "rcx", "r11", "memory");
	return result;
}

/* Moves memory, mapping by mapping, so that only the kernel sees it. */
static long move_unseen(unsigned char *at, size_t len, unsigned char *to)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned char *parts[64][2];
	size_t count = 0;
	char line[512];
	while (maps && count < 64 && fgets(line, sizeof line, maps)) {
		unsigned char *start, *end;
		if (sscanf(line, "%p-%p", (void **)&start, (void **)&end) == 2 && end > at && start < at + len) {
			parts[count][0] = start < at ? at : start;
			parts[count++][1] = end > at + len ? at + len : end;
		}
	}
	if (maps)
		fclose(maps);
	for (size_t i = 0; i < count; i++) {
		size_t part = (size_t)(parts[i][1] - parts[i][0]);
		register long r10 __asm__("r10") = MREMAP_MAYMOVE | MREMAP_FIXED;
		register unsigned char *r8 __asm__("r8") = to + (parts[i][0] - at);
		long result = SYS_mremap;
		__asm__ volatile("syscall"
				 : "+a"(result)
				 : "D"(parts[i][0]), "S"(part), "d"(part), "r"(r10), "r"(r8)
				 : "rcx", "r11", "memory");
		if (result < 0)
			return result;
	}
	return count ? 0 : -EFAULT;
}

/* Puts shared memory of System V there. */
static long map_segment(unsigned char *at, size_t len)
{
	int id = shmget(IPC_PRIVATE, len, IPC_CREAT | 0600);
	void *mapped = id < 0 ? (void *)-1 : shmat(id, at, SHM_REMAP);
	long result = mapped == at ? 0 : -errno;
	if (id >= 0)
		shmctl(id, IPC_RMID, NULL);
	return result;
}

/* Registers a userfaultfd of one's own, and protects the pages with it; a write would wait for ever. */
static long watch(unsigned char *at, size_t len)
{
	static int fd = -1;
	if (fd < 0)
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register wanted = {
		.range = { (uintptr_t)at, len },
		.mode = UFFDIO_REGISTER_MODE_WP,
	};
	struct uffdio_writeprotect protect = { wanted.range, UFFDIO_WRITEPROTECT_MODE_WP };
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &wanted) ||
	    ioctl(fd, UFFDIO_WRITEPROTECT, &protect))
		return -errno;
	return 0;
}

/* Unregisters memory of which a userfaultfd knows nothing, or something. */
static long unwatch(unsigned char *at, size_t len)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_range range = { (uintptr_t)at, len };
	long done = fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_UNREGISTER, &range) ? -errno : 0;
	close(fd);
	return done;
}

static int pages_from;
static unsigned char *pagers_own;

/* Before it takes a message it makes a call over memory of its own. */
static void *serve_pages(void *arg)
{
	struct uffd_msg msg;
	struct pollfd wait = { pages_from, POLLIN, 0 };
	while (poll(&wait, 1, -1) == 1) {
		if (madvise(pagers_own, PAGE, MADV_DONTFORK) || read(pages_from, &msg, sizeof msg) != sizeof msg)
			break;
		struct uffdio_zeropage zeros = { .range = { msg.arg.pagefault.address & -PAGE, PAGE } };
		if (msg.event == UFFD_EVENT_PAGEFAULT && ioctl(pages_from, UFFDIO_ZEROPAGE, &zeros) && errno != EEXIST)
			break;
	}
	perror("pager");
	return arg;
}

/*
 * A thread of one's own serves `len` bytes, and hears of what happens to them. Makes a call over them, or over `more` bytes to each
 * side as well, for which the kernel waits for that thread.
 */
static long page(unsigned char *at, size_t len, size_t more, unsigned char *own, const char *call)
{
	pthread_t thread;
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP |
							       UFFD_FEATURE_EVENT_REMAP };
	struct uffdio_register wanted = { .range = { (uintptr_t)at, len }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	pages_from = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	pagers_own = own;
	if (pages_from < 0 || ioctl(pages_from, UFFDIO_API, &api) || madvise(at, len, MADV_DONTNEED) ||
	    ioctl(pages_from, UFFDIO_REGISTER, &wanted) || pthread_create(&thread, NULL, serve_pages, NULL))
		return -errno;
	unsigned char *from = at - more;
	size_t all = len + 2 * more;
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	if (strcmp(call, "read") == 0)
		return errno_of(madvise(from, all, 22 /* POPULATE_READ */));
	if (strcmp(call, "write") == 0)
		return errno_of(madvise(from, all, 23 /* POPULATE_WRITE */));
	if (strcmp(call, "lock") == 0)
		return errno_of(mlock(from, all));
	if (strcmp(call, "lockall") == 0)
		return errno_of(mlockall(MCL_CURRENT));
	if (strcmp(call, "discard") == 0)
		return errno_of(madvise(at, len, MADV_DONTNEED));
	if (strcmp(call, "unmap") == 0)
		return errno_of(munmap(at, len));
	if (strcmp(call, "mapover") == 0)
		return mmap(at, len, prot, flags | MAP_FIXED, -1, 0) == at ? 0 : -errno;
	if (strcmp(call, "move") == 0)
		return mremap(at, len, 2 * len, MREMAP_MAYMOVE) == MAP_FAILED ? -errno : 0;
	return -EINVAL;
}

#include "uffdio_move.h"

/* Moves pages to memory with a userfaultfd of one's own, one by one as a collector does, and compares them with what they were. */
static long move_out(unsigned char *at, size_t len, const unsigned char *were)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	unsigned char *to = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_MOVE };
	struct uffdio_register wanted = { .range = { (uintptr_t)to, len }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	if (fd < 0 || to == MAP_FAILED || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &wanted))
		return -errno;
	for (size_t done = 0; done < len; done += PAGE) {
		struct uffdio_move one = { .dst = (uintptr_t)to + done, .src = (uintptr_t)at + done, .len = PAGE };
		if (ioctl(fd, UFFDIO_MOVE, &one))
			return -errno;
	}
	return memcmp(to, were, len) ? -EILSEQ : 0;
}

/* Discards every second page, each with a call of its own; with `far` none is near the one before. */
static long scatter(unsigned char *at, unsigned char *copy, size_t count, int far)
{
	size_t half = (count + 1) / 2;
	for (size_t i = 0; i < half; i++) {
		size_t page = 2 * (far ? i * 1000003 % half : i);
		if (madvise(at + page * PAGE, PAGE, MADV_DONTNEED))
			return -errno;
		memset(copy + page * PAGE, 0, PAGE);
	}
	return 0;
}

static void *nothing(void *arg)
{
	return arg;
}

/* Whether there are mappings left for what a program cannot do without. */
static long has_room(void)
{
	pthread_t thread;
	void *block = malloc(64ul << 20);
	if (!block)
		return -ENOMEM;
	free(block);
	int error = pthread_create(&thread, NULL, nothing, NULL);
	return error ? -error : -pthread_join(thread, NULL);
}

/* How many pages the kernel says are in memory. */
static long in_core(unsigned char *at, size_t count)
{
	static unsigned char told[4096];
	long are = 0;
	if (count > sizeof told || mincore(at, count * PAGE, told))
		return count > sizeof told ? -EINVAL : -errno;
	for (size_t i = 0; i < count; i++)
		are += told[i] & 1;
	return are;
}

/* Memory that one thread discards; another offers its first pages and writes there as soon as it finds zeros. */
static struct behind {
	volatile unsigned char *at;
	_Atomic int go;
} behind;

static void *write_behind(void *unused)
{
	while (!behind.go)
		;
	while (*behind.at == 1)
		;
	madvise((void *)behind.at, HUGE_PAGE, MADV_MERGEABLE);
	*behind.at = 42;
	return unused;
}

/* How many of these writes were lost. */
static long lose_behind(size_t tries, size_t mib)
{
	long lost = 0;
	for (size_t t = 0; t < tries; t++) {
		pthread_t thread;
		unsigned char *at = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (at == MAP_FAILED)
			return -errno;
		memset(at, 1, mib << 20);
		behind = (struct behind){ .at = at };
		if (pthread_create(&thread, NULL, write_behind, NULL) != 0)
			return -EAGAIN;
		behind.go = 1;
		long discarded = errno_of(madvise(at, mib << 20, MADV_DONTNEED));
		if (discarded < 0)
			*at = 0;
		pthread_join(thread, NULL);
		if (discarded < 0)
			return discarded;
		lost += *at != 42;
		munmap(at, mib << 20);
	}
	return lost;
}

/* A chunk whose discard by another thread has begun, and goes on when a pager of the program's reads what happens before it. */
static struct late {
	unsigned char *at;
	pthread_t thread;
	int fd;
} late;

static void *discard_late(void *unused)
{
	(void)unused;
	return (void *)errno_of(madvise(late.at - PAGE, PAGE + HUGE_PAGE, MADV_DONTNEED));
}

/* Offers the chunk meanwhile; gives its address. */
static long start_late(void)
{
	unsigned char *all = mmap(NULL, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		return -errno;
	late.at = all + PAGE + (-(uintptr_t)(all + PAGE) & (HUGE_PAGE - 1));
	memset(late.at, 7, HUGE_PAGE);
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMOVE };
	struct uffdio_register wanted = { .range = { (uintptr_t)late.at - PAGE, PAGE },
					  .mode = UFFDIO_REGISTER_MODE_MISSING };
	late.fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct pollfd wait = { late.fd, POLLIN, 0 };
	if (late.fd < 0 || ioctl(late.fd, UFFDIO_API, &api) || ioctl(late.fd, UFFDIO_REGISTER, &wanted) ||
	    pthread_create(&late.thread, NULL, discard_late, NULL) || poll(&wait, 1, 10000) != 1 ||
	    madvise(late.at, HUGE_PAGE, MADV_MERGEABLE))
		return -errno;
	return (long)(uintptr_t)late.at;
}

/* Lets the discard go on. How many bytes it left. */
static long end_late(void)
{
	struct uffd_msg msg;
	void *done;
	if (read(late.fd, &msg, sizeof msg) != sizeof msg || pthread_join(late.thread, &done) || done)
		return -EIO;
	long left = 0;
	for (size_t i = 0; i < HUGE_PAGE; i++)
		left += late.at[i] != 0;
	close(late.fd);
	return left;
}

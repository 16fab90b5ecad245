/* A process in one of the states that `pageone doctor` tells of: subject STATE. Says "up", and waits for the end of its input. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEN ((size_t)8 << 20)

static void fail(const char *what)
{
	printf("fail %s: %s\n", what, strerror(errno));
	fflush(stdout);
	exit(1);
}

static char *memory(int flags, size_t len)
{
	char *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | flags, -1, 0);
	if (start == MAP_FAILED)
		fail("mmap");
	memset(start, 7, len);
	return start;
}

static void locked(int other)
{
	char *start = memory(MAP_PRIVATE, LEN);
	madvise(start, LEN, MADV_MERGEABLE);
	if (mlock(other ? memory(MAP_PRIVATE, LEN) : start, LEN))
		fail("mlock");
}

/* Offers memory of a kind that is left alone. */
static void apart(const char *kind)
{
	char *start = memory(MAP_PRIVATE, LEN);
	int failed = 0;
	if (!strcmp(kind, "executable"))
		failed = mprotect(start, LEN, PROT_READ | PROT_WRITE | PROT_EXEC);
	else if (!strcmp(kind, "wiped-on-fork"))
		failed = madvise(start, LEN, MADV_WIPEONFORK);
	else if (!strcmp(kind, "sealed"))
		failed = syscall(462, start, LEN, 0) != 0; /* mseal */
	else if (!strcmp(kind, "read-only"))
		failed = mprotect(start, LEN, PROT_READ);
	else
		failed = mprotect(start, LEN, PROT_NONE);
	if (failed)
		fail(kind);
	madvise(start, LEN, MADV_MERGEABLE);
}

/* Writes to a private mapping of a file, which stays as it is. */
static void written(const char *path)
{
	int fd = open(path, O_RDWR);
	if (fd < 0 || ftruncate(fd, LEN))
		fail("file");
	char *start = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	if (start == MAP_FAILED)
		fail("mmap");
	memset(start, 7, LEN);
}

static void filter(void)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { 1, &allow };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("seccomp");
}

/* From here on all but reading, writing and the end of a thread ends it: so it speaks for itself. */
static void strict(void)
{
	char c;
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
		fail("seccomp");
	ssize_t got = write(1, "up\n", 3);
	while (got > 0)
		got = read(0, &c, 1);
	syscall(SYS_exit, 0);
}

static void hold(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
		fail("userfaultfd");
	struct uffdio_register range = {
		.range = { (unsigned long)memory(MAP_PRIVATE, LEN), LEN },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	if (ioctl(fd, UFFDIO_REGISTER, &range))
		fail("register");
}

int main(int argc, char **argv)
{
	const char *state = argc > 1 ? argv[1] : "plain";
	if (!strcmp(state, "plain"))
		memory(MAP_PRIVATE, LEN);
	else if (!strcmp(state, "offers"))
		madvise(memory(MAP_PRIVATE, LEN), LEN, MADV_MERGEABLE);
	else if (!strcmp(state, "shared"))
		memory(MAP_SHARED, LEN);
	else if (!strcmp(state, "huge"))
		memory(MAP_PRIVATE | MAP_HUGETLB, 4 << 20);
	else if (!strcmp(state, "locked") && mlock(memory(MAP_PRIVATE, LEN), LEN))
		fail("mlock");
	else if (!strcmp(state, "offers-locked"))
		locked(0);
	else if (!strcmp(state, "offers-and-locks"))
		locked(1);
	else if (!strcmp(state, "offers-apart"))
		apart(argv[2]);
	else if (!strcmp(state, "written"))
		written(argv[2]);
	else if (!strcmp(state, "held"))
		hold();
	else if (!strcmp(state, "direct") && open(argv[2], O_RDONLY | O_DIRECT) < 0)
		fail("open");
	else if (!strcmp(state, "shadow")) /* where AddressSanitizer has its own */
		mmap((void *)0x02008fff7000, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	else if (!strcmp(state, "filter"))
		filter();
	else if (!strcmp(state, "strict"))
		strict();
	else if (!strcmp(state, "secret") && (setgid(61001) || setuid(61001)))
		fail("setuid");
	else if (!strcmp(state, "ids") && setresuid(61001, 0, 0))
		fail("setresuid");
	puts("up");
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}

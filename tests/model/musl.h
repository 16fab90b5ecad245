/* What glibc has and musl lacks, as far as the model uses it. */
#ifndef MUSL_H
#define MUSL_H

#define _LINUX_PRCTL_H /* <sys/prctl.h> has it all */
#include <errno.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Those that these calls give; else the number. */
static inline const char *strerrorname_np(int error)
{
	static _Thread_local char number[8];
	static const struct {
		int error;
		const char *name;
	} names[] = {
#define NAMED(name) { name, #name }
		NAMED(EPERM), NAMED(ENOENT), NAMED(ESRCH), NAMED(EINTR), NAMED(EIO), NAMED(EBADF), NAMED(ECHILD),
		NAMED(EAGAIN), NAMED(ENOMEM), NAMED(EACCES), NAMED(EFAULT), NAMED(EBUSY), NAMED(EEXIST), NAMED(ENODEV),
		NAMED(EINVAL), NAMED(ENFILE), NAMED(EMFILE), NAMED(ENOSPC), NAMED(ENOSYS), NAMED(EOPNOTSUPP),
		NAMED(ETIMEDOUT), NAMED(EDEADLK), NAMED(EHWPOISON),
#undef NAMED
	};
	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (names[i].error == error)
			return names[i].name;
	snprintf(number, sizeof(number), "E%d", error);
	return number;
}

static inline ssize_t process_madvise(int pidfd, const struct iovec *ranges, size_t count, int advice, unsigned flags)
{
	return syscall(SYS_process_madvise, pidfd, ranges, count, advice, flags);
}

static inline int pkey_alloc(unsigned flags, unsigned rights)
{
	return (int)syscall(SYS_pkey_alloc, flags, rights);
}

static inline int pkey_mprotect(void *at, size_t len, int prot, int key)
{
	return (int)syscall(SYS_pkey_mprotect, at, len, prot, key);
}

/* malloc of musl's has nothing to be set. */
enum { M_TOP_PAD, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD };
static inline int mallopt(int what, int value)
{
	return (void)what, (void)value, 1;
}

static inline int malloc_trim(size_t pad)
{
	return (void)pad, 0;
}

#endif

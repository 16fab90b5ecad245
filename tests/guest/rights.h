/*
 * Calls by which a process changes what it may do, each by its name.
 */
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "threads.h"

/* capset(2) has no declaration in libc's headers. */
int capset(struct __user_cap_header_struct *, const struct __user_cap_data_struct *);

static long drop_capability(unsigned capability)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2];
	if (syscall(SYS_capget, &head, data))
		return -1;
	data[capability / 32].effective &= ~(1u << capability % 32);
	data[capability / 32].permitted &= ~(1u << capability % 32);
	return capset(&head, data);
}

static long restrict_files(unsigned long access)
{
	struct landlock_ruleset_attr attr = { .handled_access_fs = access };
	int rules = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	if (rules < 0)
		return -1;
	long result = syscall(SYS_landlock_restrict_self, rules, 0);
	close(rules);
	return result;
}

static long enter_own(const char *kind)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
	int fd = open(path, O_RDONLY);
	long result = fd < 0 ? -1 : setns(fd, 0);
	close(fd);
	return result;
}

/* A call by an instruction of this program's, as code outside libc makes it. */
static long inline_call(long number, unsigned long a, unsigned long b, unsigned long c)
{
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	errno = result < 0 ? (int)-result : 0;
	return result < 0 ? -1 : result;
}

/* Mounts something else over /proc, in a namespace of its own whose making the agent does not see. */
static long hide_proc(void)
{
	if (inline_call(SYS_unshare, CLONE_NEWNS, 0, 0) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return -1;
	return mount("none", "/proc", "tmpfs", 0, NULL);
}

/*
 * A filter by which every call goes on but number `call`, which has `action`. How it is installed: 0 prctl, 1 seccomp
 * by libc's syscall, 2 the same for all threads, 3 by an instruction of this program's, 4 the same for all threads.
 */
static long filter(unsigned call, unsigned action, int how)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, action),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };
	switch (how) {
	case 0:
		return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
	case 1:
	case 2:
		return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, how == 2 ? SECCOMP_FILTER_FLAG_TSYNC : 0ul, &program);
	default:
		return inline_call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, how == 4 ? SECCOMP_FILTER_FLAG_TSYNC : 0ul,
				   (unsigned long)&program);
	}
}

/*
 * Gives up what Chromium's renderers give up, in their order: namespaces of the user, the network and the processes, an empty root
 * directory, all capabilities, and then, for all threads at once, every call but those that a program at work makes.
 */
static long enter_sandbox(void)
{
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
	static struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(fstat), ALLOW(newfstatat), ALLOW(lseek), ALLOW(mmap),
		ALLOW(munmap), ALLOW(mprotect), ALLOW(mremap), ALLOW(madvise), ALLOW(brk), ALLOW(futex), ALLOW(gettid),
		ALLOW(getpid), ALLOW(rt_sigprocmask), ALLOW(rt_sigaction), ALLOW(rt_sigreturn), ALLOW(clock_gettime),
		ALLOW(nanosleep), ALLOW(clock_nanosleep), ALLOW(sched_yield), ALLOW(poll), ALLOW(ppoll), ALLOW(sendmsg),
		ALLOW(recvmsg), ALLOW(restart_syscall), ALLOW(exit), ALLOW(exit_group),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct none[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
	char empty[] = "/tmp/pageone-sandbox-XXXXXX";
	if (!mkdtemp(empty) || unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID))
		return -1;
	int fd = open(empty, O_RDONLY | O_DIRECTORY);
	if (rmdir(empty) || fd < 0 || fchdir(fd) || chroot(".") || close(fd) || capset(&head, none) ||
	    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

/* A root directory without /proc, as container engines make one. */
static long pivot_root(void)
{
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", "/tmp", "tmpfs", 0, NULL) || chdir("/tmp") || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH))
		return -1;
	return chdir("/");
}

static void *offer_as_odd(void *range)
{
	struct sched_param none = { 0 };
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	sched_setaffinity(0, sizeof one, &one);
	setpriority(PRIO_PROCESS, 0, 19);
	sched_setscheduler(0, SCHED_IDLE, &none);
	struct iovec *it = range;
	return madvise(it->iov_base, it->iov_len, MADV_MERGEABLE) ? range : NULL;
}

/* Offers a range by a thread that is idle, nice, and bound to the first CPU. */
static long offer_by_odd_thread(void *start, size_t len)
{
	struct iovec range = { start, len };
	pthread_t thread;
	void *failed = &range;
	if (pthread_create(&thread, NULL, offer_as_odd, &range) || pthread_join(thread, &failed))
		return -EAGAIN;
	return failed ? -EINVAL : 0;
}

/* Structures that cannot be read: the kernel says EFAULT. Gives which call went wrong. */
static long give_bad_structures(void)
{
	static const unsigned long bad[] = { 8, ~0ul & ~4095ul };
	void *closed = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sock_fprog program = { 3, closed };
	for (int i = 0; i < 3; i++) {
		void *at = i == 2 ? closed : (void *)bad[i];
		if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, at, 0, 0) == 0 || errno != EFAULT)
			return -10 - i;
		if (syscall(SYS_clone3, at, 88) >= 0 || errno != EFAULT)
			return -20 - i;
	}
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0 || errno != EFAULT)
		return -30;
	munmap(closed, 4096);
	return 0;
}

static long change_rights(const char *what, unsigned long a, unsigned long b, unsigned long c)
{
	gid_t groups[] = { (gid_t)a };
#define CALL(name, call) if (strcmp(what, name) == 0) return call;
	CALL("setuid", setuid((uid_t)a))
	CALL("setgid", setgid((gid_t)a))
	CALL("seteuid", seteuid((uid_t)a))
	CALL("setegid", setegid((gid_t)a))
	CALL("setreuid", setreuid((uid_t)a, (uid_t)b))
	CALL("setregid", setregid((gid_t)a, (gid_t)b))
	CALL("setresuid", setresuid((uid_t)a, (uid_t)b, (uid_t)c))
	CALL("setresgid", setresgid((gid_t)a, (gid_t)b, (gid_t)c))
	CALL("setfsuid", setfsuid((uid_t)a))
	CALL("setfsgid", setfsgid((gid_t)a))
	CALL("setgroups", setgroups(1, groups))
	CALL("initgroups", initgroups("root", (gid_t)a))
	CALL("inlinesetresuid", inline_call(SYS_setresuid, a, b, c))
	CALL("rawsetresuid", syscall(SYS_setresuid, a, b, c))
	CALL("capset", drop_capability((unsigned)a))
	CALL("keepcaps", prctl(PR_SET_KEEPCAPS, a, 0, 0, 0))
	CALL("bounding", prctl(PR_CAPBSET_DROP, a, 0, 0, 0))
	CALL("securebits", prctl(PR_SET_SECUREBITS, a, 0, 0, 0))
	CALL("nonewprivs", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	CALL("dumpable", prctl(PR_SET_DUMPABLE, a, 0, 0, 0))
	CALL("askkeys", syscall(SYS_keyctl, 0, -3, 0) < 0 ? -1 : 0)
	CALL("probestrict", syscall(SYS_seccomp, 0, 1, NULL) < 0 && errno == EINVAL ? 0 : -1)
	CALL("landlock", restrict_files(LANDLOCK_ACCESS_FS_MAKE_BLOCK))
	CALL("noread", restrict_files(LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR))
	CALL("hideproc", hide_proc())
	CALL("unshare", unshare((int)a))
	CALL("setns", enter_own("net"))
	CALL("personality", personality(a))
	CALL("rawpersonality", syscall(SYS_personality, a))
	CALL("chroot", chroot("/"))
	CALL("sandbox", enter_sandbox())
	CALL("pivot", pivot_root())
	CALL("filter", filter((unsigned)a, (unsigned)b, (int)c))
	errno = ENOSYS;
	return -1;
}

/* ---- the same in another thread, in a signal handler, and in a child of vfork ---- */

static struct change {
	const char *what;
	unsigned long a, b, c;
	long result;
} change;

static void *make_change(void *arg)
{
	struct change *it = arg;
	it->result = change_rights(it->what, it->a, it->b, it->c);
	it->result = it->result < 0 ? -errno : it->result;
	return arg;
}

static void on_signal(int signal)
{
	(void)signal;
	make_change(&change);
}

static int rights_open[2] = { -1, -1 }, rights_end[2] = { -1, -1 };
static pthread_t odd_thread;

/* A thread that makes a change and then waits until it is told to end. */
static void *change_and_stay(void *arg)
{
	char byte;
	make_change(arg);
	if (write(rights_open[1], "", 1) == 1)
		while (read(rights_end[0], &byte, 1) < 0)
			;
	return NULL;
}

/* "rights WHERE:WHAT NUMBERS", as in "rights m:setuid 1234". */
static long rights(const char *line)
{
	pthread_t thread;
	static char what[64];
	char where, byte;
	change = (struct change){ .what = what };
	if (sscanf(line, "%*s %c:%63s %lu %lu %lu", &where, what, &change.a, &change.b, &change.c) < 2)
		return -EINVAL;
	switch (where) {
	case 'm':
		make_change(&change);
		return change.result;
	case 't':
		pthread_create(&thread, NULL, make_change, &change);
		pthread_join(thread, NULL);
		return change.result;
	case 'o': /* a thread that stays */
		if (pipe(rights_open) || pipe(rights_end) || pthread_create(&odd_thread, NULL, change_and_stay, &change))
			return -EAGAIN;
		return read(rights_open[0], &byte, 1) == 1 ? change.result : -EPIPE;
	case 'e': /* its end */
		return write(rights_end[1], "", 1) == 1 ? -pthread_join(odd_thread, NULL) : -EPIPE;
	case 's':
		signal(SIGUSR2, on_signal);
		raise(SIGUSR2);
		return change.result;
	case 'v': {
		pid_t pid = vfork();
		if (pid == 0) {
			make_change(&change);
			_exit(0);
		}
		waitpid(pid, NULL, 0);
		return change.result;
	}
	case 'f': { /* a child of its own, which has one thread after it as before */
		int status = 0;
		pid_t pid = fork();
		if (pid == 0) {
			make_change(&change);
			_exit(change.result < 0 ? 1 : own_threads() == 1 ? 0 : 2);
		}
		if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
			return -ECHILD;
		return -WEXITSTATUS(status);
	}
	}
	return -EINVAL;
}

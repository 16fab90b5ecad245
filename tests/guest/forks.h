/*
 * Children made in every way there is, while other threads take locks and advise, and processes that end
 * without libc. A child compares all its memory; see guest.c.
 */
#include <sched.h>
#include <sys/time.h>

/* From tests/guest/early.c, a library whose fork handlers are older than the agent's. */
#pragma weak early_advise
int early_advise(void *at, size_t len, int advice);

static unsigned forks_bad(void)
{
	unsigned bad = 0;
	for (size_t p = 0; p < pages; p++)
		bad |= (unsigned)differs(p);
	return bad;
}

static int forks_child(void *arg)
{
	(void)arg;
	_exit((int)forks_bad());
}

struct forks_clone3 {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
};

static _Noreturn void forks_on_stack(void)
{
	_exit((int)forks_bad());
}

/* The child of a fork past libc's function goes on on a stack of its own, with what it finds there: where to return to. */
static pid_t fork_on_stack(int number, char *stack, size_t len)
{
	uintptr_t *top = (void *)(stack + len - 64);
	struct forks_clone3 args = { .exit_signal = SIGCHLD, .stack = (uintptr_t)stack, .stack_size = len - 64 };
	*top = (uintptr_t)forks_on_stack;
	if (number == SYS_clone)
		return (pid_t)syscall(SYS_clone, SIGCHLD, top, 0, 0, 0);
	return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

static pid_t fork_as(int how)
{
	static char stack[64 * 1024] __attribute__((aligned(64)));
	struct forks_clone3 args = { .exit_signal = SIGCHLD };
	switch (how % 8) {
	case 6: return fork_on_stack(SYS_clone, stack, sizeof stack);
	case 7: return fork_on_stack(SYS_clone3, stack, sizeof stack);
	case 0: return fork();
	case 1: return _Fork();
	case 2: return clone(forks_child, stack + sizeof stack, SIGCHLD, NULL);
	case 3: return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	case 4: return (pid_t)syscall(SYS_clone3, &args, sizeof args);
	default: return (pid_t)syscall(SYS_fork);
	}
}

/* Makes `count` children one after the other, each in another way, and gives how many missed something. */
static long make_forks(size_t count)
{
	long bad = 0;
	for (size_t i = 0; i < count; i++) {
		int status = 0;
		/* A page that a child shared is moved again once it is written. */
		for (size_t p = 0; p < pages; p++)
			if (!absent[p])
				*(volatile unsigned char *)(mem + p * PAGE) = shadow[p * PAGE];
		pid_t made = fork_as((int)i);
		if (made == 0)
			forks_child(NULL);
		if (made < 0)
			return -errno;
		while (waitpid(made, &status, 0) < 0 && errno == EINTR)
			;
		bad += status != 0;
	}
	return bad;
}

static atomic_int cycling, forked, forks_missed;
static pthread_t cycler;
static size_t cycled;

/* Advises under a lock that the process's fork handlers take, over a page of which nothing is said. */
static void *cycle(void *arg)
{
	(void)arg;
	while (atomic_load(&cycling)) {
		early_advise(mem + cycled * PAGE, PAGE, MADV_DONTNEED);
		mem[cycled * PAGE] = 1;
	}
	return NULL;
}

static void on_alarm(int number)
{
	(void)number;
	int before = errno, status = 0;
	pid_t made = _Fork();
	if (made == 0)
		forks_child(NULL);
	if (made > 0 && waitpid(made, &status, 0) == made) {
		atomic_fetch_add(&forked, 1);
		atomic_fetch_add(&forks_missed, status != 0);
	}
	errno = before;
}

/* From here a thread advises page `page`, and a signal's handler makes a child every 3 ms. */
static long start_cycle(size_t page)
{
	struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 3000 }, { 0, 3000 } };
	cycled = page;
	absent[page] = 1;
	atomic_store(&cycling, 1);
	if (!early_advise)
		return -ENOSYS;
	if (pthread_create(&cycler, NULL, cycle, NULL))
		return -EAGAIN;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	return 0;
}

/* Ends it, and gives how many children the handler made; an error if one missed something. */
static long stop_cycle(void)
{
	struct itimerval never = { { 0, 0 }, { 0, 0 } };
	setitimer(ITIMER_REAL, &never, NULL);
	atomic_store(&cycling, 0);
	pthread_join(cycler, NULL);
	return atomic_load(&forks_missed) ? -EILSEQ : atomic_load(&forked);
}

static void *exit_later(void *arg)
{
	usleep(50000);
	syscall(SYS_exit, (int)(size_t)arg);
	return NULL;
}

/* The first thread ends by itself, past libc, and then, if there is a second, that one. */
static void raw_exit(unsigned long code, unsigned long second)
{
	pthread_t thread;
	if (second)
		pthread_create(&thread, NULL, exit_later, (void *)second);
	syscall(SYS_exit, (int)code);
}

/*
 * Calls over the region by a thread whose own stack lies in it, as a coroutine's does in a pool of stacks.
 */
#include <signal.h>
#include <sys/prctl.h>
#include <ucontext.h>

static struct {
	size_t first, count;
	int how;
	long result;
} standing;

/* One of the calls over the whole region, or a row of discards that comes near the stack. */
static long call_on_ground(void)
{
	size_t first = standing.first;
	switch (standing.how) {
	case 0: return errno_of(mlockall(MCL_CURRENT | MCL_ONFAULT));
	case 1: return errno_of(mlock(mem, pages * PAGE));
	case 2: return errno_of(madvise(mem, pages * PAGE, MADV_DONTFORK));
	case 3: return errno_of(madvise(mem, pages * PAGE, MADV_UNMERGEABLE));
	case 4:
		for (size_t p = first > 200 ? first - 200 : 0; p < first; p++) {
			if (madvise(mem + p * PAGE, PAGE, MADV_DONTNEED))
				return -errno;
			memset(shadow + p * PAGE, 0, PAGE);
		}
		return 0;
	default: return -EINVAL;
	}
}

/* What lies on the stack is still there after the call. */
static __attribute__((noinline)) long call_between_frames(unsigned depth)
{
	volatile uint64_t frame[64];
	for (size_t i = 0; i < 64; i++)
		frame[i] = mix(depth * 64 + i);
	long result = depth ? call_between_frames(depth - 1) : call_on_ground();
	for (size_t i = 0; i < 64; i++)
		if (frame[i] != mix(depth * 64 + i))
			return -EILSEQ;
	return result;
}

static void *stand(void *arg)
{
	standing.result = call_between_frames(20);
	return arg;
}

static void forget_ground(void)
{
	memset(absent + standing.first, 1, standing.count);
}

/* Has a thread do what `standing` says, on this stack. */
static long stand_there(void *stack, size_t len)
{
	pthread_attr_t attributes;
	pthread_t thread;
	pthread_attr_init(&attributes);
	pthread_attr_setstack(&attributes, stack, len);
	int error = pthread_create(&thread, &attributes, stand, NULL);
	if (error)
		return -error;
	/* A thread that sleeps for ever takes along who looks at its control block: the alarm ends them all. */
	alarm(15);
	error = pthread_join(thread, NULL);
	alarm(0);
	return error ? -error : standing.result;
}

/* The call by a thread whose stack and control block are `count` pages of the region; it has 15 seconds. */
static long call_from_within(size_t first, size_t count, int how)
{
	standing.first = first;
	standing.count = count;
	standing.how = how;
	forget_ground();
	return stand_there(mem + first * PAGE, count * PAGE);
}

static ucontext_t at_home, on_ground;

static void step(void)
{
	stand(NULL);
}

static void step_alone(void)
{
	standing.result = call_on_ground();
}

/* How many bytes of a stack the call takes, with all that it calls; or its error. */
static long depth_of_call(size_t first, int how)
{
	static _Alignas(64) unsigned char stack[128 * 1024];
	standing.first = first;
	standing.how = how;
	memset(stack, 0xa5, sizeof stack);
	getcontext(&on_ground);
	on_ground.uc_stack.ss_sp = stack;
	on_ground.uc_stack.ss_size = sizeof stack;
	on_ground.uc_link = &at_home;
	makecontext(&on_ground, step_alone, 0);
	swapcontext(&at_home, &on_ground);
	size_t free = 0;
	while (free < sizeof stack && stack[free] == 0xa5)
		free++;
	return standing.result ? standing.result : (long)(sizeof stack - free);
}

#define LAZY (16 * PAGE)
static unsigned char *lazy;

/* Gives the stack the page that was missed. */
static void grow(int number, siginfo_t *about, void *context)
{
	(void)number, (void)context;
	unsigned char *page = (unsigned char *)((uintptr_t)about->si_addr & ~(PAGE - 1));
	if (page < lazy || page >= lazy + LAZY || mprotect(page, PAGE, PROT_READ | PROT_WRITE))
		_exit(98);
}

/* The call on a stack whose pages come when they are touched, with any number of bytes left in the page at hand. */
static long call_on_lazy_stack(size_t first, int how)
{
	static unsigned char other[64 * 1024];
	stack_t alternate = { .ss_sp = other, .ss_size = sizeof other };
	struct sigaction action = { .sa_sigaction = grow, .sa_flags = SA_ONSTACK | SA_SIGINFO }, before;
	lazy = mmap(NULL, LAZY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	standing.first = first;
	standing.how = how;
	standing.result = 0;
	if (lazy == MAP_FAILED || sigaltstack(&alternate, NULL) || sigaction(SIGSEGV, &action, &before))
		return -errno;
	for (size_t room = 128; room <= PAGE && !standing.result; room += 128) {
		mprotect(lazy, LAZY - PAGE, PROT_NONE);
		getcontext(&on_ground);
		on_ground.uc_stack.ss_sp = lazy;
		on_ground.uc_stack.ss_size = LAZY - PAGE + room;
		on_ground.uc_link = &at_home;
		makecontext(&on_ground, step_alone, 0);
		swapcontext(&at_home, &on_ground);
	}
	sigaction(SIGSEGV, &before, NULL);
	munmap(lazy, LAZY);
	return standing.result;
}

/* The same by a child of one thread, that goes on on such a stack, and then compares all its memory. */
static long call_in_child(size_t first, size_t count, int how)
{
	standing.first = first;
	standing.count = count;
	standing.how = how;
	pid_t made = fork();
	if (made == 0) {
		forget_ground();
		getcontext(&on_ground);
		on_ground.uc_stack.ss_sp = mem + first * PAGE;
		on_ground.uc_stack.ss_size = count * PAGE;
		on_ground.uc_link = &at_home;
		makecontext(&on_ground, step, 0);
		swapcontext(&at_home, &on_ground);
		_exit(standing.result ? (int)-standing.result : forks_bad() ? EILSEQ : 0);
	}
	for (int i = 0, status; i < 1000; i++) {
		if (waitpid(made, &status, WNOHANG) == made)
			return WIFEXITED(status) ? -WEXITSTATUS(status) : -ECHILD;
		usleep(10000);
	}
	kill(made, SIGKILL);
	waitpid(made, NULL, 0);
	return -ETIMEDOUT;
}

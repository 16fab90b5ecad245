/*
 * Protection keys: memory that has one, and stacks that lie in such memory. The guest has one key of its own.
 */
#include <setjmp.h>

/* The key, which is open to the thread that asks first and to those that it makes later; or an error. */
static int own_key(void)
{
	static int key = -1;
	if (key < 0)
		key = pkey_alloc(0, 0);
	return key < 0 ? -errno : key;
}

/* Gives memory the key, or none; `how` 2: and reads alone. */
static long give_key(unsigned char *at, size_t len, unsigned long how)
{
	int key = how ? own_key() : 0;
	if (key < 0)
		return key;
	return errno_of(pkey_mprotect(at, len, how == 2 ? PROT_READ : PROT_READ | PROT_WRITE, key));
}

/* The same by a call that nothing in libc sees. */
static long give_key_unseen(unsigned char *at, size_t len)
{
	int key = own_key();
	if (key < 0)
		return key;
	register long r10 __asm__("r10") = key;
	long result = SYS_pkey_mprotect;
	__asm__ volatile("syscall"
			 : "+a"(result)
			 : "D"(at), "S"(len), "d"(PROT_READ | PROT_WRITE), "r"(r10)
			 : "rcx", "r11", "memory");
	return result;
}

/* 0 opens the key to this thread; 1 closes it (PKEY_DISABLE_ACCESS), 2 closes it to writes. */
static long close_key(unsigned rights)
{
	int key = own_key();
	return key < 0 ? key : errno_of(pkey_set(key, rights));
}

static sigjmp_buf touched;

static void on_refusal(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	(void)context;
	siglongjmp(touched, info->si_code);
}

/* Reads a byte, or writes it as it is; gives 0, or why the kernel refused that: 2 SEGV_ACCERR, 4 SEGV_PKUERR. */
static long touch(unsigned char *at, int writes)
{
	struct sigaction act = { .sa_sigaction = on_refusal, .sa_flags = SA_SIGINFO }, old;
	/* A handler begins with all keys closed, and jumps out of there. */
	volatile int key = own_key(), rights = key < 0 ? 0 : pkey_get(key);
	sigaction(SIGSEGV, &act, &old);
	int why = sigsetjmp(touched, 1);
	if (why == 0) {
		unsigned char byte = *(volatile unsigned char *)at;
		if (writes)
			*(volatile unsigned char *)at = byte;
	}
	sigaction(SIGSEGV, &old, NULL);
	if (key >= 0)
		pkey_set(key, (unsigned)rights);
	return why;
}

/* Calls over the region by a thread whose stack and control block lie in memory with the key. */
static long call_on_keyed_stack(int how)
{
	const size_t len = 64 * PAGE;
	int key = own_key();
	if (key < 0)
		return key;
	void *stack = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (stack == MAP_FAILED || pkey_mprotect(stack, len, PROT_READ | PROT_WRITE, key))
		return -errno;
	standing.first = pages;
	standing.how = how;
	long result = stand_there(stack, len);
	munmap(stack, len);
	return result;
}

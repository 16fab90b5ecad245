/*
 * The loop. `torture SEED GUEST FOLDER GENERATION`: runs until SIGTERM, compares everything, and
 * ends with 0. Counters go to FOLDER/counts-GUEST. After each step the guest rests several
 * times as long as it worked: the engine has only what processor time the guests leave.
 */
#include "guest.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define REST 6
/* Steps of a guest that a fork and exec has made. */
#define SHORT_LIFE 60

static volatile sig_atomic_t stopping;

static const struct {
	const char *name;
	void (*run)(void);
	unsigned weight;
} operations[] = {
	{ "write bytes", write_bytes, 180 },
	{ "write pages", write_pages, 40 },
	{ "copy pages", copy_pages, 20 },
	{ "zero pages", zero_pages, 20 },
	{ "renew a chunk", renew_chunk, 16 },
	{ "read", read_pages, 150 },
	{ "read all", verify_all, 8 },
	{ "discard", discard, 25 },
	{ "free lazily", free_lazily, 20 },
	{ "map anew", map_anew, 25 },
	{ "offer", offer, 8 },
	{ "withdraw", withdraw, 5 },
	{ "protect", protect, 30 },
	{ "probe", probe, 20 },
	{ "lock", lock_for_now, 6 },
	{ "foreign memory", foreign_for_now, 12 },
	{ "private file", private_file_for_now, 8 },
	{ "block", block_for_now, 8 },
	{ "huge pages of the machine's", huge_pages_for_now, 3 },
	{ "heap", heap_for_now, 8 },
	{ "stack", stack_for_now, 8 },
	{ "huge pages", huge, 4 },
	{ "grow", grow, 8 },
	{ "shrink", shrink, 8 },
	{ "move the region", move_region, 6 },
	{ "move a run", move_run, 20 },
	{ "direct write", direct_write, 12 },
	{ "direct read", direct_read, 15 },
	{ "buffered read", buffered_read, 10 },
	{ "piped read", piped_read, 8 },
	{ "pin", pin, 6 },
	{ "fixed read", fixed_read, 12 },
	{ "fixed write", fixed_write, 8 },
	{ "fork", fork_child, 10 },
	{ "fork storm", fork_storm, 5 },
	{ "fork and exec", fork_exec, 4 },
	{ "threads", run_threads, 8 },
};
#define OPERATIONS (sizeof operations / sizeof *operations)

static void on_term(int signal)
{
	(void)signal;
	stopping = 1;
}

static void on_crash(int signal, siginfo_t *info, void *context)
{
	(void)context;
	char text[256];
	int len = snprintf(text, sizeof text,
			   "torture: signal %d at %p (page %ld): seed %lu guest %u generation %u step %lu %s\n",
			   signal, info->si_addr, ((long)info->si_addr - (long)mem) / (long)PAGE, seed,
			   guest, generation, step, operation);
	COUNT(failures, 1);
	if (write(2, text, (size_t)len) < 0)
		_exit(EXIT_BROKEN);
	_exit(EXIT_BROKEN);
}

static void catch_signals(void)
{
	struct sigaction term = { .sa_handler = on_term, .sa_flags = SA_RESTART };
	struct sigaction crash = { .sa_sigaction = on_crash, .sa_flags = SA_SIGINFO };
	sigaction(SIGTERM, &term, NULL);
	sigaction(SIGSEGV, &crash, NULL);
	sigaction(SIGBUS, &crash, NULL);
}

void name_process(const char *role)
{
	char name[16];
	snprintf(name, sizeof name, "torture-%s", role);
	prctl(PR_SET_NAME, name);
}

static long cpu_us(void)
{
	struct timespec time;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void one_step(void)
{
	unsigned total = 0;
	for (size_t i = 0; i < OPERATIONS; i++)
		total += operations[i].weight;
	draws_of(++step);
	uint64_t at = draw(total);
	size_t i = 0;
	while (at >= operations[i].weight)
		at -= operations[i++].weight;
	operation = operations[i].name;
	COUNT(steps, 1);
	operations[i].run();
}

void live(unsigned long steps)
{
	while (!stopping && steps-- > 0) {
		long before = cpu_us();
		one_step();
		reap(0);
		usleep((unsigned)((cpu_us() - before) * REST + 300));
	}
	operation = "end";
	verify_all();
	reap(1);
}

static void open_counts(const char *folder)
{
	char path[512];
	snprintf(path, sizeof path, "%s/counts-%u", folder, guest);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, PAGE))
		exit(EXIT_BROKEN);
	counts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (counts == MAP_FAILED)
		exit(EXIT_BROKEN);
	close(fd);
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	seed = strtoull(argv[1], NULL, 10);
	guest = (unsigned)strtoul(argv[2], NULL, 10);
	generation = (unsigned)strtoul(argv[4], NULL, 10);
	setenv("TORTURE_FOLDER", argv[3], 1);
	open_counts(argv[3]);
	catch_signals();
	name_process(generation ? "exec" : "guest");
	/* Large blocks are mappings of their own, always. */
	mallopt(M_MMAP_THRESHOLD, 64 << 10);
	open_region(generation ? CHUNK_PAGES : 3 * CHUNK_PAGES);
	open_file(argv[3]);
	draws_of(0);
	for (size_t i = 0; i < pages / CHUNK_PAGES; i++)
		renew_chunk();
	offer();
	live(generation ? SHORT_LIFE : (unsigned long)-1);
	return 0;
}

/* Threads and processes. */
#include "guest.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILDREN 3
#define STORM 16
#define THREADS 4

extern char **environ;
static int children;
static unsigned families;

static void ended(int status)
{
	children--;
	/* The end of the test ends children as well. A wrong byte has been counted by its finder. */
	int asked = WIFSIGNALED(status) && (WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL);
	int found = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_MISMATCH;
	errno = 0;
	if (!asked && !found && status != 0)
		fprintf(stderr, "torture: a child of guest %u ended with status %#x\n", guest, status);
	must(asked || found || status == 0, "a child's end");
}

void reap(int all)
{
	int status;
	while (children > 0) {
		pid_t pid = waitpid(-1, &status, all ? 0 : WNOHANG);
		if (pid == 0)
			return;
		if (pid > 0)
			ended(status);
		else
			must(errno == EINTR, "waitpid");
	}
}

/* Makes a child; both sides go on with operations of their own. */
static pid_t make_child(const char *role)
{
	unsigned number = ++families;
	pid_t child = fork();
	must(child >= 0, "fork");
	if (child > 0) {
		children++;
		COUNT(forks, 1);
		return child;
	}
	children = 0;
	families = 0;
	/* Grandchildren of different parents have streams of their own. */
	generation = generation * 64 + number % 64 + 1;
	step = 0;
	forget_pin();
	name_process(role);
	return 0;
}

/* A child that lives on: it compares what it inherited, writes, discards, and may offer. */
void fork_child(void)
{
	unsigned long steps = 20 + draw(200);
	if (children >= CHILDREN || generation >= 64 || make_child("child") > 0)
		return;
	open_file(getenv("TORTURE_FOLDER"));
	draws_of(0);
	if (draw(2))
		verify_all();
	if (draw(2))
		offer(); /* a guest of its own from here */
	live(steps);
	_exit(0);
}

/*
 * Children made while the engine is busy with what the parent has just renewed: each looks whether
 * any page was out of the parent's reach when it was made.
 */
void fork_storm(void)
{
	if (children > 0 || generation > 0)
		return;
	renew_chunk();
	renew_chunk();
	for (int i = 0; i < STORM; i++) {
		usleep((unsigned)draw(20000));
		if (make_child("storm") == 0) {
			draws_of(0);
			verify_all();
			write_bytes();
			_exit(0);
		}
		if (i % 4 == 3)
			write_pages();
	}
}

/* A child that becomes another program: a small guest of its own, for a moment. */
void fork_exec(void)
{
	static char numbers[3][24];
	if (children >= CHILDREN || generation > 0)
		return;
	snprintf(numbers[0], sizeof numbers[0], "%lu", seed);
	snprintf(numbers[1], sizeof numbers[1], "%u", guest);
	snprintf(numbers[2], sizeof numbers[2], "%u", 32 + ++families % 32);
	char *args[] = { "torture", numbers[0], numbers[1], getenv("TORTURE_FOLDER"), numbers[2], NULL };
	pid_t child;
	if (draw(2)) {
		must(posix_spawn(&child, "/proc/self/exe", NULL, NULL, args, environ) == 0, "posix_spawn");
	} else if ((child = fork()) == 0) {
		write_bytes();
		execv("/proc/self/exe", args);
		_exit(EXIT_BROKEN);
	}
	must(child > 0, "fork");
	children++;
	COUNT(forks, 1);
}

/* ---- threads: a counter of all, a page that one writes and others read, pages of their own ---- */

static struct {
	struct run run; /* page 0 the counter, page 1 the sequence, then one page a thread */
	unsigned rounds;
} work;

/* Two words that the writer raises in turn: a reader may see the second behind, never ahead. */
static void write_sequence(uint64_t value)
{
	_Atomic uint64_t *words = (void *)(mem + (work.run.first + 1) * PAGE);
	atomic_store(&words[0], value);
	atomic_store(&words[300], value);
}

static uint64_t read_sequence(uint64_t least)
{
	_Atomic uint64_t *words = (void *)(mem + (work.run.first + 1) * PAGE);
	uint64_t second = atomic_load(&words[300]), first = atomic_load(&words[0]);
	errno = 0;
	if (first < second || second < least) {
		COUNT(mismatches, 1);
		must(0, "MISMATCH: a thread's write was lost for another thread");
	}
	return second;
}

static void *labour(void *arg)
{
	size_t id = (size_t)arg;
	_Atomic unsigned char *byte = (void *)(mem + work.run.first * PAGE + 77);
	_Atomic unsigned *counter = (void *)(mem + work.run.first * PAGE + 128);
	size_t own = work.run.first + 2 + id;
	uint64_t state = mix(seed + step * THREADS + id), seen = 0;
	for (unsigned round = 1; round <= work.rounds; round++) {
		atomic_fetch_add(byte, 1);
		atomic_fetch_add(counter, 1);
		if (id == 0)
			write_sequence(round);
		else
			seen = read_sequence(seen);
		state = mix(state + round);
		size_t at = own * PAGE + state % PAGE;
		mem[at] = shadow[at] = (unsigned char)(state >> 32);
		if (round % 16 == 0)
			usleep(state % 3 ? 100 : 8000);
		if (memcmp(mem + own * PAGE, shadow + own * PAGE, PAGE))
			wrong(own);
	}
	return NULL;
}

void run_threads(void)
{
	pthread_t threads[THREADS];
	struct run run = { draw(pages - 2 - THREADS), 2 + THREADS };
	writable(run);
	for (size_t p = run.first; p < run.first + run.count; p++)
		set_page(p, p < run.first + 2 ? 0 : 1 + draw(300));
	work.run = run;
	work.rounds = 32 + (unsigned)draw(128);
	for (size_t i = 0; i < THREADS; i++)
		must(pthread_create(&threads[i], NULL, labour, (void *)i) == 0, "pthread_create");
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	unsigned total = THREADS * work.rounds;
	unsigned char *counter = shadow + run.first * PAGE, *sequence = counter + PAGE;
	counter[77] = (unsigned char)total;
	memcpy(counter + 128, &total, sizeof total);
	memcpy(sequence, &(uint64_t){ work.rounds }, 8);
	memcpy(sequence + 300 * 8, &(uint64_t){ work.rounds }, 8);
	verify(run);
	COUNT(increments, total);
	COUNT(written, run.count);
}

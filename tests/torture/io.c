/* System calls and devices that write to the region. */
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../guest/ring.h"

#define MOST 16ul

static int direct_file = -1, plain_file = -1;
static unsigned char *scratch;

/* Every other guest: pages of guests that can pin them are not merged again. */
int pins_memory(void)
{
	return guest % 2 == 0;
}

void open_file(const char *folder)
{
	char path[512];
	if (direct_file >= 0 && direct_file != plain_file)
		close(direct_file);
	if (plain_file >= 0)
		close(plain_file);
	snprintf(path, sizeof path, "%s/file-%u-%u-%d", folder, guest, generation, getpid());
	plain_file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	/* Some file systems know no O_DIRECT: then these operations go through the page cache. */
	direct_file = pins_memory() ? open(path, O_RDWR | O_DIRECT | O_CLOEXEC) : -1;
	if (direct_file < 0)
		direct_file = plain_file;
	if (!scratch)
		scratch = mmap(NULL, MOST * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(plain_file >= 0 && scratch != MAP_FAILED && unlink(path) == 0, "open");
}

static unsigned char *at(struct run run)
{
	return mem + run.first * PAGE;
}

static unsigned char *shadow_at(struct run run)
{
	return shadow + run.first * PAGE;
}

static size_t len(struct run run)
{
	return run.count * PAGE;
}

/* Pages whose content is known and that can be written: what a device reads must be told. */
static struct run draw_settled(void)
{
	struct run run = draw_run(MOST);
	writable(run);
	verify(run);
	for (size_t p = run.first; p < run.first + run.count; p++)
		if (state[p] == EITHER)
			set_byte(p * PAGE, 1);
	return run;
}

static void compare_scratch(struct run run)
{
	for (size_t i = 0; i < run.count; i++)
		if (memcmp(scratch + i * PAGE, shadow_at(run) + i * PAGE, PAGE)) {
			fprintf(stderr, "torture: what reached the file is wrong\n");
			wrong(run.first + i);
		}
}

void direct_write(void)
{
	struct run run = draw_settled();
	must(pwrite(direct_file, at(run), len(run), 0) == (ssize_t)len(run), "pwrite");
	must(pread(direct_file, scratch, len(run), 0) == (ssize_t)len(run), "pread");
	compare_scratch(run);
	COUNT(direct, run.count);
}

/* Puts contents of the pool in the file: what is read becomes what others have. */
static void fill_file(struct run run)
{
	uint64_t content = draw_content();
	for (size_t i = 0; i < run.count; i++)
		pattern(scratch + i * PAGE, content + i);
	must(pwrite(direct_file, scratch, len(run), 0) == (ssize_t)len(run), "pwrite");
}

static void arrived(struct run run)
{
	memcpy(shadow_at(run), scratch, len(run));
	memset(state + run.first, KNOWN, run.count);
	verify(run);
	COUNT(direct, run.count);
}

void direct_read(void)
{
	struct run run = draw_settled();
	fill_file(run);
	must(pread(direct_file, at(run), len(run), 0) == (ssize_t)len(run), "pread");
	arrived(run);
}

void buffered_read(void)
{
	struct run run = draw_settled();
	fill_file(run);
	must(pread(plain_file, at(run), len(run), 0) == (ssize_t)len(run), "pread");
	arrived(run);
}

struct sender {
	int to;
	size_t len;
	unsigned pause_us;
};

static void *send_slowly(void *arg)
{
	struct sender *sender = arg;
	for (size_t done = 0; done < sender->len;) {
		usleep(sender->pause_us);
		ssize_t sent = write(sender->to, scratch + done, PAGE * 2 < sender->len - done ? PAGE * 2 : sender->len - done);
		must(sent > 0, "write");
		done += (size_t)sent;
	}
	return NULL;
}

/* A call that waits inside the kernel, with the region as buffer, while the engine goes on. */
void piped_read(void)
{
	struct run run = draw_settled();
	int fds[2];
	fill_file(run);
	must(pipe2(fds, O_CLOEXEC) == 0, "pipe");
	struct sender sender = { fds[1], len(run), (unsigned)draw(20000) };
	pthread_t thread;
	must(pthread_create(&thread, NULL, send_slowly, &sender) == 0, "pthread_create");
	for (size_t done = 0; done < len(run);) {
		ssize_t got = read(fds[0], at(run) + done, len(run) - done);
		must(got > 0, "read");
		done += (size_t)got;
	}
	pthread_join(thread, NULL);
	close(fds[0]);
	close(fds[1]);
	arrived(run);
}

/* ---- io_uring: pages pinned for many steps ---- */

static struct ring ring = { .fd = -1 };
static struct run pinned;

void forget_pin(void)
{
	if (ring.fd >= 0)
		ring_close(&ring);
	pinned.count = 0;
}

void unpin(struct run run)
{
	if (run.first < pinned.first + pinned.count && pinned.first < run.first + run.count)
		forget_pin();
}

void pin(void)
{
	forget_pin();
	struct run run = draw_settled();
	if (!pins_memory())
		return;
	/* EPERM, ENOSYS: io_uring is switched off here. */
	if (ring_open(&ring, at(run), len(run)) == 0)
		pinned = run;
}

static void through_pin(int opcode)
{
	writable(pinned);
	int done = ring_do(&ring, opcode, direct_file, at(pinned), len(pinned));
	errno = done < 0 ? -done : 0;
	must(done == (int)len(pinned), "io_uring");
}

void fixed_read(void)
{
	if (pinned.count == 0)
		return;
	fill_file(pinned);
	through_pin(IORING_OP_READ_FIXED);
	arrived(pinned);
}

void fixed_write(void)
{
	if (pinned.count == 0)
		return;
	verify(pinned);
	through_pin(IORING_OP_WRITE_FIXED);
	must(pread(plain_file, scratch, len(pinned), 0) == (ssize_t)len(pinned), "pread");
	compare_scratch(pinned);
	COUNT(direct, pinned.count);
}

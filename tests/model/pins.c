/* Memory that an io_uring keeps pinned over many lines, and reads and writes by its frames. */
#include "model.h"

#include "../guest/ring.h"

static struct ring ring;
static struct {
	int open;
	size_t first, count;
	pid_t of;
} pinned;

static unsigned char *page_at(size_t page)
{
	return (unsigned char *)ARENA + page * PAGE;
}

void unpin(void)
{
	/* A child has the descriptor, and must not do with it as it likes. */
	if (pinned.open && pinned.of == getpid())
		ring_close(&ring);
	pinned.open = 0;
}

void pin(size_t first, size_t count)
{
	unpin();
	int error = ring_open(&ring, page_at(first), count * PAGE);
	say(" %d", error);
	pinned.open = error == 0;
	pinned.first = first;
	pinned.count = count;
	pinned.of = getpid();
}

void fixed(int read, size_t first, size_t count, long file_page)
{
	(void)count;
	if (!pinned.open || pinned.of != getpid())
		return;
	unsigned char *at = page_at(pinned.first + first % pinned.count);
	int opcode = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
	say(" %d", ring_do_at(&ring, opcode, files[1].fd, at, PAGE, (uint64_t)file_page * PAGE));
}

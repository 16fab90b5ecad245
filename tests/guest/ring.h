/* One io_uring with one fixed buffer, or with a ring of provided buffers: the pages stay pinned while it is open. */
#ifndef TEST_GUEST_RING_H
#define TEST_GUEST_RING_H

#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct ring {
	int fd;
	/* Of the next transfer: flags, and the group from which its buffer is taken. */
	unsigned flags, group;
	char *rings;
	size_t rings_len, sqes_len;
	struct io_uring_sqe *sqes;
	struct io_uring_params p;
};

static inline void ring_close(struct ring *ring)
{
	munmap(ring->rings, ring->rings_len);
	munmap(ring->sqes, ring->sqes_len);
	close(ring->fd);
	ring->fd = -1;
}

/* Opens a ring and pins a buffer, if there is one; gives 0 or a negative error number. */
static inline int ring_open(struct ring *ring, void *buffer, size_t len)
{
	memset(ring, 0, sizeof *ring);
	struct io_uring_params *p = &ring->p;
	ring->fd = (int)syscall(SYS_io_uring_setup, 4, p);
	if (ring->fd < 0)
		return -errno;
	ring->rings_len = p->sq_off.array + p->sq_entries * 4 + 65536;
	ring->sqes_len = p->sq_entries * sizeof *ring->sqes;
	int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
	ring->rings = mmap(NULL, ring->rings_len, prot, flags, ring->fd, IORING_OFF_SQ_RING);
	ring->sqes = mmap(NULL, ring->sqes_len, prot, flags, ring->fd, IORING_OFF_SQES);
	struct iovec range = { buffer, len };
	if (ring->rings == MAP_FAILED || (void *)ring->sqes == MAP_FAILED ||
	    (len && syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_BUFFERS, &range, 1) < 0)) {
		int error = errno;
		ring_close(ring);
		return -error;
	}
	return 0;
}

/* Does one transfer between a file and the pinned buffer, through the pin. */
static inline int ring_do_at(struct ring *ring, int opcode, int file, void *buffer, size_t len, uint64_t offset)
{
	unsigned *sq_tail = (unsigned *)(ring->rings + ring->p.sq_off.tail);
	unsigned *sq_mask = (unsigned *)(ring->rings + ring->p.sq_off.ring_mask);
	unsigned *sq_array = (unsigned *)(ring->rings + ring->p.sq_off.array);
	unsigned *cq_head = (unsigned *)(ring->rings + ring->p.cq_off.head);
	unsigned *cq_tail = (unsigned *)(ring->rings + ring->p.cq_off.tail);
	unsigned *cq_mask = (unsigned *)(ring->rings + ring->p.cq_off.ring_mask);
	struct io_uring_cqe *cqes = (struct io_uring_cqe *)(ring->rings + ring->p.cq_off.cqes);
	unsigned tail = *sq_tail, at = tail & *sq_mask;
	struct io_uring_sqe *sqe = &ring->sqes[at];
	memset(sqe, 0, sizeof *sqe);
	sqe->opcode = (uint8_t)opcode;
	sqe->fd = file;
	sqe->addr = (uint64_t)(uintptr_t)buffer;
	sqe->len = (uint32_t)len;
	sqe->off = offset;
	sqe->flags = (uint8_t)ring->flags;
	sqe->buf_group = (uint16_t)ring->group;
	sq_array[at] = at;
	__atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
	unsigned submit = 1, head = *cq_head;
	while (head == __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE)) {
		long entered = syscall(SYS_io_uring_enter, ring->fd, submit, 1, IORING_ENTER_GETEVENTS, NULL, 0);
		if (entered < 0 && errno != EINTR)
			return -errno;
		submit = 0;
	}
	int result = cqes[head & *cq_mask].res;
	__atomic_store_n(cq_head, head + 1, __ATOMIC_RELEASE);
	return result;
}

/* The same with the start of the file. */
static inline int ring_do(struct ring *ring, int opcode, int file, void *buffer, size_t len)
{
	return ring_do_at(ring, opcode, file, buffer, len, 0);
}

/*
 * Makes a page of memory the ring of provided buffers of a new io_uring: the kernel keeps the page's frame, and shows it
 * to no process. Gives 0 or a negative error number.
 */
static inline int ring_provide(struct ring *ring, void *page)
{
	int opened = ring_open(ring, NULL, 0);
	if (opened < 0)
		return opened;
	struct io_uring_buf_reg reg = { .ring_addr = (uint64_t)(uintptr_t)page, .ring_entries = 8, .bgid = 7 };
	if (syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_PBUF_RING, &reg, 1) < 0) {
		int error = errno;
		ring_close(ring);
		return -error;
	}
	return 0;
}

/* Reads from a pipe into a buffer that the kernel takes from the ring of provided ones: the number of bytes, or an error. */
static inline int ring_take(struct ring *ring, void *page, void *buffer, size_t len)
{
	struct io_uring_buf_ring *provided = page;
	int ends[2];
	provided->bufs[0].addr = (uint64_t)(uintptr_t)buffer;
	provided->bufs[0].len = (uint32_t)len;
	provided->bufs[0].bid = 0;
	__atomic_store_n(&provided->tail, 1, __ATOMIC_RELEASE);
	if (pipe(ends) < 0 || write(ends[1], "provided", 8) != 8)
		return -errno;
	ring->flags = IOSQE_BUFFER_SELECT, ring->group = 7;
	int got = ring_do(ring, IORING_OP_READ, ends[0], NULL, len);
	ring->flags = ring->group = 0;
	close(ends[0]);
	close(ends[1]);
	return got;
}

#endif

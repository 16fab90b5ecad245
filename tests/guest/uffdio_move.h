/* UFFDIO_MOVE, of Linux 6.8: not in every machine's headers. */
#include <linux/userfaultfd.h>
#include <stdint.h>

#ifndef UFFDIO_MOVE
#define UFFD_FEATURE_MOVE (1 << 16)
struct uffdio_move {
	uint64_t dst, src, len, mode;
	int64_t move;
};
#define UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct uffdio_move)
#endif

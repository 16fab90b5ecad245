/*
 * PageONE: offer memory for page deduplication.
 *
 * Link with -lpageone_agent, or load the library with LD_PRELOAD. Offering
 * memory starts one thread inside the process; it finds the engine through
 * the socket named by $PAGEONE_SOCKET (default /run/pageone.sock for root,
 * $XDG_RUNTIME_DIR/pageone.sock otherwise). Without an engine the calls
 * succeed, and the memory is merged once an engine appears.
 *
 * Offered memory behaves as before in every way a program can see: pages of
 * equal content share one physical copy until one of them is written.
 *
 * A program that uses madvise(MADV_MERGEABLE) needs none of these calls.
 *
 * Unmap or remap offered memory through libc, not through system calls of
 * your own. malloc's memory may be freed as ever; where pageone_sees_libc
 * says 0, withdraw it first.
 */
#ifndef PAGEONE_H
#define PAGEONE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Offers the pages of [addr, addr + len) for merging. addr must lie on a page
 * boundary; len is in bytes and is rounded up to whole pages. Memory that is
 * not private and anonymous is left as it is.
 *
 * Returns 0, or -1 with errno EINVAL (addr inside a page, or the range
 * overflows) or ENOMEM (some of the range is not mapped).
 */
int pageone_register(void *addr, size_t len);

/*
 * Takes the range back: its merged pages get private copies before the call
 * returns, and it is not merged again.
 *
 * Returns 0, or -1 with errno EINVAL as above, or ENOMEM or EAGAIN when there
 * is no memory for the copies: the range is withdrawn, and its merged pages
 * stay merged (and correct) until written.
 */
int pageone_unregister(void *addr, size_t len);

/*
 * Says that the content of [addr, addr + len) no longer matters: the pages
 * are given back to the host now, and read as zeros until they are written.
 * For allocators, runtimes and VMMs that know of free pages. Both addr and
 * len must be multiples of the page size. It does what madvise(MADV_DONTNEED)
 * does, and pageone status counts such pages apart.
 *
 * Returns 0, or -1 with errno EINVAL (not whole pages, or locked memory) or
 * ENOMEM (some of the range is not mapped; the rest is done).
 */
int pageone_recycle(void *addr, size_t len);

/*
 * Merges the offered pages of [addr, addr + len) now. A page that equals
 * another of the domain at this moment, or is zeros, need not have been quiet
 * before. For clones of a snapshot, a machine that is paused, workers just
 * started. addr and len as for pageone_register. Waits until it is done; other
 * threads go on. It needs 64 KiB of stack.
 *
 * Returns the number of pages that share a copy now and did not before. As
 * write(2) may write a part, it may have merged a part: another call goes on,
 * or says why there is no more. Where no page was merged for one of these
 * reasons it returns -1 with errno
 *   EINVAL     addr and len as for pageone_register
 *   ENOTCONN   no engine serves this process (see pageone_served), or it does
 *              not merge (run=0), or it has ended
 *   EBUSY      the kernel may write to this process's memory unseen (pageone
 *              merge says why): it is merged when it has been quiet
 *   EAGAIN     too many wait to have memory merged, or this process's agent
 *              did not answer in time: ask again in a while
 *   EPERM      the socket belongs to an engine of another user, not root's
 *   EPROTO     the engine speaks another version of the protocol
 *   ETIMEDOUT  the engine took no connection for ten seconds, or did not
 *              answer for ten minutes; signals do not lengthen the wait
 * or what socket(2) and connect(2) give.
 */
int64_t pageone_merge(void *addr, size_t len);

/* Returns 1 while an engine serves this process, else 0. */
int pageone_served(void);

/*
 * Returns 1 when the calls that libc makes for itself are seen (free of a
 * large block, trims, thread stacks), else 0: the library was loaded when
 * the process had threads already, /proc is not there, or this libc is not
 * known to it.
 */
int pageone_sees_libc(void);

#ifdef __cplusplus
}
#endif

#endif

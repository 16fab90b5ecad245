/* A heap elsewhere: where brk(2) begins and ends is the process's to say, as for a program that was restored. */
#ifndef TEST_GUEST_BRK_H
#define TEST_GUEST_BRK_H

#include <errno.h>
#include <linux/prctl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SKIP_4 "%*s%*s%*s%*s"
#define SKIP_16 SKIP_4 SKIP_4 SKIP_4 SKIP_4
#define SKIP_22 SKIP_16 SKIP_4 "%*s%*s"

/* What the kernel says of this process's memory, as prctl(2) wants it; nothing mapped is moved. Gives whether it was told. */
static inline int brk_map(struct prctl_mm_map *map)
{
	unsigned long code[2], stack, data[7];
	char text[1024];
	FILE *stat = fopen("/proc/self/stat", "re");
	int read = stat && fgets(text, sizeof text, stat);
	if (stat)
		fclose(stat);
	/* Behind the name: fields 26 to 28, and 45 to 51. */
	const char *at = read ? strrchr(text, ')') : NULL;
	if (!at || sscanf(at, ") %*c" SKIP_22 "%lu %lu %lu" SKIP_16 "%lu %lu %lu %lu %lu %lu %lu", &code[0], &code[1], &stack,
			  &data[0], &data[1], &data[2], &data[3], &data[4], &data[5], &data[6]) != 10)
		return 0;
	*map = (struct prctl_mm_map){ .start_code = code[0], .end_code = code[1], .start_stack = stack,
				      .start_data = data[0], .end_data = data[1], .start_brk = data[2],
				      .arg_start = data[3], .arg_end = data[4], .env_start = data[5], .env_end = data[6],
				      .brk = (uint64_t)syscall(SYS_brk, 0), .exe_fd = (uint32_t)-1 };
	return 1;
}

/* The heap lies at [start, end) from here on. Gives 0 or a negative error number. */
static inline int brk_begins(void *start, void *end)
{
	struct prctl_mm_map map;
	if (!brk_map(&map))
		return -EIO;
	map.start_brk = (uintptr_t)start, map.brk = (uintptr_t)end;
	return prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) ? -errno : 0;
}

#endif

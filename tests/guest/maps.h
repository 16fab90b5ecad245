/* The mappings of this process, as the kernel lists them. */
#ifndef MAPS_H
#define MAPS_H
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAPS_TEXT (4ul << 20)

/* Calls `each` with every mapping of at least `least` bytes that is private, anonymous and writable. */
static void each_anonymous(unsigned long least, void (*each)(unsigned long start, unsigned long end))
{
	static char text[MAPS_TEXT];
	size_t len = 0;
	ssize_t got;
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	while (fd >= 0 && (got = read(fd, text + len, MAPS_TEXT - 1 - len)) > 0)
		len += (size_t)got;
	close(fd);
	text[len] = 0;
	for (char *line = text, *next; line && *line; line = next) {
		unsigned long start, end, inode;
		char perms[8];
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		if (sscanf(line, "%lx-%lx %7s %*s %*s %lu", &start, &end, perms, &inode) != 4)
			continue;
		if (strncmp(perms, "rw", 2) == 0 && perms[3] == 'p' && inode == 0 && end - start >= least)
			each(start, end);
	}
}
#endif

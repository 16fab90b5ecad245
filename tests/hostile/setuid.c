/* A setuid-root program with a secret: it reads a file that root alone may read, keeps it at a known place,
 * and waits. Attackers want these bytes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SECRET_AT 0x700000000ul
#define SECRET_PAGES 64ul

int main(void)
{
	char secret[64] = { 0 };
	int file = open(SECRET_FILE, O_RDONLY | O_CLOEXEC);
	if (geteuid() != 0 || file < 0 || read(file, secret, sizeof secret) <= 0)
		return 3;
	char *at = mmap((void *)SECRET_AT, SECRET_PAGES * 4096, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (at == MAP_FAILED)
		return 4;
	for (unsigned long place = 0; place < SECRET_PAGES * 4096; place += sizeof secret) {
		memcpy(at + place, secret, sizeof secret);
		if (place % 4096 == 64)
			memcpy(at + place, &place, sizeof place); /* no page is another's equal */
	}
	alarm(120);
	for (;;)
		pause();
}

/*
 * Memory of which runs of twelve pages are equal in all such processes, in turns with runs that no other has: less than what one mapping
 * needs to be offered for a program. It ends with its input.
 */
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORDS 512ul
#define PAGES 4096ul
#define RUN 12ul

int main(void)
{
	uint64_t *memory = mmap(NULL, PAGES * WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	for (size_t page = 0; page < PAGES; page++) {
		uint64_t owner = page / RUN % 2 ? (uint64_t)getpid() << 32 : 0;
		for (size_t word = 0; word < WORDS; word++)
			memory[page * WORDS + word] = (owner + page + 1) * 0x9e3779b97f4a7c15ull + word;
	}
	puts("ready");
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}

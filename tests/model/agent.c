/*
 * The agent's coming and going. In most lists it is there from the first instruction to the last. Where a list has a line `attach`,
 * the program begins without it: then the driver puts it in and takes it out at such lines, from outside, while this process waits.
 *
 * Before the agent comes, and when it has gone, offers go to the kernel's KSM, and their flag divides mappings: in both runs. With
 * the agent there is no such flag in either.
 */
#include "model.h"

#include <string.h>
#include <unistd.h>

static int comes_later, is_in = 1;

void agent_by(FILE *list)
{
	static char line[512], name[64];
	while (fgets(line, sizeof line, list))
		if (sscanf(line, "%*u %63s", name) == 1 && strcmp(name, "attach") == 0)
			comes_later = 1;
	rewind(list);
	is_in = !comes_later;
}

int agent_is_in(void)
{
	return is_in;
}

/* The driver answers when it is done. */
static int ask(const char *wish)
{
	char answer = 0;
	dprintf(1, "%s\n", wish);
	return read(0, &answer, 1) == 1 && answer == 'y';
}

void agent_comes(void)
{
	if (!comes_later || is_in)
		return;
	is_in = plain || ask("attach");
	say(" %d", is_in);
	if (plain)
		ksm_mappings(1);
	/* The agent takes what it merges from KSM when it has found its engine. */
	for (int i = 0; i < 6000 && ksm_mappings(0); i++)
		usleep(10000);
	say(" %zu", ksm_mappings(0));
}

void agent_goes(void)
{
	if (!comes_later || !is_in)
		return;
	is_in = !plain && !ask("detach");
	say(" %d %zu", !is_in, stored(0, UINTPTR_MAX));
	/* Again KSM's are those offers that the agent had: here the run without PageONE has none. */
	ksm_mappings(1);
}

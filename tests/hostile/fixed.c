/* A setuid-root program with code at a known place, which it never runs itself: it makes a folder that root alone can make.
 * Attackers want it run. */
#define _GNU_SOURCE
#include <signal.h>
#include <unistd.h>

/* Without a stack, for the attacker who has it run chooses that, too. */
__asm__(".pushsection .fixed, \"ax\"\n"
	"	mov $83, %eax\n" /* mkdir */
	"	lea path(%rip), %rdi\n"
	"	mov $0700, %esi\n"
	"	syscall\n"
	"	mov $231, %eax\n" /* exit_group */
	"	xor %edi, %edi\n"
	"	syscall\n"
	"path: .asciz \"" REACHED "\"\n"
	".popsection\n");

static void ring(int signal)
{
	(void)signal;
}

int main(void)
{
	sigset_t none;
	signal(SIGALRM, ring);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (geteuid() != 0)
		return 3;
	for (int i = 0; i < 120; i++)
		sleep(1);
	return 0;
}

/* A server that is not the daemon: agents that come here must not become its guests. */
#include "hostile.h"

static int memory_file(const char *name, size_t bytes)
{
	int fd = memfd_create(name, MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		fail("memfd");
	return fd;
}

static void welcome(int to)
{
	int descriptors[] = { memory_file("pageone-lifeline", PAGE), memory_file("pageone-lifeline", PAGE),
			      memory_file("pageone-store", 1 << 20) };
	unsigned char packet[6 + 16] = { 2, PROTOCOL & 0xff, PROTOCOL >> 8, 1, 0, 0 }; /* and no domain */
	union { char room[CMSG_SPACE(sizeof descriptors)]; struct cmsghdr align; } control = { { 0 } };
	struct iovec part = { packet, sizeof packet };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				  .msg_controllen = sizeof control };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof descriptors);
	memcpy(CMSG_DATA(head), descriptors, sizeof descriptors);
	sendmsg(to, &message, MSG_NOSIGNAL);
	for (int i = 0; i < 3; i++)
		close(descriptors[i]);
}

/* fake-server: listens at the path, welcomes each agent, and says when one is ready or answers. */
void fake_server(const char *path, char **args)
{
	(void)args;
	struct sockaddr_un here = { .sun_family = AF_UNIX };
	snprintf(here.sun_path, sizeof here.sun_path, "%s", path);
	int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	mode_t mask = umask(0);
	if (bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 8))
		fail("listen");
	umask(mask);
	say("ready");
	for (;;) {
		struct pollfd waits[] = { { listener, POLLIN, 0 }, { 0, POLLIN, 0 } };
		poll(waits, 2, -1);
		if (waits[1].revents)
			hold();
		int to = accept(listener, NULL, NULL);
		unsigned char packet[MAX_MESSAGE];
		ssize_t len = recv(to, packet, sizeof packet, 0);
		say("an agent connects");
		if (len > 0 && packet[0] == 1) {
			say("an agent says hello");
			welcome(to);
			struct pollfd wait = { to, POLLIN, 0 };
			if (poll(&wait, 1, 3000) == 1 && recv(to, packet, sizeof packet, 0) > 0)
				say("an agent answers %d", packet[0]);
		}
		close(to);
	}
}

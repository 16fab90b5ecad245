/* Descriptors that are dear to close, or to look at. */
#include "hostile.h"
#include <arpa/inet.h>
#include <netinet/in.h>

int send_with(int socket, const void *packet, size_t len, const int *descriptors, int count)
{
	union { char room[CMSG_SPACE(253 * sizeof(int))]; struct cmsghdr align; } control = { { 0 } };
	struct iovec part = { (void *)packet, len };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				  .msg_controllen = CMSG_SPACE((size_t)count * sizeof(int)) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
	memcpy(CMSG_DATA(head), descriptors, (size_t)count * sizeof(int));
	return sendmsg(socket, &message, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* A TCP socket whose close waits for a minute, because its bytes are never taken. */
static int lingering(int listener)
{
	struct sockaddr_in to;
	socklen_t len = sizeof to;
	getsockname(listener, (struct sockaddr *)&to, &len);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct linger wait = { 1, 60 };
	static char bytes[1 << 20];
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, len))
		fail("connect");
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &wait, sizeof wait);
	for (int i = 0; i < 64 && send(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0; i++)
		;
	return fd;
}

/* linger: the last reference of such sockets goes to the daemon: with a hello, with a request, with an answer. */
void linger(const char *path, char **args)
{
	(void)args;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int little = 4096;
	setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
	if (bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 64))
		fail("listen");
	struct session s = { .socket = -1 };
	int joined = join(&s, path, "") == 0;
	if (joined)
		serve(&s, 1, NULL, 200);
	for (int i = 0; i < 8; i++) {
		/* Its end leaves the last reference to the message, and does not wait itself. */
		pid_t sender = child();
		if (sender != 0) {
			waitpid(sender, NULL, 0);
			continue;
		}
		int fd = lingering(listener), to = i == 7 && joined ? s.socket : dial(path);
		unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, i % 2 }, answer[20] = { 6 };
		if (to == s.socket)
			send_with(to, answer, sizeof answer, &fd, 1);
		else
			send_with(to, hello, sizeof hello, &fd, 1);
		if (i % 2)
			send_with(to, "\"status\"", 8, &fd, 1);
		_exit(0);
	}
	say("ready");
	if (joined)
		serve(&s, 1, NULL, -1);
	hold();
}

/* nested DEPTH: a socket in whose queue lies a socket in whose queue lies ... */
void nested(const char *path, char **args)
{
	int depth = args[0] ? atoi(args[0]) : 3000, inner = open("/dev/null", O_RDONLY);
	int to = dial(path);
	for (int i = 0; i < depth; i++) {
		int ends[2];
		if (socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) || send_with(ends[0], "x", 1, &inner, 1))
			break;
		close(inner);
		close(ends[0]);
		inner = ends[1];
	}
	unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 0 };
	int sent = to < 0 ? to : send_with(to, hello, sizeof hello, &inner, 1);
	close(inner);
	say("ready, %d", sent);
	hold();
}

/* bundles: packets with as many descriptors as fit, without end. */
void bundles(const char *path, char **args)
{
	(void)args;
	int many[253];
	for (int i = 0; i < 253; i++)
		many[i] = open("/dev/null", O_RDONLY);
	struct session s = { .socket = -1 };
	int joined = join(&s, path, "") == 0;
	say("ready");
	unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 }, answer[20] = { 6, 1 };
	for (struct pollfd end = { 0, POLLIN, 0 }; poll(&end, 1, 10) == 0;) {
		int to = dial(path);
		if (to >= 0) {
			send_with(to, hello, sizeof hello, many, 253);
			send_with(to, "\"status\"", 8, many, 253);
			close(to);
		}
		if (joined && send_with(s.socket, answer, sizeof answer, many, 253))
			joined = 0;
	}
}

/* descriptor-bomb DESCRIPTORS SESSIONS: what has to be looked at for pins, in as many sessions as it gets. */
void descriptor_bomb(const char *path, char **args)
{
	static struct session all[256];
	int descriptors = args[0] ? atoi(args[0]) : 18900, most = args[0] && args[1] ? atoi(args[1]) : 50;
	struct offers bait = offer_bait();
	fill(map_at(SECRET_AT, CHUNK / PAGE), SECRET_PAGES, 3);
	int count = 0;
	for (int i = 0; i < most && i < 256; i++)
		if (join(&all[count], path, "") == 0)
			count++;
	if (count > 0)
		watch(&all[0], SECRET_AT, CHUNK, 0);
	for (int i = 0; i < descriptors; i++)
		if (open("/dev/null", O_RDONLY) < 0)
			break;
	say("ready, %d sessions", count);
	serve(all, count, &bait, -1);
}

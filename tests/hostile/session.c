/* The agent's side of the protocol, without any of its scruples. */
#include "hostile.h"

#define DESCRIPTORS 80

int dial(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	snprintf(to.sun_path, sizeof to.sun_path, "%s", path);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) {
		int error = errno;
		close(fd);
		return -error;
	}
	return fd;
}

int say_hello(int socket, const char *domain)
{
	unsigned char packet[1 + 2 + 1 + 1 + 63] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 0 };
	size_t len = strlen(domain);
	packet[4] = (unsigned char)len;
	memcpy(packet + 5, domain, len < 63 ? len : 63);
	return send(socket, packet, sizeof packet, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* Takes a packet and its descriptors; gives its length, 0 at the end, or a negative error number. */
static ssize_t take(int socket, unsigned char *packet, int *descriptors, int *count, int flags)
{
	union { char room[CMSG_SPACE(DESCRIPTORS * sizeof(int))]; struct cmsghdr align; } control;
	struct iovec part = { packet, MAX_MESSAGE };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				  .msg_controllen = sizeof control };
	*count = 0;
	ssize_t len = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
	if (len < 0)
		return -errno;
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	if (head && head->cmsg_type == SCM_RIGHTS) {
		*count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(descriptors, CMSG_DATA(head), (size_t)*count * sizeof(int));
	}
	return len;
}

static void *map_line(int fd)
{
	return mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

/* Waits for the welcome; 0, or negative when there is none. */
int take_welcome(struct session *s, int socket, int wait_ms)
{
	static unsigned char packet[MAX_MESSAGE];
	int descriptors[DESCRIPTORS], count;
	struct pollfd wait = { socket, POLLIN, 0 };
	memset(s, 0, sizeof *s);
	s->socket = socket;
	s->device = -1;
	if (poll(&wait, 1, wait_ms) != 1)
		return -ETIMEDOUT;
	ssize_t len = take(socket, packet, descriptors, &count, 0);
	if (len < 3 || packet[0] != 2 || count < 3)
		return -ECONNREFUSED;
	s->line = descriptors[0];
	s->tie = descriptors[1];
	s->store_count = packet[3] | packet[4] << 8;
	for (int i = 0; i < s->store_count && i + 2 < count; i++)
		s->stores[i] = descriptors[2 + i];
	if (packet[5])
		s->device = descriptors[count - 1];
	s->line_map = map_line(s->line);
	s->tie_map = map_line(s->tie);
	return 0;
}

atomic_int second_thread_ends;

static void *sleep_on(void *arg)
{
	atomic_store((atomic_uint *)arg, (unsigned)gettid());
	while (!atomic_load(&second_thread_ends))
		rest(5);
	syscall(SYS_exit, 0);
	return NULL;
}

/* The number of a thread of this process that is not its first, as an agent's is. */
unsigned second_thread(void)
{
	static pid_t of;
	static atomic_uint number;
	pthread_t thread;
	if (of == getpid())
		return number;
	of = getpid();
	number = 0;
	if (pthread_create(&thread, NULL, sleep_on, &number))
		return 0;
	while (number == 0)
		rest(1);
	return number;
}

/* What the session says is its userfaultfd: with one that exists, the engine stands guard over its pages. */
unsigned userfaultfd_said;

int say_ready(struct session *s)
{
	unsigned char packet[1 + 4 + 4 + 8 + 8 + 1] = { 3 }; /* thread, userfaultfd, lifeline, journal, attached */
	uint32_t thread = second_thread();
	uint64_t line = (uint64_t)s->line_map;
	memcpy(packet + 1, &thread, 4);
	memcpy(packet + 5, &userfaultfd_said, 4);
	memcpy(packet + 9, &line, 8);
	return send(s->socket, packet, sizeof packet, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

int join(struct session *s, const char *path, const char *domain)
{
	int socket = dial(path), result;
	if (socket < 0)
		return socket;
	if ((result = say_hello(socket, domain)) || (result = take_welcome(s, socket, 3000)) ||
	    (result = say_ready(s))) {
		close(socket);
		return result;
	}
	return 0;
}

static unsigned char *put(unsigned char *at, uint64_t value, size_t bytes)
{
	memcpy(at, &value, bytes);
	return at + bytes;
}

static int is_whole(const struct offers *offers)
{
	static const uint64_t none[8];
	return memcmp(offers->pages, none, sizeof none) == 0;
}

/* One packet of changes: entries for chunks from `*next` on, at most MAX_ENTRIES. */
static int say_changes(struct session *s, const struct offers *offers, uint64_t *next, uint64_t end)
{
	unsigned char packet[MAX_MESSAGE], *at = packet, *entries;
	at = put(at, 6, 1);
	unsigned char *more = at;
	at = put(at, 0, 1);
	at = put(at, s->syncs, 8);
	at = put(at, 4096, 8);
	entries = at;
	at = put(at, 0, 2);
	uint16_t count = 0;
	int whole = offers && is_whole(offers);
	for (; *next < end && count < MAX_ENTRIES; ++*next, count++) {
		uint64_t chunk = offers->first + (whole ? 0 : *next % offers->chunks) * CHUNK;
		at = put(at, whole, 1);
		at = put(at, chunk, 8);
		if (whole) {
			at = put(at, offers->chunks, 4);
			continue;
		}
		memcpy(at, offers->pages, 64);
		memset(at + 64, offers->stored ? 0xff : 0, 64);
		at += 128;
	}
	put(entries, count, 2);
	put(more, *next < end, 1);
	return send(s->socket, packet, (size_t)(at - packet), MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int answer_sync(struct session *s, const struct offers *offers)
{
	uint64_t next = 0, all = offers ? (is_whole(offers) ? 1 : offers->chunks) : 0;
	uint64_t times = s->syncs == 0 ? 1 : offers ? offers->again : 0;
	s->syncs++;
	do {
		int result = say_changes(s, offers, &next, all * times);
		if (result)
			return result;
	} while (next < all * times);
	return 0;
}

/* Says that everything was merged as asked, which is not true. */
static int answer_merge(struct session *s, const unsigned char *question)
{
	unsigned char packet[1 + 8 + 8 + 512] = { 8 };
	uint16_t ops, first, pages;
	memcpy(&ops, question + 11, 2);
	for (int i = 0; i < ops; i++) {
		const unsigned char *op = question + 13 + 12 * i;
		uint64_t target;
		memcpy(&first, op, 2);
		memcpy(&pages, op + 2, 2);
		memcpy(&target, op + 4, 8);
		int outcome = target == UINT64_MAX ? 2 : target == UINT64_MAX - 1 ? 0 : 1;
		for (int page = first; page < first + pages && page < 512; page++)
			packet[17 + page] = (unsigned char)outcome;
	}
	s->merges++;
	rest(s->late);
	return send(s->socket, packet, sizeof packet, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int answer_unmerge(struct session *s, const unsigned char *question)
{
	unsigned char packet[1 + 8 + 64] = { 10 };
	memcpy(packet + 9, question + 9, 64);
	return send(s->socket, packet, sizeof packet, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* Answers one question; negative when the session is over. */
int answer(struct session *s, const struct offers *offers)
{
	static unsigned char packet[MAX_MESSAGE];
	int descriptors[DESCRIPTORS], count;
	ssize_t len = take(s->socket, packet, descriptors, &count, MSG_DONTWAIT);
	if (len == -EAGAIN)
		return 0;
	if (len <= 0)
		return -ECONNRESET;
	if (packet[0] == 5 && count == 1) {
		void *line = map_line(descriptors[0]);
		munmap(s->line_map, PAGE);
		close(s->line);
		s->line_map = line;
		s->line = descriptors[0];
	}
	switch (packet[0]) {
	case 5: return answer_sync(s, offers);
	case 7: return answer_merge(s, packet);
	case 9: return answer_unmerge(s, packet);
	default: return -EPROTO;
	}
}

/* Answers for `ms`, or with a negative number until the test lets go. */
void serve(struct session *all, int count, const struct offers *offers, int ms)
{
	struct timespec now, begin;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	struct pollfd *waits = calloc((size_t)count + 1, sizeof *waits);
	waits[count] = (struct pollfd){ ms < 0 ? 0 : -1, POLLIN, 0 };
	for (int i = 0; i < count; i++)
		waits[i] = (struct pollfd){ all[i].socket, POLLIN, 0 };
	for (;;) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		long left = ms - (now.tv_sec - begin.tv_sec) * 1000 - (now.tv_nsec - begin.tv_nsec) / 1000000;
		if (ms >= 0 && left <= 0)
			break;
		poll(waits, (nfds_t)count + 1, ms < 0 ? -1 : (int)left);
		if (waits[count].revents)
			hold();
		for (int i = 0; i < count; i++)
			if (waits[i].revents && answer(&all[i], offers) < 0) {
				close(waits[i].fd);
				waits[i].fd = all[i].socket = -1;
			}
	}
	free(waits);
}

/* Lets the engine see what is written in this memory, as an agent does; with `missing` each thread that touches a page that is
 * not there waits for an answer that never comes, the engine's too. */
int watch(struct session *s, uint64_t at, size_t bytes, int missing)
{
	int fd = s->device >= 0 ? ioctl(s->device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK) : -1;
	if (fd < 0)
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
	struct uffdio_api api = { .api = UFFD_API, .features = WP_ASYNC | WP_UNPOPULATED };
	struct uffdio_register range = { .range = { at, bytes }, .mode = UFFDIO_REGISTER_MODE_WP };
	if (missing)
		range.mode |= UFFDIO_REGISTER_MODE_MISSING;
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range))
		return -errno;
	return fd;
}

/* The bait: the pages at which the setuid program has its secret. */
struct offers offer_bait(void)
{
	return (struct offers){ .first = SECRET_AT, .chunks = 1, .pages = { ~0ull } };
}

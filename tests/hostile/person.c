/* Who speaks: processes that are not what the daemon may take them for. Each says whether it got a welcome. */
#include "hostile.h"
#include <grp.h>
#include <linux/capability.h>

static void try(const char *path, const char *what)
{
	struct session s;
	int joined = join(&s, path, "");
	if (joined == 0)
		serve(&s, 1, NULL, 500);
	say("ready, %s: %s", what, joined == 0 && s.socket >= 0 && s.syncs > 0 ? "served" : "refused");
	if (joined == 0 && s.socket >= 0)
		serve(&s, 1, NULL, -1);
}

/* twice: one process, several sessions at a time. */
void twice(const char *path, char **args)
{
	(void)args;
	static struct session all[4];
	int count = 0, served = 0;
	for (int i = 0; i < 4; i++)
		if (join(&all[count], path, "") == 0)
			count++;
	serve(all, count, NULL, 500);
	for (int i = 0; i < count; i++)
		served += all[i].socket >= 0 && all[i].syncs > 0;
	say("ready, twice: %d", served);
	serve(all, count, NULL, -1);
}

/* passed: a connection made by another process than the one that speaks. */
void passed(const char *path, char **args)
{
	(void)args;
	int socket = dial(path);
	if (child() == 0) {
		struct session s;
		int refused = say_hello(socket, "") || take_welcome(&s, socket, 60000) || say_ready(&s);
		if (!refused)
			serve(&s, 1, NULL, 500);
		say("ready, passed: %s", !refused && s.socket >= 0 && s.syncs > 0 ? "served" : "refused");
		if (!refused)
			serve(&s, 1, NULL, 3600 * 1000);
		_exit(0);
	}
	close(socket);
}

/* ids-differ: real, effective and saved user are not one. */
void ids_differ(const char *path, char **args)
{
	(void)args;
	uid_t uid = (uid_t)atoi(getenv("HOSTILE_UID"));
	if (setresgid(uid, uid, uid) || setresuid(uid, uid, 0))
		fail("setresuid");
	prctl(PR_SET_DUMPABLE, 1);
	try(path, "ids differ");
}

/* undumpable: no other process of its user may look into it. */
void undumpable(const char *path, char **args)
{
	(void)args;
	prctl(PR_SET_DUMPABLE, 0);
	try(path, "undumpable");
}

/* turns-secret: the same, once it is served. */
void turns_secret(const char *path, char **args)
{
	(void)args;
	struct session s;
	int joined = join(&s, path, "");
	if (joined == 0)
		serve(&s, 1, NULL, 500);
	if (joined || s.syncs == 0) {
		say("ready, not served at all");
		hold();
	}
	prctl(PR_SET_DUMPABLE, 0);
	serve(&s, 1, NULL, 3000);
	say("ready, turns secret: %s", s.socket >= 0 ? "served" : "refused");
	if (s.socket >= 0)
		serve(&s, 1, NULL, -1);
}

static atomic_int may_turn;

/* A thread that kept the capability to change its user, and becomes root again by itself. */
static void *turn_root(void *ignored)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct caps[2];
	while (!atomic_load(&may_turn))
		rest(1);
	if (syscall(SYS_capget, &head, caps))
		fail("capget");
	caps[0].effective = caps[0].permitted;
	if (syscall(SYS_capset, &head, caps) || syscall(SYS_setresuid, -1, 0, -1))
		fail("become root again");
	for (;;)
		pause();
	return ignored;
}

/* turns-root: all its threads are an ordinary user's when it joins, and one of them becomes root afterwards. */
void turns_root(const char *path, char **args)
{
	uid_t uid = (uid_t)atoi(getenv("HOSTILE_UID"));
	pthread_t thread;
	struct session s;
	(void)args;
	prctl(PR_SET_KEEPCAPS, 1);
	if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
		fail("become a user");
	prctl(PR_SET_DUMPABLE, 1);
	pthread_create(&thread, NULL, turn_root, NULL);
	int joined = join(&s, path, "");
	if (joined == 0)
		serve(&s, 1, NULL, 500);
	if (joined || s.socket < 0 || s.syncs == 0) {
		say("ready, not served at all");
		hold();
	}
	atomic_store(&may_turn, 1);
	serve(&s, 1, NULL, 3000);
	say("ready, turns root: %s", s.socket >= 0 ? "served" : "refused");
	if (s.socket >= 0)
		serve(&s, 1, NULL, -1);
}

static void map_root(const char *file, uid_t uid)
{
	char text[64];
	int fd = open(file, O_WRONLY), len = snprintf(text, sizeof text, "0 %u 1", uid);
	if (fd < 0 || write(fd, text, (size_t)len) != len)
		fail(file);
	close(fd);
}

/* inside-userns: root of a user namespace of its own; asks to turn a knob, then joins. */
void inside_userns(const char *path, char **args)
{
	(void)args;
	uid_t uid = getuid();
	if (unshare(CLONE_NEWUSER)) {
		say("ready, no user namespaces");
		hold();
	}
	int fd = open("/proc/self/setgroups", O_WRONLY);
	if (fd < 0 || write(fd, "deny", 4) != 4)
		fail("setgroups");
	map_root("/proc/self/uid_map", uid);
	map_root("/proc/self/gid_map", uid);
	unsigned char hello[68] = { 1, PROTOCOL & 0xff, PROTOCOL >> 8, 1 };
	char answer[512] = { 0 };
	const char *turn = "{\"set\":[{\"run\":0}]}";
	int to = dial(path);
	send(to, hello, sizeof hello, MSG_NOSIGNAL);
	send(to, turn, strlen(turn), MSG_NOSIGNAL);
	recv(to, answer, sizeof answer - 1, 0);
	say("control: %s", answer + 1);
	try(path, getuid() == 0 ? "root inside" : "nobody inside");
}

/* What the attackers share: the agent's protocol spoken raw, and words with the test that drives them.
 *
 * An attacker is `hostile UID VERB SOCKET [ARGUMENTS]`, started by root. It becomes that user, attacks, writes a
 * line that begins with "ready" when the attack stands, and goes on until its standard input ends. */
#ifndef HOSTILE_H
#define HOSTILE_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Newer than the headers of Debian 12. */
#define WP_UNPOPULATED (1ull << 13)
#define WP_ASYNC (1ull << 15)

#define PAGE 4096ul
#define CHUNK (2ul << 20)
#define MAX_MESSAGE (16 * 1024)
#define MAX_ENTRIES 119
/* Where the setuid program has its secret, and attackers their bait. */
#define SECRET_AT 0x700000000ul
#define SECRET_PAGES 64ul

/* A session as an agent has it. */
struct session {
	int socket, line, tie, device, store_count, stores[64];
	void *line_map, *tie_map;
	unsigned syncs, merges; /* questions answered so far */
	int late;               /* milliseconds until it answers that it has merged */
};

/* What a session answers when it is asked for changes. */
struct offers {
	uint64_t first;      /* address of the first chunk */
	uint64_t chunks;     /* how many */
	uint64_t pages[8];   /* which pages of each; all zeros: a whole range in one entry */
	int stored;          /* says that all of these pages lie in a store */
	unsigned again;      /* every sync repeats the offers, this many times */
};

/* session.c */
int dial(const char *path);
int say_hello(int socket, const char *domain);
int take_welcome(struct session *s, int socket, int wait_ms);
int say_ready(struct session *s);
int join(struct session *s, const char *path, const char *domain);
int answer(struct session *s, const struct offers *offers);
int send_with(int socket, const void *packet, size_t len, const int *descriptors, int count); /* bomb.c */
void serve(struct session *all, int count, const struct offers *offers, int ms);
int watch(struct session *s, uint64_t at, size_t bytes, int missing);
struct offers offer_bait(void);
unsigned second_thread(void);
extern atomic_int second_thread_ends;
extern unsigned userfaultfd_said;

/* main.c */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char *what) __attribute__((noreturn));
void rest(int ms);
void fill(void *at, size_t pages, uint64_t seed);
void *map_at(uint64_t at, size_t pages);
pid_t beside(int (*run)(void *), void *arg);
pid_t child(void);
void become(uid_t uid);
void take_threads(long count);
void hold(void) __attribute__((noreturn));

typedef void verb(const char *path, char **args);
/* deputy.c */
verb deputy, zombie_deputy, early_deputy, su_deputy;
/* reuse.c */
verb reused_before, reused_after;
/* person.c */
verb twice, passed, ids_differ, undumpable, turns_secret, turns_root, inside_userns;
/* flood.c */
verb silent, late, dumb, sessions, many_processes, domains, stopped, liar, slow_reader, hello_storm, ask_storm;
/* offers.c */
verb chunk_flood, endless_offer, sync_storm, fill_store;
/* maps.c */
verb store_maps, claims;
/* bomb.c */
verb linger, nested, bundles, descriptor_bomb;
/* stall.c */
verb stall, hung_fuse, fuse_pages, fuse_libc, fuse_flush;
/* lines.c */
verb hung_write, pinned_lines;
/* locks.c */
verb file_locks, pidfd_locks, text_locks, leases;
/* odd.c */
verb many_maps, map_storm, stops_early, headless, merge_storm;
/* crowd.c */
verb many_threads, thread_storm, rights_storm, busy, vfork_deputy, mounts, long_mounts, long_maps;
/* tamper.c */
verb tamper, lock_folder, forge;
/* clients.c */
verb every_kind, stopping_clients, never_lets_go;
/* server.c */
verb fake_server;
/* tracee.c */
verb lying_note, false_entry, exec_when_traced, exec_beside;

#endif

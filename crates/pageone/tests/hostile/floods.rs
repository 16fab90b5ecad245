//! No other user waits for a stranger: floods, bombs, and agents that stall or lie.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Command;

use crate::arena::{ATTACKER, Arena, CROWD, HONEST};
use crate::support::Guest;

/// A test for each attack that needs nothing of the place.
macro_rules! attacks {
    ($($name:ident: $verb:literal $($arg:literal)*;)*) => {$(
        #[test]
        fn $name() {
            if let Some(arena) = Arena::new() {
                arena.withstands(|arena| arena.attack($verb, &[$($arg),*]));
            }
        }
    )*};
}

attacks! {
    silent_agents: "silent" "400";
    connections_without_a_hello: "dumb" "300";
    thousands_of_sessions_of_one_process: "sessions" "5000";
    hundreds_of_processes: "many-processes" "300";
    agents_that_answer_late: "late" "200" "60" "40";
    stopped_agents: "stopped" "60";
    an_agent_that_lies: "liar";
    requests_whose_replies_nobody_takes: "slow-reader" "200";
    thousands_of_domains: "domains" "1000";
    lingering_sockets: "linger";
    sockets_inside_sockets: "nested" "3000";
    bundles_of_descriptors: "bundles";
    thousands_of_descriptors_to_look_at: "descriptor-bomb" "18900" "50";
    a_million_chunks_of_one_page: "chunk-flood";
    a_million_chunks_in_pieces: "chunk-flood" "1048576" "0x5555555555555555";
    an_offer_of_all_addresses: "endless-offer" "67108864";
    an_offer_of_a_thousandfold: "endless-offer" "8192" "0x20000000000";
    a_storm_of_syncs: "sync-storm";
    reads_that_do_not_return: "stall" "16";
    a_store_mapped_half_a_million_times: "store-maps" "8" "62500";
    claims_of_all_there_is: "claims";
    a_storm_of_hellos: "hello-storm" "1";
    a_storm_of_hellos_by_many_threads: "hello-storm" "8";
    guests_with_sixty_thousand_mappings: "many-maps" "8" "60000";
    joins_with_sixty_thousand_mappings: "map-storm" "60000";
    processes_that_stop_in_the_handshake: "stops-early" "60";
    processes_whose_first_thread_has_ended: "headless" "60";
    wishes_to_merge_without_pause: "merge-storm" "8";
    brief_wishes_to_merge_without_pause: "merge-storm" "8" "brief";
    guests_that_execute_with_ten_thousand_threads: "thread-storm" "10000" "/bin/true";
    ids_that_change_all_the_time: "rights-storm" "1" "0";
    descriptors_of_every_kind: "every-kind";
}

/// Workers run on CPUs that nothing else wants. What an operator waits for does not.
#[test]
fn users_who_keep_all_cpus_busy() {
    if let Some(arena) = Arena::new() {
        let attacker = arena.attack("busy", &["8"]);
        arena.withstands_busy_cpus(attacker);
    }
}

/// One that has root's rights for a moment is in no domain then. Of two CPUs the storm leaves one: workers run on idle ones only.
#[test]
fn ids_that_change_all_the_time_in_a_program_that_was_roots() {
    if let Some(arena) = Arena::new() {
        arena.withstands(|arena| {
            let attacker = arena.attack("rights-storm", &["1", "1"]);
            crate::common::wait_for("a word of its ids", || {
                arena
                    .log()
                    .contains("and all have to be of user")
                    .then_some(())
            });
            attacker
        });
    }
}

/// A user takes all the room of the store that he can get; the honest guests, whose pages change, find room all the same.
#[test]
fn a_user_who_fills_the_store() {
    if let Some(arena) = Arena::with(&["--store-limit", "32MiB"]) {
        arena.withstands(|arena| arena.attack("fill-store", &["40"]));
    }
}

/// The kernel walks all POSIX locks on a file whenever any process closes it. An attacker has some hundred thousand on each file of its
/// own session, and on those of an honest guest that every user may read. Its agent, too, reads some of these.
#[test]
fn locks_on_what_others_close() {
    let Some(arena) = Arena::new() else {
        return;
    };
    let honest = format!("/proc/{}", arena.pair[0].pid);
    let file = |name: &str| format!("{honest}/{name}");
    let mut files = Vec::from(["status", "comm", "stat", "task", "mountinfo"].map(file));
    for thread in std::fs::read_dir(file("task")).unwrap() {
        let status = thread.unwrap().path().join("status");
        files.push(status.to_str().unwrap().to_owned());
    }
    let mut args = vec!["250000"];
    args.extend(files.iter().map(String::as_str));
    arena.withstands(|arena| {
        let attacker = arena.attack("file-locks", &args);
        arena.closers_alone_take_long();
        attacker
    });
}

/// A policy for which the loop of the daemon reads the cgroup of each process.
const BY_CGROUP: &str = "[[rule]]\ncgroup = '/nowhere/**'\nper = 'cgroup'\n";

/// To open a file on which its owner has a lease takes 45 s, and `/proc/PID/stat` is such a file. The policy asks for cgroups, which the loop
/// of the daemon reads.
#[test]
fn leases_on_what_the_daemon_reads_of_them() {
    let Some(arena) = Arena::with_policy(BY_CGROUP) else {
        return;
    };
    arena.withstands(|arena| arena.attack("leases", &[]));
}

/// The same where the kernel tells a process's ids in texts alone.
#[test]
fn leases_on_what_the_daemon_reads_of_them_on_an_older_kernel() {
    let fault = cfg!(debug_assertions).then_some("pidfd-info 25 1 1");
    if let Some(arena) = fault.and_then(Arena::with_fault) {
        arena.withstands(|arena| arena.attack("leases", &[]));
    }
}

/// The same of files that the daemon itself reads for a status, a round or a hello, and that every user may read.
#[test]
fn locks_on_what_the_daemon_reads_of_itself() {
    let Some(arena) = Arena::with_policy(BY_CGROUP) else {
        return;
    };
    let own = ["mounts", "cgroup"].map(|name| format!("/proc/{}/{name}", arena.pid()));
    let hosts = [
        "/proc/sys/kernel/hostname",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    ];
    let files = own.into_iter().chain(hosts.map(str::to_owned));
    let files = files.filter(|file| std::path::Path::new(file).exists());
    let args: Vec<_> = std::iter::once("400000".to_owned()).chain(files).collect();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    arena.withstands(|arena| {
        let attacker = arena.attack("text-locks", &args);
        arena.closers_alone_take_long();
        attacker
    });
}

/// All threads are compared when a guest joins, and some at each sync: that some must not be found by a look at all.
#[test]
fn guests_with_ten_thousand_threads() {
    if let Some(arena) = Arena::new() {
        arena.withstands(|arena| {
            let attacker = arena.attack("many-threads", &["2", "10000", "0"]);
            arena.serves(2, ATTACKER);
            arena.takes_little(5);
            attacker
        });
    }
}

/// So many groups cost no other user anything where the kernel tells a thread's ids alone, and its process is served.
#[test]
fn guests_in_sixty_thousand_groups() {
    if let Some(arena) = Arena::new() {
        arena.withstands(|arena| {
            let attacker = arena.attack("many-threads", &["24", "40", "65536"]);
            if !arena.log().contains("fewer groups") {
                arena.serves(24, ATTACKER);
            }
            // Each look costs more than that of other guests, and is had each round.
            arena.takes_little(2);
            attacker
        });
    }
}

/// Before Linux 6.13 the kernel lists a thread's groups with its ids.
#[test]
fn guests_in_sixty_thousand_groups_on_an_older_kernel() {
    let fault = cfg!(debug_assertions).then_some("pidfd-info 25 1 1");
    if let Some(arena) = fault.and_then(Arena::with_fault) {
        arena.withstands(|arena| {
            let attacker = arena.attack("many-threads", &["24", "40", "65536"]);
            arena.takes_little(3);
            assert!(arena.log().contains("fewer groups"), "{}", arena.log());
            attacker
        });
    }
}

/// Each of the mappings is a line of 16 KiB in the guest's table of mappings.
#[test]
fn guests_whose_mappings_have_long_names() {
    let Some(arena) = Arena::new() else { return };
    let folder = arena.public_folder();
    let number = std::cell::Cell::new(0);
    arena.withstands(|arena| {
        number.set(number.get() + 1);
        let own = folder.join(number.get().to_string());
        std::fs::create_dir(&own).unwrap();
        std::os::unix::fs::chown(&own, Some(ATTACKER), Some(ATTACKER)).unwrap();
        arena.attack("long-maps", &["4", "60000", own.to_str().unwrap()])
    });
}

/// A user's guests end all at once, and what they leave does not close soon: a stranger has locks on some of their pidfds. That takes
/// no connection's place, of theirs or of others.
#[test]
fn many_guests_that_end_at_once() {
    let Some(arena) = Arena::new() else { return };
    let crowd = arena.attack_as(CROWD, "many-processes", &["200"]);
    arena.serves(200, CROWD);
    let some: Vec<_> = crowd.pids().iter().map(u32::to_string).skip(1).collect();
    let mut args = vec!["200000"];
    args.extend(some.iter().map(String::as_str).step_by(20));
    let _locks = arena.attack("pidfd-locks", &args);
    drop(crowd);
    for _ in 0..10 {
        arena.answers_in_time_to(CROWD);
    }
    arena.serves_in_time();
    arena.serves(0, CROWD);
}

#[test]
fn users_who_ask_without_pause() {
    let Some(arena) = Arena::new() else { return };
    let ask = |n| arena.attack_as(ATTACKER + 1 + n, "ask-storm", &["8"]);
    let _attackers: Vec<_> = (0..6).map(ask).collect();
    for _ in 0..4 {
        arena.answers_a_user_in_time();
    }
}

#[test]
fn domains_that_fill_the_keeper() {
    if let Some(arena) = Arena::with(&["--keep"]) {
        arena.withstands(|arena| arena.attack("domains", &["1000"]));
    }
}

/// A file system's folder; what is mounted there goes with it.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

pub(crate) fn has_fuse() -> bool {
    let there = std::path::Path::new("/dev/fuse").exists();
    if !there {
        eprintln!("skipped: there is no /dev/fuse");
    }
    there
}

#[test]
fn a_file_system_that_hangs_in_an_honest_guest() {
    let Some(arena) = Arena::new().filter(|_| has_fuse()) else {
        return;
    };
    let mounted = Mounted(arena.public_folder());
    let holders: RefCell<Vec<Guest>> = RefCell::default();
    let folder = mounted.0.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        holders.borrow_mut().clear();
        let _ = Command::new("umount").arg("-l").arg(&folder).output();
        let attacker = arena.attack("hung-fuse", &[&folder]);
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec 9<\"$1\"; exec \"$2\"", "sh", &folder]);
        shell.arg(arena.file("guest"));
        let mut holder = Guest::from(&mut arena.under_agent(shell, &arena.place.socket(), HONEST));
        holder.offer(64, 99);
        holders.borrow_mut().push(holder);
        arena.let_pass(1);
        attacker
    });
}

#[test]
fn pages_of_a_file_system_that_hangs() {
    withstands_a_file_system("fuse-pages");
}

#[test]
fn a_userfaultfd_that_is_a_file_and_hangs_when_it_is_closed() {
    withstands_a_file_system("fuse-flush");
}

/// An attack that mounts a file system which hangs.
fn withstands_a_file_system(verb: &str) {
    let Some(arena) = Arena::new().filter(|_| has_fuse()) else {
        return;
    };
    let mounted = Mounted(arena.public_folder());
    let folder = mounted.0.to_str().unwrap().to_owned();
    arena.withstands(|arena| {
        let _ = Command::new("umount").arg("-l").arg(&folder).output();
        arena.attack(verb, &[&folder])
    });
}

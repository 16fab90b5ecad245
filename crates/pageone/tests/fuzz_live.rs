//! Random clients against a real daemon: packets, descriptors, connections and ends of several users at random.
//!
//! Meanwhile `status` is asked again and again and must answer soon; afterwards the daemon's descriptors, threads and memory must
//! be about where they were. The acts of a client follow from the seed, which is printed; in which order the clients
//! get their turns does not. `PAGEONE_FUZZ_SEED=N` does the same again, `PAGEONE_FUZZ_LIVE_SECONDS` (8) says for how long.

mod common;
#[path = "support/random.rs"]
mod random;
#[path = "support/user.rs"]
mod user;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{PATIENCE, Place, count, daemon, json};
use random::Random;
use sys::socket;
use wire::{DomainOf, Hello, MAX_MESSAGE, Name, Request, Role};

/// Who the clients are, if this is root: two of each.
const USERS: [u32; 3] = [61_001, 61_002, 61_003];
/// In which a daemon answers: a second; where other work keeps the processors busy, as many as threads share one.
fn prompt() -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").expect("the load");
    let load = load.split(' ').next().and_then(|load| load.parse().ok());
    let cpus = std::thread::available_parallelism().expect("processors");
    let busy: f64 = load.expect("a number");
    Duration::from_secs_f64(1.0 + busy / f64::from(u32::try_from(cpus.get()).expect("few")))
}

/// Connections that a client holds at most.
const HELD: usize = 40;

fn hello(random: &mut Random) -> Vec<u8> {
    let role = *random.pick(&[Role::Agent, Role::Control]);
    let name = random.next().to_string();
    let domain = Name::new(["", "x", &name][random.below(3)]).expect("a name");
    let mut packet = [0; MAX_MESSAGE];
    let len = Hello { role, domain }.encode(&mut packet);
    packet[..len].to_vec()
}

fn packet(random: &mut Random) -> Vec<u8> {
    let requests = [
        Request::Status,
        Request::Heap,
        Request::Domain("x".to_owned()),
        Request::DomainOf(DomainOf {
            pid: 1,
            began: 0,
            name: String::new(),
        }),
        Request::Set(vec![]),
    ];
    let mut packet = match random.below(4) {
        0 => (0..random.below(300)).map(|_| random.byte()).collect(),
        1 => serde_json::to_vec(random.pick(&requests)).expect("JSON"),
        2 => vec![random.byte(); random.below(2 * MAX_MESSAGE)],
        _ => hello(random),
    };
    if random.below(4) == 0 && !packet.is_empty() {
        let at = random.below(packet.len());
        packet[at] ^= 1 << random.below(8);
    }
    packet
}

/// A TCP connection that takes 20 s to close, and its other end.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let mut stream =
        TcpStream::connect(listener.local_addr().expect("its name")).expect("connected");
    let (other, _) = listener.accept().expect("accepted");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(20))).expect("set");
    stream.set_nonblocking(true).expect("set");
    while stream.write(&[0; 1 << 20]).is_ok() {}
    (stream, other)
}

/// What a client does until it is over; it never closes what lingers, its other thread's user does.
fn torment(
    place: &Path,
    mut random: Random,
    over: &AtomicBool,
    acts: &AtomicU64,
    slow: &TcpStream,
) {
    let mut held: Vec<OwnedFd> = Vec::new();
    while !over.load(Relaxed) {
        acts.fetch_add(1, Relaxed);
        let at = random.below(held.len().max(1));
        match (random.below(10), held.get(at)) {
            (0..=2, _) | (_, None) => {
                // With a full queue, connecting would wait: the daemon takes what it can.
                if held.len() < HELD
                    && let Ok(socket) = socket::connect(place)
                {
                    rustix::io::ioctl_fionbio(&socket, true).expect("set");
                    let greeting = hello(&mut random);
                    if random.below(3) > 0 {
                        let _ = socket::send_within(&socket, &greeting, &[], Duration::ZERO);
                    }
                    held.push(socket);
                }
            }
            (3..=6, Some(socket)) => {
                let own = [socket.as_fd(), slow.as_fd()];
                let along = &own[..[0, 0, 0, 1, 2][random.below(5)]];
                let packet = packet(&mut random);
                let _ = socket::send_within(socket, &packet, along, Duration::ZERO);
            }
            (7, Some(socket)) => drop(socket::recv(socket, &mut [0; MAX_MESSAGE])),
            (8, Some(socket)) => {
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            }
            (_, Some(_)) => drop(held.swap_remove(at)),
        }
    }
}

/// Descriptors, threads, and KiB in memory.
fn size(pid: u32) -> [u64; 3] {
    let entries = |name| {
        std::fs::read_dir(format!("/proc/{pid}/{name}"))
            .expect("a process")
            .count()
    };
    let resident = sys::usage::resident_bytes(pid).expect("a process");
    [
        entries("fd") as u64,
        entries("task") as u64,
        resident / 1024,
    ]
}

/// Asks for the counters until it is over; gives how long the answers took.
fn watch(place: &Place, over: &AtomicBool) -> Vec<Duration> {
    let mut took = Vec::new();
    while !over.load(Relaxed) {
        let begin = Instant::now();
        json(place);
        took.push(begin.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    took.sort_unstable();
    took
}

#[test]
fn a_daemon_outlives_random_clients_and_answers_meanwhile() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.path(), mode).expect("a mode");
    let mut daemon = daemon(&place, &["--merge-period", "100ms"]);
    let pid = daemon.0.id();
    let (before, prompt) = (size(pid), prompt());
    let seed = random::number("PAGEONE_FUZZ_SEED").unwrap_or_else(random::seed);
    let time = random::number("PAGEONE_FUZZ_LIVE_SECONDS").unwrap_or(8);
    eprintln!("PAGEONE_FUZZ_SEED={seed}");
    let is_root = rustix::process::geteuid().is_root();
    let (over, acts) = (AtomicBool::new(false), AtomicU64::new(0));
    let path = place.socket();
    let slow: Vec<_> = (0..6).map(|_| lingering()).collect();
    let took = std::thread::scope(|scope| {
        let (over, acts, path) = (&over, &acts, &path);
        for (number, (slow, _)) in (0..).zip(&slow) {
            scope.spawn(move || {
                let random = Random::new(seed.wrapping_add(number));
                if is_root {
                    user::become_user(USERS[usize::try_from(number).expect("small") % USERS.len()]);
                }
                torment(path, random, over, acts, slow);
            });
        }
        let watching = scope.spawn(|| watch(&place, over));
        std::thread::sleep(Duration::from_secs(time));
        over.store(true, Relaxed);
        watching.join().expect("all were answered")
    });
    // The other ends go first: then nothing lingers.
    slow.into_iter().for_each(|(stream, other)| {
        drop(other);
        drop(stream);
    });
    let late = took.iter().filter(|took| **took > prompt).count();
    let longest = took.last().expect("some answers");
    eprintln!(
        "{} acts; {} answers, the longest after {longest:?}",
        acts.load(Relaxed),
        took.len()
    );
    // Each is asked by a process of its own, one after another, on a machine that may be busy.
    assert!(acts.load(Relaxed) > 1000 && took.len() as u64 > 3 * time);
    assert!(
        late * 50 <= took.len() && *longest < 5 * prompt,
        "{late} late of {}: {longest:?}",
        took.len()
    );
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = size(pid);
        let back =
            now[0] <= before[0] + 8 && now[1] <= before[1] + 2 && now[2] <= before[2] + (64 << 10);
        let sharing = count(&json(&place), "pages_sharing");
        if back && sharing == 0 {
            eprintln!("descriptors, threads and KiB were {before:?}, and are {now:?}");
            break;
        }
        assert!(
            Instant::now() < deadline,
            "descriptors, threads and KiB were {before:?}, and are {now:?}; {sharing} pages share"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0, "{}", daemon.stderr());
}

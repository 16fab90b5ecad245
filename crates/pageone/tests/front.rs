//! The front of root's daemon, where strangers knock: the attempts of other users' clients, and that status answers meanwhile.

mod common;
#[path = "support/user.rs"]
mod user;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use common::{Place, alone, daemon, json, output, pageone, wait_for};
use sys::socket;
use user::as_user;
use wire::{Hello, MAX_MESSAGE, Name, Reply, Request, Role};

/// The longest a daemon may take to answer whatever others do.
const PROMPT: Duration = Duration::from_secs(1);
/// Users that exist nowhere.
const STRANGERS: [u32; 3] = [61_001, 61_002, 61_003];

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: other users need root");
    }
    root
}

/// A place whose socket others can reach.
fn open_place() -> Place {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.path(), mode).expect("a mode");
    place
}

fn say_hello(socket: &OwnedFd, role: Role) {
    let domain = Name::default();
    let mut packet = [0; MAX_MESSAGE];
    let len = Hello { role, domain }.encode(&mut packet);
    socket::send(socket, &packet[..len], &[]).expect("hello");
}

fn connect(place: &Place) -> OwnedFd {
    socket::connect(place.socket()).expect("a connection")
}

/// Asks as the command line does, and fails if that takes long.
#[track_caller]
fn assert_prompt(place: &Place) {
    let begin = Instant::now();
    json(place);
    assert!(
        begin.elapsed() < PROMPT,
        "status took {:?}",
        begin.elapsed()
    );
}

#[track_caller]
fn assert_ends_promptly(mut daemon: common::Running) {
    let begin = Instant::now();
    daemon.signal(sys::signals::SIGTERM);
    assert_eq!(daemon.end(), 0);
    assert!(
        begin.elapsed() < PROMPT,
        "the end took {:?}",
        begin.elapsed()
    );
}

/// A TCP connection with unsent data, whose close waits as long as its linger time; and its other end.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let mut stream =
        TcpStream::connect(listener.local_addr().expect("its name")).expect("connected");
    let (other, _) = listener.accept().expect("accepted");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(30))).expect("set");
    stream.set_nonblocking(true).expect("set");
    while stream.write(&[0; 1 << 20]).is_ok() {}
    (stream, other)
}

#[test]
fn descriptors_that_do_not_close_hold_up_nobody() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let place = open_place();
    let daemon = daemon(&place, &[]);
    let mut others = Vec::new();
    for at in 0..6 {
        let (stream, other) = lingering();
        let sent = as_user(STRANGERS[at % 3], || {
            let socket = connect(&place);
            if at % 2 == 0 {
                say_hello(&socket, Role::Agent);
            }
            socket::send(&socket, b"x", &[stream.as_fd()])
        });
        match sent {
            // It is the daemon's to close, and lingers while its other end lives.
            Ok(()) => others.push(other),
            // From Linux 6.16 on it is the sender who is told; without its other end it does not linger.
            Err(_) => drop(other),
        }
        drop(stream);
        assert_prompt(&place);
    }
    assert_ends_promptly(daemon);
}

#[test]
fn silent_and_slow_clients_hold_up_nobody() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let place = open_place();
    let daemon = daemon(&place, &[]);
    let mut held = Vec::new();
    for stranger in STRANGERS {
        as_user(stranger, || {
            for at in 0..80 {
                // The daemon may have hung up on it.
                let Ok(socket) = socket::connect(place.socket()) else {
                    continue;
                };
                let _ = match at % 4 {
                    0 => Ok(()),
                    1 => socket::send(&socket, &[1], &[]),
                    _ => {
                        let mut packet = [0; MAX_MESSAGE];
                        let hello = Hello {
                            role: Role::Control,
                            domain: Name::default(),
                        };
                        let len = hello.encode(&mut packet);
                        let _ = socket::send(&socket, &packet[..len], &[]);
                        let request = serde_json::to_vec(&Request::Status).expect("JSON");
                        socket::send(&socket, &request, &[])
                    }
                };
                held.push(socket);
            }
        });
        assert_prompt(&place);
        let mut set = pageone();
        set.args(["set", "merge_period=5s", "--socket"])
            .arg(place.socket());
        let begin = Instant::now();
        assert!(output(&mut set).status.success());
        assert!(begin.elapsed() < PROMPT, "set took {:?}", begin.elapsed());
    }
    // 240 silent ones of three users: a fourth gets a place, and so does each of the three.
    as_user(61_004, || {
        let status = ask(&place, &Request::Status);
        assert!(matches!(&status, Reply::Status(_)), "{status:?}");
    });
    assert_ends_promptly(daemon);
}

fn ask(place: &Place, request: &Request) -> Reply {
    let socket = connect(place);
    let patience = Some(Duration::from_secs(30));
    let timeout = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&socket, timeout, patience).expect("set");
    say_hello(&socket, Role::Control);
    let request = serde_json::to_vec(request).expect("JSON");
    socket::send(&socket, &request, &[]).expect("a request");
    let (mut reader, mut packet) = (wire::ReplyReader::default(), vec![0; MAX_MESSAGE]);
    loop {
        let len = socket::recv(&socket, &mut packet).expect("a reply").len;
        if let Some(reply) = reader.push(&packet[..len]).expect("a reply") {
            return serde_json::from_slice(&reply).expect("JSON");
        }
    }
}

#[test]
fn too_many_silent_callers_are_turned_away_and_then_let_in() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let place = open_place();
    let _daemon = daemon(&place, &[]);
    let connect = || as_user(STRANGERS[0], || socket::connect(place.socket()));
    // More than one user may have: the daemon closes the rest at once and lives on.
    let callers: Vec<_> = (0..100).filter_map(|_| connect().ok()).collect();
    let gone = || {
        let is_gone = |socket: &&OwnedFd| {
            let nonblocking = rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(socket, nonblocking).expect("flags");
            socket::recv(socket, &mut [0; 16]).is_ok_and(|got| got.len == 0)
        };
        callers.iter().filter(is_gone).count()
    };
    let closed = wait_for("the daemon to turn callers away", || {
        Some(gone()).filter(|&gone| gone > 0)
    });
    assert!(closed <= 100 - 64, "{closed} turned away");
    // Those that stay silent lose their place after a few seconds.
    wait_for("all to be hung up on", || (gone() == 100).then_some(()));
    let reply = as_user(STRANGERS[0], || ask(&place, &Request::Status));
    assert!(matches!(reply, Reply::Status(_)), "{reply:?}");
}

#[test]
fn a_newcomer_gets_a_place_among_users_who_have_one_each() {
    let _alone = alone();
    if !is_root() {
        return;
    }
    let place = open_place();
    let config = place.file("pageone.toml", "[limits]\nconnections = 8\n");
    let _daemon = daemon(&place, &["--config", config.to_str().expect("text")]);
    let many_ids = 62_000..62_008;
    let held: Vec<_> = many_ids
        .map(|uid| as_user(uid, || connect(&place)))
        .collect();
    let begin = Instant::now();
    let reply = as_user(STRANGERS[0], || ask(&place, &Request::Status));
    assert!(matches!(reply, Reply::Status(_)), "{reply:?}");
    assert!(begin.elapsed() < PROMPT, "{:?}", begin.elapsed());
    drop(held);
}

#[test]
fn names_that_strangers_choose_forge_no_line_of_the_log() {
    let _alone = alone();
    let place = open_place();
    let mut daemon = daemon(
        &place,
        &[
            "--policy",
            place
                .file("p.toml", "default = 'refuse'\n")
                .to_str()
                .expect("text"),
        ],
    );
    let forged = "x\u{2028}\u{202e}y";
    let mut packet = [0; MAX_MESSAGE];
    let domain = Name::new(forged).expect("a name, as the wire has it");
    let len = Hello {
        role: Role::Agent,
        domain,
    }
    .encode(&mut packet);
    let socket = connect(&place);
    socket::send(&socket, &packet[..len], &[]).expect("hello");
    // Refused, and told of.
    let _ = socket::recv(&socket, &mut packet);
    json(&place);
    daemon.signal(sys::signals::SIGTERM);
    daemon.end();
    let log = daemon.stderr();
    let line = log
        .lines()
        .find(|line| line.contains("refused"))
        .expect("a refusal");
    assert!(
        line.contains(r"x\u{2028}\u{202e}y") && !log.contains(forged),
        "{log}"
    );
}

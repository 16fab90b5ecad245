//! The fuzz targets' properties on a stable toolchain: for a while, from a seed that is printed, and without coverage.
//!
//! Inputs are mutations of messages and texts that are right, so most are nearly right. A case follows from its seed
//! alone: `PAGEONE_FUZZ_SEED=N` runs that one case. `PAGEONE_FUZZ_SECONDS` (8) is for all targets together. What was once found
//! is in [`REGRESSIONS`], and runs first.

#[path = "../../../fuzz/fuzz_targets/bound.rs"]
mod bound;
#[path = "../../../fuzz/props/config.rs"]
mod config;
#[path = "../../../fuzz/props/policy.rs"]
mod policy;
#[path = "support/random.rs"]
mod random;
#[path = "../../../fuzz/props/wire.rs"]
mod wire_props;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use random::Random;
use sys::keeper::{Inbox, Note};
use wire::{
    Answer, Changes, DomainMark, DomainOf, GuestStatus, Hello, MAX_MESSAGE, Name, Question, Ready,
    Reason, Reply, Request, Role, Setting, Status, Welcome,
};

/// Inputs that broke something once.
const REGRESSIONS: [(&str, &[u8]); 4] = [
    ("agent", b""),
    ("agent", b"\0\xff\xff\xff\xff"),
    (
        "policy",
        b"[[rule]]\nuid = '0-4294967294'\nrefuse = true\n[[rule]]\nuid = 7\nper = 'uid'\n",
    ),
    ("config", b"cpu_limit = 99999999999999999999\n"),
];

/// Pieces of the texts.
const WORDS: [&str; 32] = [
    "[[rule]]\n",
    "[control]\n",
    "[monitor]\n",
    "[limits]\n",
    "uid = ",
    "gid = ",
    "cgroup = ",
    "per = ",
    "domain = ",
    "names = ",
    "split = ",
    "refuse = ",
    "default = ",
    "true",
    "'uid'",
    "'/a/**'",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "\n",
    "-1",
    "4294967295",
    "99999999999999999999",
    "1e308",
    "null",
    "\\u0000",
    "'1000-1999'",
    ":",
    ",",
    "\u{202e}",
];

/// What must hold of any bytes.
type Check = dyn Fn(&[u8]);

struct Target {
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    check: Box<Check>,
}

fn packet(encode: impl FnOnce(&mut [u8; MAX_MESSAGE]) -> usize) -> Vec<u8> {
    let mut out = [0; MAX_MESSAGE];
    let len = encode(&mut out);
    out[..len].to_vec()
}

fn agent_messages() -> Vec<Vec<u8>> {
    let name = Name::new("build").expect("a name");
    let hello = Hello {
        role: Role::Agent,
        domain: name,
    };
    let welcome = Welcome {
        stores: 3,
        device: true,
        domain: DomainMark([1, 2]),
    };
    let questions = [
        Question::Sync {
            lifeline: true,
            adopted: false,
        },
        Question::Sync {
            lifeline: false,
            adopted: true,
        },
    ];
    let answers = [
        Answer::Ready(Ready {
            thread: 7,
            line: 0x7000_0000_0000,
            ..Ready::default()
        }),
        Answer::Failed { errno: 12, step: 3 },
        Answer::Changes(Changes::new()),
    ];
    let mut seeds = vec![
        packet(|out| hello.encode(out)),
        packet(|out| welcome.encode(out)),
        packet(|out| Reason::new("no room", DomainMark::NONE).encode(out)),
    ];
    seeds.extend(
        questions
            .iter()
            .map(|question| packet(|out| question.encode(out))),
    );
    seeds.extend(
        answers
            .iter()
            .map(|answer| packet(|out| answer.encode(out))),
    );
    // Every kind, with a body of zeros and of ones.
    for kind in 0..16 {
        seeds.push([&[kind][..], &[0; 96]].concat());
        seeds.push([&[kind, 3, 0][..], &[0xff; 200]].concat());
    }
    seeds
}

fn requests() -> Vec<Vec<u8>> {
    let settings = vec![
        Setting::Threads(3),
        Setting::CpuLimit(50),
        Setting::MergeAgain(true),
    ];
    let requests = [
        Request::Status,
        Request::Heap,
        Request::Domain("x".to_owned()),
        Request::DomainOf(DomainOf {
            pid: 1,
            began: 0,
            name: String::new(),
        }),
        Request::Set(settings.clone()),
        Request::SetUnmerged(settings),
    ];
    let guest = GuestStatus {
        pid: 7,
        uid: 1000,
        comm: "qemu".into(),
        ..GuestStatus::default()
    };
    let status = Status {
        guests: vec![guest; 3],
        cpu_seconds: 0.5,
        ..Status::default()
    };
    let replies = [
        Reply::Status(Box::new(status)),
        Reply::Done,
        Reply::Refused("no".to_owned()),
    ];
    let json = |value: serde_json::Result<Vec<u8>>| value.expect("JSON");
    let mut seeds: Vec<_> = requests
        .iter()
        .map(|r| json(serde_json::to_vec(r)))
        .collect();
    seeds.extend(replies.iter().map(|r| json(serde_json::to_vec(r))));
    seeds
}

fn texts(text: &str) -> Vec<Vec<u8>> {
    let mut seeds = vec![text.as_bytes().to_vec()];
    seeds.extend(text.split("\n\n").map(|part| part.as_bytes().to_vec()));
    seeds
}

/// What a service tells its keeper, sent as it is.
fn notes() -> Target {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let inbox = Inbox::bind(&path).expect("an inbox");
    let sender = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    sender.connect(&path).expect("connected");
    let check = move |bytes: &[u8]| {
        let _folder = &folder;
        let held = [sender.as_fd(); 3];
        let held = &held[..bytes.len() % 4];
        if sys::socket::send(&sender, bytes, held).is_err() {
            return;
        }
        match inbox.next().expect("it arrives").expect("it arrives") {
            Note::Keep(name, descriptors) => {
                assert!(sys::keeper::is_name(&name) && descriptors.len() == held.len());
            }
            Note::Forget(name) => assert!(sys::keeper::is_name(&name)),
            Note::Ready | Note::Other => {}
        }
        assert!(inbox.next().expect("empty").is_none());
    };
    let seeds = [
        "FDSTORE=1\nFDPOLL=0\nFDNAME=a%20b\n",
        "FDSTOREREMOVE=1\nFDNAME=x\n",
        "READY=1\n",
    ];
    Target {
        name: "notes",
        seeds: seeds.map(|seed| seed.as_bytes().to_vec()).to_vec(),
        check: Box::new(check),
    }
}

fn as_text(check: fn(&str)) -> Box<Check> {
    Box::new(move |bytes| check(&String::from_utf8_lossy(bytes)))
}

fn targets() -> [Target; 5] {
    let config = include_str!("../../../fuzz/seeds/config.toml");
    let policy_file = include_str!("../../../packaging/policy.toml");
    [
        Target {
            name: "agent",
            seeds: agent_messages(),
            check: Box::new(wire_props::check),
        },
        Target {
            name: "control",
            seeds: requests(),
            check: Box::new(wire_props::check),
        },
        Target {
            name: "config",
            seeds: texts(config),
            check: as_text(config::check),
        },
        Target {
            name: "policy",
            seeds: texts(policy_file),
            check: as_text(policy::check),
        },
        notes(),
    ]
}

/// Changes some bytes of some seed.
fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = random.pick(seeds).clone();
    for _ in 0..=random.below(6) {
        let at = random.below(bytes.len() + 1);
        let to = (at + random.below(16)).min(bytes.len());
        match random.below(8) {
            0 => drop(bytes.splice(at..at, random.pick(&WORDS).bytes())),
            1 => drop(bytes.drain(at..to)),
            2 => drop(bytes.splice(at..to, random.pick(seeds).clone())),
            3 => bytes.truncate(at),
            4 => drop(bytes.splice(
                at..to,
                random.edge().to_le_bytes().into_iter().take(to - at),
            )),
            5 => bytes.extend_from_within(at..to),
            6 => bytes
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|b| *b ^= 1 << random.below(8)),
            _ => bytes
                .iter_mut()
                .skip(at)
                .take(1)
                .for_each(|b| *b = random.byte()),
        }
    }
    bytes.truncate(20_000);
    bytes
}

/// Says how to run a case again, should it fail.
struct Case(u64);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "again: PAGEONE_FUZZ_SEED={} cargo test -p pageone --test fuzz_smoke",
                self.0
            );
        }
    }
}

fn run(seed: u64, targets: &[Target]) {
    let _case = Case(seed);
    let mut random = Random::new(seed);
    let target = random.pick(targets);
    let input = mutate(&mut random, &target.seeds);
    (target.check)(&input);
}

#[test]
fn nothing_that_is_nearly_right_does_harm() {
    let targets = targets();
    for (name, input) in REGRESSIONS {
        let target = targets.iter().find(|target| target.name == name);
        (target.expect("a target").check)(input);
    }
    for target in &targets {
        target.seeds.iter().for_each(|seed| (target.check)(seed));
    }
    if let Some(seed) = random::number("PAGEONE_FUZZ_SEED") {
        return run(seed, &targets);
    }
    let time = Duration::from_secs(random::number("PAGEONE_FUZZ_SECONDS").unwrap_or(8));
    let (first, begin, mut cases) = (random::seed(), Instant::now(), 0);
    while begin.elapsed() < time {
        for _ in 0..64 {
            run(first.wrapping_add(cases), &targets);
            cases += 1;
        }
    }
    eprintln!("{cases} cases from seed {first}");
    assert!(cases > 1000, "only {cases} cases in {time:?}");
}

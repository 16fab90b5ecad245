//! Random lists of calls. A list is explicit: any part of it is a list too.

use std::fmt;

/// One call of one thread; what the numbers mean is the program's affair (`tests/model/main.c`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    thread: usize,
    name: String,
    kind: String,
    first: usize,
    count: usize,
    numbers: [i64; 3],
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c] = self.numbers;
        let Self {
            thread,
            name,
            kind,
            first,
            count,
            ..
        } = self;
        write!(f, "{thread} {name} {kind} {first} {count} {a} {b} {c}")
    }
}

impl Line {
    /// Whether the call is one that is refused, or goes another way, where memory may be pinned.
    fn is_refused_when_pinned(&self) -> bool {
        const WIPEONFORK: i64 = 18;
        let [a, new, _] = self.numbers;
        match self.name.as_str() {
            "mbind" | "home-node" | "userfaultfd" | "name" => true,
            "mremap" => usize::try_from(new).is_ok_and(|new| new > self.count),
            "madvise" | "process_madvise" | "by-number" => a == WIPEONFORK,
            _ => false,
        }
    }

    /// Whether it is the line at which the agent comes into a program that began without.
    pub(crate) fn is_attach(&self) -> bool {
        self.name == "attach"
    }

    /// Whether it is a line at which the agent goes.
    pub(crate) fn is_detach(&self) -> bool {
        self.name == "detach"
    }

    /// The same with another call.
    pub(crate) fn named(&self, name: &str) -> Self {
        let name = name.to_owned();
        Self {
            name,
            ..self.clone()
        }
    }
}

/// A list as the program reads it.
pub(crate) fn text(lines: &[Line]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// The inverse of [`text`].
pub(crate) fn read(text: &str) -> Vec<Line> {
    let line = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        // What a call does not need may be left out.
        let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<i64>().unwrap());
        let size = |at: usize| usize::try_from(number(at)).unwrap();
        Line {
            thread: size(0),
            name: words[1].to_owned(),
            kind: words.get(2).unwrap_or(&"-").to_string(),
            first: size(3),
            count: size(4),
            numbers: [number(5), number(6), number(7)],
        }
    };
    text.lines()
        .filter(|text| !text.is_empty())
        .map(line)
        .collect()
}

/// Pages of the arena that get mappings at first: two chunks. Behind them is room, for moves and growth.
const BUSY: usize = 1024;
const ALL: usize = 1400;
/// Where the heap begins, if it lies in the arena: between mappings, or behind them.
const HEAPS: [usize; 3] = [500, 800, 1040];
/// How far it may grow where no mapping is in the way.
const HEAP: usize = 160;
/// A mapping that grows downwards, and the pages below it, which stay free for that.
const DOWNWARD: usize = 1500;
/// Calls of a list, without those that prepare it.
const LENGTH: usize = 40;
/// In one of so many lists all is compared behind each call.
const STEPWISE: usize = 8;
/// Advice by which memory is offered.
const MERGEABLE: i64 = 12;

const KINDS: [&str; 15] = [
    "private",
    "readable",
    "closed",
    "code",
    "noreserve",
    "locked",
    "populated",
    "growsdown",
    "stack",
    "shared",
    "file",
    "privatefile",
    "memfd",
    "privatememfd",
    "huge",
];

/// Advice of madvise(2), and how often it is drawn. Those that take frames out of use are not among them.
const ADVICE: [(i64, usize); 24] = [
    (0, 1),
    (1, 1),
    (2, 1),
    (3, 1),
    (4, 24),
    (9, 4),
    (10, 4),
    (11, 2),
    (12, 12),
    (13, 4),
    (14, 2),
    (15, 2),
    (16, 4),
    (17, 2),
    (18, 4),
    (19, 2),
    (20, 2),
    (21, 2),
    (22, 3),
    (23, 3),
    (24, 4),
    (25, 2),
    (102, 4),
    (103, 3),
];

/// What a list is about, besides the calls that all lists have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    /// Nothing may be pinned: merged memory is the kernel's in all respects.
    Free,
    /// An io_uring keeps memory. Then some calls are refused that the kernel alone would carry out (`docs/memory-calls.md`),
    /// and are not drawn.
    Pinned,
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((word ^ (word >> 31)) >> 1).unwrap() % bound
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn weighted<T: Copy>(&mut self, all: &[(T, usize)]) -> T {
        let mut at = self.below(all.iter().map(|(_, weight)| weight).sum());
        for &(value, weight) in all {
            if at < weight {
                return value;
            }
            at -= weight;
        }
        unreachable!("the weights were summed up")
    }

    /// A range that mostly meets the places at which mappings begin and end.
    fn range(&mut self) -> (usize, usize) {
        let count = self.of(&[1, 1, 2, 3, 8, 16, 16, 40, 64, 64, 130, 512]);
        let place = self.below(BUSY / 16) * 16;
        let first = match self.below(4) {
            0 => place + self.below(16),
            1 => place.saturating_sub(count),
            _ => place,
        };
        (first.min(ALL - count), count)
    }

    fn content(&mut self) -> i64 {
        i64::try_from(self.below(7)).unwrap()
    }
}

/// The list of a seed.
pub(crate) fn draw(seed: u64) -> Vec<Line> {
    let mut random = Random(seed);
    let sort = match random.below(6) {
        0 => Sort::Pinned,
        _ => Sort::Free,
    };
    let by_steps = random.below(STEPWISE) == 0;
    let mut lines = begin(&mut random);
    for _ in 0..LENGTH {
        lines.push(draw_line(&mut random, sort));
        lines.extend(match by_steps {
            true => look_closely(&mut random),
            false => look_sometimes(&mut random),
        });
    }
    lines.extend([
        call("check"),
        call("settle"),
        call("check"),
        call("take-back"),
    ]);
    lines
}

/// What stands behind a call: as a rule nothing, or a part of what can be seen.
fn look_sometimes(random: &mut Random) -> Vec<Line> {
    match random.below(12) {
        0 | 1 => vec![call("settle")],
        2..=4 => vec![call("check")],
        5..=7 => vec![call("look")],
        _ => Vec::new(),
    }
}

/// All that can be seen, behind each call. Policies and sizes of pages can be seen while nothing is merged: now and then all is taken
/// back, and offered again.
fn look_closely(random: &mut Random) -> Vec<Line> {
    let mut lines = vec![call("check")];
    match random.below(12) {
        0 => lines.push(call("settle")),
        1 => lines.extend([
            call("take-back"),
            over("madvise", (0, ALL), [MERGEABLE, 0, 0]),
            call("settle"),
        ]),
        _ => {}
    }
    lines
}

/// The list of a seed for a program that begins without the agent. It is put in at some line, the first one often. It may be taken
/// out at a later one, and put in again.
pub(crate) fn draw_attached(seed: u64) -> Vec<Line> {
    let mut lines = draw(seed);
    let mut random = Random(!seed);
    // An agent whose guest may have pinned pages does not go.
    let mut wishes = match lines.iter().any(|line| line.name == "pin") {
        true => 1,
        false => 1 + random.below(3),
    };
    let mut at = match random.below(3) {
        0 => 0,
        _ => random.below(lines.len()),
    };
    for wish in ["attach", "detach"].into_iter().cycle() {
        lines.insert(at, call(wish));
        at += 1 + random.below(lines.len() - at);
        wishes -= 1;
        if wishes == 0 {
            break;
        }
    }
    lines
}

fn call(name: &str) -> Line {
    Line {
        thread: 0,
        name: name.to_owned(),
        kind: "-".to_owned(),
        first: 0,
        count: 0,
        numbers: [0; 3],
    }
}

fn over(name: &str, (first, count): (usize, usize), numbers: [i64; 3]) -> Line {
    Line {
        first,
        count,
        numbers,
        ..call(name)
    }
}

fn map(kind: &str, range: (usize, usize), flags: i64, file_page: usize) -> Line {
    const FIXED: i64 = 0x10;
    let numbers = [FIXED | flags, i64::try_from(file_page).unwrap(), 0];
    Line {
        kind: kind.to_owned(),
        ..over("map", range, numbers)
    }
}

/// Mappings of many kinds side by side, most of them private memory that is filled and offered.
fn begin(random: &mut Random) -> Vec<Line> {
    let mut lines = vec![map("growsdown", (DOWNWARD, 16), 0, 0)];
    let heap = match random.below(2) {
        0 => random.of(&HEAPS),
        _ => ALL,
    };
    if heap < ALL {
        lines.push(over("heap-here", (heap, 1), [0; 3]));
        lines.push(over("brk", (0, 0), [size(HEAP), 0, 0]));
        lines.push(over("heap-fill", (0, HEAP), [random.content(), 0, 0]));
        lines.push(over("heap-madvise", (0, HEAP), [MERGEABLE, 0, 0]));
    }
    let mut at = 0;
    while at < BUSY {
        if (heap..heap + HEAP).contains(&at) {
            at = heap + HEAP;
            continue;
        }
        let count = random.of(&[16, 32, 64, 64, 128, 256]).min(BUSY - at);
        let count = if at < heap {
            count.min(heap - at)
        } else {
            count
        };
        let kind = if random.below(10) < 6 {
            "private"
        } else {
            random.of(&KINDS)
        };
        let range = (at, count);
        if random.below(12) > 0 && kind != "huge" {
            let file_page = random.below(128);
            lines.push(map(kind, range, 0, file_page));
            let numbers = [random.content(), i64::try_from(random.below(2)).unwrap(), 0];
            lines.push(over("fill", range, numbers));
            if random.below(10) < 7 {
                lines.push(over("madvise", range, [MERGEABLE, 0, 0]));
            }
        }
        at += count;
    }
    lines.push(over("madvise", (DOWNWARD, 16), [MERGEABLE, 0, 0]));
    for id in 0..random.below(4) {
        lines.push(loose_of(random, id));
    }
    lines.push(call("settle"));
    lines
}

type Make = fn(&mut Random) -> Line;

/// Any call, and in a list of pins those of pins.
fn draw_line(random: &mut Random, sort: Sort) -> Line {
    match sort {
        Sort::Free => draw_any(random),
        Sort::Pinned if random.below(4) == 0 => draw_pin(random),
        Sort::Pinned => loop {
            let line = draw_any(random);
            if !line.is_refused_when_pinned() {
                break line;
            }
        },
    }
}

fn draw_pin(random: &mut Random) -> Line {
    let file_page = size(random.below(128));
    match random.below(8) {
        0 | 1 => over("pin", random.range(), [0; 3]),
        2 => over("unpin", (0, 1), [0; 3]),
        3..6 => over("fixed-read", (random.below(512), 1), [file_page, 0, 0]),
        _ => over("fixed-write", (random.below(512), 1), [file_page, 0, 0]),
    }
}

fn draw_any(random: &mut Random) -> Line {
    let calls: &[(Make, usize)] = &[
        (fill, 24),
        (poke, 8),
        (below, 3),
        (advise, 60),
        (free_lazily, 4),
        (process_advise, 8),
        (by_number, 10),
        (register, 4),
        (unregister, 2),
        (map_over, 16),
        (unmap, 8),
        (protect, 12),
        (pkey_protect, 3),
        (lock, 8),
        (lock_all, 1),
        (remap, 16),
        (bind, 5),
        (policy, 1),
        (home_node, 2),
        (migrate, 1),
        (move_pages, 3),
        (seal, 1),
        (remap_file, 1),
        (sync, 2),
        (read_into, 6),
        (write_from, 4),
        (userfault, 3),
        (move_away, 3),
        (name, 4),
        (storm, 6),
        (child, 10),
        (block, 24),
        (heap, 12),
        (stack, 8),
        (loose, 10),
    ];
    let make = random.weighted(calls);
    let line = make(random);
    Line {
        thread: random.of(&[0, 0, 1, 2]),
        ..line
    }
}

fn fill(random: &mut Random) -> Line {
    let numbers = [random.content(), i64::try_from(random.below(2)).unwrap(), 0];
    over("fill", random.range(), numbers)
}

fn poke(random: &mut Random) -> Line {
    let at = i64::try_from(random.below(4096)).unwrap();
    over("poke", random.range(), [at, 0x33, 0])
}

fn below(random: &mut Random) -> Line {
    let down = random.below(2);
    over(
        "below",
        if down == 0 {
            (DOWNWARD, 1)
        } else {
            (DOWNWARD - 1, 1)
        },
        [0; 3],
    )
}

fn advise(random: &mut Random) -> Line {
    let advice = random.weighted(&ADVICE);
    let downward = random.below(30) == 0;
    over(
        "madvise",
        if downward {
            (DOWNWARD, 8)
        } else {
            random.range()
        },
        [advice, 0, 0],
    )
}

fn free_lazily(random: &mut Random) -> Line {
    over("free-lazily", random.range(), [random.content(), 0, 0])
}

fn process_advise(random: &mut Random) -> Line {
    let advice = random.weighted(&ADVICE);
    over("process_madvise", random.range(), [advice, 0, 0])
}

fn by_number(random: &mut Random) -> Line {
    const COLLAPSE: i64 = 25;
    let kind = random.of(&[
        "madvise", "madvise", "mprotect", "munmap", "mlock", "munlock",
    ]);
    let value = match kind {
        "madvise" => random.weighted(&ADVICE),
        "mprotect" => random.of(&[0, 1, 3, 3]),
        _ => 0,
    };
    // Whether a huge page can be made is not the same twice.
    let value = if value == COLLAPSE { 4 } else { value };
    Line {
        kind: kind.to_owned(),
        ..over("by-number", random.range(), [value, 0, 0])
    }
}

fn register(random: &mut Random) -> Line {
    over("register", random.range(), [0; 3])
}

fn unregister(random: &mut Random) -> Line {
    over("unregister", random.range(), [0; 3])
}

fn map_over(random: &mut Random) -> Line {
    const NOREPLACE: i64 = 0x10_0000;
    let kind = if random.below(3) == 0 {
        "private"
    } else {
        random.of(&KINDS)
    };
    let flags = if random.below(6) == 0 { NOREPLACE } else { 0 };
    let range = if kind == "huge" {
        (random.below(3) * 512, 512)
    } else {
        random.range()
    };
    map(kind, range, flags, random.below(128))
}

fn unmap(random: &mut Random) -> Line {
    over("munmap", random.range(), [0; 3])
}

fn protect(random: &mut Random) -> Line {
    let prot = random.of(&[0, 1, 1, 3, 3, 3, 5, 7]);
    over("mprotect", random.range(), [prot, 0, 0])
}

fn pkey_protect(random: &mut Random) -> Line {
    let numbers = [random.of(&[1, 3]), random.of(&[0, 1]), 0];
    over("pkey_mprotect", random.range(), numbers)
}

fn lock(random: &mut Random) -> Line {
    let name = random.of(&["mlock", "mlock-onfault", "munlock", "munlock"]);
    over(name, random.range(), [0; 3])
}

fn lock_all(random: &mut Random) -> Line {
    over(
        "mlockall",
        (0, 1),
        [random.of(&[0, 0, 1, 2, 3, 5, 6]), 0, 0],
    )
}

fn remap(random: &mut Random) -> Line {
    let (first, count) = random.range();
    // May move, fixed, leave the old mapping: what goes together, and now and then what does not.
    let flags = random.of(&[0, 1, 1, 1, 3, 3, 3, 5, 7, 2]);
    let new = match random.below(3) {
        0 => count,
        1 => (count / 2).max(1),
        _ => count + random.of(&[1, 16, 64]),
    };
    let to = if random.below(3) == 0 {
        BUSY
    } else {
        random.below(BUSY / 16) * 16
    };
    over(
        "mremap",
        (first, count),
        [flags, size(new), size(to.min(ALL - new.min(ALL)))],
    )
}

fn size(value: usize) -> i64 {
    i64::try_from(value).unwrap()
}

fn bind(random: &mut Random) -> Line {
    const LOCAL: i64 = 4;
    const STRICT: i64 = 1;
    let (mode, flags) = (random.of(&[0, 1, 2, 3, 4]), random.of(&[0, 0, 1, 2]));
    // Whether a page is there, and is none of zeros, is not compared: each that is there would be misplaced.
    let flags = match (mode, flags) {
        (LOCAL, STRICT) => 0,
        (_, flags) => flags,
    };
    over("mbind", random.range(), [mode, flags, 0])
}

fn policy(random: &mut Random) -> Line {
    over("set_mempolicy", (0, 1), [random.of(&[0, 1, 2, 3, 4]), 0, 0])
}

fn home_node(random: &mut Random) -> Line {
    over("home-node", random.range(), [random.of(&[0, 0, 1]), 0, 0])
}

fn migrate(random: &mut Random) -> Line {
    over(
        "migrate_pages",
        (0, 1),
        [random.of(&[1, 3]), random.of(&[1, 1, 2]), 0],
    )
}

fn move_pages(random: &mut Random) -> Line {
    // A question; to where the pages are, those of others too; and what the kernel does not know.
    over(
        "move_pages",
        random.range(),
        [random.of(&[0, 2, 2, 4, 1]), 0, 0],
    )
}

fn seal(random: &mut Random) -> Line {
    over("mseal", random.range(), [0; 3])
}

fn remap_file(random: &mut Random) -> Line {
    over(
        "remap_file_pages",
        random.range(),
        [size(random.below(64)), 0, 0],
    )
}

fn sync(random: &mut Random) -> Line {
    over("msync", random.range(), [random.of(&[1, 4, 2]), 0, 0])
}

fn read_into(random: &mut Random) -> Line {
    over("read", random.range(), [random.content(), 0, 0])
}

fn write_from(random: &mut Random) -> Line {
    over("write", random.range(), [0; 3])
}

fn userfault(random: &mut Random) -> Line {
    over("userfaultfd", random.range(), [random.of(&[1, 2, 3]), 0, 0])
}

fn move_away(random: &mut Random) -> Line {
    const HOLES_TOO: i64 = 2;
    over(
        "move-away",
        random.range(),
        [random.of(&[0, HOLES_TOO]), 0, 0],
    )
}

fn name(random: &mut Random) -> Line {
    // A name, or none any more.
    over("name", random.range(), [random.of(&[0, 0, 0, 1]), 0, 0])
}

fn storm(random: &mut Random) -> Line {
    over("storm", random.range(), [random.content(), 0, 0])
}

fn child(random: &mut Random) -> Line {
    let kind = random.of(&["fork", "fork", "vfork", "_Fork", "clone"]);
    let numbers = [random.content(), 0, 0];
    Line {
        kind: kind.to_owned(),
        ..over("family", random.range(), numbers)
    }
}

fn block(random: &mut Random) -> Line {
    let id = random.below(12);
    let pages = random.of(&[4, 20, 40, 100, 300, 700]);
    let numbers = [random.content(), 0, 0];
    match random.below(12) {
        0..4 => over("malloc", (id, pages), numbers),
        4 | 5 => over("realloc", (id, pages), [0; 3]),
        6 | 7 => over("dealloc", (id, 0), [0; 3]),
        8 => call("trim"),
        _ => over("block-offer", (id, 0), [0; 3]),
    }
}

fn heap(random: &mut Random) -> Line {
    let range = (random.below(300), random.of(&[1, 8, 64]));
    match random.below(6) {
        0 | 1 => over(
            "brk",
            (0, 0),
            [random.of(&[64, 100, 300, -30, -100, -1000]), 0, 0],
        ),
        2 => over("heap-fill", range, [random.content(), 0, 0]),
        _ => over(
            "heap-madvise",
            range,
            [random.of(&[12, 12, 12, 4, 13]), 0, 0],
        ),
    }
}

fn stack(random: &mut Random) -> Line {
    let range = (random.below(6), 0);
    match random.below(2) {
        0 => over("stack-begin", range, [random.content().max(1), 0, 0]),
        _ => over("stack-end", range, [0; 3]),
    }
}

fn loose(random: &mut Random) -> Line {
    let id = random.below(8);
    match random.below(2) {
        0 => over("loose-end", (id, 0), [0; 3]),
        _ => loose_of(random, id),
    }
}

/// A mapping where the kernel puts it.
fn loose_of(random: &mut Random, id: usize) -> Line {
    let kind = random.of(&KINDS);
    let pages = match kind {
        "huge" => 512,
        _ => random.of(&[1, 4, 16, 64]),
    };
    Line {
        kind: kind.to_owned(),
        ..over("loose", (id, pages), [random.content(), 0, 0])
    }
}

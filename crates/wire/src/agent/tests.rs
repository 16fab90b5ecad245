use proptest::prelude::*;

use super::question::{OP_BYTES, SLOT_LIMIT};
use super::*;
use crate::codec::MAX_MESSAGE;
use crate::page::{CHUNK_PAGES, PageOutcome};

fn packet(encode: impl FnOnce(&mut [u8; MAX_MESSAGE]) -> usize) -> Vec<u8> {
    let mut out = [0; MAX_MESSAGE];
    let len = encode(&mut out);
    out[..len].to_vec()
}

#[test]
fn pages_join_into_runs() {
    let mut merge = Merge::new(0, 0);
    for (page, slot) in [
        (1, Some(10)),
        (2, Some(11)),
        (3, Some(9)),
        (4, None),
        (5, None),
    ] {
        assert!(merge.push(page, slot));
    }
    let op = |first, pages, target| MergeOp {
        first,
        pages,
        target,
    };
    assert!(merge.push_as(6, Target::Enclosed) && merge.push_as(7, Target::Enclosed));
    assert_eq!(
        merge.ops(),
        [
            op(1, 2, Target::Slot(10)),
            op(3, 1, Target::Slot(9)),
            op(4, 2, Target::Zeros),
            op(6, 2, Target::Enclosed)
        ]
    );
    assert!(!merge.push(5, None), "a page twice");
    assert!(!merge.push(512, None), "a page outside the chunk");
}

#[test]
fn the_largest_messages_fit_and_return() {
    let mut merge = Merge::new(0, 3);
    let mut changes = Changes::new();
    for page in 0..512 {
        let target = match page % 3 {
            0 => Target::Enclosed,
            _ => Target::Slot(u64::from(page) * 2),
        };
        assert!(merge.push_as(page, target));
    }
    while changes.push(Change::Chunk {
        chunk: 0,
        offered: PageBits::FULL,
        stored: PageBits::EMPTY,
    }) {}
    assert_eq!(changes.entries().len(), Changes::MAX);
    let question = Question::Merge(merge);
    assert_eq!(
        Question::decode(&packet(|out| question.encode(out))),
        Ok(question)
    );
    let answer = Answer::Changes(changes);
    assert_eq!(
        Answer::decode(&packet(|out| answer.encode(out))),
        Ok(answer)
    );
}

#[test]
fn overlapping_runs_and_stray_addresses_are_refused() {
    let mut good = Merge::new(CHUNK_BYTES as u64, 0);
    good.push(4, Some(1));
    good.push(9, Some(7));
    let mut bytes = packet(|out| Question::Merge(good).encode(out));
    bytes[13 + OP_BYTES] = 3; // the second run now starts before the first ends
    assert_eq!(
        Question::decode(&bytes),
        Err(DecodeError::Range {
            field: "run",
            value: 3
        })
    );
    let mut bytes = packet(|out| Question::Merge(good).encode(out));
    bytes[1] = 1; // the chunk's address is no longer aligned
    assert!(matches!(
        Question::decode(&bytes),
        Err(DecodeError::Range { field: "chunk", .. })
    ));
}

#[test]
fn a_reason_has_no_second_line() {
    let reason = Reason::new("one\ntwo\u{1b}", DomainMark([3, 4]));
    assert_eq!(reason.as_str(), "one two ");
    let mut bytes = packet(|out| reason.encode(out));
    assert_eq!(Reception::decode(&bytes), Ok(Reception::Refused(reason)));
    bytes[21] = b'\n';
    let bad = Reception::decode(&bytes);
    let is_bad = matches!(
        bad,
        Err(DecodeError::Range {
            field: "reason",
            ..
        })
    );
    assert!(is_bad, "{bad:?}");
}

#[test]
fn another_version_is_named() {
    let hello = Hello {
        role: Role::Agent,
        domain: Name::default(),
    };
    let mut bytes = packet(|out| hello.encode(out));
    bytes[1] = 99;
    assert_eq!(Hello::decode(&bytes), Err(DecodeError::Version(99)));
}

proptest! {
    #[test]
    fn hello_returns(domain in "[a-z/0-9äö]{0,30}", control: bool) {
        let role = if control { Role::Control } else { Role::Agent };
        let hello = Hello { role, domain: Name::new(&domain).unwrap() };
        prop_assert_eq!(Hello::decode(&packet(|out| hello.encode(out))), Ok(hello));
        prop_assert_eq!(hello.domain.as_str(), domain);
    }

    #[test]
    fn refusals_and_readiness_return(text in "\\PC{0,300}", thread: u32, page in 0..ADDRESS_LIMIT >> 12) {
        let reason = Reason::new(&text, DomainMark::NONE);
        prop_assert!(text.starts_with(reason.as_str()));
        prop_assert!(text.len() > Reason::MAX - 4 || text == reason.as_str());
        let refused = Reception::decode(&packet(|out| reason.encode(out)));
        prop_assert_eq!(refused, Ok(Reception::Refused(reason)));
        let ready = Ready { thread, uffd: thread / 2, line: page << 12, journal: page << 12, attached: thread % 2 == 1 };
        let ready = Answer::Ready(ready);
        prop_assert_eq!(Answer::decode(&packet(|out| ready.encode(out))), Ok(ready));
    }

    #[test]
    fn merges_return(pages in prop::collection::btree_map(0u16..512, prop::option::of(0..SLOT_LIMIT), 0..512)) {
        let mut merge = Merge::new(7 << 21, 1);
        for (&page, &slot) in &pages {
            prop_assert!(merge.push(page, slot));
        }
        let question = Question::Merge(merge);
        prop_assert_eq!(Question::decode(&packet(|out| question.encode(out))), Ok(question));
    }

    #[test]
    fn any_bytes_decode_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = Hello::decode(&bytes);
        let _ = Reception::decode(&bytes);
        let _ = Question::decode(&bytes);
        let _ = Answer::decode(&bytes);
    }

    #[test]
    fn answers_return(
        more: bool, numbers: [u64; 2],
        entries in prop::collection::vec((0u64..1 << 30, prop::option::of(0u32..100), any::<[[u64; 8]; 2]>()), 0..Changes::MAX),
        outcomes in prop::collection::vec(0u8..10, CHUNK_PAGES),
    ) {
        let mut changes = Changes::new();
        (changes.more, changes.cpu_ns, changes.memory_bytes) = (more, numbers[0], numbers[1]);
        for (chunk, whole, [offered, stored]) in entries {
            let chunk = chunk << 21;
            let change = match whole {
                Some(chunks) => Change::Whole { chunk, chunks },
                None => Change::Chunk { chunk, offered: PageBits(offered), stored: PageBits(stored) },
            };
            prop_assert!(changes.push(change));
        }
        let _ = changes.push(Change::Recycled { pages: numbers[1] });
        let mut merged = Merged { outcomes: [PageOutcome::NotAsked; CHUNK_PAGES], cpu_ns: numbers[0], window_ns: numbers[1] };
        for (place, number) in merged.outcomes.iter_mut().zip(outcomes) {
            *place = PageOutcome::from_wire(number).unwrap_or(PageOutcome::NotAsked);
        }
        for answer in [Answer::Changes(changes), Answer::Merged(merged)] {
            prop_assert_eq!(Answer::decode(&packet(|out| answer.encode(out))), Ok(answer));
        }
    }

    /// What a decoder takes, also of a packet with some bytes wrong, its encoder writes back.
    #[test]
    fn whatever_decodes_returns(
        pages in prop::collection::btree_map(0u16..512, prop::option::of(0..SLOT_LIMIT), 0..20),
        wrong in prop::collection::vec((0usize..300, any::<u8>()), 0..4),
    ) {
        let mut merge = Merge::new(7 << 21, 1);
        for (&page, &slot) in &pages {
            merge.push(page, slot);
        }
        let mut changes = Changes::new();
        changes.push(Change::Recycled { pages: 5 });
        changes.push(Change::Whole { chunk: 1 << 21, chunks: 9 });
        changes.push(Change::Chunk { chunk: 1 << 22, offered: PageBits::FULL, stored: PageBits::EMPTY });
        let mut packets = [
            packet(|out| Question::Merge(merge).encode(out)),
            packet(|out| Answer::Changes(changes).encode(out)),
        ];
        for bytes in &mut packets {
            for &(at, byte) in &wrong {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            if let Ok(question) = Question::decode(bytes) {
                prop_assert_eq!(Question::decode(&packet(|out| question.encode(out))), Ok(question));
            }
            if let Ok(answer) = Answer::decode(bytes) {
                prop_assert_eq!(Answer::decode(&packet(|out| answer.encode(out))), Ok(answer));
            }
        }
    }

    #[test]
    fn cut_messages_fail(cut in 0usize..100) {
        let question = Question::Unmerge(Unmerge { chunk: 1 << 21, pages: PageBits::FULL });
        let bytes = packet(|out| question.encode(out));
        let cut = cut.min(bytes.len() - 1);
        prop_assert!(Question::decode(&bytes[..cut]).is_err());
    }
}

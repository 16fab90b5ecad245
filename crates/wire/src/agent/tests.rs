use proptest::prelude::*;

use super::*;

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
    let op = |first, pages, slot| MergeOp { first, pages, slot };
    assert_eq!(
        merge.ops(),
        [op(1, 2, Some(10)), op(3, 1, Some(9)), op(4, 2, None)]
    );
    assert!(!merge.push(5, None), "a page twice");
    assert!(!merge.push(512, None), "a page outside the chunk");
}

#[test]
fn the_largest_messages_fit_and_return() {
    let mut merge = Merge::new(0, 3);
    let mut changes = Changes::new();
    for page in 0..512 {
        assert!(merge.push(page, Some(u64::from(page) * 2)));
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
        let _ = Welcome::decode(&bytes);
        let _ = Question::decode(&bytes);
        let _ = Answer::decode(&bytes);
    }

    #[test]
    fn cut_messages_fail(cut in 0usize..100) {
        let question = Question::Unmerge(Unmerge { chunk: 1 << 21, pages: PageBits::FULL });
        let bytes = packet(|out| question.encode(out));
        let cut = cut.min(bytes.len() - 1);
        prop_assert!(Question::decode(&bytes[..cut]).is_err());
    }
}

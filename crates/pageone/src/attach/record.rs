//! The note of all changes to a process, in its own memory: any later `pageone`, of whatever version, undoes them by that.
//!
//! The note is a page behind the board, which can be read and not written. The process could have made it itself, as all that it
//! holds. So it is read as a stranger's: numbers are bounded, and the worst that a false note brings about happens to the
//! process that has it.

use std::ops::Range;

use sys::elf::number;

use super::board::{Patch, begins_with_jump};
use super::site::JUMP;

/// Room for the note.
pub(super) const RECORD_BYTES: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"P1attach");
/// The words before the patches.
const HEAD: usize = 11;
/// The words of a patch: where it is, what was there, and what is.
const PATCH: usize = 3;

/// The note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The agent's image, and the stack behind it.
    pub(super) image: Range<u64>,
    /// The board, this note included.
    pub(super) board: Range<u64>,
    /// Functions of the image, in the order of [`FUNCTIONS`].
    pub(super) functions: [u64; FUNCTIONS.len()],
    /// What core dumps held before; `None` if it could not be read.
    pub(super) dump: Option<u32>,
    pub(super) patches: Vec<Patch>,
}

/// The functions of the image that it takes to end it, without `pageone_attached_`.
pub(super) const FUNCTIONS: [&str; 5] = ["call", "end", "again", "beyond", "leave"];

impl Record {
    /// The page; `None` when there are too many patches for it.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let mut words = vec![MAGIC, self.image.start, self.image.end];
        words.extend([self.board.start, self.board.end]);
        words.extend(self.functions);
        words.push(self.dump.map_or(u64::MAX, u64::from));
        debug_assert_eq!(words.len(), HEAD);
        words.push(self.patches.len() as u64);
        for patch in &self.patches {
            words.extend([patch.at, word(patch.before), word(patch.after)]);
        }
        let mut page: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let fits = page.len() <= RECORD_BYTES;
        page.resize(RECORD_BYTES, 0);
        fits.then_some(page)
    }

    /// The note on a page.
    pub(super) fn decode(page: &[u8]) -> Option<Self> {
        let word = |index: usize| number(page, index * 8, 8);
        if word(0)? != MAGIC {
            return None;
        }
        let mut functions = [0; FUNCTIONS.len()];
        for (index, function) in functions.iter_mut().enumerate() {
            *function = word(5 + index)?;
        }
        let count = usize::try_from(word(HEAD)?).ok();
        let count = count.filter(|&count| count < RECORD_BYTES / 8)?;
        let patch = |index: usize| {
            let at = HEAD + 1 + index * PATCH;
            Some(Patch {
                at: word(at)?,
                before: bytes(word(at + 1)?),
                after: bytes(word(at + 2)?),
            })
        };
        let record = Self {
            image: word(1)?..word(2)?,
            board: word(3)?..word(4)?,
            functions,
            dump: u32::try_from(word(HEAD - 1)?).ok(),
            patches: (0..count).map(patch).collect::<Option<_>>()?,
        };
        record.is_sound().then_some(record)
    }

    fn is_sound(&self) -> bool {
        let Self { image, board, .. } = self;
        let is_range = |range: &Range<u64>| {
            range.start < range.end && (range.start | range.end).is_multiple_of(4096)
        };
        let inside = |at: &u64| image.contains(at);
        is_range(image)
            && is_range(board)
            && self.functions.iter().all(inside)
            && !self.patches.is_empty()
            && self
                .patches
                .iter()
                .all(|patch| begins_with_jump(&patch.after))
    }

    /// The function of this name.
    pub(super) fn function(&self, name: &str) -> u64 {
        let index = FUNCTIONS.iter().position(|known| *known == name);
        let found = index.and_then(|index| self.functions.get(index));
        *found.expect("one of the list")
    }
}

fn word(code: [u8; JUMP]) -> u64 {
    let mut word = [0; 8];
    word[..JUMP].copy_from_slice(&code);
    u64::from_le_bytes(word)
}

fn bytes(word: u64) -> [u8; JUMP] {
    let [a, b, c, d, e, ..] = word.to_le_bytes();
    [a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let patch = |at| Patch {
            at,
            before: [0xb8, 11, 0, 0, 0],
            after: [0xe9, 1, 2, 3, 4],
        };
        Record {
            image: 0x1000..0x9000,
            board: 0xa000..0xd000,
            functions: [0x1000, 0x1100, 0x1200, 0x1300, 0x8fff],
            dump: Some(0x33),
            patches: (0..60).map(patch).collect(),
        }
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let record = record();
        let page = record.encode().unwrap();
        assert_eq!(Record::decode(&page), Some(record.clone()));
        assert_eq!(record.function("leave"), 0x8fff);
        let unknown = Record {
            dump: None,
            ..record
        };
        assert_eq!(Record::decode(&unknown.encode().unwrap()), Some(unknown));
    }

    #[test]
    fn what_is_no_note_is_refused() {
        let good = record().encode().unwrap();
        assert_eq!(Record::decode(&[]), None);
        assert_eq!(Record::decode(&good[..100]), None);
        for (at, value) in [
            (0, 0),
            (1, 0x9000),
            (2, 0x9001),
            (3, u64::MAX),
            (5, 0),
            (11, 0),
            (11, u64::MAX),
            (14, 0),
        ] {
            let mut page = good.clone();
            page[at * 8..at * 8 + 8].copy_from_slice(&u64::to_le_bytes(value));
            assert_eq!(Record::decode(&page), None, "{at}: {value:x}");
        }
        let mut many = record();
        many.patches = (0..9).flat_map(|_| record().patches).collect();
        assert_eq!(many.encode(), None);
    }
}

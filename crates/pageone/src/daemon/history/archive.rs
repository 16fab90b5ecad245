//! The history in a keeper's hands, sample by sample, for the next daemon.
//!
//! ```text
//!  history.INODE     0        64                   64 + 8640 × 64
//!                    │ title  │ fine samples       │ coarse samples    │
//!                             number % 8640          number / 60 % 4464
//!  a sample          number  at  saved  net  store  metadata  cpu  guests  stalls  check
//!                    4       8   8      8    8      8         8    4       4       4      bytes, little end first
//! ```
//!
//! A sample is 64 bytes in one page, so a daemon that is killed leaves it whole or not begun. The check is a hash of the
//! rest. One damaged sample, or a title of another version, and all is refused: the history is empty then, and the log says why.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use sys::keeper::{Keeper, Kept};
use sys::memfd::{self, AdoptError, Archive};
use twox_hash::XxHash3_64;
use wire::Sample;

use super::{COARSE, COARSE_SAMPLES, FINE_SAMPLES, Numbered, Rings, is_coarse};

/// How the keeper calls it; the file's number follows.
const NAME: &str = "history.";
/// How the kernel calls it.
const FILE: &str = "pageone-history";
const TITLE: &[u8] = b"pageone history 1\n";
const RECORD: usize = 64;
const CHECKED: usize = RECORD - 4;
const BYTES: usize = RECORD * (1 + FINE_SAMPLES + COARSE_SAMPLES);

/// Why a former daemon's history is not taken.
#[derive(Debug, thiserror::Error)]
enum Misfit {
    #[error("it is of another version")]
    Version,
    #[error("its sample {place} is damaged")]
    Damaged { place: usize },
    #[error("there are several")]
    Several,
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    #[error("it cannot be read: {0}")]
    System(#[from] std::io::Error),
}

/// Where the next daemon finds the samples.
#[derive(Debug)]
pub(super) struct Shelf {
    keeper: Arc<Keeper>,
    archive: Archive,
}

/// A former daemon's samples, out of `kept`; and the shelf for more of them.
pub(super) fn load(keeper: &Arc<Keeper>, kept: &mut Vec<Kept>) -> (Rings, Option<Shelf>) {
    let is_history = |kept: &mut Kept| kept.name.starts_with(NAME);
    let mut old: Vec<_> = kept.extract_if(.., is_history).collect();
    let names: Vec<_> = old.iter().map(|kept| kept.name.clone()).collect();
    let found = match old.pop() {
        Some(_) if !old.is_empty() => Some(Err(Misfit::Several)),
        Some(kept) => Some(adopt(kept)),
        None => None,
    };
    match found {
        Some(Ok((rings, archive))) => {
            tracing::info!(samples = rings.taken, "the history goes on");
            let keeper = Arc::clone(keeper);
            return (rings, Some(Shelf { keeper, archive }));
        }
        Some(Err(why)) => tracing::warn!("a former daemon's history is not taken over: {why}"),
        None => {}
    }
    let forgotten = names.iter().try_for_each(|name| keeper.forget(name));
    let shelf = forgotten.and_then(|()| Shelf::new(keeper));
    let shelf = shelf.inspect_err(|error| {
        tracing::warn!("the next daemon will not know this one's history: {error}");
    });
    (Rings::default(), shelf.ok())
}

fn adopt(kept: Kept) -> Result<(Rings, Archive), Misfit> {
    let archive = Archive::adopt(kept.descriptor, FILE)?;
    if archive.bytes() != BYTES {
        return Err(Misfit::Version);
    }
    let bytes = archive.read().map_err(std::io::Error::from)?;
    let (records, _) = bytes.as_chunks::<RECORD>();
    let rings = match records.split_first() {
        Some((title, samples)) if *title == titled() => read(samples)?,
        _ => return Err(Misfit::Version),
    };
    Ok((rings, archive))
}

fn titled() -> [u8; RECORD] {
    let mut title = [0; RECORD];
    if let Some(place) = title.get_mut(..TITLE.len()) {
        place.copy_from_slice(TITLE);
    }
    title
}

fn read(records: &[[u8; RECORD]]) -> Result<Rings, Misfit> {
    let (fine, coarse) = records.split_at(FINE_SAMPLES);
    let fine = ring(fine, 0, fine_place)?;
    let coarse = ring(coarse, FINE_SAMPLES, coarse_place)?;
    let last = fine.back();
    Ok(Rings {
        taken: last.map_or(0, |(number, _)| number + 1),
        cpu_before: last.map_or(0.0, |(_, sample)| sample.cpu_seconds),
        fine,
        coarse,
    })
}

/// The samples of a ring that begins at record `first`, by number.
fn ring(
    records: &[[u8; RECORD]],
    first: usize,
    place_of: impl Fn(u64) -> usize,
) -> Result<VecDeque<Numbered>, Misfit> {
    let mut ring = Vec::new();
    for (place, record) in (first..).zip(records) {
        if record.iter().all(|byte| *byte == 0) {
            continue;
        }
        let sample = decode(record).filter(|(number, _)| place_of(*number) == place);
        ring.push(sample.ok_or(Misfit::Damaged { place })?);
    }
    ring.sort_unstable_by_key(|(number, _)| *number);
    Ok(ring.into())
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the samples of a ring"
)]
fn fine_place(number: u64) -> usize {
    (number % FINE_SAMPLES as u64) as usize
}

fn coarse_place(number: u64) -> usize {
    FINE_SAMPLES + (number / COARSE % COARSE_SAMPLES as u64) as usize
}

impl Shelf {
    fn new(keeper: &Arc<Keeper>) -> std::io::Result<Self> {
        let archive = Archive::new(FILE, BYTES)?;
        archive.write(0, &titled())?;
        let shelf = Self {
            keeper: Arc::clone(keeper),
            archive,
        };
        keeper.keep(&shelf.name()?, shelf.archive.as_fd())?;
        Ok(shelf)
    }

    fn name(&self) -> std::io::Result<String> {
        Ok(format!("{NAME}{}.", memfd::number(&self.archive)?))
    }

    /// Writes a sample to its places.
    pub(super) fn write(&self, number: u64, sample: &Sample) -> std::io::Result<()> {
        let record = encode(number, sample);
        let coarse = is_coarse(number).then(|| coarse_place(number));
        for place in std::iter::once(fine_place(number)).chain(coarse) {
            self.archive.write(RECORD * (1 + place), &record)?;
        }
        Ok(())
    }

    /// Takes it back from the keeper.
    pub(super) fn forget(self) {
        let forgotten = self.name().and_then(|name| self.keeper.forget(&name));
        if let Err(error) = forgotten {
            tracing::warn!("the keeper keeps an old history: {error}");
        }
    }
}

/// Numbers of samples have 32 bits here: 1300 years of them.
#[expect(clippy::cast_possible_truncation, reason = "1300 years")]
fn encode(number: u64, sample: &Sample) -> [u8; RECORD] {
    let mut bytes = Vec::with_capacity(RECORD);
    bytes.extend((number as u32).to_le_bytes());
    bytes.extend(sample.at.to_le_bytes());
    bytes.extend(sample.saved_bytes.to_le_bytes());
    bytes.extend(sample.net_saved_bytes.to_le_bytes());
    bytes.extend(sample.store_bytes.to_le_bytes());
    bytes.extend(sample.metadata_bytes.to_le_bytes());
    bytes.extend(sample.cpu_seconds.to_le_bytes());
    bytes.extend(sample.guests.to_le_bytes());
    bytes.extend(sample.stall_percent.unwrap_or(f32::NAN).to_le_bytes());
    bytes.extend(check(&bytes).to_le_bytes());
    let mut record = [0; RECORD];
    record.copy_from_slice(&bytes);
    record
}

#[expect(clippy::cast_possible_truncation, reason = "half of a hash")]
fn check(bytes: &[u8]) -> u32 {
    XxHash3_64::oneshot(bytes) as u32
}

/// The sample of a record; none when it is damaged.
fn decode(record: &[u8; RECORD]) -> Option<Numbered> {
    let (checked, hash) = record.split_at(CHECKED);
    if check(checked).to_le_bytes() != hash {
        return None;
    }
    let mut rest = checked;
    let number = u32::from_le_bytes(take(&mut rest)?);
    let sample = Sample {
        at: u64::from_le_bytes(take(&mut rest)?),
        saved_bytes: u64::from_le_bytes(take(&mut rest)?),
        net_saved_bytes: i64::from_le_bytes(take(&mut rest)?),
        store_bytes: u64::from_le_bytes(take(&mut rest)?),
        metadata_bytes: u64::from_le_bytes(take(&mut rest)?),
        cpu_seconds: f64::from_le_bytes(take(&mut rest)?),
        guests: u32::from_le_bytes(take(&mut rest)?),
        stall_percent: Some(f32::from_le_bytes(take(&mut rest)?)).filter(|stalls| !stalls.is_nan()),
        unseen_seconds: 0,
    };
    Some((u64::from(number), sample))
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use sys::keeper::{Inbox, Note as Told};

    /// A keeper that the test plays.
    struct Post {
        inbox: Inbox,
        keeper: Arc<Keeper>,
        _folder: tempfile::TempDir,
    }

    impl Post {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("notify");
            Self {
                inbox: Inbox::bind(&path).unwrap(),
                keeper: Arc::new(Keeper::at(path.as_os_str()).unwrap()),
                _folder: folder,
            }
        }

        fn kept(&self) -> Kept {
            match self.inbox.next().unwrap() {
                Some(Told::Keep(name, mut held)) => Kept {
                    name,
                    descriptor: held.pop().unwrap(),
                },
                other => panic!("{other:?}"),
            }
        }

        fn load(&self, kept: Vec<Kept>) -> (Rings, Option<Shelf>) {
            let mut kept = kept;
            let loaded = load(&self.keeper, &mut kept);
            assert!(kept.is_empty());
            loaded
        }
    }

    fn copy(kept: &Kept) -> Kept {
        Kept {
            name: kept.name.clone(),
            descriptor: kept.descriptor.try_clone().unwrap(),
        }
    }

    fn sample(number: u64) -> Sample {
        Sample {
            at: 1_700_000_000 + number * 10,
            saved_bytes: number << 12,
            net_saved_bytes: -7,
            store_bytes: 1,
            metadata_bytes: u64::MAX,
            cpu_seconds: 0.5,
            guests: 3,
            stall_percent: (number % 2 == 1).then_some(1.25),
            unseen_seconds: 0,
        }
    }

    /// Takes samples until `until` have been taken, as a daemon does.
    fn take_samples(rings: &mut Rings, shelf: Option<&Shelf>, until: u64) {
        while rings.taken < until {
            let (number, kept) = rings.push(sample(rings.taken));
            shelf.unwrap().write(number, &kept).unwrap();
        }
    }

    #[test]
    fn the_next_daemon_has_all_samples_also_when_both_rings_went_round() {
        let post = Post::new();
        let (mut rings, shelf) = post.load(Vec::new());
        let kept = post.kept();
        let mut cpu = 0.0;
        let round = COARSE * COARSE_SAMPLES as u64;
        for until in [1, 59, 60, 61, 8_641, round + 4_000] {
            take_samples(&mut rings, shelf.as_ref(), until);
            let (next, _shelf) = post.load(vec![copy(&kept)]);
            assert_eq!((&next.fine, &next.coarse), (&rings.fine, &rings.coarse));
            assert_eq!(next.taken, until);
            assert_eq!(next.cpu_before, 0.5, "of the last sample");
            cpu = next.cpu_before;
        }
        let (mut next, _shelf) = post.load(vec![kept]);
        assert_eq!(next.push(sample(0)).1.cpu_seconds, cpu + 0.5);
        assert!(post.inbox.next().unwrap().is_none(), "the same archive");
        const { assert!(BYTES < 1 << 20) };
    }

    #[test]
    fn what_is_damaged_or_foreign_is_refused_and_forgotten() {
        type Harm = fn(&Post, Kept) -> Vec<Kept>;
        fn changed(kept: Kept, at: usize, bytes: &[u8]) -> Vec<Kept> {
            rustix::io::pwrite(&kept.descriptor, bytes, at as u64).unwrap();
            vec![kept]
        }
        fn instead(kept: Kept, descriptor: OwnedFd) -> Vec<Kept> {
            let name = kept.name;
            vec![Kept { name, descriptor }]
        }
        let harms: [(&str, Harm); 8] = [
            ("another version", |_, kept| changed(kept, 16, b"2")),
            ("a changed bit", |_, kept| {
                changed(kept, RECORD * 5 + 13, b"!")
            }),
            ("half a sample", |_, kept| {
                changed(kept, RECORD * 5 + 32, &[0; 32])
            }),
            ("a sample elsewhere", |_, kept| {
                changed(kept, RECORD * 40, &encode(3, &sample(3)))
            }),
            ("a fine one among the coarse", |_, kept| {
                changed(
                    kept,
                    RECORD * (1 + FINE_SAMPLES),
                    &encode(100, &sample(100)),
                )
            }),
            ("another size", |_, kept| {
                let other = Archive::new(FILE, BYTES + RECORD).unwrap();
                instead(kept, other.as_fd().try_clone_to_owned().unwrap())
            }),
            ("another file", |_, kept| {
                instead(kept, std::fs::File::open("/proc/self/exe").unwrap().into())
            }),
            ("two", |_, kept| vec![copy(&kept), kept]),
        ];
        for (what, harm) in harms {
            let post = Post::new();
            let (mut rings, shelf) = post.load(Vec::new());
            let kept = post.kept();
            take_samples(&mut rings, shelf.as_ref(), 20);
            let name = kept.name.clone();
            let (next, shelf) = post.load(harm(&post, kept));
            assert_eq!(
                (next.taken, next.fine.len(), next.coarse.len()),
                (0, 0, 0),
                "{what}"
            );
            let told = post.inbox.next().unwrap();
            assert!(
                matches!(&told, Some(Told::Forget(old)) if *old == name),
                "{what}: {told:?}"
            );
            let told = if what == "two" {
                post.inbox.next().unwrap()
            } else {
                told
            };
            assert!(matches!(told, Some(Told::Forget(_))), "{what}");
            assert_ne!(post.kept().name, name, "{what}: one that goes on from here");
            assert!(shelf.is_some());
        }
    }
}

//! A guest of the demo: real files, zeros and private data, verified and rewritten while merged.
//!
//! ```text
//!  page 0 ─────────────── files ─────────────── zeros ── private ── hot ─── end
//!         the same in each guest                         its own    rewritten all the time
//! ```
//!
//! The guest keeps a checksum of each page, taken from the bytes it meant to write, never from those it
//! read back, and compares it all the time. Now and then it rewrites a page anywhere: merged pages
//! among them, which break.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sys::memory::Anonymous;

use crate::bench::Answer;

/// Bytes in a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Where the files are: what any Linux machine has, the same for all guests.
const FOLDERS: [&str; 3] = ["/usr/bin", "/usr/lib", "/usr/share"];
/// Pages verified in one go.
const SLICE_PAGES: usize = 256;
/// Of one part work, so many parts rest: the guests leave the processors to each other.
const REST: u32 = 12;
/// One rewritten page anywhere for so many slices.
const SLICES_PER_BREAK: u64 = 4;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    number: u64,
    #[arg(long)]
    pages: usize,
    #[arg(long)]
    file_pages: usize,
}

/// Which pages hold what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Pages in the guest.
    pub(crate) pages: usize,
    /// Pages of files, from the first page on.
    pub(crate) files: usize,
    /// Pages of zeros, after them.
    pub(crate) zeros: usize,
    /// Pages rewritten all the time, the last ones.
    pub(crate) hot: usize,
}

impl Layout {
    /// The layout of a guest of `pages` pages with `files` pages of files.
    pub(crate) fn new(pages: usize, files: usize) -> Self {
        Self {
            pages,
            files: files.min(pages * 6 / 10),
            zeros: pages * 15 / 100,
            hot: pages / 50,
        }
    }

    /// What a perfect merger gives back of `guests` such guests, in bytes.
    pub(crate) fn ideal_saved_bytes(self, guests: usize) -> u64 {
        let pages = self.files * guests.saturating_sub(1) + self.zeros * guests;
        (pages * PAGE_BYTES) as u64
    }
}

/// How many pages the files of this machine fill, up to `most`.
pub(crate) fn available_file_pages(most: usize) -> usize {
    let mut pages = 0;
    let folders = FOLDERS.map(PathBuf::from);
    for_each_file(&folders, &mut |_, len| {
        pages += len.div_ceil(PAGE_BYTES);
        pages < most
    });
    pages.min(most)
}

/// Calls `visit` with each regular file below `folders` in the order of names, until it gives
/// false; gives false then as well.
fn for_each_file(folders: &[PathBuf], visit: &mut dyn FnMut(&Path, usize) -> bool) -> bool {
    for folder in folders {
        let Ok(entries) = fs::read_dir(folder) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let Ok(meta) = fs::symlink_metadata(&path) else {
                continue;
            };
            let len = usize::try_from(meta.len()).unwrap_or(0);
            let go_on = match meta.file_type() {
                kind if kind.is_dir() => for_each_file(&[path], visit),
                kind if kind.is_file() && len > 0 => visit(&path, len),
                _ => true,
            };
            if !go_on {
                return false;
            }
        }
    }
    true
}

/// A guest at work.
struct Worker {
    memory: Anonymous,
    sums: Vec<u64>,
    layout: Layout,
    random: u64,
    next_page: usize,
    slices: u64,
    answer: Answer,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let layout = Layout::new(args.pages, args.file_pages);
    let mut worker = Worker {
        memory: Anonymous::new(args.pages * PAGE_BYTES).context("no memory for this guest")?,
        sums: vec![0; args.pages],
        layout,
        random: (args.number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        next_page: 0,
        slices: 0,
        answer: Answer::default(),
    };
    worker.fill();
    worker.answer.written_pages = 0;
    writeln!(io::stdout(), "{}", worker.answer)?;
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for order in io::stdin().lines().map_while(Result::ok) {
            if sender.send(order).is_err() {
                return;
            }
        }
    });
    worker.work(&orders)
}

impl Worker {
    fn fill(&mut self) {
        let mut page = [0; PAGE_BYTES];
        let filled = self.fill_files(&mut page);
        for index in filled..self.layout.files {
            self.fill_private(index, &mut page);
        }
        let private = self.layout.files + self.layout.zeros;
        for index in self.layout.files..private {
            self.write(index, &[0; PAGE_BYTES]);
        }
        for index in private..self.layout.pages {
            self.fill_private(index, &mut page);
        }
    }

    /// Fills the first pages with files; gives how many.
    fn fill_files(&mut self, page: &mut [u8; PAGE_BYTES]) -> usize {
        let mut index = 0;
        let folders = FOLDERS.map(PathBuf::from);
        for_each_file(&folders, &mut |path, len| {
            // A file that cannot be read, or shrinks, leaves zeros: in each guest the same.
            let mut file = File::open(path).ok();
            for _ in 0..len.div_ceil(PAGE_BYTES) {
                if index == self.layout.files {
                    return false;
                }
                page.fill(0);
                if let Some(file) = &mut file {
                    let _ = read_page(file, page);
                }
                self.write(index, page);
                index += 1;
            }
            true
        });
        index
    }

    fn fill_private(&mut self, index: usize, page: &mut [u8; PAGE_BYTES]) {
        for word in page.chunks_exact_mut(8) {
            word.copy_from_slice(&self.draw().to_le_bytes());
        }
        self.write(index, page);
    }

    fn write(&mut self, index: usize, page: &[u8; PAGE_BYTES]) {
        self.sums[index] = checksum(page);
        self.memory[index * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
        self.answer.written_pages += 1;
    }

    /// Verifies and rewrites, and follows orders, until there are no more to come.
    fn work(&mut self, orders: &Receiver<String>) -> Result<()> {
        let mut rest = Duration::ZERO;
        loop {
            match orders.recv_timeout(rest) {
                Ok(order) => self.obey(&order)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            let begin = Instant::now();
            self.verify(SLICE_PAGES);
            self.rewrite();
            rest = begin.elapsed() * REST;
        }
    }

    fn obey(&mut self, order: &str) -> Result<()> {
        match order {
            "offer" => self.memory.offer().context("cannot offer memory")?,
            "report" => {}
            "verify" => {
                self.next_page = 0;
                self.verify(self.layout.pages);
            }
            other => bail!("unknown order {other:?}"),
        }
        writeln!(io::stdout(), "{}", self.answer)?;
        Ok(())
    }

    fn verify(&mut self, pages: usize) {
        for _ in 0..pages {
            let page = &self.memory[self.next_page * PAGE_BYTES..][..PAGE_BYTES];
            self.answer.errors += u64::from(checksum(page) != self.sums[self.next_page]);
            self.answer.verified_bytes += PAGE_BYTES as u64;
            self.next_page = (self.next_page + 1) % self.layout.pages;
        }
    }

    fn rewrite(&mut self) {
        let mut page = [0; PAGE_BYTES];
        for _ in 0..8 {
            let hot = self.pick(self.layout.hot.max(1));
            self.fill_private(self.layout.pages - 1 - hot, &mut page);
        }
        self.slices += 1;
        if self.slices.is_multiple_of(SLICES_PER_BREAK) {
            let anywhere = self.pick(self.layout.pages);
            self.fill_private(anywhere, &mut page);
        }
    }

    fn pick(&mut self, below: usize) -> usize {
        let draw = usize::try_from(self.draw() >> 1).unwrap_or(0);
        draw % below
    }

    /// The next word of a splitmix64 stream.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

fn checksum(page: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(page);
    hasher.finish()
}

fn read_page(file: &mut File, page: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
    let mut at = 0;
    while at < PAGE_BYTES {
        match file.read(&mut page[at..])? {
            0 => return Ok(()),
            read => at += read,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(number: u64) -> Worker {
        let layout = Layout::new(200, 120);
        let mut worker = Worker {
            memory: Anonymous::new(200 * PAGE_BYTES).unwrap(),
            sums: vec![0; 200],
            layout,
            random: number,
            next_page: 0,
            slices: 0,
            answer: Answer::default(),
        };
        worker.fill();
        worker
    }

    #[test]
    fn files_and_zeros_are_equal_in_guests_and_the_rest_is_not() {
        let (a, b) = (worker(1), worker(2));
        let equal = |range: std::ops::Range<usize>| {
            let bytes = range.start * PAGE_BYTES..range.end * PAGE_BYTES;
            a.memory[bytes.clone()] == b.memory[bytes]
        };
        assert_eq!((a.layout.files, a.layout.zeros, a.layout.hot), (120, 30, 4));
        assert!(equal(0..available_file_pages(120)));
        assert!(equal(120..150));
        assert!(
            a.sums[150..]
                .iter()
                .zip(&b.sums[150..])
                .all(|(a, b)| a != b)
        );
        assert_eq!(a.layout.ideal_saved_bytes(2), (120 + 60) * 4096);
    }

    #[test]
    fn rewriting_keeps_the_sums_right_and_a_flipped_bit_is_found() {
        let mut worker = worker(3);
        for _ in 0..100 {
            worker.rewrite();
            worker.verify(7);
        }
        worker.verify(200);
        assert_eq!(worker.answer.errors, 0);
        assert!(worker.answer.written_pages > 800);
        worker.memory[77 * PAGE_BYTES + 5] ^= 1;
        worker.verify(200);
        assert_eq!(worker.answer.errors, 1);
    }
}

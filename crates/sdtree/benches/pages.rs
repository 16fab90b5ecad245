//! `cargo bench -p sdtree --bench pages`: an index whose keys are whole 4096-byte pages, as in KSM's trees.
//!
//! Lookups of present pages through copies of them, in random order; lookups per second. Of one kind of pages, all share their content but for
//! eight bytes, at the start, after 128 zero bytes, or at the end. The peer is an ordered map that compares with memcmp.
//!
//! `SDTREE_PAGES` and `SDTREE_ROUNDS` change the size of it; `SDTREE_CLOCK=cpu` is for busy machines, as for `maps`. Each round goes over everything; the table shows medians.

#![allow(clippy::cast_possible_truncation, missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use sdtree::ByteTree;
use std::collections::BTreeMap;
use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;
use support::{mix, on_processor_ns};

const PAGE: usize = 4096;

/// Where the eight bytes are that tell the pages apart.
const KINDS: [(&str, usize, usize); 3] = [
    ("first 8 bytes differ", 0, 0),
    ("8 bytes differ after 128 zeros", 128, 128),
    ("last 8 bytes differ", PAGE - 8, 0),
];

/// A page in a common block of pages.
#[derive(Clone)]
struct Page(Arc<[u8]>, usize);

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        &self.0[self.1 * PAGE..][..PAGE]
    }
}

fn block(pages: usize, at: usize, zeros: usize) -> Arc<[u8]> {
    let common: Vec<u8> = (0..PAGE as u64).map(|index| mix(index) as u8).collect();
    let mut bytes = vec![0; pages * PAGE];
    for (index, page) in bytes.chunks_exact_mut(PAGE).enumerate() {
        page.copy_from_slice(&common);
        page[..zeros].fill(0);
        page[at..at + 8].copy_from_slice(&mix(index as u64).to_be_bytes());
    }
    bytes.into()
}

/// Pages of one kind, in both maps.
struct Stage {
    stored: Arc<[u8]>,
    /// Copies to search by, a quarter of them.
    asked: Arc<[u8]>,
    tree: ByteTree<Page, u32>,
}

impl Stage {
    fn new(pages: usize, at: usize, zeros: usize) -> Self {
        let stored = block(pages, at, zeros);
        let tree = ByteTree::new();
        for index in 0..pages {
            let page = Page(Arc::clone(&stored), index);
            tree.get_or_insert(page, index as u32)
                .expect("a page is a key");
        }
        let asked = block(pages / 4, at, zeros);
        Self {
            stored,
            asked,
            tree,
        }
    }

    fn ordered(&self) -> BTreeMap<&[u8], u32> {
        self.stored.chunks_exact(PAGE).zip(0..).collect()
    }
}

fn main() {
    let setting =
        |name, default| env::var(name).map_or(default, |text| text.parse().expect("a number"));
    let pages = setting("SDTREE_PAGES", 200_000);
    let rounds = setting("SDTREE_ROUNDS", 5);
    let stages = KINDS.map(|(_, at, zeros)| Stage::new(pages, at, zeros));
    let ordered = [0, 1, 2].map(|kind: usize| stages[kind].ordered());
    let maps = [
        "sdtree, 1 thread",
        "sdtree, 2 threads",
        "BTreeMap by memcmp",
    ];
    let mut results = vec![vec![Vec::new(); KINDS.len()]; maps.len()];
    for _ in 0..rounds {
        for (kind, Stage { asked, tree, .. }) in stages.iter().enumerate() {
            for (threads, result) in [1, 2].into_iter().zip(&mut results) {
                result[kind].push(lookups(asked, threads, |page| tree.get(page)));
            }
            results[2][kind].push(lookups(asked, 1, |page| ordered[kind].get(page).copied()));
        }
    }
    println!(
        "{pages} pages, M lookups/s, medians of {rounds} rounds; in brackets the time as a multiple of the first column's\n"
    );
    println!(
        "| | {} |\n|---|---|---|---|",
        KINDS.map(|(name, _, _)| name).join(" | ")
    );
    for (map, kinds) in maps.iter().zip(&mut results) {
        let medians: Vec<f64> = kinds.iter_mut().map(|figures| median(figures)).collect();
        let cells: Vec<String> = medians
            .iter()
            .map(|figure| format!("{figure:.3} ({:.2})", medians[0] / figure))
            .collect();
        println!("| {map} | {} |", cells.join(" | "));
    }
    let tree = &stages[0].tree;
    let bytes = tree.memory_bytes() as f64 / pages as f64;
    println!(
        "\nsdtree: {bytes:.1} bytes a page beside the page; {:.2} branches on a path.",
        tree.stats().mean_depth()
    );
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// M lookups/s, of all threads together. With `SDTREE_CLOCK=cpu`, per second on a processor and not of the clock.
fn lookups(asked: &[u8], threads: usize, get: impl Fn(&[u8]) -> Option<u32> + Sync) -> f64 {
    let pages = asked.len() / PAGE;
    let on_processor = AtomicU64::new(0);
    let start = Instant::now();
    thread::scope(|scope| {
        for me in 0..threads {
            let (get, on_processor) = (&get, &on_processor);
            scope.spawn(move || {
                let before = on_processor_ns();
                for step in pages * me / threads..pages * (me + 1) / threads {
                    let index = mix(step as u64) as usize % pages;
                    assert_eq!(get(&asked[index * PAGE..][..PAGE]), Some(index as u32));
                }
                on_processor.fetch_add(on_processor_ns() - before, Relaxed);
            });
        }
    });
    let seconds = if env::var("SDTREE_CLOCK").is_ok_and(|clock| clock == "cpu") {
        on_processor.into_inner() as f64 / 1e9 / threads as f64
    } else {
        start.elapsed().as_secs_f64()
    };
    pages as f64 / seconds / 1e6
}

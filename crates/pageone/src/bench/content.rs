//! The content of each page of each guest: a pure function of the seed, so that a guest can verify
//! every byte at any time without keeping a copy.
//!
//! Pages come in runs of `run_pages`. A run is the same in all guests with probability `dup`, else
//! every guest has its own. Within a run all pages differ. Each page begins with a number of zero
//! bytes drawn from a geometric distribution of mean `zero_prefix`: comparisons from the front have
//! to read through them.

/// Bytes in a page.
const PAGE_BYTES: usize = 4096;
/// The longest zero prefix: the 63 random bits that follow tell any two pages apart.
const MAX_PREFIX: usize = PAGE_BYTES - 8;

/// The content of all guests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Content {
    /// Everything follows from it.
    pub seed: u64,
    /// Probability that a run is shared by all guests, 0 to 1.
    pub dup: f64,
    /// Pages in a run, at least 1.
    pub run_pages: u64,
    /// Mean number of leading zero bytes in a page.
    pub zero_prefix: f64,
    /// Pages in a guest.
    pub pages: u64,
    /// Whether each guest has the runs in an order of its own.
    pub shuffle: bool,
}

impl Content {
    /// The same pages in all guests, at the same places.
    #[must_use]
    pub fn equal(seed: u64, pages: u64) -> Self {
        Self {
            seed,
            dup: 1.0,
            run_pages: 16,
            zero_prefix: 0.0,
            pages,
            shuffle: false,
        }
    }

    /// Fills `page` (4096 bytes) as page `index` of `guest`.
    pub fn fill(&self, guest: u64, index: u64, page: &mut [u8]) {
        let mut state = self.key(guest, index);
        let prefix = self.prefix(next(&mut state)).min(page.len());
        for word in page.chunks_exact_mut(8) {
            word.copy_from_slice(&next(&mut state).to_le_bytes());
        }
        if prefix > 0 {
            page[..prefix].fill(0);
            page[prefix] |= 1;
        }
    }

    /// Whether `page` is page `index` of `guest`. `scratch` is used to regenerate it.
    pub fn matches(&self, guest: u64, index: u64, page: &[u8], scratch: &mut [u8]) -> bool {
        self.fill(guest, index, scratch);
        page == scratch
    }

    /// What a perfect merger gives back with `guests` guests: all but one copy of each shared page.
    #[must_use]
    pub fn ideal_saved_bytes(&self, guests: u64) -> u64 {
        let shared = (0..self.pages).filter(|&index| self.shared(index / self.run_pages));
        shared.count() as u64 * guests.saturating_sub(1) * PAGE_BYTES as u64
    }

    fn shared(&self, run: u64) -> bool {
        unit(mix(self.seed ^ mix(run))) < self.dup
    }

    /// The random stream of a page. Pages of the same key have the same content.
    fn key(&self, guest: u64, index: u64) -> u64 {
        let run = index / self.run_pages;
        let run = if self.shuffle {
            self.place(guest, run)
        } else {
            run
        };
        let owner = if self.shared(run) { 0 } else { guest + 1 };
        let page = run * self.run_pages + index % self.run_pages;
        mix(self
            .seed
            .wrapping_add(mix(page.wrapping_mul(2).wrapping_add(1)))
            ^ mix(owner << 32))
    }

    /// Which run `guest` has at place `run`: a permutation of the whole runs. A last, shorter run
    /// stays where it is.
    fn place(&self, guest: u64, run: u64) -> u64 {
        let runs = self.pages / self.run_pages;
        if run >= runs {
            return run;
        }
        let mut step = mix(self.seed ^ mix(guest + 77)) % runs;
        while gcd(step, runs) != 1 {
            step += 1;
        }
        let shift = u128::from(mix(guest ^ self.seed) % runs);
        let place = (u128::from(run) * u128::from(step) + shift) % u128::from(runs);
        u64::try_from(place).unwrap_or(run)
    }

    /// A geometric number of mean `zero_prefix` from a random word.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float beyond the range saturates, and is bounded right after"
    )]
    fn prefix(&self, word: u64) -> usize {
        if self.zero_prefix <= 0.0 {
            return 0;
        }
        let stay = self.zero_prefix / (self.zero_prefix + 1.0);
        let draw = (1.0 - unit(word)).ln() / stay.ln();
        (draw as usize).min(MAX_PREFIX)
    }
}

/// The next word of a splitmix64 stream.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

/// The finalizer of splitmix64: a bijection that looks random.
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A number in 0..1 from a random word.
#[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1_u64 << 53) as f64
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use proptest::prelude::*;

    fn content() -> Content {
        Content {
            seed: 42,
            dup: 0.7,
            run_pages: 16,
            zero_prefix: 0.0,
            pages: 4096,
            shuffle: false,
        }
    }

    fn page(content: &Content, guest: u64, index: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        content.fill(guest, index, &mut page);
        page
    }

    /// The saving a plain count of distinct pages gives.
    fn counted(content: &Content, guests: u64) -> u64 {
        let all = (0..guests).flat_map(|g| (0..content.pages).map(move |i| (g, i)));
        let distinct: HashSet<Vec<u8>> = all.map(|(g, i)| page(content, g, i)).collect();
        (guests * content.pages - distinct.len() as u64) * PAGE_BYTES as u64
    }

    #[test]
    fn the_same_seed_gives_the_same_pages_and_another_does_not() {
        let other = Content {
            seed: 43,
            ..content()
        };
        assert_eq!(page(&content(), 1, 5), page(&content(), 1, 5));
        assert_ne!(page(&content(), 1, 5), page(&other, 1, 5));
    }

    #[test]
    fn the_ideal_is_what_counting_distinct_pages_gives() {
        for shuffle in [false, true] {
            let content = Content {
                pages: 1000,
                zero_prefix: 100.0,
                shuffle,
                ..content()
            };
            let ideal = content.ideal_saved_bytes(3);
            assert_eq!(ideal, counted(&content, 3));
            assert!(ideal > 0);
        }
    }

    #[test]
    fn the_share_of_equal_pages_is_near_dup_and_comes_in_runs() {
        let content = content();
        let equal: Vec<bool> = (0..content.pages)
            .map(|i| page(&content, 0, i) == page(&content, 1, i))
            .collect();
        let share = equal.iter().filter(|&&e| e).count() * 100 / equal.len();
        assert!((60..80).contains(&share), "{share} % equal");
        assert!(equal.chunks(16).all(|run| run.iter().all(|&e| e == run[0])));
    }

    #[test]
    fn a_shuffled_guest_has_the_same_pages_elsewhere() {
        let content = Content {
            dup: 1.0,
            shuffle: true,
            ..content()
        };
        let sorted = |guest| {
            let mut pages: Vec<_> = (0..content.pages)
                .map(|i| page(&content, guest, i))
                .collect();
            pages.sort();
            pages
        };
        assert_eq!(sorted(0), sorted(1));
        let moved = (0..content.pages).filter(|&i| page(&content, 0, i) != page(&content, 1, i));
        assert!(moved.count() > 3000);
    }

    #[test]
    fn zero_prefixes_have_their_mean_and_end_where_they_should() {
        let content = Content {
            zero_prefix: 128.0,
            ..content()
        };
        let prefixes: Vec<usize> = (0..content.pages)
            .map(|i| page(&content, 0, i).iter().take_while(|&&b| b == 0).count())
            .collect();
        let mean = prefixes.iter().sum::<usize>() / prefixes.len();
        assert!((118..138).contains(&mean), "mean {mean}");
        let short = prefixes.iter().filter(|&&p| p < 128).count();
        assert!(short > prefixes.len() / 2, "not geometric: {short}");
    }

    #[test]
    fn pages_may_differ_in_their_last_eight_bytes_alone() {
        let content = Content {
            zero_prefix: 1e12,
            ..content()
        };
        let pages: HashSet<_> = (0..content.pages).map(|i| page(&content, 0, i)).collect();
        assert_eq!(pages.len() as u64, content.pages);
        let ends = |page: &Vec<u8>| page[..PAGE_BYTES - 8].iter().all(|&byte| byte == 0);
        assert!(pages.iter().all(ends));
    }

    proptest! {
        #[test]
        fn every_place_is_taken_once(seed: u64, guest in 0_u64..50, runs in 1_u64..300) {
            let content = Content { seed, run_pages: 4, pages: runs * 4 + 3, ..content() };
            let mut seen = HashMap::new();
            for run in 0..=runs {
                prop_assert_eq!(seen.insert(content.place(guest, run), run), None);
            }
            prop_assert!(seen.keys().all(|&place| place <= runs));
        }

        #[test]
        fn no_page_is_all_zeros(seed: u64, mean in 0.0..100_000.0_f64, index: u64) {
            let content = Content { seed, zero_prefix: mean, ..content() };
            prop_assert!(page(&content, 0, index % content.pages).iter().any(|&b| b != 0));
        }
    }
}

//! What is in the guests of a case, and what a perfect engine saves of it.

use crate::bench::content::Content;

const PAGE_BYTES: u64 = 4096;

/// What is in the pages of all guests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Runs of pages, some the same in all guests.
    Runs(Content),
    /// One page, everywhere.
    Equal {
        /// Its content follows from it.
        seed: u64,
        /// Pages in a guest.
        pages: u64,
    },
}

impl Fill {
    /// Pages in a guest.
    pub(super) fn pages(&self) -> u64 {
        match self {
            Self::Runs(content) => content.pages,
            Self::Equal { pages, .. } => *pages,
        }
    }

    /// Fills `page` as page `index` of guest `number`.
    pub(super) fn page(&self, number: u64, index: u64, page: &mut [u8]) {
        match self {
            Self::Runs(content) => content.fill(number, index, page),
            Self::Equal { seed, .. } => one(*seed).fill(0, 0, page),
        }
    }

    /// What a perfect engine gives back of `guests` guests.
    pub(super) fn ideal_bytes(&self, guests: u64) -> u64 {
        match self {
            Self::Runs(content) => content.ideal_saved_bytes(guests),
            Self::Equal { pages, .. } => (pages * guests).saturating_sub(1) * PAGE_BYTES,
        }
    }

    /// The flags that make guest `number` of it.
    pub(super) fn words(&self, number: u64) -> Vec<String> {
        let mut words = vec![
            format!("--number={number}"),
            format!("--pages={}", self.pages()),
        ];
        match self {
            Self::Equal { seed, .. } => {
                words.extend([format!("--seed={seed}"), "--equal".to_owned()])
            }
            Self::Runs(content) => {
                words.push(format!("--seed={}", content.seed));
                words.push(format!("--dup={}", content.dup));
                words.push(format!("--run-pages={}", content.run_pages));
                words.push(format!("--zero-prefix={}", content.zero_prefix));
                words.extend(content.shuffle.then(|| "--shuffle".to_owned()));
            }
        }
        words
    }
}

fn one(seed: u64) -> Content {
    Content {
        seed,
        dup: 1.0,
        run_pages: 1,
        zero_prefix: 0.0,
        pages: 1,
        shuffle: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_equal_and_one_stays() {
        let fill = Fill::Equal { seed: 3, pages: 5 };
        let page = |number, index| {
            let mut page = vec![0; 4096];
            fill.page(number, index, &mut page);
            page
        };
        assert_eq!(page(0, 0), page(4, 2));
        assert!(page(0, 0).iter().any(|&byte| byte != 0));
        assert_eq!(fill.ideal_bytes(3), 14 * 4096);
        assert_eq!(fill.ideal_bytes(0), 0);
    }
}

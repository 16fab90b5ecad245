//! The content of the guests of a case, and the saving of a perfect engine.

use crate::bench::content::{Content, mix};

const PAGE_BYTES: u64 = 4096;
/// Pages of a child of which one run is its own.
const BLOCK: u64 = 64;
/// The longest such run. Any length up to it is as likely, so three tenths are the child's own.
const LONGEST: u64 = 38;

/// What is in the pages of all guests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// Runs of pages, some the same in all guests.
    Runs(Content),
    /// Children of one image: each has runs of its own in it, at other places and of other lengths than its brothers.
    Children {
        /// All content follows from it.
        seed: u64,
        /// Pages in a guest.
        pages: u64,
    },
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
            Self::Children { pages, .. } | Self::Equal { pages, .. } => *pages,
        }
    }

    /// Fills `page` as page `index` of guest `number`.
    pub(super) fn page(&self, number: u64, index: u64, page: &mut [u8]) {
        match self {
            Self::Runs(content) => content.fill(number, index, page),
            Self::Children { seed, pages } => {
                let owner = if owns(*seed, number, index) {
                    number + 1
                } else {
                    0
                };
                child(*seed, *pages).fill(owner, index, page);
            }
            Self::Equal { seed, .. } => one(*seed).fill(0, 0, page),
        }
    }

    /// What a perfect engine gives back of `guests` guests.
    pub(super) fn ideal_bytes(&self, guests: u64) -> u64 {
        match self {
            Self::Runs(content) => content.ideal_saved_bytes(guests),
            Self::Children { seed, pages } => {
                let same = |index| (0..guests).filter(|&it| !owns(*seed, it, index)).count();
                let saved = |index| same(index).saturating_sub(1) as u64;
                (0..*pages).map(saved).sum::<u64>() * PAGE_BYTES
            }
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
            Self::Children { seed, .. } => {
                words.extend([format!("--seed={seed}"), "--children".to_owned()]);
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

/// Whether page `index` is the own of child `number`, and not the image's.
fn owns(seed: u64, number: u64, index: u64) -> bool {
    let own = mix(seed ^ mix(number + 1));
    let place = index + own % BLOCK;
    let draw = mix(own ^ mix(place / BLOCK));
    let len = draw % (LONGEST + 1);
    let first = (draw >> 32) % (BLOCK - len + 1);
    (first..first + len).contains(&(place % BLOCK))
}

/// Pages that differ by owner and place: that of number 0 is the image.
fn child(seed: u64, pages: u64) -> Content {
    Content {
        dup: 0.0,
        run_pages: 16,
        pages,
        ..one(seed)
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
    fn children_have_three_tenths_of_their_own_at_other_places_and_the_rest_of_the_image() {
        let fill = Fill::Children {
            seed: 3,
            pages: 4096,
        };
        let pages = |number| {
            let page = |index| {
                let mut page = vec![0; 4096];
                fill.page(number, index, &mut page);
                page
            };
            (0..4096).map(page).collect::<Vec<_>>()
        };
        let all = [0, 1, 2].map(pages);
        let distinct: std::collections::HashSet<_> = all.iter().flatten().collect();
        let saved = (3 * 4096 - distinct.len()) * 4096;
        assert_eq!(fill.ideal_bytes(3), saved as u64);
        let own = |number| (0..4096).filter(|&index| owns(3, number, index)).count();
        for number in 0..3 {
            assert!((1100..1350).contains(&own(number)), "{}", own(number));
        }
        let both = |&index: &u64| owns(3, 0, index) && owns(3, 1, index);
        let both = (0..4096).filter(both).count();
        assert!(
            (250..500).contains(&both),
            "{both} are both's own: a tenth by chance"
        );
    }

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

//! Guests that hold merged pages which they do not read, and give nothing back: most likely these pages are free in the guest,
//! like the files that its kernel has cached once.

use wire::GuestStatus;

use crate::guest::counters::is_most;

/// Looks in a row that must find most merged pages unread: a page that was merged just now is unread as well.
const LEAST_LOOKS: u64 = 30;

/// How the guest could give memory back, if most of its merged pages have been unread for so many `looks`.
pub(super) fn of(guest: &GuestStatus, looks: u64) -> Option<String> {
    let (merged, unread) = (guest.pages_sharing, guest.pages_unread);
    let recycled = guest.pages_recycled;
    let keeps = recycled.discarded == 0 && recycled.told == 0;
    let hint = || {
        format!(
            "{unread} of {merged} merged pages were not read since, and it discards nothing. If they are free, give them back: \
             a virtual machine by free page reporting or a balloon, a program by madvise or pageone_recycle (/usr/share/doc/pageone/recycle.md)"
        )
    };
    (keeps && looks >= LEAST_LOOKS && is_most(unread, merged)).then(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::Recycled;

    #[test]
    fn only_a_guest_that_reads_little_and_discards_nothing_gets_a_hint() {
        let idle = GuestStatus {
            pages_sharing: 10_000,
            pages_unread: 5_000,
            ..GuestStatus::default()
        };
        let hint = of(&idle, LEAST_LOOKS).expect("most is unread");
        assert!(hint.starts_with("5000 of 10000 merged pages"), "{hint}");
        assert_eq!(of(&idle, LEAST_LOOKS - 1), None, "too early");
        let small = GuestStatus {
            pages_sharing: 1000,
            pages_unread: 1000,
            ..GuestStatus::default()
        };
        assert_eq!(of(&small, LEAST_LOOKS), None, "not worth it");
        let reading = GuestStatus {
            pages_unread: 4_999,
            ..idle.clone()
        };
        assert_eq!(of(&reading, LEAST_LOOKS), None, "it reads");
        let recycled = |discarded, zeroed, told| GuestStatus {
            pages_recycled: Recycled {
                discarded,
                zeroed,
                told,
            },
            ..idle.clone()
        };
        assert_eq!(of(&recycled(1, 0, 0), LEAST_LOOKS), None, "it discards");
        assert_eq!(of(&recycled(0, 0, 1), LEAST_LOOKS), None, "it tells");
        assert!(
            of(&recycled(0, 1, 0), LEAST_LOOKS).is_some(),
            "zeros are no discards"
        );
    }
}

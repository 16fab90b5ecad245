//! KSM's knowledge of a process: /proc/PID/ksm_stat (Documentation/admin-guide/mm/ksm.rst).

use std::io;

/// KSM's figures of one process. Older kernels have no word on `all` and `mergeable`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Pages that KSM has looked at and keeps an entry of, 64 bytes each.
    pub tracked: u64,
    /// Pages that are the kernel's zero page now.
    pub zeros: u64,
    /// Pages that are shared.
    pub merging: u64,
    /// What this saves, in bytes, less the entries.
    pub profit: i64,
    /// Whether all its memory was given to KSM (`PR_SET_MEMORY_MERGE`).
    pub all: bool,
    /// Whether a part of its memory is KSM's, where the kernel says so.
    pub mergeable: Option<bool>,
}

impl Member {
    /// The figures of process `pid`.
    ///
    /// # Errors
    /// `NotFound` when the process is gone, or on a kernel without KSM; `PermissionDenied` for others' processes.
    pub fn of(pid: u32) -> io::Result<Self> {
        let text = crate::text::read(format!("/proc/{pid}/ksm_stat"))?;
        Ok(Self::parse(&text))
    }

    /// Lines are `name value`, later ones `name: value`; those of newer kernels are passed over.
    fn parse(text: &str) -> Self {
        let mut member = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.split_once(' ') else {
                continue;
            };
            let number = || value.parse().unwrap_or_default();
            match name.trim_end_matches(':') {
                "ksm_rmap_items" => member.tracked = number(),
                "ksm_zero_pages" => member.zeros = number(),
                "ksm_merging_pages" => member.merging = number(),
                "ksm_process_profit" => member.profit = value.parse().unwrap_or_default(),
                "ksm_merge_any" => member.all = value == "yes",
                "ksm_mergeable" => member.mergeable = Some(value == "yes"),
                _ => {}
            }
        }
        member
    }

    /// Whether some of its memory may be KSM's, as far as the kernel tells.
    #[must_use]
    pub fn may_take_part(&self) -> bool {
        self.mergeable.unwrap_or(true) || self.tracked > 0 || self.zeros > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_new_kernels_are_understood() {
        let old = Member::parse(
            "ksm_rmap_items 7\nksm_zero_pages 2\nksm_merging_pages 3\nksm_process_profit -448\n",
        );
        let expected = Member {
            tracked: 7,
            zeros: 2,
            merging: 3,
            profit: -448,
            all: false,
            mergeable: None,
        };
        assert_eq!(old, expected);
        let new = Member::parse(
            "ksm_rmap_items 0\nksm_merge_any: yes\nksm_mergeable: no\nksm_new: 5 apples\n\nx",
        );
        assert!(new.all && new.mergeable == Some(false) && !new.may_take_part());
        assert!(old.may_take_part() && Member::default().may_take_part());
    }
}

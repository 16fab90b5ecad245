//! The content of a store, as root sees it.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::support::Guest;

const PAGE: usize = 4096;

/// The pages of a memory file that are not empty.
pub(crate) fn pages(file: &Path) -> Vec<Vec<u8>> {
    // Closed meanwhile: nothing is in it.
    let bytes = fs::read(file).unwrap_or_default();
    let pages = bytes.chunks(PAGE);
    pages
        .filter(|page| page.iter().any(|&byte| byte != 0))
        .map(<[u8]>::to_vec)
        .collect()
}

/// Pages of a process from `at` on, as far as they are there.
pub(crate) fn memory(pid: u32, at: u64, count: usize) -> HashSet<Vec<u8>> {
    let file = File::open(format!("/proc/{pid}/mem")).unwrap();
    let read = |page: usize| {
        let mut bytes = vec![0; PAGE];
        file.read_exact_at(&mut bytes, at + (page * PAGE) as u64)
            .ok()?;
        bytes.iter().any(|&byte| byte != 0).then_some(bytes)
    };
    (0..count).filter_map(read).collect()
}

/// What a guest has offered.
pub(crate) fn offered(guest: &Guest, count: usize) -> HashSet<Vec<u8>> {
    memory(guest.pid, guest.memory as u64, count)
}

/// Whether `secret` stands anywhere in the page, where the setuid program puts it.
pub(crate) fn tells(page: &[u8], secret: &[u8]) -> bool {
    page.chunks(secret.len()).any(|part| part == secret)
}

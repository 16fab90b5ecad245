//! The machine and its kernel, as /proc/sys names them.

use std::path::Path;

use crate::foreign::ForeignName;

/// The machine's name; empty where the kernel does not tell.
#[must_use]
pub fn name() -> ForeignName {
    read("/proc/sys/kernel/hostname").into()
}

/// The kernel's release, like `6.8.0-31-generic`; empty where it does not tell.
#[must_use]
pub fn kernel_release() -> String {
    read("/proc/sys/kernel/osrelease")
}

/// Major and minor number of a release.
#[must_use]
pub fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The whole number in a file of /proc/sys; `None` where there is no such file.
#[must_use]
pub fn sysctl(name: &str) -> Option<u64> {
    read(Path::new("/proc/sys").join(name.replace('.', "/")))
        .parse()
        .ok()
}

fn read(path: impl AsRef<Path>) -> String {
    // Every user may read these, so every user may lock them.
    let text = crate::text::read(path).unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_named() {
        assert!(!name().raw().is_empty());
        assert!(version_of(&kernel_release()).unwrap() >= (5, 0));
        assert_eq!(version_of("6.8.0-31-generic"), Some((6, 8)));
        assert_eq!(version_of("6.18-rc1"), Some((6, 18)));
        assert_eq!(version_of("six"), None);
        assert!(sysctl("vm.max_map_count").unwrap() > 1000);
        assert_eq!(sysctl("no.such"), None);
    }
}

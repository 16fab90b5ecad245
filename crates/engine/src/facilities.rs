//! The facilities of the kernel and the machine that the engine needs, found and tried before it starts.

use std::os::fd::{AsFd, OwnedFd};

use numa::Topology;
use rustix::io::Errno;
use sys::memfd::Lifeline;

use crate::domain::placement::Atlas;
use crate::domain::placement::Placement;
use crate::error::EngineError;
use crate::page::PAGE;

/// What this process may do with userfaultfd.
#[derive(Debug)]
pub(crate) enum Right {
    /// It may open the device, and hands it to guests.
    Lends(OwnedFd),
    /// It may use the system call. Its guests may too, if they have its rights.
    Own,
    /// Neither: guests need a right of their own.
    None,
}

/// What an engine needs of the kernel, each part tried in this process.
#[derive(Debug)]
pub struct Facilities {
    /// `PAGEMAP_SCAN`, and the `/proc` in which it is.
    pub page_map: Result<(), EngineError>,
    /// `process_vm_readv`.
    pub reading: Result<(), EngineError>,
    /// userfaultfd with `WP_ASYNC` and `MOVE`; false where this process has no right to it.
    pub userfaultfd: Result<bool, EngineError>,
    /// Leases on memory files.
    pub lifelines: Result<(), EngineError>,
}

impl Facilities {
    /// Tries all of them.
    #[must_use]
    pub fn tried() -> Self {
        Self {
            page_map: page_map(),
            reading: reading(),
            userfaultfd: userfaultfd().map(|right| !matches!(right, Right::None)),
            lifelines: lifelines(),
        }
    }
}

/// Tries whether the kernel tells of many pages at once what was written.
pub(crate) fn page_map() -> Result<(), EngineError> {
    // Linux 6.7 has it, and lacks MOVE.
    let needs = "mount it (`mount -t proc proc /proc`)";
    let proc = |error| cannot_try("the /proc of this PID namespace", needs, error);
    let found = sys::process::check_proc();
    found.map_err(|error| proc(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let needs = "Linux 6.8 or newer";
    sys::pagemap::probe().map_err(|error| cannot_try("PAGEMAP_SCAN", needs, error))
}

/// Tries whether memory of other processes may be read by the system call for that: a container's filter may refuse it.
pub(crate) fn reading() -> Result<(), EngineError> {
    let needs = "a kernel built with CONFIG_CROSS_MEMORY_ATTACH, and no filter that hides it";
    sys::process::try_to_read().map_err(|error| cannot_try("process_vm_readv", needs, error))
}

/// Tries how pages can be held and moved.
pub(crate) fn userfaultfd() -> Result<Right, EngineError> {
    let device = sys::uffd::Uffd::device().ok();
    let tried = match &device {
        Some(device) => sys::uffd::Uffd::from_device(device.as_fd()),
        None => sys::uffd::Uffd::open(),
    };
    match tried {
        Ok(_) => Ok(device.map_or(Right::Own, Right::Lends)),
        // Guests may have a right of their own that this process lacks.
        Err(Errno::PERM | Errno::ACCESS) => {
            tracing::warn!(
                "no right to userfaultfd here: guests need one of their own (remedy: vm.unprivileged_userfaultfd=1, or a daemon of root's)"
            );
            Ok(Right::None)
        }
        Err(error) => Err(cannot_try(
            "userfaultfd with WP_ASYNC and MOVE",
            "Linux 6.8 or newer built with CONFIG_USERFAULTFD",
            error,
        )),
    }
}

/// Tries whether a lifeline tells that it is held: without that no canonical page would ever be given back.
pub(crate) fn lifelines() -> Result<(), EngineError> {
    const WHAT: &str = "a lease on a memory file";
    const NEEDS: &str = "fs.leases-enable=1, on a kernel built with CONFIG_FILE_LOCKING";
    let tried = |error| cannot_try(WHAT, NEEDS, error);
    let (line, held) = Lifeline::new().map_err(tried)?;
    let before = line.ask().map_err(tried)?;
    drop(held);
    match (before, line.ask().map_err(tried)?) {
        (false, true) => Ok(()),
        _ => Err(tried(Errno::NOSYS)),
    }
}

/// Why a facility could not be tried: the kernel lacks it, or this process lacks something at the moment.
fn cannot_try(what: &'static str, needs: &'static str, error: Errno) -> EngineError {
    let remedy = match error {
        Errno::MFILE => {
            "this process has no descriptors left: raise its limit (ulimit -n, LimitNOFILE=)"
        }
        Errno::NFILE => {
            "the machine has no descriptors left: raise fs.file-max, or end what holds them"
        }
        Errno::NOMEM | Errno::AGAIN => {
            "memory is short: free some, or raise the limit of this process's cgroup (memory.max)"
        }
        Errno::PERM | Errno::ACCESS => {
            "it is forbidden here: run as root, or allow it (seccomp, LSM, hidepid of /proc)"
        }
        _ => {
            return EngineError::Missing {
                what,
                needs,
                source: error.into(),
            };
        }
    };
    EngineError::Untried {
        what,
        remedy,
        source: error.into(),
    }
}

/// Where stores are made: one on each node with memory.
pub(crate) fn placement(topology: Option<Topology>) -> std::io::Result<Placement> {
    let topology = match topology {
        Some(topology) => topology,
        None => Topology::live().map_err(std::io::Error::other)?,
    };
    Placement::new(topology).ok_or_else(|| std::io::Error::other("no node has memory"))
}

/// How to tell where pages are, tried on a page of this process.
pub(crate) fn atlas(placement: &Placement) -> Result<Atlas, EngineError> {
    let missing = |what, needs, source| EngineError::Missing {
        what,
        needs,
        source,
    };
    let atlas = Atlas::new(placement).ok_or_else(|| {
        missing(
            "the place of emulated nodes in physical memory",
            "a kernel with memory hot-plug (/sys/devices/system/memory)",
            std::io::ErrorKind::Unsupported.into(),
        )
    })?;
    if let Atlas::Ranges(_) = atlas {
        let page = std::hint::black_box([1u8; 1]);
        let at = page.as_ptr() as u64 / PAGE * PAGE;
        let map = sys::pagemap::Pagemap::open(std::process::id());
        let frames = map.and_then(|map| map.frames(at..at + PAGE));
        let frames = frames.map_err(std::io::Error::from);
        let needs = "CAP_SYS_ADMIN: run as root";
        let denied = |source| missing("the right to read frame numbers", needs, source);
        match frames.map_err(denied)?.first() {
            Some(&frame) if frame != 0 => {}
            _ => return Err(denied(std::io::ErrorKind::PermissionDenied.into())),
        }
    }
    Ok(atlas)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_short_is_not_called_missing() {
        let said = |errno| cannot_try("PAGEMAP_SCAN", "Linux 6.7", errno).to_string();
        for (errno, remedy) in [
            (Errno::MFILE, "LimitNOFILE"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOMEM, "memory.max"),
            (Errno::ACCESS, "run as root"),
        ] {
            let said = said(errno);
            assert!(said.contains(remedy) && !said.contains("missing"), "{said}");
        }
        assert_eq!(said(Errno::NOTTY), "PAGEMAP_SCAN is missing: Linux 6.7");
    }
}

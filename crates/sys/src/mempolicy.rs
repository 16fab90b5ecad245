//! Memory policies and the nodes of pages: mbind(2), set_mempolicy(2), get_mempolicy(2), move_pages(2),
//! set_mempolicy_home_node(2) and getcpu(2).
//!
//! All of these are safe to call with any address. A policy decides where *future* pages come from, and a
//! migration copies a page and replaces it under the page-table lock: no byte that a program can read changes.
//! The kernel checks every address and answers EFAULT where nothing is mapped.

use std::io;

use linux_raw_sys::mempolicy as raw;
use rustix::process::Pid;

/// The kernel's upper bound on node numbers (`CONFIG_NODES_SHIFT` is at most 10).
pub const MAX_NODES: u32 = 1024;
const WORDS: usize = (MAX_NODES / 64) as usize;
// The kernel looks at one bit less than it is told (`get_nodes()` in mm/mempolicy.c).
const MAX_NODE_ARGUMENT: libc::c_ulong = MAX_NODES as libc::c_ulong + 1;

/// Pages that one [`pages_to_nodes`] call hands to the kernel at a time: keeps the two arrays in the L1 cache.
const QUERY_BATCH: usize = 1024;

/// A set of node numbers below [`MAX_NODES`], laid out as the kernel wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeMask([u64; WORDS]);

impl NodeMask {
    /// The empty set.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// The set of `nodes`.
    ///
    /// # Errors
    /// `InvalidInput` when a number is not below [`MAX_NODES`].
    pub fn from_nodes(nodes: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        let mut mask = Self::EMPTY;
        for node in nodes {
            if node >= MAX_NODES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("node {node} is not below {MAX_NODES}"),
                ));
            }
            mask.0[(node / 64) as usize] |= 1 << (node % 64);
        }
        Ok(mask)
    }

    /// The numbers in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..MAX_NODES).filter(|node| self.0[(node / 64) as usize] >> (node % 64) & 1 == 1)
    }

    /// Whether the set holds no node.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }
}

/// What a policy does with its nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The policy of the thread, or of the system where the thread has none.
    Default,
    /// Only these nodes; an allocation that none of them can serve fails.
    Bind,
    /// These first, then the others by distance. One node only.
    Preferred,
    /// As `Preferred`, for several nodes. Linux 5.15.
    PreferredMany,
    /// Page by page in turn.
    Interleave,
    /// In turn, as many pages as the weights in /sys/kernel/mm/mempolicy/weighted_interleave say. Linux 6.9.
    WeightedInterleave,
    /// The node of the CPU that touches the page first.
    Local,
}

// libc 0.2 lacks the two newest modes.
const MPOL_PREFERRED_MANY: libc::c_int = 5;
const MPOL_WEIGHTED_INTERLEAVE: libc::c_int = 6;

impl Mode {
    fn number(self) -> libc::c_int {
        match self {
            Self::Default => libc::MPOL_DEFAULT,
            Self::Preferred => libc::MPOL_PREFERRED,
            Self::Bind => libc::MPOL_BIND,
            Self::Interleave => libc::MPOL_INTERLEAVE,
            Self::Local => libc::MPOL_LOCAL,
            Self::PreferredMany => MPOL_PREFERRED_MANY,
            Self::WeightedInterleave => MPOL_WEIGHTED_INTERLEAVE,
        }
    }

    #[cfg(test)]
    fn from_number(number: libc::c_int) -> Option<Self> {
        [
            Self::Default,
            Self::Preferred,
            Self::Bind,
            Self::Interleave,
            Self::Local,
            Self::PreferredMany,
            Self::WeightedInterleave,
        ]
        .into_iter()
        .find(|mode| mode.number() == number)
    }
}

/// What mbind does with the pages that are there already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Existing {
    /// They stay where they are.
    Stay,
    /// Those mapped by no other process move to where the policy wants them, as far as they can.
    Move,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Sets the policy of the pages in `[address, address + len_bytes)` of this process.
///
/// # Errors
/// EFAULT where the range is not mapped whole, EINVAL for an address off a page boundary, for a node without
/// memory or a mode this kernel lacks, ENOSYS on a kernel without NUMA.
pub fn mbind(
    address: usize,
    len_bytes: usize,
    mode: Mode,
    nodes: &NodeMask,
    existing: Existing,
) -> io::Result<()> {
    let flags = match existing {
        Existing::Stay => 0,
        Existing::Move => raw::MPOL_MF_MOVE,
    };
    // SAFETY: the kernel reads MAX_NODES bits at the mask, which holds as many. It writes nothing of ours;
    // the module's head says why the range itself may be any.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            len_bytes,
            mode.number(),
            nodes.0.as_ptr(),
            MAX_NODE_ARGUMENT,
            flags,
        )
    };
    check(result).map(drop)
}

/// Sets the policy of this thread, for every range that has none of its own; children and exec inherit it.
///
/// # Errors
/// EINVAL for a node without memory or a mode this kernel lacks, ENOSYS on a kernel without NUMA.
pub fn set_mempolicy(mode: Mode, nodes: &NodeMask) -> io::Result<()> {
    // SAFETY: the kernel reads MAX_NODES bits at the mask, which holds as many, and writes nothing of ours.
    let result = unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            mode.number(),
            nodes.0.as_ptr(),
            MAX_NODE_ARGUMENT,
        )
    };
    check(result).map(drop)
}

/// The policy of this thread.
///
/// # Errors
/// ENOSYS on a kernel without NUMA; `Unsupported` for a mode this crate does not know.
#[cfg(test)]
pub(crate) fn thread_policy() -> io::Result<(Mode, NodeMask)> {
    policy(0, 0)
}

/// The policy of the page at `address`.
///
/// # Errors
/// EFAULT where nothing is mapped; otherwise as [`thread_policy`].
#[cfg(test)]
pub(crate) fn policy_at(address: usize) -> io::Result<(Mode, NodeMask)> {
    policy(address, raw::MPOL_F_ADDR)
}

#[cfg(test)]
fn policy(address: usize, flags: u32) -> io::Result<(Mode, NodeMask)> {
    let mut number: libc::c_int = 0;
    let mut mask = NodeMask::EMPTY;
    // SAFETY: both pointers are to live values of this frame; the kernel writes an int at the first and
    // at most MAX_NODES bits at the second, which holds as many.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut number,
            mask.0.as_mut_ptr(),
            libc::c_ulong::from(MAX_NODES),
            address,
            flags,
        )
    };
    check(result)?;
    // The upper bits are mode flags (static, relative, NUMA balancing).
    let mode = Mode::from_number(number & 0xff)
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, format!("policy {number}")))?;
    Ok((mode, mask))
}

/// Names the node from which distances are measured when a bound range has to fall back. Linux 5.17.
///
/// # Errors
/// ENOSYS before Linux 5.17, EOPNOTSUPP for a range whose policy is neither bind nor preferred-many, EINVAL for an
/// offline node.
pub fn set_mempolicy_home_node(address: usize, len_bytes: usize, node: u32) -> io::Result<()> {
    // SAFETY: takes numbers only; the module's head says why the range may be any.
    let result = unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy_home_node,
            address,
            len_bytes,
            libc::c_ulong::from(node),
            0 as libc::c_ulong,
        )
    };
    check(result).map(drop)
}

/// Writes the node of each page of process `pid` (`None`: this one) to `nodes`; where there is no page, a
/// negative errno: ENOENT nothing there, EFAULT nothing mapped or the zero page.
///
/// The query goes in batches, so it never keeps the memory map of a busy process for long.
///
/// # Errors
/// EPERM for a process we may not look into, ESRCH for one that is gone.
///
/// # Panics
/// When the two slices differ in length.
pub fn pages_to_nodes(pid: Option<Pid>, pages: &[usize], nodes: &mut [i32]) -> io::Result<()> {
    assert_eq!(pages.len(), nodes.len(), "one answer for each page");
    crate::fault::check(crate::fault::Point::Nodes)?;
    for (pages, nodes) in pages.chunks(QUERY_BATCH).zip(nodes.chunks_mut(QUERY_BATCH)) {
        move_pages(pid, pages, None, nodes)?;
    }
    Ok(())
}

/// Moves each page of process `pid` (`None`: this one) to its node in `targets`, and writes where it is
/// afterwards to `nodes`, or a negative errno (EACCES: mapped by others too, EBUSY: pinned just now).
/// Returns how many the kernel left out on account of a failure that stopped it.
///
/// # Errors
/// EPERM, ESRCH as for [`pages_to_nodes`]; ENODEV for a target that is offline, EACCES for one that the
/// cpuset forbids.
///
/// # Panics
/// When the slices differ in length.
pub fn move_pages_to(
    pid: Option<Pid>,
    pages: &[usize],
    targets: &[i32],
    nodes: &mut [i32],
) -> io::Result<usize> {
    assert_eq!(pages.len(), targets.len(), "one target for each page");
    assert_eq!(pages.len(), nodes.len(), "one answer for each page");
    move_pages(pid, pages, Some(targets), nodes)
}

fn move_pages(
    pid: Option<Pid>,
    pages: &[usize],
    targets: Option<&[i32]>,
    nodes: &mut [i32],
) -> io::Result<usize> {
    let flags = if targets.is_some() {
        raw::MPOL_MF_MOVE
    } else {
        0
    };
    // SAFETY: the kernel reads `pages.len()` addresses and as many targets, and writes as many results: all
    // three arrays hold that many (both callers assert it). The addresses themselves may be any.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid.map_or(0, |pid| pid.as_raw_nonzero().get()),
            pages.len() as libc::c_ulong,
            pages.as_ptr(),
            targets.map_or(std::ptr::null(), <[i32]>::as_ptr),
            nodes.as_mut_ptr(),
            flags,
        )
    };
    // Not negative: the number of pages left out, which is no more than were given.
    check(result).map(|left| usize::try_from(left).unwrap_or(usize::MAX))
}

/// Lets this thread run on these CPUs only; children and exec inherit it.
///
/// # Errors
/// `InvalidInput` for a CPU number that the set cannot hold, EINVAL when none of the CPUs is online and allowed.
pub fn run_on_cpus(cpus: &[u32]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        let number = usize::try_from(cpu)
            .ok()
            .filter(|&number| number < rustix::thread::CpuSet::MAX_CPU);
        let message = || io::Error::new(io::ErrorKind::InvalidInput, format!("CPU {cpu}"));
        set.set(number.ok_or_else(message)?);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The CPUs this thread may run on.
///
/// # Errors
/// EINVAL on a machine with more CPUs than the set can hold.
pub fn allowed_cpus() -> io::Result<Vec<u32>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Ok(cpus.filter_map(|cpu| u32::try_from(cpu).ok()).collect())
}

/// The CPU and the node this thread runs on at this moment.
pub fn current_cpu_and_node() -> (u32, u32) {
    let (mut cpu, mut node) = (0_u32, 0_u32);
    // SAFETY: the kernel writes one unsigned int at each of the two, which live in this frame; the third is unused.
    let result = unsafe {
        libc::syscall(
            libc::SYS_getcpu,
            &raw mut cpu,
            &raw mut node,
            std::ptr::null_mut::<libc::c_void>(),
        )
    };
    debug_assert_eq!(result, 0, "getcpu fails for bad pointers only");
    (cpu, node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zeroed::ZeroedSlice;

    #[test]
    fn a_mask_holds_what_it_was_given() {
        let mask = NodeMask::from_nodes([0, 63, 64, 1023]).unwrap();
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 63, 64, 1023]);
        assert!(NodeMask::from_nodes([1024]).is_err());
        assert!(NodeMask::EMPTY.is_empty());
    }

    #[test]
    fn a_bound_range_says_so_and_its_pages_are_there() {
        let mut table = ZeroedSlice::<u64>::new(8 * 512).unwrap();
        let node0 = NodeMask::from_nodes([0]).unwrap();
        let address = table.as_ptr() as usize;
        mbind(
            address,
            table.len_bytes(),
            Mode::Bind,
            &node0,
            Existing::Stay,
        )
        .unwrap();
        assert_eq!(policy_at(address).unwrap(), (Mode::Bind, node0));
        table[0] = 1;
        table[7 * 512] = 1;
        let pages: Vec<usize> = (0..8).map(|page| address + page * 4096).collect();
        let mut nodes = [7; 8];
        pages_to_nodes(None, &pages, &mut nodes).unwrap();
        assert_eq!((nodes[0], nodes[7]), (0, 0));
        assert!(nodes[1..7].iter().all(|&node| node < 0), "{nodes:?}");
    }

    #[test]
    fn errors_come_through() {
        let node0 = NodeMask::from_nodes([0]).unwrap();
        let error = mbind(1, 4096, Mode::Bind, &node0, Existing::Stay).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        let absent = NodeMask::from_nodes([1023]).unwrap();
        assert_eq!(
            set_mempolicy(Mode::Bind, &absent)
                .unwrap_err()
                .raw_os_error(),
            Some(libc::EINVAL)
        );
        let nobody = Pid::from_raw(i32::MAX);
        assert!(pages_to_nodes(nobody, &[0], &mut [0]).is_err());
    }

    #[test]
    fn the_affinity_can_be_set_and_read() {
        std::thread::spawn(|| {
            let all = allowed_cpus().unwrap();
            run_on_cpus(&all[..1]).unwrap();
            assert_eq!(allowed_cpus().unwrap(), all[..1]);
            assert_eq!(current_cpu_and_node().0, all[0]);
            assert!(run_on_cpus(&[]).is_err() && run_on_cpus(&[u32::MAX]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_thread_policy_can_be_set_and_read() {
        let before = thread_policy().unwrap();
        let node0 = NodeMask::from_nodes([0]).unwrap();
        set_mempolicy(Mode::Preferred, &node0).unwrap();
        assert_eq!(thread_policy().unwrap(), (Mode::Preferred, node0));
        set_mempolicy(Mode::Default, &NodeMask::EMPTY).unwrap();
        assert_eq!(thread_policy().unwrap().0, Mode::Default);
        set_mempolicy(before.0, &before.1).unwrap();
    }
}

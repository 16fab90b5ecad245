//! Every system call and every /proc and /sys reader of PageONE, each contract stated once.
//!
//! Two callers with different needs share this crate. The engine and the command line are ordinary
//! programs. The agent is a thread without thread-local storage of its own inside a foreign
//! process, so the parts that it uses ([`uffd`], [`mapping`], [`vma`], [`thread`], [`socket`]) neither
//! allocates nor touches `errno`. These wrappers go through rustix, which enters the kernel
//! directly and returns errors as values.

mod apart;
pub mod bind;
pub mod bystander;
pub mod clock;
pub mod closers;
pub mod confined;
pub mod cpus;
pub mod credentials;
#[cfg(feature = "index")]
pub mod directory;
pub mod dump;
pub mod elf;
#[cfg(target_arch = "x86_64")]
pub mod entry;
pub mod fault;
pub mod filter;
pub mod footing;
pub mod foreign;
pub mod golang;
pub mod guardian;
pub mod heir;
pub mod host;
pub mod inherited;
pub mod keeper;
pub mod keys;
pub mod ksm;
pub mod mapping;
pub mod mark;
pub mod memfd;
pub mod meminfo;
pub mod memory;
pub mod mempolicy;
mod mounts;
mod namespace;
pub mod node;
pub mod own;
pub mod pagemap;
pub mod pins;
pub mod principal;
pub mod priority;
pub mod process;
pub mod raw;
pub mod residence;
pub mod rights;
pub mod sanitizer;
#[cfg(target_arch = "x86_64")]
pub mod seize;
pub mod signals;
pub mod socket;
pub mod stack;
pub mod stranger;
pub mod subject;
pub mod task;
pub mod text;
pub mod thread;
pub mod title;
pub mod twin;
pub mod uffd;
pub mod usage;
pub mod vma;
pub mod witness;
pub mod zeroed;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

//! The agent's library as it will lie in another process: put in order by us, for no loader will see it.

use anyhow::{Context, Result, bail};
use sys::elf::number;

use super::elf::{Elf, Segment};

/// Room for the stack on which a thread of the process works for us, behind the image.
pub(super) const STACK_BYTES: usize = 256 * 1024;

/// What it takes of libc: the place of a thread's error number.
pub(super) const ERRNO: &str = "__errno_location";
/// What std and the allocator would call, in a panic or in what an attached agent never does: it ends the process. An agent
/// that needs more is refused, for it may call that at any time.
const BARRED: [&str; 42] = [
    "_Unwind_Backtrace",
    "_Unwind_DeleteException",
    "_Unwind_GetDataRelBase",
    "_Unwind_GetIP",
    "_Unwind_GetIPInfo",
    "_Unwind_GetLanguageSpecificData",
    "_Unwind_GetRegionStart",
    "_Unwind_GetTextRelBase",
    "_Unwind_RaiseException",
    "_Unwind_Resume",
    "_Unwind_SetGR",
    "_Unwind_SetIP",
    "__register_atfork",
    "__tls_get_addr",
    "__xpg_strerror_r",
    "abort",
    "calloc",
    "clock_gettime",
    "dl_iterate_phdr",
    "dladdr",
    "dlclose",
    "dlopen",
    "dlsym",
    "free",
    "fstat64",
    "getcwd",
    "getenv",
    "getpid",
    "lseek64",
    "malloc",
    "open64",
    "posix_memalign",
    "pthread_key_create",
    "pthread_key_delete",
    "pthread_setspecific",
    "read",
    "readlink",
    "realloc",
    "realpath",
    "stat64",
    "write",
    "writev",
];
/// What stands for these.
const MISSING: &str = "pageone_missing";

/// The library, and where it will lie.
#[derive(Debug)]
pub(super) struct Image {
    elf: Elf,
    base: u64,
}

/// An entry of the image's table of hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    pub(super) name: String,
    /// The hook; `None` for a variable of libc's.
    pub(super) hook: Option<u64>,
    /// Where the image wants to find libc's own.
    pub(super) next: Option<u64>,
}

impl Hook {
    /// The one for the system call of a function of musl's.
    pub(super) fn gate(function: &str) -> Self {
        Self {
            name: function.to_owned(),
            hook: Some(0),
            next: None,
        }
    }
}

impl Image {
    /// The library of this file.
    ///
    /// # Errors
    /// It is no agent's library, or that of another version.
    pub(super) fn of(file: &[u8]) -> Result<Self> {
        let elf = Elf::lay_out(file)?;
        if elf.find(MISSING).is_none() {
            bail!("it is of another version, which cannot be attached");
        }
        Ok(Self { elf, base: 0 })
    }

    /// Bytes that it takes in a process, its stack included.
    pub(super) fn len(&self) -> usize {
        self.elf.bytes.len() + STACK_BYTES
    }

    /// Its parts, with rights of their own.
    pub(super) fn segments(&self) -> &[Segment] {
        &self.elf.segments
    }

    /// What is to be written to where it will lie.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.elf.bytes
    }

    /// Where a function or a variable of it will lie.
    ///
    /// # Errors
    /// It has none of this name.
    pub(super) fn address(&self, name: &str) -> Result<u64> {
        let found = self.elf.find(name);
        let found = found.with_context(|| format!("the agent's library has no {name}"))?;
        Ok(self.base + found)
    }

    /// Puts its addresses in order for a place at `base`, in a process whose libc has the error number at `errno`.
    ///
    /// # Errors
    /// It has relocations that are not known, or needs functions that are not there.
    pub(super) fn relocate(&mut self, base: u64, errno: u64) -> Result<()> {
        const ADDRESS: u32 = 1;
        const GLOBAL: u32 = 6;
        const JUMP: u32 = 7;
        const RELATIVE: u32 = 8;
        const MODULE: u32 = 16;
        self.base = base;
        for entry in self.elf.relocations()? {
            let value = match entry.kind {
                RELATIVE => base.wrapping_add(entry.addend),
                ADDRESS | GLOBAL | JUMP => {
                    let symbol = self.bound(entry.symbol, errno)?;
                    symbol.wrapping_add(if entry.kind == ADDRESS {
                        entry.addend
                    } else {
                        0
                    })
                }
                // A module of thread-local storage, which only a panic would use.
                MODULE => 0,
                kind => bail!("the agent's library has a relocation of kind {kind}"),
            };
            self.write(entry.place, &value.to_le_bytes())?;
        }
        Ok(())
    }

    fn bound(&self, symbol: usize, errno: u64) -> Result<u64> {
        let symbol = self.elf.symbol(symbol).context("a symbol is missing")?;
        if let Some(value) = symbol.value {
            return Ok(self.base + value);
        }
        if symbol.name == ERRNO.as_bytes() {
            return Ok(errno);
        }
        if symbol.is_weak {
            return Ok(0);
        }
        if BARRED.iter().any(|name| name.as_bytes() == symbol.name) {
            return self.address(MISSING);
        }
        bail!(
            "the agent's library calls libc's {}, which one that is attached cannot",
            String::from_utf8_lossy(symbol.name)
        )
    }

    /// Writes the words of the environment.
    ///
    /// # Errors
    /// They do not fit.
    pub(super) fn set_words(&mut self, words: &[u8]) -> Result<()> {
        let at = self.address("PAGEONE_WORDS")? - self.base;
        if words.len() > wire::attach::WORDS_BYTES {
            bail!("the socket's path and the domain are too long");
        }
        self.write(usize::try_from(at)?, words)
    }

    /// Writes a word at an address in it.
    ///
    /// # Errors
    /// It does not lie there.
    pub(super) fn set(&mut self, address: u64, value: u64) -> Result<()> {
        let at = usize::try_from(address.wrapping_sub(self.base))?;
        self.write(at, &value.to_le_bytes())
    }

    fn write(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        let place = self.elf.bytes.get_mut(at..at.saturating_add(bytes.len()));
        place
            .context("a place lies outside")?
            .copy_from_slice(bytes);
        Ok(())
    }

    /// A bit for each call that its hooks see.
    ///
    /// # Errors
    /// It has none.
    pub(super) fn numbers(&self) -> Result<&[u8]> {
        const BYTES: usize = 64;
        let at = usize::try_from(self.address("PAGEONE_NUMBERS")? - self.base)?;
        let bits = self.elf.bytes.get(at..at + BYTES);
        bits.context("a table lies outside")
    }

    /// The requests of ioctl(2) that have a hook.
    ///
    /// # Errors
    /// It has none.
    pub(super) fn requests(&self) -> Result<[u32; 3]> {
        let table = usize::try_from(self.address("PAGEONE_REQUESTS")? - self.base)?;
        let mut all = [0; 3];
        for (index, request) in all.iter_mut().enumerate() {
            let word = number(&self.elf.bytes, table + index * 4, 4);
            *request = u32::try_from(word.context("a table lies outside")?)?;
        }
        Ok(all)
    }

    /// Its table of hooks, once it was [relocated](Self::relocate).
    ///
    /// # Errors
    /// The table is not in order.
    pub(super) fn hooks(&self) -> Result<Vec<Hook>> {
        const MOST: usize = 256;
        let table = usize::try_from(self.address("PAGEONE_HOOKS")? - self.base)?;
        let mut all = Vec::new();
        for entry in (0..MOST).map(|index| table + index * 24) {
            let word = |at| number(&self.elf.bytes, entry + at, 8).context("the table is cut");
            let [name, hook, next] = [word(0)?, word(8)?, word(16)?];
            if name == 0 {
                return Ok(all);
            }
            let name = usize::try_from(name.wrapping_sub(self.base))?;
            let name = self.elf.text(name).context("a hook without a name")?;
            all.push(Hook {
                name: String::from_utf8_lossy(name).into_owned(),
                hook: (hook != 0).then_some(hook),
                next: (next != 0).then_some(next),
            });
        }
        bail!("the table of hooks has no end");
    }
}

//! Code close to libc, between its functions and the hooks, and a note of what was written over libc.
//!
//! A jump reaches 2 GiB, and the image lies farther away, apart from all that is the program's. So the jumps go to this board:
//!
//! ```text
//!   libc's setuid ── jmp ──▶ board: undo, jmp ──▶ hook in the image
//!   hook ── call ──▶ board: what stood in setuid, jmp ──▶ libc's setuid, behind the jump
//! ```

use anyhow::{Context, Result, bail};

use super::site::{ENDBR64, JUMP, SEEN, Site, sites};

pub(super) const BOARD_BYTES: usize = 8192;
/// jmp *0(%rip), and the address behind it.
const FAR: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];

/// Bytes of libc, and those in their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patch {
    pub(super) at: u64,
    pub(super) before: [u8; JUMP],
    pub(super) after: [u8; JUMP],
}

/// The board, as it will lie at an address.
#[derive(Debug)]
pub(super) struct Board {
    base: u64,
    pub(super) code: Vec<u8>,
    pub(super) patches: Vec<Patch>,
}

/// A function of libc: where it is, and how it begins.
pub(super) struct Function {
    pub(super) at: u64,
    pub(super) code: [u8; SEEN],
}

impl Board {
    pub(super) fn new(base: u64) -> Self {
        Self {
            base,
            code: Vec::new(),
            patches: Vec::new(),
        }
    }

    /// Puts `hook` before a function. Gives the address at which the function is called as it was, if it has one way only.
    ///
    /// # Errors
    /// The function's code is not understood, or too far away.
    pub(super) fn hook(&mut self, function: &Function, hook: u64) -> Result<Option<u64>> {
        let sites = sites(&function.code);
        if begins_with_jump(&function.code) {
            bail!("it leads elsewhere: another tool has changed it");
        }
        if sites.is_empty() {
            bail!("its code is not one of those that are known");
        }
        for site in &sites {
            let to = self.far(&site.undo, hook)?;
            let at = function.at + site.at as u64;
            let before = function.code.get(site.at..site.at + JUMP);
            self.patches.push(Patch {
                at,
                before: before.context("it is cut")?.try_into()?,
                after: jump(at, to).context("it is too far away")?,
            });
        }
        match sites.as_slice() {
            [Site { at, len, .. }] => {
                let end = at + len;
                let code = function.code.get(..end).context("it is cut")?;
                self.far(code, function.at + end as u64).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Adds code that goes on far away.
    fn far(&mut self, code: &[u8], to: u64) -> Result<u64> {
        let at = self.base + self.code.len() as u64;
        self.code.extend_from_slice(code);
        self.code.extend_from_slice(&FAR);
        self.code.extend_from_slice(&to.to_le_bytes());
        self.code.resize(self.code.len().next_multiple_of(16), 0xcc);
        if self.code.len() > BOARD_BYTES {
            bail!("there are too many functions");
        }
        Ok(at)
    }
}

/// Whether a function leads elsewhere: an agent has been here.
pub(super) fn begins_with_jump(code: &[u8]) -> bool {
    code.strip_prefix(&ENDBR64)
        .unwrap_or(code)
        .starts_with(&[0xe9])
}

/// Where a function leads whose first instruction is a jump.
pub(super) fn jump_at_beginning(function: &Function) -> Option<u64> {
    let skip = match function.code.starts_with(&ENDBR64) {
        true => ENDBR64.len(),
        false => 0,
    };
    match function.code.get(skip..)? {
        [0xe9, a, b, c, d, ..] => {
            let distance = i32::from_le_bytes([*a, *b, *c, *d]);
            let behind = function.at + (skip + JUMP) as u64;
            Some(behind.wrapping_add_signed(distance.into()))
        }
        _ => None,
    }
}

/// A jump from `from` to `to`.
fn jump(from: u64, to: u64) -> Option<[u8; JUMP]> {
    let distance = to.wrapping_sub(from + JUMP as u64).cast_signed();
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_leads_to_its_hook_and_back() {
        let mut function = Function {
            at: 0x10_0000,
            code: [0x90; SEEN],
        };
        let setuid = [
            0x48, 0x83, 0xec, 0x38, 0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0,
        ];
        function.code[..setuid.len()].copy_from_slice(&setuid);
        let mut board = Board::new(0x20_0000);
        let next = board.hook(&function, 0x7777_0000_0000).unwrap();
        assert_eq!(next, Some(0x20_0020));
        let [patch] = board.patches.as_slice() else {
            panic!("one site")
        };
        assert_eq!(
            (patch.at, patch.before),
            (0x10_0004, [0x64, 0x48, 0x8b, 0x04, 0x25])
        );
        assert_eq!(jump(patch.at, 0x20_0000), Some(patch.after));
        assert_eq!(board.code[..4], [0x48, 0x83, 0xc4, 0x38]);
        assert_eq!(board.code[10..18], 0x7777_0000_0000_u64.to_le_bytes());
        assert_eq!(board.code[0x20..0x2d], setuid);
        assert_eq!(board.code[0x33..0x3b], 0x10_000d_u64.to_le_bytes());
        assert!(jump(0, 1 << 40).is_none());
    }
}

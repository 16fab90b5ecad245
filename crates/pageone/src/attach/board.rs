//! Code close to libc, between its functions and the hooks, and a note of what was written over libc.
//!
//! A jump reaches 2 GiB, and the image lies farther away, apart from all that is the program's. So the jumps go to this board:
//!
//! ```text
//!   libc's setuid ── jmp ──▶ board: undo, jmp ──▶ hook in the image
//!   hook ── call ──▶ board: what stood in setuid, jmp ──▶ libc's setuid, behind the jump
//! ```

use anyhow::{Context, Result, bail};
use iced_x86::{Decoder, DecoderOptions};
use wire::attach::LEAVES;

use super::gates::Gate;
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
                let code = moved(code, function.at, self.end()).context("it is too far away")?;
                self.far(&code, function.at + end as u64).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Puts the image's `entered` in the place of a system call of the function with this code, which lies at `at`. Where `only` has
    /// requests, which come in the second argument, a call with another one is libc's as before.
    ///
    /// # Errors
    /// It is too far away.
    pub(super) fn gate(
        &mut self,
        (at, code): (u64, &[u8]),
        gate: Gate,
        entered: u64,
        only: &[u32],
    ) -> Result<()> {
        let mut moved = code
            .get(gate.at..gate.enters)
            .context("it is cut")?
            .to_vec();
        for (index, request) in only.iter().enumerate() {
            moved.extend([0x81, 0xfe]); // cmp $request, %esi
            moved.extend(request.to_le_bytes());
            // je, behind the other requests and the jump to libc's own call
            let over = (only.len() - index - 1) * 8 + FAR.len() + 8;
            moved.extend([0x74, u8::try_from(over)?]);
        }
        if !only.is_empty() {
            moved.extend(FAR);
            moved.extend((at + gate.enters as u64).to_le_bytes());
        }
        self.enter(&moved, &[], entered, at + gate.end() as u64)
            .and_then(|to| self.jump_at(at, code, gate, to))
    }

    /// Has a thread tell the image of the stack that it unmaps, before it does so at the gate of `code`, which begins at `at`.
    ///
    /// # Errors
    /// It is too far away.
    pub(super) fn end_of_thread(
        &mut self,
        (at, code): (u64, &[u8]),
        gate: Gate,
        entered: u64,
    ) -> Result<()> {
        let [a, b, c, d, ..] = LEAVES.to_le_bytes();
        let own = code.get(gate.at..gate.enters).context("it is cut")?;
        self.enter(&[0xb8, a, b, c, d], own, entered, at + gate.enters as u64)
            .and_then(|to| self.jump_at(at, code, gate, to))
    }

    fn jump_at(&mut self, at: u64, code: &[u8], gate: Gate, to: u64) -> Result<()> {
        let from = at + gate.at as u64;
        let before = code.get(gate.at..gate.at + JUMP).context("it is cut")?;
        self.patches.push(Patch {
            at: from,
            before: before.try_into()?,
            after: jump(from, to).context("it is too far away")?,
        });
        Ok(())
    }

    /// Adds code that goes to the image between two parts, with libc's red zone left alone, and then far away.
    fn enter(&mut self, before: &[u8], behind: &[u8], entered: u64, to: u64) -> Result<u64> {
        const LEAVE_ZONE: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x80]; // lea -128(%rsp), %rsp
        const BACK: [u8; 8] = [0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]; // lea 128(%rsp), %rsp
        let distance = BACK.len() + behind.len() + FAR.len() + 8;
        let mut code = before.to_vec();
        code.extend(LEAVE_ZONE);
        code.extend([0xff, 0x15]); // call *distance(%rip)
        code.extend(u32::try_from(distance)?.to_le_bytes());
        code.extend(BACK);
        code.extend(behind);
        code.extend(FAR);
        code.extend(to.to_le_bytes());
        code.extend(entered.to_le_bytes());
        self.add(&code)
    }

    fn end(&self) -> u64 {
        self.base + self.code.len() as u64
    }

    /// Adds code that goes on far away.
    fn far(&mut self, code: &[u8], to: u64) -> Result<u64> {
        self.add(&[code, &FAR, &to.to_le_bytes()].concat())
    }

    fn add(&mut self, code: &[u8]) -> Result<u64> {
        let at = self.end();
        self.code.extend_from_slice(code);
        self.code.resize(self.code.len().next_multiple_of(16), 0xcc);
        if self.code.len() > BOARD_BYTES {
            bail!("there are too many functions");
        }
        Ok(at)
    }
}

/// Code from one place as it is at another one: distances to memory are others there.
fn moved(code: &[u8], from: u64, to: u64) -> Option<Vec<u8>> {
    let mut moved = code.to_vec();
    let mut decoder = Decoder::with_ip(64, code, from, DecoderOptions::NONE);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if !instruction.is_ip_rel_memory_operand() {
            continue;
        }
        let place = usize::try_from(instruction.ip() - from).ok()?
            + decoder
                .get_constant_offsets(&instruction)
                .displacement_offset();
        let behind = to + (instruction.next_ip() - from);
        let distance = instruction.ip_rel_memory_address().wrapping_sub(behind);
        let distance = i32::try_from(distance.cast_signed()).ok()?;
        moved
            .get_mut(place..place + 4)?
            .copy_from_slice(&distance.to_le_bytes());
    }
    Some(moved)
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

    #[test]
    fn a_gate_leads_to_the_image_and_behind_its_call() {
        // mov $11,%eax; mov %rbx,%rdi; syscall
        let code = [0xb8, 11, 0, 0, 0, 0x48, 0x89, 0xdf, 0x0f, 0x05, 0xc3];
        let (gate, entered) = (Gate { at: 0, enters: 8 }, 0x7777_0000_0000_u64);
        let mut board = Board::new(0x20_0000);
        board.gate((0x10_0000, &code), gate, entered, &[]).unwrap();
        assert_eq!(board.patches[0].after, jump(0x10_0000, 0x20_0000).unwrap());
        assert_eq!(board.code[..8], code[..8]);
        // The call finds the image's address, and the jump libc's, behind its system call.
        assert_eq!(board.code[13..15], [0xff, 0x15]);
        let distance = usize::from(board.code[15]);
        assert_eq!(
            board.code[19 + distance..27 + distance],
            entered.to_le_bytes()
        );
        assert_eq!(board.code[33..41], 0x10_000a_u64.to_le_bytes());
        let mut board = Board::new(0x20_0000);
        board
            .gate((0x10_0000, &code), gate, entered, &[7, 8])
            .unwrap();
        // Each condition leads to where the image is called, behind libc's own call.
        assert_eq!(board.code[8..16], [0x81, 0xfe, 7, 0, 0, 0, 0x74, 22]);
        assert_eq!(board.code[16..24], [0x81, 0xfe, 8, 0, 0, 0, 0x74, 14]);
        assert_eq!(board.code[30..38], 0x10_0008_u64.to_le_bytes());
        assert_eq!(board.code[38..40], [0x48, 0x8d]);
        let mut board = Board::new(0x20_0000);
        let gate = Gate { at: 0, enters: 5 };
        board
            .end_of_thread((0x10_0000, &code), gate, entered)
            .unwrap();
        assert_eq!(board.code[..5], [0xb8, 0x1d, 0xe0, 0xa6, 0x50]);
        assert_eq!(
            board.code[24..29],
            code[..5],
            "the number of libc's own call"
        );
        assert_eq!(board.code[35..43], 0x10_0005_u64.to_le_bytes());
    }

    #[test]
    fn code_finds_its_memory_from_elsewhere() {
        // mov %rdi,(%rsp); lea 0x10(%rip),%rdi
        let code = [0x48, 0x89, 0x3c, 0x24, 0x48, 0x8d, 0x3d, 0x10, 0, 0, 0];
        let there = moved(&code, 0x10_0000, 0x20_0000).unwrap();
        assert_eq!(there[..7], code[..7]);
        assert_eq!(there[7..], (0x10_i32 - 0x10_0000).to_le_bytes());
        assert_eq!(moved(&code, 0, 1 << 40), None);
    }
}

//! Where a stopped thread stands.

use libc::user_regs_struct;

/// The kernel's own error numbers by which it notes that a call is to be begun again: ERESTARTSYS, ERESTARTNOINTR,
/// ERESTARTNOHAND, ERESTART_RESTARTBLOCK. No program sees them.
const AGAIN: [i64; 4] = [-512, -513, -514, -516];

/// Where a stopped thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number.
    pub thread: u32,
    /// Its next instruction.
    pub at: u64,
    /// The end of its stack.
    pub stack: u64,
    /// What `%rax` holds: the number of the call that it makes if it stands before a `syscall` instruction.
    pub rax: u64,
    /// The number of the call that the kernel is to begin again when the thread goes on.
    pub again: Option<u64>,
}

impl Place {
    pub(super) fn of(thread: u32, registers: &user_regs_struct) -> Self {
        let is_again = AGAIN.contains(&registers.rax.cast_signed());
        let in_call = !registers.orig_rax.cast_signed().is_negative();
        Self {
            thread,
            at: registers.rip,
            stack: registers.rsp,
            rax: registers.rax,
            again: (is_again && in_call).then_some(registers.orig_rax),
        }
    }
}

//! Work of a thread on another stack than its own.

/// Does `act` on the stack whose upper end is `top`. A panic in it ends the process.
///
/// # Safety
/// The stack must be free until this returns, and large enough. Nothing in `act` may depend on where its stack lies: a handler
/// of a signal may, so signals should be blocked.
#[cfg(target_arch = "x86_64")]
pub unsafe fn on<T>(top: usize, act: impl FnOnce() -> T) -> T {
    use std::mem::{ManuallyDrop, MaybeUninit};

    struct Call<F, T> {
        act: ManuallyDrop<F>,
        result: MaybeUninit<T>,
    }
    /// # Safety
    /// `call` must be a call that was never run.
    unsafe extern "C" fn run<F: FnOnce() -> T, T>(call: *mut Call<F, T>) {
        // SAFETY: the caller's promise.
        let call = unsafe { &mut *call };
        // SAFETY: it is taken once.
        let act = unsafe { ManuallyDrop::take(&mut call.act) };
        call.result.write(act());
    }
    fn runner<F: FnOnce() -> T, T>(_: &Call<F, T>) -> unsafe extern "C" fn(*mut Call<F, T>) {
        run::<F, T>
    }
    let (act, result) = (ManuallyDrop::new(act), MaybeUninit::uninit());
    let mut call = Call { act, result };
    let run = runner(&call);
    // SAFETY: the caller vouches for the stack; r12 is kept by what is called, and brings this one back. `run` comes back here,
    // for it can't unwind.
    unsafe {
        core::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {run}",
            "mov rsp, r12",
            top = in(reg) top & !15,
            run = in(reg) run,
            inout("rdi") &raw mut call => _,
            out("r12") _,
            clobber_abi("C"),
        );
    }
    // SAFETY: `run` has written it.
    unsafe { call.result.assume_init() }
}

/// Does `act` on the caller's own stack: there is no way to another one on this processor.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn on<T>(_top: usize, act: impl FnOnce() -> T) -> T {
    act()
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_on_the_other_stack() {
        let mut stack = vec![0_u8; 64 * 1024];
        let ends = stack.as_mut_ptr_range();
        let range = ends.start.addr()..ends.end.addr();
        let (given, mut seen) = (String::from("moved there"), 0);
        // SAFETY: it is this test's, and large enough for what is done.
        let back = unsafe {
            on(range.end, || {
                let here = 0_u8;
                seen = (&raw const here).addr();
                given + " and back"
            })
        };
        assert_eq!(back, "moved there and back");
        assert!(range.contains(&seen));
        let here = 0_u8;
        assert!(!range.contains(&(&raw const here).addr()));
    }
}

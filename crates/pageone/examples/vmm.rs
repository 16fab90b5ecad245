//! A virtual machine for tests: one vCPU that reads and writes its memory all the time, while that
//! memory is merged (`tests/kvm.rs`). A guest of `PageONE` when the agent is preloaded.
//!
//! ```text
//!  0     8 KiB   64 KiB     1 MiB                               2 MiB
//!  ├───────┼ tables ┼ program ─┼─ data: each word is its own address ─┤   the first word of a page
//!  └ zeros                     └ page 0 ─ page 1 ─ …                      counts its increments
//! ```
//!
//! A round: the vCPU asks (`in`) in which pages to increment and where to begin, compares each
//! sixteenth word of every page with its address, increments, and tells (`out`) how many words were
//! wrong. Sixteen rounds see all words. The program runs in long mode with all memory mapped where
//! it is. So only the second level of translation (or KVM's shadow of the first), and with it
//! the MMU notifiers, lies between the vCPU and merged pages. Where KVM has no hardware to
//! run a guest on it emulates it, a million instructions a second: hence the sixteenths.
//!
//! Commands on standard input, one line each, answered by one line as `tests/guest/guest.c` does. They are
//! `rounds` (rounds done), `write N` (one round that increments in each Nth page), `check` (the host
//! compares), `address` (of the data in this process).

use std::io::BufRead;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const PAGE: u32 = 4096;
const MIB: u32 = 1 << 20;
/// Page tables of three levels, a page each.
const TABLES: u32 = 0x2000;
const PROGRAM: u32 = 0x1_0000;
const DATA: u32 = MIB;
const END: u32 = 2 * MIB;
const PAGES: u32 = (END - DATA) / PAGE;
/// Where the program asks how often to write, and where it tells the wrong words.
const ASK: u16 = 0x10;
const TELL: u16 = 0x11;
/// After a round the vCPU rests so many times as long as it took: the engine has only the processor
/// time that is left.
const REST: u32 = 2;

std::arch::global_asm!(
    ".globl vmm_program, vmm_program_end",
    "vmm_program:",
    "2:  mov edx, 0x10",
    "    in eax, dx",
    "    movzx ebx, ax", // increment in each ebx-th page; 0: in none
    "    mov ecx, ebx",  // pages until then
    "    shr eax, 16",
    "    mov r8d, eax",      // the first word of a page to compare
    "    mov esi, 0x100000", // the page
    "    xor edi, edi",      // wrong words
    "3:  lea ebp, [rsi + r8]",
    "    lea r9d, [rsi + 4096]",
    "4:  cmp dword ptr [rbp], ebp",
    "    je 5f",
    "    inc edi",
    "5:  add ebp, 64",
    "    cmp ebp, r9d",
    "    jb 4b",
    "    test ebx, ebx",
    "    jz 6f",
    "    dec ecx",
    "    jnz 6f",
    "    mov ecx, ebx",
    "    inc dword ptr [rsi]",
    "6:  add esi, 4096",
    "    cmp esi, 0x200000",
    "    jb 3b",
    "    mov edx, 0x11",
    "    mov eax, edi",
    "    out dx, eax",
    "    jmp 2b",
    "vmm_program_end:",
);

unsafe extern "C" {
    static vmm_program: u8;
    static vmm_program_end: u8;
}

/// What vCPU and commands share.
#[derive(Default)]
struct Shared {
    rounds: AtomicU64,
    wrong: AtomicU64,
    /// Increment in each so-many-th page in the next round; 0 when that is done, or in none.
    write: AtomicU32,
}

fn main() -> Result<()> {
    let memory = memory()?;
    let vm = Kvm::new().context("/dev/kvm")?.create_vm()?;
    give(&vm, &memory)?;
    let vcpu = start_state(vm.create_vcpu(0)?)?;
    let shared = Shared::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // No other thread waits for this one: the process ends with it.
            if let Err(why) = run(vcpu, &shared) {
                println!("bad the vCPU: {why:#}");
                std::process::exit(1);
            }
        });
        commands(&memory, &shared)?;
        std::process::exit(0);
    })
}

/// Guest memory with program and data in it, offered for merging.
fn memory() -> Result<GuestMemoryMmap> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), END as usize)])?;
    // SAFETY: both symbols bound the program above, which is never written.
    let program = unsafe {
        let start = &raw const vmm_program;
        let len = (&raw const vmm_program_end).offset_from(start);
        std::slice::from_raw_parts(start, usize::try_from(len)?)
    };
    memory.write_slice(program, GuestAddress(PROGRAM.into()))?;
    map_all(&memory)?;
    for page in (DATA..END).step_by(PAGE as usize) {
        for word in (page + 4..page + PAGE).step_by(4) {
            memory.write_obj(word, GuestAddress(word.into()))?;
        }
    }
    let start = memory.get_host_address(GuestAddress(0))?;
    // SAFETY: merging changes no content.
    let offered = unsafe { libc::madvise(start.cast(), END as usize, libc::MADV_MERGEABLE) };
    ensure!(offered == 0, "madvise: {}", std::io::Error::last_os_error());
    Ok(memory)
}

/// Tables that map each address to itself, in pages of 2 MiB.
fn map_all(memory: &GuestMemoryMmap) -> Result<()> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let table = |level: u32| u64::from(TABLES + level * PAGE);
    let next = |level| table(level) | PRESENT_WRITABLE;
    memory.write_obj(next(1), GuestAddress(table(0)))?;
    memory.write_obj(next(2), GuestAddress(table(1)))?;
    for (entry, start) in (0..END).step_by(2 * MIB as usize).enumerate() {
        let at = GuestAddress(table(2) + entry as u64 * 8);
        memory.write_obj(u64::from(start) | LARGE | PRESENT_WRITABLE, at)?;
    }
    Ok(())
}

fn give(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<()> {
    let region = kvm_userspace_memory_region {
        memory_size: END.into(),
        userspace_addr: memory
            .get_host_address(GuestAddress(0))?
            .expose_provenance() as u64,
        ..Default::default()
    };
    // SAFETY: the memory lives as long as the process.
    unsafe { vm.set_user_memory_region(region) }?;
    Ok(())
}

/// Long mode, with the tables of [`map_all`]: the program begins.
fn start_state(vcpu: VcpuFd) -> Result<VcpuFd> {
    let mut sregs = vcpu.get_sregs()?;
    let flat = kvm_segment {
        limit: u32::MAX,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    (sregs.cs, sregs.ds) = (
        kvm_segment {
            selector: 8,
            type_: 11,
            l: 1,
            ..flat
        },
        kvm_segment {
            selector: 16,
            type_: 3,
            ..flat
        },
    );
    (sregs.es, sregs.ss, sregs.fs, sregs.gs) = (sregs.ds, sregs.ds, sregs.ds, sregs.ds);
    // Protection and paging; physical address extension; long mode, enabled and active.
    (sregs.cr0, sregs.cr3) = (sregs.cr0 | 0x8000_0001, TABLES.into());
    (sregs.cr4, sregs.efer) = (sregs.cr4 | 0x20, sregs.efer | 0x500);
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: PROGRAM.into(),
        rflags: 2,
        ..Default::default()
    })?;
    Ok(vcpu)
}

fn run(mut vcpu: VcpuFd, shared: &Shared) -> Result<()> {
    let (mut writing, mut began) = (0, Instant::now());
    for round in 0u32.. {
        match vcpu.run() {
            Ok(VcpuExit::IoIn(ASK, data)) => {
                std::thread::sleep(began.elapsed() * REST);
                began = Instant::now();
                writing = shared.write.load(Ordering::Acquire);
                let first_word = 4 + round / 2 % 16 * 4;
                data.copy_from_slice(&(writing | first_word << 16).to_le_bytes());
            }
            Ok(VcpuExit::IoOut(TELL, data)) => {
                let wrong = u32::from_le_bytes(data.try_into()?);
                shared.wrong.fetch_add(wrong.into(), Ordering::Relaxed);
                shared.rounds.fetch_add(1, Ordering::Release);
                if writing != 0 {
                    shared.write.store(0, Ordering::Release);
                }
            }
            Ok(other) => bail!("it stops for {other:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => bail!("KVM_RUN: {error}"),
        }
    }
    Ok(())
}

fn commands(memory: &GuestMemoryMmap, shared: &Shared) -> Result<()> {
    let mut increments = vec![0; PAGES as usize];
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = match line.split_once(' ').unwrap_or((&line, "")) {
            ("rounds", _) => Ok(shared.rounds.load(Ordering::Acquire)),
            ("address", _) => {
                let data = memory.get_host_address(GuestAddress(DATA.into()))?;
                Ok(data.expose_provenance() as u64)
            }
            ("write", each) => write(each.parse()?, &mut increments, shared),
            ("check", _) => check(memory, &increments, shared),
            _ => bail!("there is no command {line}"),
        };
        match answer {
            Ok(number) => println!("ok {number}"),
            Err(why) => println!("bad {why:#}"),
        }
    }
    Ok(())
}

/// Lets the vCPU increment in each `each`-th page, once, and waits until it has.
fn write(each: u32, increments: &mut [u32], shared: &Shared) -> Result<u64> {
    ensure!(each > 0, "in no page at all");
    shared.write.store(each, Ordering::Release);
    while shared.write.load(Ordering::Acquire) != 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let each = each as usize;
    increments
        .iter_mut()
        .skip(each - 1)
        .step_by(each)
        .for_each(|count| *count += 1);
    Ok(shared.rounds.load(Ordering::Acquire))
}

/// Compares all data with what must be there, and asks what the vCPU has found.
fn check(memory: &GuestMemoryMmap, increments: &[u32], shared: &Shared) -> Result<u64> {
    let wrong = shared.wrong.load(Ordering::Relaxed);
    ensure!(wrong == 0, "the vCPU has seen {wrong} wrong words");
    for (page, count) in (DATA..END).step_by(PAGE as usize).zip(increments) {
        for word in (page..page + PAGE).step_by(4) {
            let found: u32 = memory.read_obj(GuestAddress(word.into()))?;
            let expected = if word == page { *count } else { word };
            ensure!(
                found == expected,
                "at {word:#x}: {found:#x}, expected {expected:#x}"
            );
        }
    }
    Ok(increments.len() as u64)
}

//! The smallest VMM that offers its memory: a machine of 16 MiB whose two halves are equal, paused while they are merged.
//!
//! `pageone run -- target/debug/examples/offer_vm` prints the pages merged, then runs three instructions that write one page.
//! Without `/dev/kvm` it says so and ends.
#![allow(clippy::cast_possible_truncation)] // a machine of 16 MiB, on x86-64 alone

use anyhow::{Context, Result, ensure};
use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use pageone_guest::{Error, Offer, is_served, recycle};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const HALF: u64 = 8 << 20;
const PAGE: u64 = 4096;
const CODE: u64 = 0x1000;
const FROM: u64 = 0x8000;
const TO: u64 = 0x9000;
/// mov al, [FROM]; add al, 1; mov [TO], al; hlt
const PROGRAM: [u8; 9] = [0xa0, 0x00, 0x80, 0x04, 0x01, 0xa2, 0x00, 0x90, 0xf4];

fn main() -> Result<()> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            println!("skipped: /dev/kvm: {error}");
            return Ok(());
        }
    };
    let memory: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 * HALF as usize)])?;
    for page in (0..2 * HALF).step_by(PAGE as usize) {
        let word = page % HALF + 1;
        memory.write_slice(&word.to_le_bytes().repeat(512), GuestAddress(page))?;
    }
    memory.write_slice(&PROGRAM, GuestAddress(CODE))?;

    // The machine is offered: a clone of its memory is another reference to the same regions.
    let offer = match Offer::new(memory.clone()) {
        Ok(offer) => Some(offer),
        Err((Error::NoAgent, _)) => None,
        Err((error, _)) => return Err(error.into()),
    };
    // It does not run yet, as one that is paused or was just cloned: all of it can be merged at once.
    if let Some(offer) = offer.as_ref().filter(|_| wait_for_engine()) {
        println!("merged {}", offer.merge()?);
    }

    let before: u8 = memory.read_obj(GuestAddress(FROM))?;
    run(&kvm, &memory)?;
    let after: u8 = memory.read_obj(GuestAddress(TO))?;
    ensure!(after == before.wrapping_add(1), "{after} after {before}");
    let twin: u64 = memory.read_obj(GuestAddress(HALF + TO))?;
    ensure!(
        twin == TO + 1,
        "the page that was equal has changed: {twin:#x}"
    );

    // What a balloon does with the pages that the machine gives up.
    if offer.is_some() {
        recycle(&memory, GuestAddress(HALF), 16 * PAGE as usize)?;
        let gone: u64 = memory.read_obj(GuestAddress(HALF))?;
        ensure!(gone == 0, "a recycled page reads {gone:#x}");
    }
    println!("done");
    Ok(())
}

/// The agent finds its engine within a moment, if there is one.
fn wait_for_engine() -> bool {
    for _ in 0..250 {
        if is_served() {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    false
}

/// Runs the program to its halt.
fn run(kvm: &Kvm, memory: &GuestMemoryMmap) -> Result<()> {
    let vm = kvm.create_vm()?;
    let region = kvm_userspace_memory_region {
        memory_size: 2 * HALF,
        userspace_addr: memory
            .get_host_address(GuestAddress(0))?
            .expose_provenance() as u64,
        ..Default::default()
    };
    // SAFETY: the memory lives longer than the machine, which ends with this function.
    unsafe { vm.set_user_memory_region(region) }?;
    let mut vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rflags: 2,
        ..Default::default()
    })?;
    match vcpu.run().context("KVM_RUN")? {
        VcpuExit::Hlt => Ok(()),
        other => anyhow::bail!("it stops for {other:?}"),
    }
}

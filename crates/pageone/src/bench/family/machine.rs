//! A virtual machine of the bench, as QEMU's command line.

use std::path::PathBuf;

use crate::bench::error::BenchError;

/// MiB of a machine beside its data: its kernel, its system, and what a turn writes and deletes.
const SYSTEM_MIB: u64 = 192;
pub(super) const QEMU: &str = "qemu-system-x86_64";

/// Whether guests report the memory that they have freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reporting {
    Off,
    On,
}

/// What virtual machines are made of.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct VmFiles {
    /// The kernel that the machines of `vms` boot
    #[arg(long, value_name = "FILE")]
    vm_kernel: Option<PathBuf>,
    /// Their initial file system, whose /init answers at the third serial line
    #[arg(long, value_name = "FILE")]
    vm_initramfs: Option<PathBuf>,
    /// QEMU's accelerator: kvm is faster where it works
    #[arg(long, value_name = "NAME", default_value = "tcg")]
    vm_accel: String,
}

impl VmFiles {
    /// QEMU's command line for a machine with so many MiB of data.
    pub(super) fn words(&self, mib: u64, reporting: Reporting) -> Result<Vec<String>, BenchError> {
        let file = |file: &Option<PathBuf>, flag| match file {
            Some(file) => Ok(file.display().to_string()),
            None => Err(BenchError::NoVm(flag)),
        };
        let kernel = file(&self.vm_kernel, "--vm-kernel")?;
        let initramfs = file(&self.vm_initramfs, "--vm-initramfs")?;
        // QEMU's emulation has a fault with 16-byte exchanges: one boot in six ends in it.
        let cpu = match self.vm_accel.as_str() {
            "kvm" => "host",
            _ => "max,-cx16",
        };
        let order = match reporting {
            Reporting::Off => "",
            Reporting::On => "page_reporting.page_reporting_order=0",
        };
        let memory = format!("{}M", 2 * mib + SYSTEM_MIB);
        let append = format!("quiet panic=-1 console=ttyS0 mib={mib} {order}");
        let machine = ["-accel", &self.vm_accel, "-cpu", cpu, "-m", &memory];
        let boot = [
            "-kernel", &kernel, "-initrd", &initramfs, "-append", &append,
        ];
        let mut words = vec![QEMU];
        words.extend(machine.into_iter().chain(boot));
        words.extend("-display none -monitor none -nodefaults -no-reboot".split(' '));
        words.extend("-serial null -serial null -serial stdio".split(' '));
        if reporting == Reporting::On {
            words.extend(["-device", "virtio-balloon-pci,free-page-reporting=on"]);
        }
        Ok(words.into_iter().map(str::to_owned).collect())
    }

    pub(super) fn check(&self) -> Result<(), BenchError> {
        for file in [&self.vm_kernel, &self.vm_initramfs].into_iter().flatten() {
            std::fs::File::open(file).map_err(|source| BenchError::VmFile {
                file: file.clone(),
                source,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_needs_its_files_and_says_which_flag_names_them() {
        let mut files = VmFiles::default();
        let missing = |files: &VmFiles| match files.words(16, Reporting::Off) {
            Err(BenchError::NoVm(flag)) => flag,
            other => panic!("{other:?}"),
        };
        assert_eq!(missing(&files), "--vm-kernel");
        files.vm_kernel = Some("/kernel".into());
        assert_eq!(missing(&files), "--vm-initramfs");
        files.vm_initramfs = Some("/initramfs".into());
        let words = files.words(16, Reporting::On).unwrap().join(" ");
        assert!(
            words.contains("-m 224M -kernel /kernel -initrd /initramfs"),
            "{words}"
        );
        assert!(words.contains("mib=16 page_reporting"), "{words}");
        assert!(files.check().is_err(), "there are no such files");
    }
}

//! A folder for a socket, which goes with what it is for.

use std::fs::{self, Permissions};
use std::io::Result;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

/// The folder. It is removed when this is dropped, also where no descriptor is left to read it with.
#[derive(Debug)]
pub(crate) struct Folder(TempDir);

impl Folder {
    /// What may lie in it.
    pub(super) const SOCKET: &str = "pageone.sock";
    const LOCK: &str = "pageone.sock.lock";
    pub(super) const NOTIFY: &str = "notify";

    /// Makes one below `place` that this user alone can reach, whatever the umask is.
    pub(super) fn make(place: &Path, prefix: &str) -> Result<Self> {
        let folder = Self(tempfile::Builder::new().prefix(prefix).tempdir_in(place)?);
        folder.allow(0o700)?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Sets its mode.
    pub(super) fn allow(&self, mode: u32) -> Result<()> {
        fs::set_permissions(self.path(), Permissions::from_mode(mode))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for name in [Self::SOCKET, Self::LOCK, Self::NOTIFY] {
            let _ = fs::remove_file(self.path().join(name));
        }
        // Anything else is removed with the rest, by its own drop.
        let _ = fs::remove_dir(self.path());
    }
}

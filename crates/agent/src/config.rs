//! The environment's word at the start of the process: where the engine is, in which domain the guest shall be.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wire::Name;

const PATH_BYTES: usize = 108;

/// What the environment tells at the start of the process.
pub(crate) struct Config {
    /// Path of the engine's socket, ended by a zero.
    pub(crate) path: [u8; PATH_BYTES],
    pub(crate) domain: Name,
    /// Whether offers are passed on to KSM even while an engine serves.
    pub(crate) also_ksm: bool,
    /// Whether all memory is offered, and how long the process has to have lived: see [`any`](crate::any).
    pub(crate) any: Option<Duration>,
    /// Whether memory that was advised to be of huge pages is offered with it.
    pub(crate) any_huge: bool,
}

struct Cell(UnsafeCell<Config>);

// SAFETY: written once by `configure`, before the process has a second thread; read afterwards.
unsafe impl Sync for Cell {}

static CONFIG: Cell = Cell(UnsafeCell::new(Config {
    path: [0; PATH_BYTES],
    domain: Name::EMPTY,
    also_ksm: false,
    any: None,
    any_huge: false,
}));

/// Whether this image came into its process from outside. A fork child has it, too.
static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Whether this image came from outside.
pub(crate) fn is_attached() -> bool {
    ATTACHED.load(Ordering::Relaxed)
}

/// Notes that it did.
pub(crate) fn note_attached() {
    ATTACHED.store(true, Ordering::Relaxed);
}

/// What the environment told.
pub(crate) fn config() -> &'static Config {
    // SAFETY: nothing writes any more.
    unsafe { &*CONFIG.0.get() }
}

/// Reads the environment.
///
/// # Safety
/// To be called once, while the process has one thread.
pub(crate) unsafe fn configure() {
    // SAFETY: the caller's promise.
    unsafe {
        configure_by(|name| {
            // One thread, so the environment stands still; the text is copied.
            let value = libc::getenv(name.as_ptr());
            (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
        });
    }
}

/// Takes the words that `variable` gives.
///
/// # Safety
/// To be called once, before another thread uses [`config`].
pub(crate) unsafe fn configure_by<'a>(variable: impl Fn(&CStr) -> Option<&'a [u8]>) {
    // SAFETY: the caller's promise.
    let config = unsafe { &mut *CONFIG.0.get() };
    let mut put = |parts: [&[u8]; 2]| {
        let text = parts.iter().flat_map(|part| part.iter());
        // The last byte stays zero; a path too long is cut and will not connect.
        config
            .path
            .iter_mut()
            .take(PATH_BYTES - 1)
            .zip(text)
            .for_each(|(to, from)| *to = *from);
    };
    match (variable(c"PAGEONE_SOCKET"), variable(c"XDG_RUNTIME_DIR")) {
        (Some(path), _) => put([path, b""]),
        (None, _) if rustix::process::geteuid().is_root() => put([b"/run/pageone.sock", b""]),
        (None, Some(folder)) => put([folder, b"/pageone.sock"]),
        (None, None) => {}
    }
    match variable(c"PAGEONE_DOMAIN").map(std::str::from_utf8) {
        None => {}
        Some(name) => match name.ok().and_then(Name::new) {
            Some(name) => config.domain = name,
            // Without its name the guest would be in a wider domain than it asks for.
            None => config.path = [0; PATH_BYTES],
        },
    }
    config.also_ksm = variable(c"PAGEONE_ALSO_KSM") == Some(b"1");
    // A time that is no number is no word at all.
    let any = variable(c"PAGEONE_ANY").and_then(|text| std::str::from_utf8(text).ok());
    config.any = any
        .and_then(|ms| ms.parse().ok())
        .map(Duration::from_millis);
    config.any_huge = variable(c"PAGEONE_ANY_HUGE") == Some(b"1");
    #[cfg(debug_assertions)]
    if let Some(text) = variable(sys::fault::VARIABLE) {
        sys::fault::arm(std::str::from_utf8(text).unwrap_or_default());
    }
}

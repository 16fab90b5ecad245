//! The agent's C API (`pageone.h`), found at run time.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;

use crate::Error;

type Call = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Count = unsafe extern "C" fn(*mut c_void, usize) -> i64;
type Ask = unsafe extern "C" fn() -> c_int;

/// The functions of the agent.
struct Api {
    register: Call,
    unregister: Call,
    recycle: Call,
    merge: Count,
    served: Ask,
    sees_libc: Ask,
}

/// The agent is loaded before the program, so it is looked for once.
fn api() -> Option<&'static Api> {
    static API: OnceLock<Option<Api>> = OnceLock::new();
    let find = || {
        // SAFETY: `pageone.h` declares these symbols with these types, and no other library has the names.
        unsafe {
            Some(Api {
                register: std::mem::transmute::<*mut c_void, Call>(symbol(c"pageone_register")?),
                unregister: std::mem::transmute::<*mut c_void, Call>(symbol(
                    c"pageone_unregister",
                )?),
                recycle: std::mem::transmute::<*mut c_void, Call>(symbol(c"pageone_recycle")?),
                merge: std::mem::transmute::<*mut c_void, Count>(symbol(c"pageone_merge")?),
                served: std::mem::transmute::<*mut c_void, Ask>(symbol(c"pageone_served")?),
                sees_libc: std::mem::transmute::<*mut c_void, Ask>(symbol(c"pageone_sees_libc")?),
            })
        }
    };
    API.get_or_init(find).as_ref()
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: looks a name up among the libraries that are loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

fn done(call: &'static str, result: i64) -> Result<u64, Error> {
    let source = io::Error::last_os_error();
    u64::try_from(result).map_err(|_| Error::Refused { call, source })
}

fn start(range: &Range<usize>) -> *mut c_void {
    ptr::with_exposed_provenance_mut(range.start)
}

/// Offers a range of whole pages.
pub(crate) fn register(range: &Range<usize>) -> Result<(), Error> {
    let api = api().ok_or(Error::NoAgent)?;
    // SAFETY: the caller's region is mapped, and merging changes no content.
    let result = unsafe { (api.register)(start(range), range.len()) };
    done("pageone_register", result.into()).map(drop)
}

/// Withdraws it.
pub(crate) fn unregister(range: &Range<usize>) -> Result<(), Error> {
    let api = api().ok_or(Error::NoAgent)?;
    // SAFETY: as for `register`.
    let result = unsafe { (api.unregister)(start(range), range.len()) };
    done("pageone_unregister", result.into()).map(drop)
}

/// Merges it now.
pub(crate) fn merge(range: &Range<usize>) -> Result<u64, Error> {
    let api = api().ok_or(Error::NoAgent)?;
    // SAFETY: as for `register`.
    let result = unsafe { (api.merge)(start(range), range.len()) };
    done("pageone_merge", result)
}

/// Gives its pages back to the host: they read as zeros.
pub(crate) fn recycle(range: &Range<usize>) -> Result<(), Error> {
    let api = api().ok_or(Error::NoAgent)?;
    // SAFETY: the range is a part of a region that the caller has for himself, or of memory that any thread may write.
    let result = unsafe { (api.recycle)(start(range), range.len()) };
    done("pageone_recycle", result.into()).map(drop)
}

/// Whether an engine serves this process now.
#[must_use]
pub fn is_served() -> bool {
    // SAFETY: looks at a flag.
    api().is_some_and(|api| unsafe { (api.served)() } == 1)
}

/// Whether the agent sees the calls that libc makes for itself, such as `free` of a large block. Where it does not, withdraw an
/// offer before its memory is freed; an [`Offer`](crate::Offer) that is dropped first does.
#[must_use]
pub fn sees_libc() -> bool {
    // SAFETY: as above.
    api().is_some_and(|api| unsafe { (api.sees_libc)() } == 1)
}

//! Tools that a machine may lack.

/// Says that a test is skipped for want of `tool`. With `PAGEONE_TEST_STRICT=1` the test fails instead: a machine that had all tools
/// has lost one.
#[track_caller]
pub(crate) fn lacks(tool: &str) {
    let strict = std::env::var_os("PAGEONE_TEST_STRICT").is_some_and(|on| on == "1");
    assert!(!strict, "there is no {tool}, and PAGEONE_TEST_STRICT is 1");
    eprintln!("skipped: there is no {tool}");
}

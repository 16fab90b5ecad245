//! Configurations from anywhere: no panic, memory in proportion to the text, values in their ranges.

use crate::bound::bounded;
use pageone::config::Config;

pub(crate) fn check(text: &str) {
    // A log filter may hold regular expressions, which are compiled: that is the constant part.
    let parsed = bounded(4096 * text.len() + (16 << 20), || Config::parse(text));
    let Ok(config) = parsed else { return };
    let mut knobs = config.knobs.settings().into_iter();
    assert!(knobs.all(|knob| knob.check().is_ok()));
    assert_eq!(Config::parse(text).as_ref(), Ok(&config));
}

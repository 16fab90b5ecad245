//! Configurations from anywhere: no panic, memory in proportion to the text, values in their ranges.

use std::time::Duration;

use crate::bound::bounded;
use pageone::config::Config;

pub(crate) fn check(text: &str) {
    // A log filter may hold regular expressions, which are compiled: that is the constant part.
    let parsed = bounded(4096 * text.len() + (16 << 20), || Config::parse(text));
    let Ok(config) = parsed else { return };
    let day = Duration::from_secs(86_400);
    assert!(config.threads.is_none_or(|n| (1..=1024).contains(&n)));
    assert!(
        config
            .merge_period
            .is_none_or(|time| (Duration::from_millis(10)..=day).contains(&time))
    );
    assert_eq!(Config::parse(text).as_ref(), Ok(&config));
}

//! The beginning of a JSON object that tells of this machine and this moment.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sys::foreign::{ForeignName, plain_json};

/// Which form an answer has, where and when it was made.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    schema: u32,
    host: ForeignName,
    /// Seconds since 1970.
    time: u64,
}

impl Head {
    /// Of an answer of this form, here and now.
    pub(crate) fn now(schema: u32) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            schema,
            host: sys::host::name(),
            time: since.map_or(0, |since| since.as_secs()),
        }
    }
}

/// An answer with its head.
#[derive(Debug, Serialize)]
pub(crate) struct Headed<T> {
    #[serde(flatten)]
    head: Head,
    #[serde(flatten)]
    answer: T,
}

impl<T> Headed<T> {
    /// The first form of an answer.
    pub(crate) fn first(answer: T) -> Self {
        let head = Head::now(1);
        Self { head, answer }
    }
}

/// The first form of an answer, as a line of JSON in which nothing acts.
///
/// # Errors
/// It is no object.
pub(crate) fn line(answer: &impl Serialize) -> serde_json::Result<String> {
    Ok(plain_json(&serde_json::to_string(&Headed::first(answer))?) + "\n")
}

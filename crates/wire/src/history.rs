//! How the counters were: samples of the daemon's history.

use serde::{Deserialize, Serialize};

use crate::status::Status;

/// A few counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Seconds since 1970.
    pub at: u64,
    /// [`Status::saved_bytes`].
    pub saved_bytes: u64,
    /// [`Status::net_saved_bytes`].
    pub net_saved_bytes: i64,
    /// [`Status::store_bytes`].
    pub store_bytes: u64,
    /// [`Status::metadata_bytes`].
    pub metadata_bytes: u64,
    /// [`Status::cpu_seconds`]: it grows, over restarts too where the history was handed over.
    pub cpu_seconds: f64,
    /// Guests.
    pub guests: u32,
    /// Percent of the ten seconds before in which a task of the machine waited for memory; none: the kernel does not tell.
    pub stall_percent: Option<f32>,
    /// Of the seconds since the sample before, so many of which there is no sample: no daemon ran, or the machine slept.
    pub unseen_seconds: u64,
}

impl Sample {
    /// The sample of a status that was true at `at`.
    #[must_use]
    pub fn of(status: &Status, at: u64, stall_percent: Option<f32>) -> Self {
        Self {
            at,
            saved_bytes: status.saved_bytes,
            net_saved_bytes: status.net_saved_bytes,
            store_bytes: status.store_bytes,
            metadata_bytes: status.metadata_bytes,
            cpu_seconds: status.cpu_seconds,
            guests: u32::try_from(status.guests.len()).unwrap_or(u32::MAX),
            stall_percent,
            unseen_seconds: 0,
        }
    }
}

//! The questions of the command line, and the engine's replies: JSON.

use serde::{Deserialize, Serialize};

use crate::history::Sample;
use crate::knobs::Setting;
use crate::status::Status;

/// What the command line asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The counters.
    Status,
    /// The slots of all stores by node and zone.
    Heap,
    /// How the counters were in the last `seconds`: at most `most` samples.
    History {
        /// Seconds back from now.
        seconds: u64,
        /// Samples.
        most: u32,
    },
    /// Which domain would the caller have as a guest that asks for this name (empty: for none)?
    Domain(String),
    /// Which domain would another process have? Of those of other users only who sees all guests is told.
    DomainOf(DomainOf),
    /// Turn knobs, all or none.
    Set(Vec<Setting>),
    /// Give all merged pages private copies, turn knobs, and go on as before.
    SetUnmerged(Vec<Setting>),
    /// Merge memory now.
    Merge(MergeNow),
}

/// Whose domain is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainOf {
    /// The process.
    pub pid: u32,
    /// When it began, in ticks since boot: another number space has other processes, and numbers are given again.
    pub began: u64,
    /// The name that it would ask for; empty: none.
    pub name: String,
}

/// Whose memory is to be merged now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeNow {
    /// The processes; none: the one that asks.
    pub pids: Vec<u32>,
    /// The first address.
    pub start: u64,
    /// The address behind the last.
    pub end: u64,
    /// Whether a part of it is enough, in a fraction of a second. A caller that asks so again and again, with pauses, takes
    /// little CPU time.
    #[serde(default)]
    pub brief: bool,
}

/// What merging now has brought.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergedNow {
    /// Pages of the processes that share a copy now, or the kernel's zero page, and did not before.
    pub pages: u64,
    /// Memory that these pages no longer take.
    pub saved_bytes: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
    /// The CPU time of daemon and agents meanwhile, in microseconds.
    pub used_us: u64,
    /// Whether nothing was left for want of time; what was left is merged in the next rounds.
    pub finished: bool,
    /// Processes whose memory was left alone.
    pub left_alone: Vec<LeftAlone>,
}

/// A process whose memory was not merged now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftAlone {
    /// The process.
    pub pid: u32,
    /// Why, for programs.
    pub cause: Cause,
    /// Why, in words.
    pub why: String,
}

/// Why a process's memory was not merged now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The kernel may write to it unseen.
    Unseen,
    /// Its agent does not answer.
    Silent,
    /// It is no guest any more.
    Gone,
}

/// What the engine replies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Heap`]: a heap's view as the `numa` crate writes it, which this crate only carries.
    Heap(serde_json::Value),
    /// To [`Request::History`], oldest first.
    History(Vec<Sample>),
    /// To [`Request::Domain`] and [`Request::DomainOf`].
    Domain(String),
    /// The same, and all memory shall be offered.
    DomainOfAny(String),
    /// To [`Request::DomainOf`]: there is no such process, or none of which the caller may know.
    Unseen,
    /// To [`Request::Merge`].
    Merged(MergedNow),
    /// Done.
    Done,
    /// To [`Request::Set`]: the knobs are turned, and not all is yet as they say: why.
    Turned(String),
    /// Not done: why.
    Refused(String),
    /// Not done, because too much waits: why. It may be done a while later.
    Crowded(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::{KnobValues, Pace, RunMode, Thp};
    use proptest::prelude::*;

    fn setting() -> impl Strategy<Value = Setting> {
        let numbers = any::<(u16, u32, u64, bool)>();
        let which = any::<prop::sample::Index>();
        (numbers, 0_u8..3, which).prop_map(|((threads, pages, long, on), mode, which)| {
            let values = KnobValues {
                run: RunMode::try_from(mode).unwrap_or_default(),
                merge_period_ms: long,
                threads,
                use_zero_pages: on,
                merge_across_nodes: on,
                hashdist: on,
                max_page_sharing: pages,
                merge_again: on,
                cpu_limit: pages,
                pace: if on { Pace::Auto } else { Pace::Fixed },
                thp: if on { Thp::Auto } else { Thp::Keep },
                store_limit_mib: long,
            };
            *which.get(&values.settings())
        })
    }

    proptest! {
        #[test]
        fn requests_return(settings in prop::collection::vec(setting(), 0..9), name: String) {
            let of = DomainOf { pid: 1, began: 2, name: name.clone() };
            let all = [Request::Set(settings), Request::Domain(name), Request::DomainOf(of), Request::Status, Request::Heap];
            for request in all {
                let json = serde_json::to_vec(&request).expect("JSON");
                let again: Request = serde_json::from_slice(&json).expect("a request");
                prop_assert_eq!(again, request);
            }
        }

        #[test]
        fn texts_that_are_nearly_requests_are_read_or_refused(
            words in prop::collection::vec(
                prop::sample::select(vec!["{", "}", "[", "]", ":", ",", "\"set\"", "\"run\"", "\"pace\"", "1", "-1", "1e99", "null", "\"auto\"", "\"status\""]),
                0..12,
            ),
        ) {
            if let Ok(request) = serde_json::from_str::<Request>(&words.concat()) {
                let json = serde_json::to_vec(&request).expect("JSON");
                prop_assert_eq!(serde_json::from_slice::<Request>(&json).expect("a request"), request);
            }
        }
    }
}

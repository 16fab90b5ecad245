//! The daemon's answers, asked for at most once a second however many clients ask here.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sys::foreign::plain_json;
use sys::ksm::Ksm;
use wire::{Reply, Request, Status};

use crate::{client, view};

/// For so long the last answer serves.
const FRESH: Duration = Duration::from_secs(1);
/// The longest wait for the daemon.
const PATIENCE: Duration = Duration::from_secs(5);
/// Samples of a chart.
const POINTS: u32 = 600;

/// An answer, or why there is none; and since when.
type Kept<T> = Mutex<Option<(Instant, Result<T, String>)>>;

/// The samples of so many seconds as JSON, or why there are none; and since when.
type Past = (u64, Instant, Result<String, String>);

/// The daemon at a socket.
pub(super) struct Source {
    socket: PathBuf,
    ksm: Ksm,
    status: Kept<Arc<Status>>,
    /// By the seconds asked for, of which there are three.
    history: Mutex<Vec<Past>>,
}

impl Source {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            ksm: Ksm::default(),
            status: Mutex::default(),
            history: Mutex::default(),
        }
    }

    pub(super) fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    fn ask(&self, request: &Request) -> Result<Reply, String> {
        match client::ask_quietly(&self.socket, request, PATIENCE) {
            Ok(Reply::Refused(why)) => Err(why),
            Ok(reply) => Ok(reply),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    /// The counters. Those who ask at the same time wait for one answer.
    pub(super) fn status(&self) -> Result<Arc<Status>, String> {
        let mut kept = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, answer)) = &*kept
            && at.elapsed() < FRESH
        {
            return answer.clone();
        }
        let answer = match self.ask(&Request::Status) {
            Ok(Reply::Status(mut status)) => {
                view::status::complete(&mut status);
                Ok(Arc::from(status))
            }
            Ok(_) => Err(client::UNEXPECTED.to_owned()),
            Err(why) => Err(why),
        };
        *kept = Some((Instant::now(), answer.clone()));
        answer
    }

    pub(super) fn status_json(&self) -> Result<String, String> {
        let status = self.status()?;
        let ksm = [
            "run",
            "pages_shared",
            "pages_sharing",
            "general_profit",
            "full_scans",
        ];
        let number = |name| self.ksm.read(name).ok()?.parse::<i64>().ok();
        let ksm = ksm.map(|name| (name, number(name)));
        let ksm: std::collections::BTreeMap<_, _> = ksm.into_iter().collect();
        let json = serde_json::json!({ "status": &*status, "ksm": ksm });
        Ok(plain_json(&json.to_string()))
    }

    /// The samples of the last `seconds`.
    pub(super) fn history_json(&self, seconds: u64) -> Result<String, String> {
        let mut kept = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(_, at, _)| at.elapsed() < FRESH);
        if let Some((.., answer)) = kept.iter().find(|(asked, ..)| *asked == seconds) {
            return answer.clone();
        }
        let most = POINTS;
        let answer = match self.ask(&Request::History { seconds, most }) {
            Ok(Reply::History(samples)) => {
                view::history::as_json(&samples).map_err(|error| error.to_string())
            }
            Ok(_) => Err(client::UNEXPECTED.to_owned()),
            Err(why) => Err(why),
        };
        kept.push((seconds, Instant::now(), answer.clone()));
        answer
    }
}

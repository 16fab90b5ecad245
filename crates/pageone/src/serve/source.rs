//! The daemon's answers, asked for at most once a second however many clients ask here.
//!
//! A status of many guests is some MB of text. So it is written once, and all clients that take it at the time share these bytes: each
//! with its own would come to the service's limit of memory.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use sys::foreign::plain_json;
use sys::ksm::Ksm;
use wire::{Reply, Request, Status};

use super::metrics;
use crate::{client, view};

/// For so long the last answer serves.
const FRESH: Duration = Duration::from_secs(1);
/// The longest wait for the daemon.
const PATIENCE: Duration = Duration::from_secs(5);
/// Samples of a chart.
const POINTS: u32 = 600;

/// A text that its takers share, or why there is none.
pub(super) type Text = Result<Arc<str>, String>;

/// An answer, or why there is none; and since when.
type Kept<T> = Mutex<Option<(Instant, Result<T, String>)>>;

/// The samples of so many seconds as JSON, or why there are none; and since when.
type Past = (u64, Instant, Text);

/// What was last written of a status.
#[derive(Default)]
struct Written(Mutex<Option<(Arc<Status>, Arc<str>)>>);

impl Written {
    /// What `write` makes of this status; those who ask at the same time wait for one text.
    fn of<E>(
        &self,
        status: &Arc<Status>,
        write: impl FnOnce() -> Result<String, E>,
    ) -> Result<Arc<str>, E> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, text)) = &*last
            && Arc::ptr_eq(of, status)
        {
            return Ok(Arc::clone(text));
        }
        // The old text goes before the new one comes.
        *last = None;
        let text: Arc<str> = write()?.into();
        *last = Some((Arc::clone(status), Arc::clone(&text)));
        Ok(text)
    }
}

/// The counters of daemon and kernel.
#[derive(Serialize)]
struct Both<'a> {
    ksm: BTreeMap<&'static str, Option<i64>>,
    status: &'a Status,
}

/// The daemon at a socket.
pub(super) struct Source {
    socket: PathBuf,
    ksm: Ksm,
    status: Kept<Arc<Status>>,
    json: Written,
    metrics: Written,
    /// By the seconds asked for, of which there are three.
    history: Mutex<Vec<Past>>,
}

impl Source {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            ksm: Ksm::default(),
            status: Mutex::default(),
            json: Written::default(),
            metrics: Written::default(),
            history: Mutex::default(),
        }
    }

    fn ask(&self, request: &Request) -> Result<Reply, String> {
        match client::ask_quietly(&self.socket, request, PATIENCE) {
            Ok(Reply::Refused(why)) => Err(why),
            Ok(reply) => Ok(reply),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    /// The counters. Those who ask at the same time wait for one answer.
    fn status(&self) -> Result<Arc<Status>, String> {
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

    pub(super) fn status_json(&self) -> Text {
        let status = self.status()?;
        self.json.of(&status, || self.write_json(&status))
    }

    /// At most `guests` guests are named, which is the same number in each call. Without a daemon they tell that.
    pub(super) fn metrics(&self, guests: usize) -> Result<Arc<str>, fmt::Error> {
        let write = |status| metrics::text(status, &self.ksm, guests);
        match self.status() {
            Ok(status) => self
                .metrics
                .of(&status, || write(Some(Arc::clone(&status)))),
            Err(_) => write(None).map(Arc::from),
        }
    }

    fn write_json(&self, status: &Status) -> Result<String, String> {
        let ksm = [
            "run",
            "pages_shared",
            "pages_sharing",
            "general_profit",
            "full_scans",
        ];
        let number = |name| self.ksm.read(name).ok()?.parse::<i64>().ok();
        let ksm = ksm.map(|name| (name, number(name))).into();
        let json = serde_json::to_string(&Both { ksm, status });
        json.map(|json| plain_json(&json))
            .map_err(|error| error.to_string())
    }

    /// The samples of the last `seconds`.
    pub(super) fn history_json(&self, seconds: u64) -> Text {
        let mut kept = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(_, at, _)| at.elapsed() < FRESH);
        if let Some((.., answer)) = kept.iter().find(|(asked, ..)| *asked == seconds) {
            return answer.clone();
        }
        let most = POINTS;
        let answer = match self.ask(&Request::History { seconds, most }) {
            Ok(Reply::History(samples)) => {
                let json = view::history::as_json(&samples);
                json.map(Arc::from).map_err(|error| error.to_string())
            }
            Ok(_) => Err(client::UNEXPECTED.to_owned()),
            Err(why) => Err(why),
        };
        kept.push((seconds, Instant::now(), answer.clone()));
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of many clients that are slow would else hold a text of its own.
    #[test]
    fn who_asks_within_a_second_shares_one_text() {
        let source = Source::new("/nonexistent".into());
        let later = Instant::now() + Duration::from_secs(60);
        let keep = |status| {
            *source.status.lock().unwrap() = Some((later, status));
        };
        keep(Ok(Arc::default()));
        let json = [(); 2].map(|()| source.status_json().unwrap());
        assert!(Arc::ptr_eq(&json[0], &json[1]));
        let value: serde_json::Value = serde_json::from_str(&json[0]).unwrap();
        assert!(value["status"]["guests"].is_array() && value["ksm"].is_object());
        let metrics = [(); 2].map(|()| source.metrics(5).unwrap());
        assert!(Arc::ptr_eq(&metrics[0], &metrics[1]));
        keep(Ok(Arc::new(Status {
            full_scans: 77,
            ..Status::default()
        })));
        assert!(source.status_json().unwrap().contains("\"full_scans\":77"));
        assert!(source.metrics(5).unwrap().contains("full_scans_total 77"));
        keep(Err("gone".to_owned()));
        assert_eq!(source.status_json(), Err("gone".to_owned()));
        assert!(source.metrics(5).unwrap().contains("pageone_up 0"));
    }
}

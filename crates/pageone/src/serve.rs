//! `pageone serve`: the counters for a monitoring and for a browser.
//!
//! ```text
//!  browser ──▶ http ──▶ /  /page.css  /page.js     one page, nothing from elsewhere
//!                   ──▶ /api/status  /api/history ─┐
//!  Prometheus ─▶    ──▶ /metrics ──────────────────┴─▶ source ──▶ the daemon's socket
//! ```
//!
//! A process apart from the daemon, that can only read: it may see as much as its user may. So a mistake here costs no guest
//! anything, and a flood of requests costs the daemon one question a second ([`source`]).

mod http;
mod metrics;
mod source;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};

use crate::output::say;
use crate::paths;
use http::Answer;
use source::Source;

/// The page, its style and its script.
const PAGE: &str = include_str!("serve/page.html");
const STYLE: &str = include_str!("serve/page.css");
const SCRIPT: &str = include_str!("serve/page.js");

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9633", value_parser = address)]
    listen: SocketAddr,
    /// Allow an address that other machines can reach; all their users can read the counters
    #[arg(long)]
    public: bool,
    /// Guests that /metrics names, those that save most first; the others are summed up
    #[arg(long, value_name = "N", default_value_t = 100)]
    guests: u16,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let wrong =
        |_| "it is no address with a port; write it like 127.0.0.1:9633 or [::1]:9633".to_owned();
    text.parse().map_err(wrong)
}

fn cannot_listen(at: SocketAddr, error: &io::Error) -> anyhow::Error {
    let remedy = match error.kind() {
        io::ErrorKind::AddrInUse => ": name another by --listen",
        _ => "",
    };
    anyhow!("cannot listen at {at}: {error}{remedy}")
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let local = args.listen.ip().is_loopback();
    if !local && !args.public {
        bail!(
            "{} can be reached by others, who would see all counters: say --public if that is wanted",
            args.listen
        );
    }
    let listener = TcpListener::bind(args.listen);
    let listener = listener.map_err(|error| cannot_listen(args.listen, &error))?;
    let source = Source::new(paths::served(args.socket.as_deref())?);
    let at = listener.local_addr()?;
    say(&format!("pageone: serving at http://{at}/"));
    let guests = usize::from(args.guests);
    http::serve(&listener, local, move |path| answer(&source, guests, path))
}

/// The answer for a path: these there are, and no others.
fn answer(source: &Source, guests: usize, path: &str) -> Answer {
    match path {
        "/" => Answer::ok("text/html; charset=utf-8", PAGE),
        "/page.css" => Answer::ok("text/css; charset=utf-8", STYLE),
        "/page.js" => Answer::ok("text/javascript; charset=utf-8", SCRIPT),
        "/metrics" => match source.metrics(guests) {
            Ok(text) => Answer::ok(metrics::KIND, text),
            Err(_) => Answer::plain(500, "the metrics cannot be written\n"),
        },
        "/api/status" => json(source.status_json()),
        "/api/history?last=hour" => json(source.history_json(3600)),
        "/api/history?last=day" => json(source.history_json(86_400)),
        "/api/history?last=month" => json(source.history_json(31 * 86_400)),
        _ => Answer::plain(
            404,
            "there is /, /metrics, /api/status and /api/history?last=hour, day or month\n",
        ),
    }
}

fn json(text: source::Text) -> Answer {
    match text {
        Ok(text) => Answer::ok("application/json", text),
        Err(why) => Answer::plain(503, why + "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_use_has_a_way_out() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = held.local_addr().unwrap();
        let error = TcpListener::bind(at).unwrap_err();
        let said = cannot_listen(at, &error).to_string();
        assert!(
            said.contains(&at.to_string()) && said.ends_with("by --listen"),
            "{said}"
        );
        let other = cannot_listen(at, &io::ErrorKind::PermissionDenied.into());
        assert!(!other.to_string().contains("--listen"));
    }
}

//! A small HTTP/1.1 server: GET and HEAD, a connection a request, everything bounded.
//!
//! | bound | value |
//! |---|---|
//! | connections at a time | [`MOST`]; for one more the oldest is closed |
//! | threads, which outlive a closed connection for a moment | [`MOST_THREADS`]; one more is closed at once |
//! | head of a request | [`HEAD`] bytes, in [`PATIENCE`] from the first |
//! | taking the answer | [`TAKING`] |
//!
//! Names are compared, never looked up in a file system, so no path leads anywhere. A page of a stranger in a user's
//! browser must not read the counters by giving its own name the address 127.0.0.1. So at a loopback address a request has to
//! name an address or `localhost` as its host.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const MOST: usize = 32;
const MOST_THREADS: usize = 128;
const HEAD: usize = 8 << 10;
const HEADERS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);
const TAKING: Duration = Duration::from_secs(10);
/// After a failed accept (no descriptors left), time before the next one.
const PAUSE: Duration = Duration::from_millis(100);

/// What an answer says. A text that was asked for by many is there once.
pub(super) enum Body {
    Fixed(&'static str),
    Own(String),
    Shared(Arc<str>),
}

impl Body {
    fn text(&self) -> &str {
        match self {
            Self::Fixed(text) => text,
            Self::Own(text) => text,
            Self::Shared(text) => text,
        }
    }
}

impl From<&'static str> for Body {
    fn from(text: &'static str) -> Self {
        Self::Fixed(text)
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        Self::Own(text)
    }
}

impl From<Arc<str>> for Body {
    fn from(text: Arc<str>) -> Self {
        Self::Shared(text)
    }
}

/// An answer.
pub(super) struct Answer {
    status: u16,
    kind: &'static str,
    body: Body,
}

impl Answer {
    pub(super) fn ok(kind: &'static str, body: impl Into<Body>) -> Self {
        let body = body.into();
        Self {
            status: 200,
            kind,
            body,
        }
    }

    pub(super) fn plain(status: u16, why: impl Into<Body>) -> Self {
        Self {
            status,
            ..Self::ok("text/plain; charset=utf-8", why)
        }
    }

    /// What is sent, one after the other; `only_head` leaves the body out.
    fn parts(&self, only_head: bool) -> (String, &str) {
        let body = if only_head { "" } else { self.body.text() };
        (self.head(), body)
    }

    fn head(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        // The page asks this server alone; what it shows runs nothing.
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
             Referrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none'; script-src 'self'; \
             style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'\r\n\r\n",
            self.status,
            self.kind,
            self.body.text().len(),
        )
    }
}

/// The connections that are open, the oldest first, and the threads that serve.
#[derive(Default)]
struct Open {
    streams: VecDeque<(u64, TcpStream)>,
    last: u64,
    threads: usize,
}

impl Open {
    /// Takes a connection in, in the place of the oldest if there is no other: so a client that says nothing keeps no other out.
    /// Gives its number; `None` without room for its thread.
    fn admit(&mut self, stream: &TcpStream) -> Option<u64> {
        let copy = stream.try_clone().ok()?;
        if self.threads >= MOST_THREADS {
            return None;
        }
        if self.streams.len() >= MOST
            && let Some((_, oldest)) = self.streams.pop_front()
        {
            // Its thread finds that out; one that has ended meanwhile needs nothing.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.last += 1;
        self.threads += 1;
        self.streams.push_back((self.last, copy));
        Some(self.last)
    }
}

/// A connection's place, given back on drop.
struct Place {
    open: Arc<Mutex<Open>>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.threads -= 1;
        open.streams.retain(|(number, _)| *number != self.number);
    }
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves for good. `local`: at a loopback address.
pub(super) fn serve<A>(listener: &TcpListener, local: bool, answer: A) -> !
where
    A: Fn(&str) -> Answer + Send + Sync + 'static,
{
    let (answer, open) = (Arc::new(answer), Arc::<Mutex<Open>>::default());
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        let Some(number) = lock(&open).admit(&stream) else {
            continue;
        };
        let place = Place {
            open: Arc::clone(&open),
            number,
        };
        let answer = Arc::clone(&answer);
        let thread = thread::Builder::new().name("request".to_owned());
        // Without a thread its place is free again.
        let _ = thread.spawn(move || {
            // The caller has gone: there is none to tell.
            let _ = talk(&stream, local, &*answer);
            drop(place);
        });
    }
}

/// One request and its answer.
fn talk(stream: &TcpStream, local: bool, answer: &impl Fn(&str) -> Answer) -> io::Result<()> {
    let (reply, only_head) = match read(stream)? {
        Ok(head) => match target(&head, local) {
            Ok((path, only_head)) => (answer(path), only_head),
            Err(refusal) => (refusal, false),
        },
        Err(refusal) => (refusal, false),
    };
    let (head, body) = reply.parts(only_head);
    let deadline = Instant::now() + TAKING;
    write(stream, head.as_bytes(), deadline)?;
    write(stream, body.as_bytes(), deadline)?;
    // A close with something unread would take back what was sent.
    stream.shutdown(Shutdown::Write)?;
    let mut rest = [0; 4096];
    let deadline = Instant::now() + Duration::from_millis(500);
    while within(stream, deadline)? && matches!((&*stream).read(&mut rest), Ok(1..)) {}
    Ok(())
}

/// Lets the next read or write wait until `deadline`; false after it.
fn within(stream: &TcpStream, deadline: Instant) -> io::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(false);
    }
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))?;
    Ok(true)
}

/// The head of a request, up to its empty line.
fn read(mut stream: &TcpStream) -> io::Result<Result<Vec<u8>, Answer>> {
    let deadline = Instant::now() + PATIENCE;
    let (mut head, mut part) = (Vec::new(), [0; 1024]);
    loop {
        if !within(stream, deadline)? {
            return Ok(Err(Answer::plain(408, "the request took too long\n")));
        }
        let got = match stream.read(&mut part) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(got) => got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        head.extend_from_slice(part.get(..got).unwrap_or_default());
        if head.windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(Ok(head));
        }
        if head.len() > HEAD {
            return Ok(Err(Answer::plain(431, "the request is too long\n")));
        }
    }
}

fn write(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        if !within(stream, deadline)? {
            return Err(ErrorKind::TimedOut.into());
        }
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The path that a head asks for, and whether for its head alone.
fn target(head: &[u8], local: bool) -> Result<(&str, bool), Answer> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Answer::plain(431, "the request has too many headers\n"));
        }
        _ => return Err(Answer::plain(400, "this is no HTTP request\n")),
    }
    let only_head = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(Answer::plain(405, "GET and HEAD alone are answered\n")),
    };
    let is_host = |header: &&httparse::Header<'_>| header.name.eq_ignore_ascii_case("host");
    let mut hosts = request.headers.iter().filter(is_host);
    let known = match (hosts.next(), hosts.next()) {
        (Some(host), None) => std::str::from_utf8(host.value).is_ok_and(is_plain_host),
        _ => false,
    };
    if local && !known {
        let why = "name this server by its address or as localhost\n";
        return Err(Answer::plain(403, why));
    }
    Ok((request.path.unwrap_or_default(), only_head))
}

/// Whether a host is `localhost` or an address, with a port or without.
fn is_plain_host(host: &str) -> bool {
    let host = host.trim();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    name.eq_ignore_ascii_case("localhost") || bare.unwrap_or(name).parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(head: &str, local: bool) -> Result<(String, bool), u16> {
        let asked = target(head.as_bytes(), local);
        asked
            .map(|(path, only_head)| (path.to_owned(), only_head))
            .map_err(|refusal| refusal.status)
    }

    #[test]
    fn an_answer_is_sent_without_a_copy_of_its_text() {
        let text: Arc<str> = "x".repeat(5).into();
        let answer = Answer::ok("text/plain", Arc::clone(&text));
        let (head, body) = answer.parts(false);
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"));
        assert!(head.contains("Content-Length: 5\r\n"), "{head}");
        assert!(std::ptr::eq(body, &*text));
        let (same, nothing) = answer.parts(true);
        assert_eq!((same.as_str(), nothing), (head.as_str(), ""));
    }

    #[test]
    fn requests_are_taken_or_refused() {
        let get = |host: &str| format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n");
        for host in ["localhost:9633", "127.0.0.1", "[::1]:9633", "LOCALHOST"] {
            assert_eq!(
                asks(&get(host), true),
                Ok(("/metrics".to_owned(), false)),
                "{host}"
            );
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:9633",
            "",
            "localhost.x",
        ] {
            assert_eq!(asks(&get(host), true), Err(403), "{host}");
            assert!(asks(&get(host), false).is_ok(), "{host}");
        }
        let two = "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n";
        assert_eq!(asks(two, true), Err(403));
        assert_eq!(asks("GET / HTTP/1.0\r\n\r\n", true), Err(403));
        let head = "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        assert_eq!(asks(head, true), Ok(("/".to_owned(), true)));
        let post = "POST / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        assert_eq!(asks(post, true), Err(405));
        assert_eq!(asks("hello\r\n\r\n", true), Err(400));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        assert_eq!(asks(&many, false), Err(431));
    }
}

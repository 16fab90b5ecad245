//! `pageone_merge`'s side of a control connection: one request and one reply of JSON, written and read without allocation.
//!
//! The agent has no serde. It writes [`Request::Merge`](crate::Request::Merge) for its own process, and of the reply it reads only
//! the answer to its question.

use core::fmt::Write;

use crate::codec::MAX_MESSAGE;

/// Writes the request to merge these addresses of the caller now; gives its length in bytes.
pub fn put_merge_now(start: u64, end: u64, out: &mut [u8; MAX_MESSAGE]) -> usize {
    struct Cursor<'a>(&'a mut [u8; MAX_MESSAGE], usize);
    impl Write for Cursor<'_> {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            let end = self.1 + text.len();
            let place = self.0.get_mut(self.1..end).ok_or(core::fmt::Error)?;
            place.copy_from_slice(text.as_bytes());
            self.1 = end;
            Ok(())
        }
    }
    let mut cursor = Cursor(out, 0);
    // A hundred bytes at most.
    let _ = write!(
        cursor,
        r#"{{"merge":{{"pids":[],"start":{start},"end":{end}}}}}"#
    );
    cursor.1
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// So many pages were merged. There may be more to merge, if the engine left the process alone after that.
    Merged(u64),
    /// Nothing was merged: the kernel may write to its memory unseen.
    Unseen,
    /// Nothing was merged: too much waits, or the process's agent did not answer in time.
    Later,
    /// It is no guest, or the engine does not merge.
    Refused,
}

/// Reads the first packet of the reply; `None` when it is none.
#[must_use]
pub fn get_merged_now(packet: &[u8]) -> Option<Now> {
    let (_, reply) = packet.split_first()?;
    if reply.starts_with(br#"{"refused":"#) {
        return Some(Now::Refused);
    }
    if reply.starts_with(br#"{"crowded":"#) {
        return Some(Now::Later);
    }
    let rest = reply.strip_prefix(br#"{"merged":{"pages":"#)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
    let mut pages = None::<u64>;
    for digit in digits {
        let digit = u64::from(digit - b'0');
        pages = Some(pages.unwrap_or(0).checked_mul(10)?.checked_add(digit)?);
    }
    let pages = pages?;
    // No name in a reason looks like these: JSON writes its quotes with a backslash.
    let says = |words: &[u8]| rest.windows(words.len()).any(|part| part == words);
    Some(match () {
        // Pages that are merged are told of in any case. A caller that asks again learns why there were not more.
        () if pages > 0 || says(br#""left_alone":[]"#) => Now::Merged(pages),
        () if says(br#""cause":"silent""#) => Now::Later,
        () if says(br#""cause":"gone""#) => Now::Refused,
        () => Now::Unseen,
    })
}

#[cfg(all(test, feature = "status"))]
mod tests {
    use super::*;
    use crate::{Cause, LeftAlone, MergeNow, MergedNow, Reply, Request, reply_parts};

    fn packet(reply: &Reply) -> Vec<u8> {
        let json = serde_json::to_vec(reply).expect("JSON");
        reply_parts(&json).next().expect("a packet")
    }

    #[test]
    fn the_request_is_what_the_daemon_reads() {
        for (start, end) in [(0, 0), (4096, u64::MAX), (u64::MAX, u64::MAX)] {
            let mut out = [0; MAX_MESSAGE];
            let len = put_merge_now(start, end, &mut out);
            let request: Request = serde_json::from_slice(&out[..len]).expect("a request");
            let expected = MergeNow {
                pids: Vec::new(),
                start,
                end,
                brief: false,
            };
            assert_eq!(request, Request::Merge(expected));
        }
    }

    #[test]
    fn the_reply_is_read_as_the_daemon_writes_it() {
        let mut merged = MergedNow {
            finished: true,
            took_us: 7,
            ..MergedNow::default()
        };
        for pages in [0, 7, 262_144, u64::MAX] {
            merged.pages = pages;
            let packet = packet(&Reply::Merged(merged.clone()));
            assert_eq!(get_merged_now(&packet), Some(Now::Merged(pages)));
        }
        for (cause, expected) in [
            (Cause::Unseen, Now::Unseen),
            (Cause::Silent, Now::Later),
            (Cause::Gone, Now::Refused),
        ] {
            merged.left_alone = vec![LeftAlone {
                pid: 5,
                cause,
                why: r#"a file of the name "cause":"silent""#.to_owned(),
            }];
            for (pages, expected) in [(0, expected), (7, Now::Merged(7))] {
                merged.pages = pages;
                let alone = packet(&Reply::Merged(merged.clone()));
                assert_eq!(get_merged_now(&alone), Some(expected));
            }
        }
        let crowded = packet(&Reply::Crowded("later".to_owned()));
        assert_eq!(get_merged_now(&crowded), Some(Now::Later));
        let refused = packet(&Reply::Refused("no".to_owned()));
        assert_eq!(get_merged_now(&refused), Some(Now::Refused));
        for other in [&b""[..], &b"\0"[..], &b"\0{"[..], &packet(&Reply::Done)[..]] {
            assert_eq!(get_merged_now(other), None);
        }
        let huge = b"\0{\"merged\":{\"pages\":99999999999999999999999,\"left_alone\":[]";
        assert_eq!(get_merged_now(huge), None);
    }
}

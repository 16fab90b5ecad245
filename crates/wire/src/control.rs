//! Framing of the command line's replies: a reply may be longer than one packet.
//!
//! A request is one packet of JSON. A reply is one or more packets; the first byte of each says
//! whether another follows, the rest is the next piece of the JSON:
//!
//! ```text
//!  ┌───┬───────────┐  ┌───┬───────────┐  ┌───┬──────┐
//!  │ 1 │ piece     │  │ 1 │ piece     │  │ 0 │ end  │
//!  └───┴───────────┘  └───┴───────────┘  └───┴──────┘
//! ```

use crate::MAX_MESSAGE;

/// The longest reply a reader accepts, in bytes: a status of well over 100 000 guests.
pub const MAX_REPLY: usize = 64 * 1024 * 1024;

const LAST: u8 = 0;
const MORE: u8 = 1;

/// Why packets are not a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// A packet without even the first byte: the peer hung up.
    #[error("the reply ends after {at} bytes, before its last part")]
    Ended {
        /// Bytes read so far.
        at: usize,
    },
    /// The first byte is neither of the two.
    #[error("a part of the reply begins with {0}, not with 0 (last) or 1 (more)")]
    Mark(u8),
    /// Longer than [`MAX_REPLY`].
    #[error("the reply is longer than {MAX_REPLY} bytes")]
    TooLong,
}

/// The packets that carry `reply`, in order; at least one.
pub fn reply_parts(reply: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    let mut rest = Some(reply);
    core::iter::from_fn(move || {
        let all = rest?;
        let (piece, after) = all.split_at(all.len().min(MAX_MESSAGE - 1));
        rest = (!after.is_empty()).then_some(after);
        let mut packet = Vec::with_capacity(piece.len() + 1);
        packet.push(if rest.is_some() { MORE } else { LAST });
        packet.extend_from_slice(piece);
        Some(packet)
    })
}

/// Puts the packets of a reply together again.
#[derive(Debug, Default)]
pub struct ReplyReader {
    bytes: Vec<u8>,
}

impl ReplyReader {
    /// Takes the next packet; gives the whole reply when it was the last one.
    ///
    /// # Errors
    /// The packet is not a part of a reply, or the reply is too long.
    pub fn push(&mut self, packet: &[u8]) -> Result<Option<Vec<u8>>, ReplyError> {
        let ended = ReplyError::Ended {
            at: self.bytes.len(),
        };
        let (&mark, piece) = packet.split_first().ok_or(ended)?;
        if self.bytes.len() + piece.len() > MAX_REPLY {
            return Err(ReplyError::TooLong);
        }
        self.bytes.extend_from_slice(piece);
        match mark {
            LAST => Ok(Some(core::mem::take(&mut self.bytes))),
            MORE => Ok(None),
            other => Err(ReplyError::Mark(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn join(packets: impl Iterator<Item = Vec<u8>>) -> Option<Vec<u8>> {
        let mut reader = ReplyReader::default();
        let mut whole = None;
        for packet in packets {
            assert!(whole.is_none(), "a packet after the last");
            assert!(packet.len() <= MAX_MESSAGE);
            whole = reader.push(&packet).expect("a part");
        }
        whole
    }

    proptest! {
        #[test]
        fn a_reply_of_any_length_comes_back(len in 0..5 * MAX_MESSAGE, salt: u8) {
            let reply: Vec<u8> = (0..=250).cycle().map(|byte: u8| byte ^ salt).take(len).collect();
            prop_assert_eq!(join(reply_parts(&reply)), Some(reply));
        }

        #[test]
        fn any_packets_are_handled(packets: Vec<Vec<u8>>) {
            let mut reader = ReplyReader::default();
            for packet in &packets {
                let _ = reader.push(packet);
            }
        }
    }

    #[test]
    fn exact_multiples_need_no_empty_part() {
        let reply = vec![7; 2 * (MAX_MESSAGE - 1)];
        assert_eq!(reply_parts(&reply).count(), 2);
        assert_eq!(reply_parts(&[]).count(), 1);
    }

    #[test]
    fn a_wrong_mark_and_an_empty_packet_are_named() {
        let mut reader = ReplyReader::default();
        assert_eq!(reader.push(&[9, 1]), Err(ReplyError::Mark(9)));
        assert!(matches!(reader.push(&[]), Err(ReplyError::Ended { .. })));
    }

    #[test]
    fn a_reply_without_end_is_refused() {
        let mut reader = ReplyReader::default();
        let part: Vec<u8> = [vec![MORE], vec![b'x'; MAX_MESSAGE - 1]].concat();
        let refused = (0..=MAX_REPLY / (MAX_MESSAGE - 1)).find_map(|_| reader.push(&part).err());
        assert_eq!(refused, Some(ReplyError::TooLong));
    }
}

//! Packets from anywhere: no decoder panics, what one reads its encoder writes back, agents' packets
//! cost no heap at all, and those of the command line little more than their length.

use std::fmt::Debug;

use crate::bound::bounded;
use wire::{
    Answer, DecodeError, Hello, MAX_MESSAGE, Question, Reason, Reception, Reply, ReplyReader,
    Request, Status, Viewer, Welcome,
};

pub(crate) fn check(bytes: &[u8]) {
    bounded(0, || {
        round_trip(bytes, Hello::decode, Hello::encode);
        round_trip(bytes, Welcome::decode, Welcome::encode);
        round_trip(bytes, Reason::decode, Reason::encode);
        let _ = Reception::decode(bytes);
        round_trip(bytes, Question::decode, Question::encode);
        round_trip(bytes, Answer::decode, Answer::encode);
    });
    // Three times the bytes, in the reply, in its packet, and in the reader, which may have room for twice that.
    bounded(12 * bytes.len() + 1024, || parts(bytes));
    bounded(64 * bytes.len() + 4096, || packets(bytes));
    bounded(256 * bytes.len() + 4096, || json(bytes));
}

fn round_trip<T: PartialEq + Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, DecodeError>,
    encode: impl Fn(&T, &mut [u8; MAX_MESSAGE]) -> usize,
) {
    if let Ok(message) = decode(bytes) {
        let mut out = [0; MAX_MESSAGE];
        let len = encode(&message, &mut out);
        assert_eq!(decode(&out[..len]), Ok(message));
    }
}

/// A reply is whole again after its packets.
fn parts(bytes: &[u8]) {
    let reply = bytes.repeat(1 + bytes.len() % 3);
    let mut reader = ReplyReader::default();
    let mut packets = wire::reply_parts(&reply).peekable();
    while let Some(packet) = packets.next() {
        assert!((1..=MAX_MESSAGE).contains(&packet.len()));
        let whole = reader.push(&packet).expect("our own packets");
        assert_eq!(whole.is_some(), packets.peek().is_none());
        if let Some(whole) = whole {
            assert_eq!(whole, reply);
        }
    }
}

/// Packets of a peer that keeps to nothing: each begins with its length.
fn packets(bytes: &[u8]) {
    let mut reader = ReplyReader::default();
    let mut rest = bytes;
    let mut sent = 0;
    while let Some((len, after)) = rest.split_first() {
        let (packet, after) = after.split_at(after.len().min(usize::from(*len)));
        rest = after;
        sent += packet.len();
        match reader.push(packet) {
            Ok(None) => {}
            Ok(Some(reply)) => return assert!(reply.len() < sent),
            Err(_) => return,
        }
    }
}

fn json(bytes: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        let text = serde_json::to_vec(&request).expect("a request is JSON");
        let again: Request = serde_json::from_slice(&text).expect("what was written reads");
        assert_eq!(again, request);
    }
    if let Ok(Reply::Status(status)) = serde_json::from_slice(bytes) {
        let text = serde_json::to_vec(&status).expect("a status is JSON");
        let mut again: Status = serde_json::from_slice(&text).expect("what was written reads");
        // JSON may round a float.
        again.cpu_seconds = status.cpu_seconds;
        assert_eq!(again, *status);
        for uid in status
            .guests
            .iter()
            .map(|guest| guest.uid)
            .chain([0])
            .take(3)
        {
            let domain = String::new();
            let own = status.of_user(&Viewer { uid, domain });
            assert!(own.guests.iter().all(|guest| guest.uid == uid));
            assert_eq!((own.only_user, own.cpu_seconds), (Some(uid), 0.0));
        }
    }
}

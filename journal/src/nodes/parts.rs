//! A control reply as one or more NATS messages: the affinity index of a large revision does not fit into one.
//!
//! A reply that fits is sent as it is. A larger one is cut into parts, in order, each with the header
//! `Ballast-Part: <number>/<count>`. NATS keeps the order on one subject, so a gap means that a part was lost.

use async_nats::{HeaderMap, Message};
use ballast_schemas::NodeReply;
use bytes::Bytes;

const PART_HEADER: &str = "Ballast-Part";
/// Payload bytes of one message; leaves room for headers below the server's default of 1 MiB.
const PART_BYTES_MAX: usize = 768 * 1024;
/// Parts of one reply: a million units take about 140 MB.
const PARTS_MAX: usize = 512;

/// Why parts are not a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PartsError {
    #[error("part {found} came where part {expected} was expected")]
    OutOfOrder { expected: usize, found: usize },
    #[error("the part header {text:?} is not <number>/<count> with a count of at most {PARTS_MAX}")]
    Header { text: String },
    #[error("the reply is not a node's: {reason}")]
    Decode { reason: String },
    #[error("the reply takes {bytes} bytes, more than {PARTS_MAX} parts of {PART_BYTES_MAX}")]
    TooLarge { bytes: usize },
}

/// The messages of one reply, in the order in which they must be sent.
pub(super) fn split(reply: &NodeReply) -> Result<Vec<(HeaderMap, Bytes)>, PartsError> {
    let encoded = rmp_serde::to_vec_named(reply).map_err(|error| PartsError::Decode { reason: error.to_string() })?;
    let body = Bytes::from(encoded);
    let count = body.len().div_ceil(PART_BYTES_MAX);
    if count <= 1 {
        return Ok(vec![(HeaderMap::new(), body)]);
    }
    if count > PARTS_MAX {
        return Err(PartsError::TooLarge { bytes: body.len() });
    }
    let part = |number: usize| {
        let from = (number - 1) * PART_BYTES_MAX;
        let mut headers = HeaderMap::new();
        headers.insert(PART_HEADER, format!("{number}/{count}"));
        (headers, body.slice(from..body.len().min(from + PART_BYTES_MAX)))
    };
    Ok((1..=count).map(part).collect())
}

/// Puts the parts of one reply after another together.
#[derive(Debug, Default)]
pub(super) struct Joiner {
    received: usize,
    body: Vec<u8>,
}

impl Joiner {
    /// The reply that `message` completes, if it does.
    pub(super) fn push(&mut self, message: &Message) -> Result<Option<NodeReply>, PartsError> {
        let header = message.headers.as_ref().and_then(|headers| headers.get(PART_HEADER));
        let Some(header) = header else {
            return decode(&message.payload).map(Some);
        };
        let (number, count) = place(header.as_str())?;
        let expected = self.received + 1;
        if number != expected {
            return Err(PartsError::OutOfOrder { expected, found: number });
        }
        self.body.extend_from_slice(&message.payload);
        self.received = number;
        if number < count {
            return Ok(None);
        }
        let whole = std::mem::take(self);
        decode(&whole.body).map(Some)
    }
}

fn decode(bytes: &[u8]) -> Result<NodeReply, PartsError> {
    ballast_schemas::from_messagepack(bytes).map_err(|error| PartsError::Decode { reason: error.to_string() })
}

fn place(text: &str) -> Result<(usize, usize), PartsError> {
    let wrong = || PartsError::Header { text: text.to_owned() };
    let (number, count) = text.split_once('/').ok_or_else(wrong)?;
    let number: usize = number.parse().map_err(|_| wrong())?;
    let count: usize = count.parse().map_err(|_| wrong())?;
    if number == 0 || number > count || count > PARTS_MAX { Err(wrong()) } else { Ok((number, count)) }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{AffinityIndex, AffinityUnit, Digest};

    use super::*;

    fn message(headers: HeaderMap, payload: Bytes) -> Message {
        let length = payload.len();
        Message {
            subject: "s".into(),
            reply: None,
            payload,
            headers: Some(headers),
            status: None,
            description: None,
            length,
        }
    }

    fn index(units: u32) -> NodeReply {
        let unit = |n: u32| AffinityUnit {
            affinity_id: Digest::of(&n.to_be_bytes()),
            extent_bytes: 4096,
            logical_bytes: 4000,
            crc64: u64::from(n),
        };
        NodeReply::AffinityIndex(Box::new(AffinityIndex { units: (0..units).map(unit).collect() }))
    }

    #[test]
    fn a_reply_larger_than_a_message_reads_back_from_its_parts() {
        let reply = index(20_000);
        let parts = split(&reply).unwrap();
        assert!(parts.len() > 1 && parts.iter().all(|(_, body)| body.len() <= PART_BYTES_MAX));
        let mut joiner = Joiner::default();
        let mut whole = None;
        for (headers, body) in parts {
            assert!(whole.is_none());
            whole = joiner.push(&message(headers, body)).unwrap();
        }
        assert_eq!(whole, Some(reply));
        assert_eq!(split(&index(3)).unwrap().len(), 1);
    }

    #[test]
    fn a_lost_part_and_a_wrong_header_are_noticed() {
        let mut parts = split(&index(20_000)).unwrap();
        let (headers, body) = parts.remove(1);
        assert_eq!(
            Joiner::default().push(&message(headers, body)),
            Err(PartsError::OutOfOrder { expected: 1, found: 2 })
        );
        for wrong in ["", "1", "0/2", "3/2", "a/b", "1/513"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
        assert!(Joiner::default().push(&message(HeaderMap::new(), Bytes::from_static(b"\xc1"))).is_err());
    }
}

//! How a node gets to know its cluster: it introduces itself to a gateway with what it holds, and hears what the log knows of it
//! (see ARCHITECTURE.md, Losing the log). What follows from the answer is done in `transfer_worker`.

use std::time::Duration;

use async_nats::{Client, RequestErrorKind};
use ballast_schemas::{BallastError, ClusterId, HelloReply, InstanceId, InstanceStanding, NodeHello, subject};
use bytes::Bytes;

/// How long a gateway may take to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// A gateway's welcome.
#[derive(Clone, Debug)]
pub(crate) struct Welcome {
    /// The cluster.
    pub cluster_id: ClusterId,
    /// How far the gateway had folded the log.
    pub log_seq: u64,
    /// Key of the transfer tokens.
    pub token_key: [u8; 32],
    /// What the log knows of each instance of the hello.
    pub standings: Vec<(InstanceId, InstanceStanding)>,
}

/// Why a node was not welcomed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    /// No gateway listens.
    #[error("no gateway listens: start one with `ballast gateway`")]
    NoGateway,
    /// NATS or the gateway does not answer.
    #[error("no answer from a gateway ({reason})")]
    NoAnswer { reason: String },
    /// A gateway answered what is not an answer.
    #[error("a gateway's answer makes no sense ({reason}): gateway and transfer worker must be of the same version")]
    Garbled { reason: String },
    /// What the node has on its cold tier can not be adopted yet.
    #[error("the cold tier does not answer ({reason})")]
    ColdTier { reason: String },
    /// This node must not take part.
    #[error("{0}")]
    Refused(BallastError),
}

/// Asks once.
pub(crate) async fn introduce(client: &Client, hello: NodeHello) -> Result<Welcome, HelloError> {
    let garbled = |reason: String| HelloError::Garbled { reason };
    let body = rmp_serde::to_vec_named(&hello).map_err(|error| garbled(error.to_string()))?;
    let request = async_nats::Request::new().payload(Bytes::from(body)).timeout(Some(ANSWER_PATIENCE));
    let reply = client.send_request(subject::HELLO_SUBJECT, request).await.map_err(|error| match error.kind() {
        RequestErrorKind::NoResponders => HelloError::NoGateway,
        _ => HelloError::NoAnswer { reason: error.to_string() },
    })?;
    let reply: HelloReply =
        ballast_schemas::from_messagepack(&reply.payload).map_err(|error| garbled(error.to_string()))?;
    match reply {
        HelloReply::Refused { error } => Err(HelloError::Refused(error)),
        HelloReply::Welcome { cluster_id, log_seq, token_key, standings, .. } => {
            let token_key = token_key
                .try_into()
                .map_err(|key: Vec<u8>| garbled(format!("a token key of {} bytes, expected 32", key.len())))?;
            if standings.len() != hello.instances.len() {
                return Err(garbled(format!("{} standings for {} instances", standings.len(), hello.instances.len())));
            }
            let standings = hello.instances.into_iter().zip(standings).collect();
            Ok(Welcome { cluster_id, log_seq, token_key, standings })
        }
    }
}

/// What a node does with an instance after a welcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Serve it.
    Serve,
    /// Delete its bytes.
    Drop,
    /// Keep its bytes, serve none of them.
    Quarantine,
    /// The gateway has not folded the entry that made the instance: nothing follows from its answer.
    Undecided,
}

/// What follows from a standing that a gateway gave after folding the log up to `log_seq`.
pub(crate) fn verdict(instance: &InstanceId, standing: InstanceStanding, log_seq: u64) -> Verdict {
    match standing {
        InstanceStanding::Known => Verdict::Serve,
        InstanceStanding::Deleted => Verdict::Drop,
        InstanceStanding::Unknown if log_seq < instance.position.seq => Verdict::Undecided,
        InstanceStanding::Unknown => Verdict::Quarantine,
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{LogPosition, RevisionIdentity};

    use super::*;

    #[test]
    fn only_a_gateway_that_folded_past_the_import_can_say_that_an_instance_is_unknown() {
        let group_id = RevisionIdentity::new("t", "n", "r", "v", 1).unwrap().group_id();
        let instance = InstanceId { group_id, position: LogPosition { seq: 10, index: 0 } };
        assert_eq!(verdict(&instance, InstanceStanding::Unknown, 9), Verdict::Undecided);
        assert_eq!(verdict(&instance, InstanceStanding::Unknown, 10), Verdict::Quarantine);
        assert_eq!(verdict(&instance, InstanceStanding::Known, 0), Verdict::Serve);
        assert_eq!(verdict(&instance, InstanceStanding::Deleted, 11), Verdict::Drop);
    }
}

//! Connections to nodes: the client's settings for the data plane, and its errors in the client's words.

use std::fmt;
use std::time::Duration;

use ballast_schemas::{BallastError, ErrorCode, NodeEndpoint};
use ballast_transfer::{ConnectOptions, NodeConnection, Route};

/// Longest time without progress before a node is given up.
const STALL: Duration = Duration::from_secs(15);
/// Longest wait for a node that checks or copies a whole import.
const LONG_WORK: Duration = Duration::from_secs(600);
/// Connections to one node for one job, at most.
const LANES_MAX: usize = 4;

/// How bytes travelled; of several ways the last in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// On one host: descriptors and mapped memory.
    Local,
    /// Over RDMA what was in memory, over TCP what was on disk.
    Rdma,
    /// Over TCP.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Transport::Local => "local",
            Transport::Rdma => "rdma",
            Transport::Tcp => "tcp",
        })
    }
}

impl From<ballast_transfer::Transport> for Transport {
    fn from(transport: ballast_transfer::Transport) -> Self {
        match transport {
            ballast_transfer::Transport::Unix => Transport::Local,
            ballast_transfer::Transport::Rdma => Transport::Rdma,
            ballast_transfer::Transport::Tcp => Transport::Tcp,
        }
    }
}

/// How bytes came over a connection, and why not over RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) transport: Transport,
    pub(crate) why_not_rdma: Option<String>,
}

impl Way {
    /// Of two ways, the one to speak of.
    pub(crate) fn slower(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => Some(if other.transport > one.transport { other } else { one }),
            (one, other) => one.or(other),
        }
    }
}

impl From<&NodeConnection> for Way {
    fn from(connection: &NodeConnection) -> Self {
        let why_not_rdma = connection.why_not_rdma().map(str::to_owned);
        Self { transport: connection.transport().into(), why_not_rdma }
    }
}

pub(crate) async fn connect(
    endpoint: &NodeEndpoint,
    token: &str,
    route: Route,
) -> Result<NodeConnection, BallastError> {
    let options = ConnectOptions { route, stall: STALL, patience: LONG_WORK };
    Ok(NodeConnection::connect(endpoint, token, &options).await?)
}

/// That a node can not be reached any more in the middle of an import, with what that means for it.
pub(crate) fn unreached(mut error: BallastError) -> BallastError {
    if error.code == ErrorCode::Unavailable {
        error.message.push_str(
            "; until the commit the import is in this node's memory alone: if the node was restarted, everything has to be put again",
        );
    }
    error
}

/// How many connections (and threads) one job uses.
pub(crate) fn lanes() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(LANES_MAX)
}

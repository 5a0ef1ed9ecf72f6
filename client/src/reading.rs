//! A revision opened for reading: lease, verified manifest, layout, and the nodes that hold it; and what a round of reads
//! that did not get everything does next (RFC, Get and Revision Lease). The reads themselves are `fetch.rs` and `fill.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::frame::Description;
use ballast_schemas::manifest::Manifest;
use ballast_schemas::{
    AcquireLeaseReply, BallastError, Digest, ErrorCode, NodeEndpoint, RevisionIdentity, WeightRevisionMetadata,
};
use ballast_transfer::{GroupLayout, MappedInstance, NodeConnection, Route};
use serde_json::json;

use crate::gateway::Gateway;
use crate::get::GetOptions;
use crate::lease::HeldLease;
use crate::nodes::{Transport, Way, connect};

/// How long reads go on without any progress, over every replica, before they fail.
const RETRY_PATIENCE: Duration = Duration::from_secs(30);
const RETRY_EVERY: Duration = Duration::from_millis(250);
/// How long a unit is looked for that no node has although all of them answer: copies are made before others go.
const LOST_PATIENCE: Duration = Duration::from_secs(3);
/// Rounds in which every replica of a unit was wrong, before it is believed.
const WRONG_ROUNDS_MAX: u32 = 2;
/// Names listed in one error's sentence, and in its details.
const NAMES_SHOWN: usize = 3;
const NAMES_DETAILED: usize = 100;

/// A revision under a lease.
#[derive(Debug)]
pub(crate) struct Reading {
    lease: HeldLease,
    revision: WeightRevisionMetadata,
    manifest: Arc<Manifest>,
    layout: Arc<GroupLayout>,
    endpoints: Vec<NodeEndpoint>,
    token: String,
    route: Route,
}

/// One node that holds some of the revision, and what.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(crate) endpoint: NodeEndpoint,
    pub(crate) token: String,
    pub(crate) route: Route,
    pub(crate) connection: NodeConnection,
    pub(crate) holdings: Description,
    /// On the same host.
    pub(crate) mapped: Option<Arc<MappedInstance>>,
}

impl Holder {
    pub(crate) fn way(&self) -> Way {
        Way::from(&self.connection)
    }

    pub(crate) fn has(&self, unit: u32) -> bool {
        self.holdings.hot.get(unit) || self.holdings.cold.get(unit)
    }

    /// Another connection to the same node.
    pub(crate) async fn again(&self) -> Result<NodeConnection, BallastError> {
        connect(&self.endpoint, &self.token, self.route).await
    }
}

impl Reading {
    /// Acquires a lease and reads the manifest from a node that holds the revision.
    pub(crate) async fn open(
        gateway: &Gateway,
        identity: &RevisionIdentity,
        options: &GetOptions,
    ) -> Result<Self, BallastError> {
        let holder = options.holder.as_deref().unwrap_or(gateway.name());
        let (lease, reply) = HeldLease::acquire(gateway, identity, holder, options.lease_ttl_ms).await?;
        let AcquireLeaseReply { revision, mut endpoints, mut token, .. } = reply;
        let expected = revision
            .manifest
            .as_ref()
            .map(|manifest| manifest.sha256)
            .ok_or_else(|| BallastError::new(ErrorCode::NotReady, format!("{identity} has no manifest yet")))?;
        let deadline = Instant::now() + RETRY_PATIENCE;
        let route = gateway.route();
        loop {
            let mut last = no_holder(identity);
            for endpoint in &endpoints {
                match read_manifest(endpoint, &token, route, identity, expected).await {
                    Ok(manifest) => {
                        let layout = GroupLayout::new(&manifest.affinity_index().extents());
                        let layout = Arc::new(layout.map_err(|error| BallastError::invalid(error.to_string()))?);
                        return Ok(Self {
                            lease,
                            revision,
                            manifest: Arc::new(manifest),
                            layout,
                            endpoints,
                            token,
                            route,
                        });
                    }
                    Err(error) => {
                        tracing::debug!(node = %endpoint.node, %error, "the manifest was not read");
                        last = error;
                    }
                }
            }
            if Instant::now() + RETRY_EVERY >= deadline || !may_pass(&last) {
                return Err(last);
            }
            tokio::time::sleep(RETRY_EVERY).await;
            let again = lease.again().await?;
            (endpoints, token) = (again.endpoints, again.token);
        }
    }

    pub(crate) fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    pub(crate) fn revision(&self) -> &WeightRevisionMetadata {
        &self.revision
    }

    /// What opens the nodes' doors to the revision, and the nodes that hold it.
    pub(crate) fn door(&self) -> (&str, &[NodeEndpoint]) {
        (&self.token, &self.endpoints)
    }

    /// The same, as it is by now.
    pub(crate) async fn new_door(&self) -> Result<(String, Vec<NodeEndpoint>), BallastError> {
        let AcquireLeaseReply { token, endpoints, .. } = self.lease.again().await?;
        Ok((token, endpoints))
    }

    /// Connects to every node that can be reached and asks what it holds. Those on this host are mapped.
    pub(crate) async fn holders(&self) -> (Vec<Holder>, Option<BallastError>) {
        let mut holders = Vec::new();
        let mut last = None;
        for endpoint in &self.endpoints {
            match self.holders_at(endpoint).await {
                Ok(here) => holders.extend(here),
                Err(error) => {
                    tracing::debug!(node = %endpoint.node, %error, "a holder can not be read from");
                    last = Some(error);
                }
            }
        }
        (holders, last)
    }

    /// A node as a holder: mapped where it can be. What it holds beyond what can be mapped makes it one more.
    async fn holders_at(&self, endpoint: &NodeEndpoint) -> Result<Vec<Holder>, BallastError> {
        let mut connection = connect(endpoint, &self.token, self.route).await?;
        let mut holders = Vec::new();
        if Transport::from(connection.transport()) == Transport::Local {
            match connection.map(self.layout.clone()).await {
                Ok(mapped) => {
                    let (is_whole, holdings) = (mapped.is_whole(), mapped.holdings().clone());
                    holders.push(self.holder(endpoint, connection, holdings, Some(Arc::new(mapped)))?);
                    if is_whole {
                        return Ok(holders);
                    }
                    connection = connect(endpoint, &self.token, self.route).await?;
                }
                Err(error) => {
                    // The same bytes come through the socket, only slower.
                    tracing::warn!(node = %endpoint.node, %error, "segments can not be mapped; reading through the socket");
                    connection = connect(endpoint, &self.token, self.route).await?;
                }
            }
        }
        let holdings = connection.describe().await?;
        holders.push(self.holder(endpoint, connection, holdings, None)?);
        Ok(holders)
    }

    fn holder(
        &self,
        endpoint: &NodeEndpoint,
        connection: NodeConnection,
        holdings: Description,
        mapped: Option<Arc<MappedInstance>>,
    ) -> Result<Holder, BallastError> {
        if holdings.layout_digest != self.layout.digest() {
            let message = format!(
                "node {} has layout {}, expected {}",
                endpoint.node,
                holdings.layout_digest,
                self.layout.digest()
            );
            return Err(BallastError::new(ErrorCode::Conflict, message));
        }
        Ok(Holder {
            endpoint: endpoint.clone(),
            token: self.token.clone(),
            route: self.route,
            connection,
            holdings,
            mapped,
        })
    }

    /// Ends the lease; only then did what was read count.
    pub(crate) async fn release(self) -> Result<(), BallastError> {
        self.lease.release().await
    }

    /// The lease alone, for whoever keeps what was read.
    pub(crate) fn into_lease(self) -> HeldLease {
        self.lease
    }

    /// Bytes of a unit.
    pub(crate) fn bytes_of(&self, unit: u32) -> u64 {
        self.manifest.units().get(unit as usize).map_or(0, |unit| unit.extent_bytes)
    }
}

fn no_holder(identity: &RevisionIdentity) -> BallastError {
    BallastError::new(
        ErrorCode::Unavailable,
        format!("no node that holds {identity} answers; is its transfer worker running?"),
    )
}

fn may_pass(error: &BallastError) -> bool {
    error.is_retryable() || error.code == ErrorCode::ChecksumMismatch
}

async fn read_manifest(
    endpoint: &NodeEndpoint,
    token: &str,
    route: Route,
    identity: &RevisionIdentity,
    expected: Digest,
) -> Result<Manifest, BallastError> {
    let mut connection = connect(endpoint, token, route).await?;
    let bytes = connection.read_manifest().await?;
    let found = Digest::of(&bytes);
    if found != expected {
        let message = format!("node {} has manifest {found} of {identity}, expected {expected}", endpoint.node);
        return Err(BallastError::new(ErrorCode::ChecksumMismatch, message));
    }
    let manifest = Manifest::parse(&bytes)?;
    manifest.check_identity(identity)?;
    Ok(manifest)
}

/// Why a unit was not read.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another replica, or the same a little later, may do.
    Unit(BallastError),
    /// Nothing would help: the target can not be written.
    Fatal(BallastError),
}

/// What one holder gave.
#[derive(Debug, Default)]
pub(crate) struct Attempt {
    pub(crate) done: Vec<u32>,
    pub(crate) failed: Vec<(u32, Failure)>,
    /// How the bytes came, where that may have changed on the way.
    pub(crate) way: Option<Way>,
}

impl Attempt {
    /// Notes how bytes came over a connection, after it was used.
    pub(crate) fn came_over(&mut self, connection: &NodeConnection) {
        self.way = Way::slower(self.way.take(), Some(connection.into()));
    }

    /// Takes what another connection gave.
    pub(crate) fn absorb(&mut self, other: Self) {
        self.done.extend(other.done);
        self.failed.extend(other.failed);
        self.way = Way::slower(self.way.take(), other.way);
    }
}

/// Which units are still wanted, and why those that failed did.
#[derive(Debug)]
pub(crate) struct Rounds {
    wanted: usize,
    /// By unit: its last error, and the rounds in which its bytes were wrong everywhere.
    pending: BTreeMap<u32, (Option<BallastError>, u32)>,
    deadline: Instant,
    is_progress: bool,
    last_unreachable: Option<BallastError>,
    /// Since when some unit is on none of the nodes, all of which answer.
    lost_since: Option<Instant>,
    pub(crate) hot_bytes: u64,
    pub(crate) cold_bytes: u64,
    pub(crate) way: Option<Way>,
}

impl Rounds {
    pub(crate) fn new(units: impl IntoIterator<Item = u32>) -> Self {
        let pending: BTreeMap<_, _> = units.into_iter().map(|unit| (unit, (None, 0))).collect();
        Self {
            wanted: pending.len(),
            pending,
            deadline: Instant::now() + RETRY_PATIENCE,
            is_progress: false,
            last_unreachable: None,
            lost_since: None,
            hot_bytes: 0,
            cold_bytes: 0,
            way: None,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.pending.is_empty()
    }

    /// Units that are still wanted.
    pub(crate) fn pending_units(&self) -> impl Iterator<Item = u32> {
        self.pending.keys().copied()
    }

    /// The holders of this round, and which of the wanted units each gives: from memory where some node has it there.
    pub(crate) async fn shares(&mut self, reading: &Reading) -> Vec<(Holder, Vec<u32>)> {
        let (holders, last) = reading.holders().await;
        let all_answer = last.is_none() && !holders.is_empty();
        let is_lost = |unit: &u32| !holders.iter().any(|holder| holder.has(*unit));
        if all_answer && self.pending.keys().any(is_lost) {
            self.lost_since.get_or_insert_with(Instant::now);
        } else {
            self.lost_since = None;
        }
        self.last_unreachable = last.or(self.last_unreachable.take());
        let mut shares: Vec<(Holder, Vec<u32>)> = holders.into_iter().map(|holder| (holder, Vec::new())).collect();
        let turns = self.pending.values().map(|(_, wrong)| *wrong as usize).collect::<Vec<_>>();
        for (unit, turn) in self.pending.keys().copied().zip(turns) {
            let hot = shares.iter().filter(|(holder, _)| holder.holdings.hot.get(unit)).count();
            let has = |holder: &Holder| if hot > 0 { holder.holdings.hot.get(unit) } else { holder.has(unit) };
            let able: Vec<usize> = (0..shares.len()).filter(|at| has(&shares[*at].0)).collect();
            // A replica that was wrong is not asked first again.
            if let Some(at) = able.get(turn % able.len().max(1)) {
                shares[*at].1.push(unit);
            }
        }
        shares.retain(|(_, units)| !units.is_empty());
        shares
    }

    /// Notes what a holder gave.
    pub(crate) fn note(
        &mut self,
        reading: &Reading,
        holder: &Description,
        way: Way,
        attempt: Attempt,
    ) -> Result<(), BallastError> {
        let came = !attempt.done.is_empty();
        let mut way = attempt.way.unwrap_or(way);
        if way.transport == Transport::Rdma && !attempt.done.iter().any(|unit| holder.hot.get(*unit)) {
            let why_not_rdma = Some("what was read is on disk".to_owned());
            way = Way { transport: Transport::Tcp, why_not_rdma };
        }
        for unit in attempt.done {
            if self.pending.remove(&unit).is_some() {
                let bytes = reading.bytes_of(unit);
                if holder.hot.get(unit) {
                    self.hot_bytes += bytes
                } else {
                    self.cold_bytes += bytes
                }
                self.is_progress = true;
            }
        }
        if came {
            self.way = Way::slower(self.way.take(), Some(way));
        }
        for (unit, failure) in attempt.failed {
            match failure {
                Failure::Fatal(error) => return Err(error),
                Failure::Unit(error) => {
                    if let Some((last, wrong)) = self.pending.get_mut(&unit) {
                        *wrong += u32::from(error.code == ErrorCode::ChecksumMismatch);
                        *last = Some(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Prepares the next round, or gives up: naming what was not read.
    pub(crate) async fn next(&mut self, reading: &mut Reading) -> Result<(), BallastError> {
        if self.is_done() {
            return Ok(());
        }
        if std::mem::take(&mut self.is_progress) {
            self.deadline = Instant::now() + RETRY_PATIENCE;
        }
        let rounds_max = WRONG_ROUNDS_MAX * reading.endpoints.len().max(1) as u32;
        let hopeless = self
            .pending
            .values()
            .any(|(last, wrong)| *wrong >= rounds_max || last.as_ref().is_some_and(|error| !may_pass(error)));
        let lost = self.lost_since.is_some_and(|since| since.elapsed() >= LOST_PATIENCE);
        if hopeless || lost || Instant::now() + RETRY_EVERY >= self.deadline || reading.lease.lapsed() {
            return Err(self.unread(reading));
        }
        tokio::time::sleep(RETRY_EVERY).await;
        let again = reading.lease.again().await?;
        (reading.endpoints, reading.token) = (again.endpoints, again.token);
        Ok(())
    }

    fn unread(&self, reading: &Reading) -> BallastError {
        let identity = &reading.revision.identity;
        let groups = reading.manifest.affinity_groups();
        let name = |unit: &u32| {
            groups.get(*unit as usize).and_then(|group| group.iter().find(|name| !name.is_empty())).copied()
        };
        let names: Vec<&str> = self.pending.keys().filter_map(name).collect();
        let last = self.pending.values().find_map(|(error, _)| error.clone());
        let last = last.or_else(|| self.last_unreachable.clone()).unwrap_or_else(|| {
            BallastError::new(ErrorCode::Unavailable, "no node has a readable copy; the revision needs repair")
        });
        let shown = names[..names.len().min(NAMES_SHOWN)].join(", ");
        let more = if names.len() > NAMES_SHOWN { ", …" } else { "" };
        let message = format!(
            "{} of {} tensors of {identity} could not be read ({shown}{more}): {}",
            names.len(),
            self.wanted,
            last.message
        );
        BallastError::new(last.code, message).with_details(json!({
            "unread_count": names.len(),
            "read_count": self.wanted - self.pending.len(),
            "unread": names[..names.len().min(NAMES_DETAILED)],
        }))
    }
}

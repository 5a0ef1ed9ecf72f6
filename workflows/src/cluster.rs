//! Cluster-wide commands: creation, settings, capabilities, snapshots (RFC, HA and Upgrade; Configuration). Never gated.

use ballast_schemas::{
    AnnounceReplica, ClusterConfig, ClusterId, ConfirmCapability, CreateCluster, ErrorCode, LogTime, Outcome,
    RaiseFoldVersion, Rejection, Reply, SnapshotCommitted, first_fold_version, is_first_fold_version,
};
use serde::{Deserialize, Serialize};

use crate::fold::{Fold, details, reject};

/// Log time after which a replica that was not announced again is taken for gone.
const REPLICA_SILENCE_MS: u64 = 600_000;
/// Replicas remembered; the one that was announced longest ago is forgotten first.
const REPLICAS_MAX: usize = 1_000;
/// Verified snapshots remembered.
const SNAPSHOTS_KEPT: usize = 2;

/// The cluster that a log belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Chosen once.
    pub cluster_id: ClusterId,
    /// One more each time the log was restored from a backup.
    pub incarnation: u64,
    /// Stream timestamp of its first entry, for display.
    pub created_unix_ms: u64,
}

/// What a replica said it can fold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnnouncedReplica {
    /// Command families.
    pub families: Vec<u8>,
    /// Its build.
    pub version: String,
    /// When it last said so, on the log clock.
    pub announced_at: LogTime,
    /// The newest rules it knows.
    #[serde(default = "first_fold_version", skip_serializing_if = "is_first_fold_version")]
    pub fold_version: u32,
}

impl AnnouncedReplica {
    /// Whether it counts as running at `clock`.
    #[must_use]
    pub fn is_live(&self, clock: LogTime) -> bool {
        clock.since(self.announced_at) <= REPLICA_SILENCE_MS
    }
}

impl Fold<'_> {
    /// Only ever called for the first command of the log; `fold` has checked it.
    pub fn create_cluster(&mut self, command: &CreateCluster) -> Outcome {
        let record = &mut self.state.record;
        if let Some(cluster) = &record.cluster {
            return reject(
                ErrorCode::Conflict,
                format!(
                    "this log already belongs to cluster {}; a cluster is created once, by the first entry",
                    cluster.cluster_id
                ),
            );
        }
        record.cluster = Some(Cluster {
            cluster_id: command.cluster_id.clone(),
            incarnation: command.incarnation,
            created_unix_ms: self.unix_ms,
        });
        record.config = command.config.clone();
        record.capabilities = command.capabilities.iter().copied().collect();
        Ok(Reply::Done)
    }

    pub fn set_config(&mut self, config: &ClusterConfig) -> Outcome {
        if let Err(reason) = config.validate() {
            return reject(ErrorCode::InvalidArgument, reason);
        }
        self.state.record.config = config.clone();
        Ok(Reply::Done)
    }

    pub fn announce_replica(&mut self, command: &AnnounceReplica) -> Outcome {
        let announced_at = self.clock();
        let replicas = &mut self.state.record.replicas;
        let replica = AnnouncedReplica {
            families: command.families.clone(),
            version: command.version.clone(),
            announced_at,
            fold_version: command.fold_version,
        };
        replicas.insert(command.replica_id.clone(), replica);
        if replicas.len() > REPLICAS_MAX {
            let oldest =
                replicas.iter().min_by_key(|(id, replica)| (replica.announced_at, *id)).map(|(id, _)| id.clone());
            if let Some(id) = oldest {
                replicas.remove(&id);
            }
        }
        Ok(Reply::Done)
    }

    pub fn confirm_capability(&mut self, command: &ConfirmCapability) -> Outcome {
        let (capability, clock) = (command.capability, self.clock());
        if self.state.has_capability(capability) {
            return Ok(Reply::Done);
        }
        let lacking = self.state.replicas().find_map(|(id, replica)| {
            let family = capability.families().iter().find(|family| !replica.families.contains(family))?;
            replica.is_live(clock).then(|| (id.clone(), *family))
        });
        if let Some((replica, family)) = lacking {
            return Err(Rejection::new(
                ErrorCode::NotReady,
                format!("replica {replica} can not fold command family {family}, which {capability} opens; upgrade or stop it first"),
            )
            .with_details(details([("replica_id", replica.as_str().into()), ("family", u64::from(family).into())])));
        }
        self.state.record.capabilities.insert(capability);
        Ok(Reply::Done)
    }

    /// Accepted only when every live replica said that it knows the new rules, and at least one did: a version that nobody
    /// knows would stop everybody.
    pub fn raise_fold_version(&mut self, command: &RaiseFoldVersion) -> Outcome {
        let (wanted, current, clock) = (command.fold_version, self.state.fold_version(), self.clock());
        if wanted == current {
            return Ok(Reply::Done);
        }
        if wanted < current {
            return reject(
                ErrorCode::InvalidArgument,
                format!("fold version {wanted} is older than the cluster's {current}; it never goes back"),
            );
        }
        let live: Vec<_> = self.state.replicas().filter(|(_, replica)| replica.is_live(clock)).collect();
        if let Some((id, replica)) = live.iter().find(|(_, replica)| replica.fold_version < wanted) {
            return Err(Rejection::new(
                ErrorCode::NotReady,
                format!(
                    "replica {id} knows fold versions up to {}, not {wanted}; upgrade or stop it first",
                    replica.fold_version
                ),
            )
            .with_details(details([
                ("replica_id", id.as_str().into()),
                ("fold_version", replica.fold_version.into()),
            ])));
        }
        if live.is_empty() {
            return reject(
                ErrorCode::NotReady,
                format!("no live replica has announced that it knows fold version {wanted}; start one that does first"),
            );
        }
        self.state.record.fold_version = wanted;
        Ok(Reply::Done)
    }

    pub fn snapshot_committed(&mut self, command: &SnapshotCommitted) -> Outcome {
        let seq = self.position.seq;
        let snapshots = &mut self.state.record.snapshots;
        if command.seq >= seq {
            return reject(
                ErrorCode::InvalidArgument,
                format!(
                    "a snapshot of sequence {} can not be committed by entry {seq}; it must be of an earlier one",
                    command.seq
                ),
            );
        }
        if snapshots.last().is_some_and(|last| last.seq >= command.seq) {
            // Another replica was faster.
            return Ok(Reply::Done);
        }
        snapshots.push(command.clone());
        if snapshots.len() > SNAPSHOTS_KEPT {
            snapshots.remove(0);
        }
        Ok(Reply::Done)
    }
}

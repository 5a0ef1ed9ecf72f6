//! Many mutations: what group commit makes of one sync per envelope.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use ballast_journal::Replica;
use ballast_schemas::RevisionIdentity;
use futures::future::{join_all, try_join_all};
use serde_json::json;

use super::lone::call;
use super::report::{Row, Runs};
use super::site::{Site, publish, submit};
use super::world::{LEASE_LIFE, of_a_lease, uuid_of};
use super::{Error, Options};

const REVISIONS: usize = 1_000;
const BATCHED_CALLERS: usize = 16;
const BATCH: usize = 64;
const SINGLE_CALLERS: usize = 256;
const BATCHED_GOAL: f64 = 50_000.0;
const SINGLE_GOAL: f64 = 15_000.0;

pub(super) async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let site = Arc::new(Site::start(options).await?);
    let gateway = site.gateway().await?;
    let revisions = Arc::new(publish(&gateway.replica, REVISIONS).await?);
    let ids = Arc::new(AtomicUsize::new(0));
    let (mut batched, mut single, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    let mut per_entry = Vec::new();
    for _ in 0..options.runs {
        let deadline = Deadline::after(options);
        let from_seq = gateway.replica.log_seq();
        let callers = (0..BATCHED_CALLERS).map(|_| {
            tokio::spawn(call_in_batches(gateway.replica.clone(), Arc::clone(&revisions), Arc::clone(&ids), deadline))
        });
        let count = total(callers).await?;
        batched.push(deadline.rate(count));
        per_entry.push(count as f64 / (gateway.replica.log_seq() - from_seq).max(1) as f64);
        let deadline = Deadline::after(options);
        let callers = (0..SINGLE_CALLERS).map(|_| {
            tokio::spawn(call_singly(gateway.replica.clone(), Arc::clone(&revisions), Arc::clone(&ids), deadline))
        });
        single.push(deadline.rate(total(callers).await?));
        let deadline = Deadline::after(options);
        let callers = (0..SINGLE_CALLERS).map(|_| {
            tokio::spawn(call_by_request(Arc::clone(&site), Arc::clone(&revisions), Arc::clone(&ids), deadline))
        });
        asked.push(deadline.rate(total(callers).await?));
    }
    gateway.stop().await?;
    let conditions = format!(
        "sync_interval: always, one server, its gateway and the callers on this machine, {:?} a run; leases on {REVISIONS} revisions: granted, renewed twice, released",
        options.run_time
    );
    let per_entry = Runs::new(per_entry).median();
    Ok(vec![
        Row::rate("lease commands, callers that send 64 at a time", "/s", &Runs::new(batched), BATCHED_GOAL).under(
            format!(
                "{conditions}; {BATCHED_CALLERS} callers in the gateway's process, {per_entry:.0} commands an entry"
            ),
        ),
        Row::rate("lease commands, 256 callers that send one each", "/s", &Runs::new(single), SINGLE_GOAL)
            .under(format!("{conditions}; callers in the gateway's process")),
        Row::rate("lease commands, 256 callers through the gateway in JSON", "/s", &Runs::new(asked), SINGLE_GOAL)
            .under(format!("{conditions}; callers on one NATS connection")),
    ])
}

/// When a run began and when its callers begin nothing more.
#[derive(Clone, Copy)]
pub(super) struct Deadline {
    began: Instant,
    at: Instant,
}

impl Deadline {
    pub fn after(options: &Options) -> Self {
        let began = Instant::now();
        Self { began, at: began + options.run_time }
    }

    pub fn is_over(self) -> bool {
        Instant::now() >= self.at
    }

    /// Everything that was done, over the time until the last of it.
    pub fn rate(self, count: usize) -> f64 {
        count as f64 / self.began.elapsed().as_secs_f64()
    }
}

pub(super) async fn total(
    callers: impl Iterator<Item = tokio::task::JoinHandle<Result<usize, Error>>>,
) -> Result<usize, Error> {
    let mut sum = 0;
    // Every caller is awaited, whatever became of the others.
    for counted in join_all(callers.collect::<Vec<_>>()).await {
        sum += counted??;
    }
    Ok(sum)
}

/// 64 leases side by side, each through its life.
async fn call_in_batches(
    replica: Replica,
    revisions: Arc<Vec<RevisionIdentity>>,
    ids: Arc<AtomicUsize>,
    deadline: Deadline,
) -> Result<usize, Error> {
    let mut count = 0;
    while !deadline.is_over() {
        let first = ids.fetch_add(BATCH, Ordering::Relaxed);
        for step in 0..LEASE_LIFE {
            let commands =
                (first..first + BATCH).map(|n| of_a_lease(&revisions[n % revisions.len()], &uuid_of(n as u64), step));
            try_join_all(commands.map(|command| submit(&replica, command))).await?;
            count += BATCH;
        }
    }
    Ok(count)
}

async fn call_singly(
    replica: Replica,
    revisions: Arc<Vec<RevisionIdentity>>,
    ids: Arc<AtomicUsize>,
    deadline: Deadline,
) -> Result<usize, Error> {
    let mut count = 0;
    while !deadline.is_over() {
        let n = ids.fetch_add(1, Ordering::Relaxed);
        for step in 0..LEASE_LIFE {
            submit(&replica, of_a_lease(&revisions[n % revisions.len()], &uuid_of(n as u64), step)).await?;
            count += 1;
        }
    }
    Ok(count)
}

async fn call_by_request(
    site: Arc<Site>,
    revisions: Arc<Vec<RevisionIdentity>>,
    ids: Arc<AtomicUsize>,
    deadline: Deadline,
) -> Result<usize, Error> {
    let mut count = 0;
    while !deadline.is_over() {
        let n = ids.fetch_add(1, Ordering::Relaxed);
        let (identity, lease_id) = (&revisions[n % revisions.len()], uuid_of(n as u64));
        let acquired = json!({"identity": identity, "lease_id": lease_id, "holder": "serving-7", "ttl_ms": 60_000});
        let renewed = json!({"identity": identity, "lease_id": lease_id, "ttl_ms": 60_000});
        let released = json!({"identity": identity, "lease_id": lease_id});
        call(&site, "acquire_lease", &acquired).await?;
        call(&site, "renew_lease", &renewed).await?;
        call(&site, "renew_lease", &renewed).await?;
        call(&site, "release_lease", &released).await?;
        count += LEASE_LIFE;
    }
    Ok(count)
}

//! A node's membership in its cluster: introduced at start, again every half minute and whenever NATS is back, so that what the
//! log decided while the node was away is carried out (see ARCHITECTURE.md, Losing the log).
//!
//! Bytes are deleted only when the log knows that they were deleted, and only instances that the log knows are served.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use ballast_journal::{LastSeen, OpenStreamsError, StreamOptions, Streams, open_streams};
use ballast_schemas::{ErrorCode, InstanceId, InstanceStanding, NodeHello};
use ballast_transfer::{NodeStore, StoreError, TokenGate, TokenKey};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::introduction::{HelloError, Verdict, Welcome, introduce, verdict};
use crate::inventory_mirror::Touched;
use crate::node_status::NodeCondition;

/// A welcomed node asks again this often.
const HELLO_EVERY: Duration = Duration::from_secs(30);
/// A node that got no answer asks again after this long.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// A node that was refused asks again after this long: only an operator can change the answer.
const REFUSED_RETRY_AFTER: Duration = Duration::from_secs(5);
/// A member is refused this often in a row before it stops serving: one gateway that lags must not hide a node's bytes.
const REFUSALS_MAX: u32 = 2;
/// Instances of one introduction: more would not fit into one NATS message.
const INSTANCES_MAX: usize = 2_000;
/// How often the connection is looked at for having come back.
const CONNECTION_LOOK_EVERY: Duration = Duration::from_millis(250);
/// What a node waits for is logged again this often.
const LOG_AGAIN_EVERY: Duration = Duration::from_secs(30);

/// Keeps one node a member.
#[derive(Debug)]
pub(crate) struct Membership {
    pub client: Client,
    pub store: Arc<NodeStore>,
    /// Opens the data plane.
    pub gate: TokenGate,
    /// How the node stands, for its status.
    pub condition: watch::Sender<NodeCondition>,
    pub touched: Touched,
    /// Told when the node holds instances that no gateway has heard of.
    pub news: Arc<Notify>,
}

impl Membership {
    /// Waits until the cluster's streams are there and a gateway has welcomed the node. The condition stays as it is: the node
    /// serves only once it also listens.
    pub(crate) async fn join(&self) -> Streams {
        let mut waiting = Waiting::default();
        let streams = loop {
            // What this node has seen of the log tells a lost log from a new one.
            let last_seen =
                self.store.cluster().map(|cluster_id| LastSeen { cluster_id, log_seq: self.store.highest_seen().seq });
            let options = StreamOptions { create: false, last_seen, ..StreamOptions::default() };
            match open_streams(self.client.clone(), &options).await {
                Ok(streams) => break streams,
                Err(error) if error.is_retryable() => {
                    waiting.note(&error.to_string());
                    self.not_serving(&error.to_string());
                    tokio::time::sleep(RETRY_AFTER).await;
                }
                Err(error) => {
                    let reason = match &error {
                        OpenStreamsError::OtherCluster { .. } => format!("{error}; {}", self.way_out()),
                        _ => error.to_string(),
                    };
                    waiting.note(&reason);
                    self.refuse(&reason).await;
                    tokio::time::sleep(REFUSED_RETRY_AFTER).await;
                }
            }
        };
        loop {
            match self.hello().await {
                Ok(()) => return streams,
                Err(HelloError::Refused(error)) => {
                    waiting.note(&error.to_string());
                    self.refuse(&error.to_string()).await;
                    tokio::time::sleep(REFUSED_RETRY_AFTER).await;
                }
                Err(error) => {
                    waiting.note(&error.to_string());
                    self.not_serving(&format!("waiting to be introduced: {error}"));
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    /// What the operator of a node with another cluster's bytes can do.
    fn way_out(&self) -> String {
        let memory = self.store.memory_report().folder.display().to_string();
        let cold = self.store.cold_report().map(|cold| format!(" and {}", cold.place.display())).unwrap_or_default();
        format!(
            "the bytes in {memory}{cold} are kept: start the node with other folders, or delete these if nobody needs them"
        )
    }

    /// Says that the node serves, and stays a member for as long as it is polled.
    pub(crate) async fn stay(&self) {
        self.serving();
        let mut waiting = Waiting::default();
        let mut refusals = 0;
        let mut next = Instant::now() + HELLO_EVERY;
        let mut connects = self.connects();
        loop {
            self.next_hello(next, &mut connects).await;
            next = Instant::now()
                + match self.hello().await {
                    Ok(()) => {
                        refusals = 0;
                        self.serving();
                        HELLO_EVERY
                    }
                    Err(HelloError::Refused(error)) => {
                        refusals += 1;
                        waiting.note(&error.to_string());
                        if refusals >= REFUSALS_MAX {
                            self.refuse(&error.to_string()).await;
                        }
                        REFUSED_RETRY_AFTER
                    }
                    // The data plane goes on: what is held is as good as it was.
                    Err(error) => {
                        waiting.note(&error.to_string());
                        RETRY_AFTER
                    }
                };
        }
    }

    /// Waits until `due`, until there are news, or until a lost connection is back (`connects` counts how often there was one).
    async fn next_hello(&self, due: Instant, connects: &mut u64) {
        loop {
            let look = Instant::now() + CONNECTION_LOOK_EVERY;
            tokio::select! {
                () = tokio::time::sleep_until(due.min(look)) => {}
                () = self.news.notified() => return,
            }
            let found = self.connects();
            if found != *connects {
                *connects = found;
                // A server that came back may have lost what was not on its disk.
                self.touched.start_over();
                return;
            }
            if Instant::now() >= due && self.client.connection_state() == ConnectionState::Connected {
                return;
            }
        }
    }

    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Introduces the node and does what follows from the answer. What it has on a cold tier that outlives it is adopted once it is
    /// known whose the tier is, and introduced as well.
    async fn hello(&self) -> Result<(), HelloError> {
        self.say_hello().await?;
        let store = Arc::clone(&self.store);
        let adopted = blocking(move || store.adopt_own()).await?;
        match adopted.map_err(|error| HelloError::ColdTier { reason: error.to_string() })? {
            true => self.say_hello().await,
            false => Ok(()),
        }
    }

    /// Introduces the node once.
    async fn say_hello(&self) -> Result<(), HelloError> {
        let store = Arc::clone(&self.store);
        let (cluster_id, seen, instances) =
            blocking(move || (store.cluster(), store.highest_seen(), store.instances())).await?;
        // A node that holds nothing introduces itself as well.
        let batches = if instances.is_empty() { vec![&[][..]] } else { instances.chunks(INSTANCES_MAX).collect() };
        for batch in batches {
            let hello = NodeHello {
                node: self.store.node().clone(),
                incarnation: self.store.incarnation().to_owned(),
                cluster_id: cluster_id.clone(),
                seen,
                instances: batch.to_vec(),
            };
            match introduce(&self.client, hello).await {
                Ok(welcome) => self.obey(welcome).await?,
                // A gateway that can not answer is no verdict on the node.
                Err(HelloError::Refused(error)) if error.code == ErrorCode::Unavailable => {
                    return Err(HelloError::NoAnswer { reason: error.to_string() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn obey(&self, welcome: Welcome) -> Result<(), HelloError> {
        let Welcome { cluster_id, log_seq, token_key, standings } = welcome;
        let key = TokenKey::new(&token_key).map_err(|error| HelloError::Garbled { reason: error.to_string() })?;
        let (store, touched) = (Arc::clone(&self.store), self.touched.clone());
        let joined = blocking(move || {
            store.set_cluster(&cluster_id)?;
            for (instance, standing) in standings {
                if follow_verdict(&store, &instance, verdict(&instance, standing, log_seq)) {
                    touched.touch(&instance);
                }
            }
            Ok::<(), StoreError>(())
        })
        .await?;
        joined.map_err(|error| HelloError::Refused(error.to_error()))?;
        self.gate.set(key);
        Ok(())
    }

    /// Keeps everything and serves nothing.
    async fn refuse(&self, reason: &str) {
        self.gate.close();
        let (store, why) = (Arc::clone(&self.store), reason.to_owned());
        if let Err(error) = blocking(move || store.quarantine_all(&why)).await {
            tracing::error!(%error, "the node's instances can not be taken out of service");
        }
        self.not_serving(reason);
    }

    fn not_serving(&self, reason: &str) {
        let next = NodeCondition::NotServing { reason: reason.to_owned() };
        self.condition.send_if_modified(|condition| std::mem::replace(condition, next.clone()) != next);
    }

    fn serving(&self) {
        self.condition.send_if_modified(|condition| {
            std::mem::replace(condition, NodeCondition::Serving) != NodeCondition::Serving
        });
    }
}

/// Tells whether what is published of the instance may have changed.
fn follow_verdict(store: &NodeStore, instance: &InstanceId, verdict: Verdict) -> bool {
    let standing = match verdict {
        Verdict::Undecided => return false,
        Verdict::Serve => InstanceStanding::Known,
        Verdict::Quarantine => {
            tracing::warn!(%instance, "the log does not know this instance: its bytes are kept and not served");
            InstanceStanding::Unknown
        }
        Verdict::Drop => {
            tracing::info!(%instance, "the log knows this instance to be deleted: its bytes go");
            InstanceStanding::Deleted
        }
    };
    if let Err(error) = store.set_standing(instance, standing) {
        // It is asked about again with the next introduction.
        tracing::error!(%instance, %error, "the instance can not be dropped");
    }
    true
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, HelloError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| HelloError::NoAnswer { reason: error.to_string() })
}

/// Logs what is waited for when it changes, and from time to time.
#[derive(Debug, Default)]
struct Waiting {
    last: Option<(String, Instant)>,
}

impl Waiting {
    fn note(&mut self, reason: &str) {
        let known = self.last.as_ref().is_some_and(|(last, at)| last == reason && at.elapsed() < LOG_AGAIN_EVERY);
        if !known {
            tracing::warn!(reason, "waiting for the cluster");
            self.last = Some((reason.to_owned(), Instant::now()));
        }
    }
}

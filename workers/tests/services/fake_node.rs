//! A node without bytes: it keeps books of what it would hold, obeys fences, and can be told to hesitate or to be away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ballast_journal::nodes::{NodeCall, NodeListener, NodeProgress};
use ballast_schemas::*;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::site::{PATIENCE, Site, eventually};

pub const UNIT_BYTES: u64 = 1000;

pub struct FakeNode {
    pub node: NodeId,
    books: Arc<Mutex<Books>>,
    /// Effects wait while this says so.
    hesitates: watch::Sender<Option<Hesitation>>,
    listening: Option<JoinHandle<()>>,
    speaking: JoinHandle<()>,
    client: async_nats::Client,
}

/// An effect and a unit of it.
pub type Hesitation = (&'static str, u32);

#[derive(Default)]
struct Books {
    held: BTreeMap<InstanceId, NodeInventory>,
    /// Every effect carried out, in order.
    effects: Vec<(&'static str, Vec<UnitRange>)>,
    fails: Option<BallastError>,
    hesitating: u32,
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.speaking.abort();
        if let Some(task) = &self.listening {
            task.abort();
        }
    }
}

impl FakeNode {
    /// Starts it and waits until the site has heard of it.
    pub async fn start(site: &Site, name: &str) -> Self {
        let node = NodeId::new(name).unwrap();
        let client = site.connect().await;
        let speaking = tokio::spawn(speak(client.clone(), status(&node, site.streams.cluster_id())));
        let (books, hesitates) = (Arc::default(), watch::Sender::new(None));
        let mut fake = Self { node: node.clone(), books, hesitates, listening: None, speaking, client };
        fake.listen().await;
        assert!(site.directory.wait_for(PATIENCE, |directory| directory.node(&node)).await.is_some());
        fake
    }

    /// Answers requests (again).
    pub async fn listen(&mut self) {
        let mut listener = NodeListener::open(self.client.clone(), &self.node).await.unwrap();
        self.client.flush().await.unwrap();
        let (books, hesitates) = (Arc::clone(&self.books), self.hesitates.subscribe());
        self.listening = Some(tokio::spawn(async move {
            while let Some(call) = listener.next().await {
                tokio::spawn(answer(call, Arc::clone(&books), hesitates.clone()));
            }
        }));
    }

    /// Nobody hears requests any more.
    pub async fn leave(&mut self) {
        let task = self.listening.take().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        // The subscription goes with its task; the server must have heard that.
        self.client.flush().await.unwrap();
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    /// Shows progress and does nothing else when asked for this effect on this unit, until told otherwise.
    pub fn hesitate(&self, on: Option<Hesitation>) {
        self.hesitates.send_replace(on);
    }

    /// Waits until a request makes it hesitate.
    pub async fn hesitates(&self) {
        eventually("the node hesitates", async || (self.books().hesitating > 0).then_some(())).await;
    }

    /// Answers every effect with this.
    pub fn fail(&self, error: Option<BallastError>) {
        self.books().fails = error;
    }

    /// The effects carried out so far, with the units of each.
    pub fn effects(&self) -> Vec<(&'static str, Vec<u32>)> {
        let units = |ranges: &Vec<UnitRange>| ranges.iter().flat_map(|range| range.iter()).collect();
        self.books().effects.iter().map(|(name, ranges)| (*name, units(ranges))).collect()
    }

    pub fn inventory(&self, instance: &InstanceId) -> Option<NodeInventory> {
        self.books().held.get(instance).cloned()
    }

    /// Publishes a revision with `units` hot units on this node.
    pub async fn import(&self, site: &Site, identity: &RevisionIdentity, units: u32) -> InstanceId {
        let session = site.begin_import(identity, &self.node, units, u64::from(units) * UNIT_BYTES).await;
        let instance = session.instance.clone();
        let inventory = NodeInventory {
            node: self.node.clone(),
            incarnation: "first".into(),
            instance: instance.clone(),
            fence: LogPosition::ZERO,
            sealed: true,
            manifest: true,
            hot: Bitmap::full(units),
            cold: Bitmap::empty(units),
            cold_lost: Bitmap::empty(units),
        };
        self.books().held.insert(instance.clone(), inventory);
        let receipt = Receipt {
            node: self.node.clone(),
            incarnation: "first".into(),
            instance: instance.clone(),
            session_id: session.session_id.clone(),
            layout_digest: Digest::of(b"layout"),
            checksums_digest: Digest::of(b"checksums"),
            manifest: ManifestRef {
                key: identity.manifest_key(),
                sha256: Digest::of(identity.to_string().as_bytes()),
                group_id: identity.group_id(),
                payload_keys_sha256: Digest::of(b"keys"),
                payload_count: units.into(),
                logical_bytes: u64::from(units) * UNIT_BYTES,
                affinity_count: units,
                affinity_digest: Digest::of(b"affinity"),
            },
        };
        site.commit_import(&session, receipt).await;
        instance
    }
}

fn status(node: &NodeId, cluster_id: &ClusterId) -> NodeStatus {
    NodeStatus {
        endpoint: NodeEndpoint { node: node.clone(), host_id: "host".into(), unix_socket: None, tcp: None },
        incarnation: "first".into(),
        cluster_id: Some(cluster_id.clone()),
        not_serving: None,
        memory_capacity_bytes: 1 << 30,
        memory_used_bytes: 0,
        memory_kind: "none".into(),
        cold_capacity_bytes: 1 << 30,
        cold_used_bytes: 0,
        cold_engine: "none".into(),
        instances: 0,
        quarantined: 0,
        objects: ballast_schemas::ObjectCounts::default(),
        shared_imports: true,
        labels: BTreeMap::new(),
    }
}

async fn speak(client: async_nats::Client, status: NodeStatus) {
    let body = serde_json::to_vec(&status).unwrap();
    loop {
        client.publish(subject::node_status(&status.endpoint.node), body.clone().into()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn answer(call: NodeCall, books: Arc<Mutex<Books>>, mut hesitates: watch::Receiver<Option<Hesitation>>) {
    while hesitates.borrow_and_update().is_some_and(|(name, unit)| concerns(&call.request, name, unit)) {
        books.lock().unwrap().hesitating += 1;
        call.progress(NodeProgress::default()).await.unwrap();
        let _ = tokio::time::timeout(Duration::from_millis(200), hesitates.changed()).await;
    }
    let reply = carry_out(&mut books.lock().unwrap(), &call.request);
    call.finish(reply).await.unwrap();
}

fn concerns(request: &NodeRequest, name: &str, unit: u32) -> bool {
    let (NodeRequest::CopyToCold(effect)
    | NodeRequest::CopyToMemory(effect)
    | NodeRequest::ReleaseMemory(effect)
    | NodeRequest::DeleteUnits(effect)) = request
    else {
        return false;
    };
    effect_name(request) == Some(name) && effect.units.iter().any(|range| range.iter().contains(&unit))
}

fn effect_name(request: &NodeRequest) -> Option<&'static str> {
    match request {
        NodeRequest::CopyToCold(_) => Some("copy_to_cold"),
        NodeRequest::CopyToMemory(_) => Some("copy_to_memory"),
        NodeRequest::ReleaseMemory(_) => Some("release_memory"),
        NodeRequest::DeleteUnits(_) => Some("delete_units"),
        NodeRequest::DeleteInstance { .. } => Some("delete_instance"),
        _ => None,
    }
}

fn carry_out(books: &mut Books, request: &NodeRequest) -> NodeReply {
    if let (Some(_), Some(error)) = (effect_name(request), &books.fails) {
        return NodeReply::Failed(error.clone());
    }
    match request {
        NodeRequest::Inventory { instance } => report(books, instance),
        NodeRequest::AffinityIndex { instance } => match books.held.get(instance) {
            Some(held) => NodeReply::AffinityIndex(Box::new(index(held.hot.len()))),
            None => NodeReply::Absent,
        },
        NodeRequest::RaiseFence { instance, fence } => effect(books, request, instance, *fence, &[], |_, _| {}),
        NodeRequest::CopyToCold(copy) => {
            effect(books, request, &copy.instance, copy.fence, &copy.units, |held, unit| held.cold.set(unit, true))
        }
        NodeRequest::CopyToMemory(copy) => {
            effect(books, request, &copy.instance, copy.fence, &copy.units, |held, unit| held.hot.set(unit, true))
        }
        NodeRequest::ReleaseMemory(release) => {
            effect(books, request, &release.instance, release.fence, &release.units, |held, unit| {
                assert!(held.cold.get(unit), "unit {unit} is released without a copy on disk");
                held.hot.set(unit, false);
            })
        }
        NodeRequest::DeleteUnits(delete) => {
            effect(books, request, &delete.instance, delete.fence, &delete.units, |held, unit| {
                held.hot.set(unit, false);
                held.cold.set(unit, false);
                held.manifest = false;
            })
        }
        NodeRequest::DeleteInstance { instance, .. } => {
            books.effects.push(("delete_instance", Vec::new()));
            books.held.remove(instance);
            NodeReply::Absent
        }
        NodeRequest::Receipt { .. } | NodeRequest::Verify { .. } => {
            NodeReply::Failed(BallastError::invalid("this node does not do that"))
        }
    }
}

fn effect(
    books: &mut Books,
    request: &NodeRequest,
    instance: &InstanceId,
    fence: LogPosition,
    units: &[UnitRange],
    change: impl Fn(&mut NodeInventory, u32),
) -> NodeReply {
    let Some(held) = books.held.get_mut(instance) else { return NodeReply::Absent };
    if fence < held.fence {
        return NodeReply::Failed(BallastError::new(
            ErrorCode::Conflict,
            format!("fence {fence} is older than {}", held.fence),
        ));
    }
    held.fence = fence;
    units.iter().flat_map(|range| range.iter()).for_each(|unit| change(held, unit));
    if let Some(name) = effect_name(request) {
        books.effects.push((name, units.to_vec()));
    }
    report(books, instance)
}

fn report(books: &Books, instance: &InstanceId) -> NodeReply {
    books.held.get(instance).map_or(NodeReply::Absent, |held| NodeReply::Inventory(Box::new(held.clone())))
}

fn index(units: u32) -> AffinityIndex {
    let unit = |n: u32| AffinityUnit {
        affinity_id: Digest::of(&n.to_be_bytes()),
        extent_bytes: UNIT_BYTES,
        logical_bytes: UNIT_BYTES,
        crc64: n.into(),
    };
    AffinityIndex { units: (0..units).map(unit).collect() }
}

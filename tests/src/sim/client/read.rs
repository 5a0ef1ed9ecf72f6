//! Reading: acquire a lease, ask the holders what they have, map or read every unit, hold the views for a while and look at
//! them again, release; only the release says whether the read counts.

use std::cell::RefCell;
use std::rc::Rc;

use ballast_schemas::{
    AcquireLease, BallastError, Command, ErrorCode, LeaseGrant, LeaseId, NodeId, ReleaseLease, RenewLease, Reply,
    WeightRevisionMetadata,
};

use super::{Client, SHORT, Shared};
use crate::sim::bugs::Bug;
use crate::sim::content::Content;
use crate::sim::gateway::{Gateway, unavailable};
use crate::sim::invariants;
use crate::sim::node::Mapped;
use crate::sim::runtime::{Either, MS, SECOND, either};

/// Looks at a unit's holders before a reader gives up.
const LOOKS: u32 = 6;

/// A view that a reader keeps.
struct View {
    unit: u32,
    node: NodeId,
    mapped: Rc<Mapped>,
}

impl Client {
    pub(super) async fn get(&self) -> Result<(), BallastError> {
        let record = self.some_ready().await?;
        let w = &self.w;
        let ttl_ms = w.draw(|rng| rng.between(2_000, 25_000));
        let hold_ns =
            w.draw(|rng| if rng.chance(3_000) { rng.between(10, 60) * SECOND } else { rng.between(0, 4) * SECOND });
        self.read_under_lease(&record, ttl_ms, hold_ns).await.map(drop)
    }

    /// Reads everything under a lease of its own. Whether every unit was read and the read counts.
    async fn read_under_lease(
        &self,
        record: &WeightRevisionMetadata,
        ttl_ms: u64,
        hold_ns: u64,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let lease_id =
            LeaseId::new(w.name(&format!("{}-l", self.slot.name))).map_err(|error| unavailable(error.to_string()))?;
        let identity = record.identity.clone();
        let command = AcquireLease {
            identity: identity.clone(),
            lease_id: lease_id.clone(),
            holder: self.slot.name.clone(),
            ttl_ms,
        };
        let acquire = move |gateway: Rc<Gateway>, until| {
            let command = command.clone();
            async move { gateway.acquire_lease(command, until).await }
        };
        let (grant, record) = self.mutate(ttl_ms * MS, acquire).await?;
        self.nap().await;
        let lapsed: Shared<bool> = Rc::new(RefCell::new(false));
        let reading = self.read_and_hold(&grant, &record, hold_ns);
        let read = match either(reading, self.keep_lease(&grant, &lapsed)).await {
            Either::First(read) => read,
            Either::Second(()) => Ok(()),
        };
        self.nap().await;
        let release = Command::ReleaseLease(ReleaseLease { identity, lease_id: lease_id.clone() });
        let released = self.submit(release).await?;
        read?;
        let Reply::LeaseEnded { lapsed } = released else { return Err(unavailable("not a lease's end")) };
        if lapsed && !w.bug(Bug::LapseIgnored) {
            return Err(BallastError::new(ErrorCode::LeaseExpired, "the lease lapsed: the read does not count"));
        }
        invariants::counted(w, &lease_id);
        Ok(())
    }

    /// Renews the lease. Never ends.
    async fn keep_lease(&self, grant: &LeaseGrant, lapsed: &Shared<bool>) {
        let w = &self.w;
        let ttl_ms = grant.ttl_ms;
        loop {
            w.rt.sleep(ttl_ms * MS / 3).await;
            let (identity, lease_id) = (grant.identity.clone(), grant.lease_id.clone());
            let command = Command::RenewLease(RenewLease { identity, lease_id, ttl_ms });
            let handler = move |gateway: Rc<Gateway>, until| {
                let command = command.clone();
                async move { gateway.submit(gateway.replica.w.command_id(), until, command).await }
            };
            match self.mutate(ttl_ms * MS / 3, handler).await {
                Err(error) if error.code != ErrorCode::Unavailable => *lapsed.borrow_mut() = true,
                _ => {}
            }
        }
    }

    async fn read_and_hold(
        &self,
        grant: &LeaseGrant,
        record: &WeightRevisionMetadata,
        hold_ns: u64,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let (content, views) = self.read_units(grant, record).await?;
        let end = w.now() + hold_ns;
        while w.now() < end && !views.is_empty() {
            w.work(SECOND).await;
            for view in &views {
                let how = format!("mapped on {}", view.node);
                invariants::saw(w, &grant.lease_id, &content, view.unit, view.mapped.read(view.unit), &how);
            }
        }
        Ok(())
    }

    async fn read_units(
        &self,
        grant: &LeaseGrant,
        record: &WeightRevisionMetadata,
    ) -> Result<(Rc<Content>, Vec<View>), BallastError> {
        let w = &self.w;
        let manifest = record.manifest.as_ref().ok_or_else(|| unavailable("no manifest"))?;
        let content = w.content(&manifest.sha256).ok_or_else(|| unavailable("an unknown manifest"))?;
        let mut views: Vec<View> = Vec::new();
        let mut missing: Vec<u32> = (0..content.len()).collect();
        for look in 0..LOOKS {
            let mut holders = record.placement.clone();
            while !holders.is_empty() && !missing.is_empty() {
                let node = holders.remove(w.draw(|rng| rng.index(holders.len())));
                let _ = self.read_from(&node, grant, &content, &mut missing, &mut views).await;
            }
            if missing.is_empty() {
                return Ok((content, views));
            }
            w.work(SHORT * u64::from(look + 1)).await;
        }
        Err(unavailable(format!("units {missing:?} of {} can not be read now", record.identity)))
    }

    /// Reads what one holder has of what is missing.
    async fn read_from(
        &self,
        node: &NodeId,
        grant: &LeaseGrant,
        content: &Rc<Content>,
        missing: &mut Vec<u32>,
        views: &mut Vec<View>,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let instance = grant.instance.clone();
        let same_host = w.node_named(node).is_some_and(|node| Some(node.at) == self.host);
        let id = instance.clone();
        let granted = self
            .on_node(node, move |store| {
                let id = id.clone();
                async move { store.grant(&id, same_host).await }
            })
            .await?;
        if granted.content.manifest.sha256 != content.manifest.sha256 {
            return Err(BallastError::new(ErrorCode::ChecksumMismatch, "another manifest"));
        }
        let mapped: Vec<Rc<Mapped>> = granted.mapped.into_iter().map(Rc::new).collect();
        let mut read = Vec::new();
        for &unit in missing.iter() {
            let view = mapped.iter().find(|mapped| granted.hot.get(unit) && mapped.covers(unit));
            let how = format!("on {node}");
            if let Some(view) = view {
                invariants::saw(w, &grant.lease_id, content, unit, view.read(unit), &how);
                views.push(View { unit, node: node.clone(), mapped: Rc::clone(view) });
                read.push(unit);
                continue;
            }
            let id = instance.clone();
            if granted.hot.get(unit) {
                let bytes = self
                    .on_node(node, move |store| {
                        let id = id.clone();
                        async move { store.read_hot(&id, unit).await }
                    })
                    .await;
                if let Ok(Some(bytes)) = bytes {
                    invariants::saw(w, &grant.lease_id, content, unit, Some(bytes), &how);
                    read.push(unit);
                }
            } else if granted.cold.get(unit) {
                let bytes = self
                    .on_node(node, move |store| {
                        let id = id.clone();
                        async move { store.read_cold(&id, unit).await }
                    })
                    .await;
                if let Ok(bytes) = bytes {
                    invariants::saw(w, &grant.lease_id, content, unit, Some(bytes), &how);
                    read.push(unit);
                }
            }
        }
        missing.retain(|unit| !read.contains(unit));
        Ok(())
    }
}

/// A full read of a revision in a cluster at rest.
pub(crate) async fn read_all(client: &Client, record: &WeightRevisionMetadata) -> Result<(), BallastError> {
    client.read_under_lease(record, 20_000, 0).await
}

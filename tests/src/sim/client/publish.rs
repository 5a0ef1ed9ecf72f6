//! Publishing: begin an import, upload to every node of the placement, seal, commit; renewing the session meanwhile. A
//! straggler may go on long after its session has ended.

use std::cell::RefCell;
use std::rc::Rc;

use ballast_schemas::{
    AbortImport, Availability, BallastError, BeginImport, Command, Digest, ErrorCode, ImportSession, NodeId,
    RenewImport, RevisionIdentity, SessionId, WeightRevisionMetadata, WeightStoragePolicy,
};

use super::{Client, DATA_PLANE, REQUEST_DEADLINE, SHORT, Shared, identity, next_generation};
use crate::sim::content::Content;
use crate::sim::gateway::{Gateway, unavailable};
use crate::sim::net::ask;
use crate::sim::runtime::{Either, MS, either};

/// Attempts at one request to a node.
const ATTEMPTS: u32 = 4;

impl Client {
    pub(super) async fn put_next(&self) -> Result<(), BallastError> {
        let any = self.some_lineage();
        let records = self.revisions().await?;
        let next = next_generation(&records, &any);
        // Sometimes somebody else's, to compete with it or to take up what was given up.
        let weight_generation = self.w.draw(|rng| match rng.below(10) {
            0 | 1 => next.saturating_sub(1).max(1),
            2 => next + 1,
            _ => next,
        });
        let policy = self.w.draw(|rng| rng.chance(8_000)).then(|| self.some_policy());
        let identity = any.with_generation(weight_generation);
        self.put(&identity, policy).await
    }

    pub(super) async fn put(
        &self,
        identity: &RevisionIdentity,
        policy: Option<WeightStoragePolicy>,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let session_id =
            SessionId::new(w.name(&format!("{}-s", self.slot.name))).map_err(|error| unavailable(error.to_string()))?;
        let content = Rc::new(w.draw(|rng| {
            let units = rng.between(1, w.plan.units_max);
            Content::new(identity, &session_id, units, rng)
        }));
        w.contents.borrow_mut().insert(content.manifest.sha256, Rc::clone(&content));
        let ttl_ms = w.draw(|rng| rng.between(4_000, 15_000));
        let command = BeginImport {
            identity: identity.clone(),
            session_id: session_id.clone(),
            ttl_ms,
            policy,
            placement_digest: content.manifest.affinity_digest,
            placement: Vec::new(),
            logical_bytes: content.manifest.logical_bytes,
            unit_count: content.len(),
        };
        let begin = move |gateway: Rc<Gateway>, until| {
            let command = command.clone();
            async move { gateway.begin_import(command, None, until).await }
        };
        let session = self.mutate(REQUEST_DEADLINE, begin).await?;
        self.nap().await;
        // A careless importer does not look whether its session is still its own.
        let careless = w.draw(|rng| rng.chance(3_000));
        let lost: Shared<bool> = Rc::new(RefCell::new(false));
        let upload = self.upload(&session, &content, &lost, careless);
        let uploaded = match either(upload, self.keep_session(&session, &lost)).await {
            Either::First(uploaded) => uploaded,
            Either::Second(()) => Err(unavailable("the session was lost")),
        };
        match uploaded {
            Ok(()) => Ok(()),
            Err(error) => {
                if w.draw(|rng| rng.chance(7_000)) {
                    let abort = AbortImport { identity: identity.clone(), session_id, coordinator: None };
                    self.submit(Command::AbortImport(abort)).await?;
                }
                Err(error)
            }
        }
    }

    async fn upload(
        &self,
        session: &ImportSession,
        content: &Rc<Content>,
        lost: &Shared<bool>,
        careless: bool,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        for node in &session.placement {
            self.allocate(node, session, content.len()).await?;
            for (unit, bytes) in (0..).zip(&content.units) {
                if *lost.borrow() && !careless {
                    return Err(BallastError::new(ErrorCode::LeaseExpired, "the session was lost"));
                }
                self.write(node, session, unit, *bytes).await?;
            }
            self.nap().await;
            // The planted gateway takes an importer's word, and this one gives it too early.
            if w.bug(crate::sim::bugs::Bug::CommitWithoutReceipts) && w.draw(|rng| rng.chance(5_000)) {
                continue;
            }
            self.seal(node, session, content).await?;
        }
        self.nap().await;
        let record = self.commit(session, content.manifest.sha256).await?;
        w.trace(format!("{} published {}", self.slot.name, record.identity));
        Ok(())
    }

    pub(super) async fn commit(
        &self,
        session: &ImportSession,
        sha256: Digest,
    ) -> Result<WeightRevisionMetadata, BallastError> {
        let session = session.clone();
        let commit = move |gateway: Rc<Gateway>, until| {
            let session = session.clone();
            async move { gateway.commit_import(&session, sha256, until).await }
        };
        self.mutate(REQUEST_DEADLINE, commit).await
    }

    /// Renews the session while bytes move. Never ends; says when it is lost.
    pub(super) async fn keep_session(&self, session: &ImportSession, lost: &Shared<bool>) {
        let w = &self.w;
        loop {
            w.rt.sleep(session.ttl_ms * MS / 3).await;
            let (identity, session_id) = (session.identity.clone(), session.session_id.clone());
            let coordinator = session.coordinator();
            let command = Command::RenewImport(RenewImport { identity, session_id, coordinator });
            let handler = move |gateway: Rc<Gateway>, until| {
                let command = command.clone();
                async move { gateway.submit(gateway.replica.w.command_id(), until, command).await }
            };
            let renewed = self.mutate(session.ttl_ms * MS / 3, handler).await;
            if renewed.is_err_and(|error| error.code != ErrorCode::Unavailable) {
                *lost.borrow_mut() = true;
            }
        }
    }

    pub(super) async fn allocate(
        &self,
        node: &NodeId,
        session: &ImportSession,
        units: u32,
    ) -> Result<(), BallastError> {
        let (id, session_id) = (session.instance.clone(), session.session_id.clone());
        self.on_node(node, move |store| {
            let (id, session_id) = (id.clone(), session_id.clone());
            async move { store.allocate(&id, &session_id, units) }
        })
        .await
    }

    async fn write(&self, node: &NodeId, session: &ImportSession, unit: u32, bytes: u64) -> Result<(), BallastError> {
        let (id, session_id) = (session.instance.clone(), session.session_id.clone());
        self.on_node(node, move |store| {
            let (id, session_id) = (id.clone(), session_id.clone());
            async move { store.write(&id, &session_id, unit, bytes).await }
        })
        .await
    }

    pub(super) async fn seal(
        &self,
        node: &NodeId,
        session: &ImportSession,
        content: &Rc<Content>,
    ) -> Result<(), BallastError> {
        let (id, session_id, content) = (session.instance.clone(), session.session_id.clone(), Rc::clone(content));
        self.on_node(node, move |store| {
            let (id, session_id, content) = (id.clone(), session_id.clone(), Rc::clone(&content));
            async move { store.seal(&id, &session_id, &content).await }
        })
        .await
    }

    /// A request on the data plane, repeated while nobody answers.
    pub(super) async fn on_node<T: 'static, F, Fut>(&self, node: &NodeId, handler: F) -> Result<T, BallastError>
    where
        F: Fn(Rc<crate::sim::node::Store>) -> Fut + Clone + 'static,
        Fut: std::future::Future<Output = Result<T, BallastError>> + 'static,
    {
        let w = &self.w;
        let Some(node) = w.node_named(node) else { return Err(unavailable("no such node")) };
        for _ in 0..ATTEMPTS {
            if let Some(answer) = ask(w, &self.slot.link, &node.slot, DATA_PLANE, handler.clone()).await {
                return answer;
            }
            w.work(SHORT).await;
        }
        Err(unavailable(format!("node {} does not answer", node.id)))
    }

    /// Waits until an import may begin.
    pub(super) async fn wait_until_absent(&self, of: &RevisionIdentity, patience_ns: u64) -> Result<(), BallastError> {
        let give_up_at = self.w.now() + patience_ns;
        loop {
            let asked = of.clone();
            let found = self.look(move |state| state.revision(&asked).map(|record| record.availability)).await?;
            if found.is_none_or(|found| found == Availability::Deleted) {
                return Ok(());
            }
            if self.w.now() > give_up_at {
                return Err(BallastError::new(ErrorCode::Busy, format!("{of} is not gone yet")));
            }
            self.w.work(SHORT * 5).await;
        }
    }
}

/// The lineage's identity at a generation.
pub(super) fn at_generation(any: &RevisionIdentity, weight_generation: u64) -> RevisionIdentity {
    let _ = identity;
    any.with_generation(weight_generation)
}

//! Puts of several participants: one client coordinates, ranks run on whichever machines there are, die in the middle, fall
//! asleep and come back after another run has taken their place, or disagree about what several of them hold. The coordinator
//! is one of those that come again: on another machine, while the run before it is dead, asleep, or only slow.

use std::rc::Rc;

use ballast_schemas::frame::Offers;
use ballast_schemas::{
    AbortImport, BallastError, BeginImport, Command, ErrorCode, ImportSession, JoinImport, NodeId, PartWriter,
    ParticipantId, Reply, SessionId, TokenPart, WriterId,
};

use super::{Client, REQUEST_DEADLINE, SHORT, Shared, next_generation};
use crate::sim::content::Content;
use crate::sim::gateway::{Gateway, unavailable};
use crate::sim::runtime::{Either, MS, SECOND, either};

/// One import of several participants.
struct Job {
    /// With the session's name, under which every run of the coordinator finds it.
    begin: BeginImport,
    content: Rc<Content>,
    participants: Vec<ParticipantId>,
    /// The units that each participant holds.
    held: Vec<Vec<u32>>,
    /// A participant that has other bytes for one of its units.
    spoiled: Option<(usize, u32)>,
}

impl Client {
    pub(super) async fn put_shared(self: &Rc<Self>) -> Result<(), BallastError> {
        let w = &self.w;
        let any = self.some_lineage();
        let identity = any.with_generation(next_generation(&self.revisions().await?, &any));
        let session_id =
            SessionId::new(w.name(&format!("{}-s", self.slot.name))).map_err(|error| unavailable(error.to_string()))?;
        let content = Rc::new(w.draw(|rng| {
            let units = rng.between(1, w.plan.units_max);
            Content::new(&identity, &session_id, units, rng)
        }));
        w.contents.borrow_mut().insert(content.manifest.sha256, Rc::clone(&content));
        let count = w.draw(|rng| rng.between(1, 4)) as usize;
        let names = (0..count).map(|rank| ParticipantId::new(format!("rank{rank}")));
        let participants: Vec<ParticipantId> = names.filter_map(Result::ok).collect();
        let mut held = vec![Vec::new(); count];
        for unit in 0..content.len() {
            let first = w.draw(|rng| rng.index(count));
            for (rank, held) in held.iter_mut().enumerate() {
                if rank == first || w.draw(|rng| rng.chance(3_000)) {
                    held.push(unit);
                }
            }
        }
        let spoiler = w.draw(|rng| rng.chance(1_500)).then(|| w.draw(|rng| rng.index(count)));
        let spoiled = spoiler.and_then(|rank| Some((rank, *w.draw(|rng| rng.pick(&held[rank]).cloned()).as_ref()?)));
        let command = BeginImport {
            identity: identity.clone(),
            session_id: session_id.clone(),
            ttl_ms: w.draw(|rng| rng.between(6_000, 20_000)),
            policy: None,
            placement_digest: content.manifest.affinity_digest,
            placement: Vec::new(),
            logical_bytes: content.manifest.logical_bytes,
            unit_count: content.len(),
        };
        let job = Rc::new(Job { begin: command, content, participants, held, spoiled });
        if w.draw(|rng| rng.chance(3_000)) {
            self.start_coordinator(&job);
        }
        self.run_coordinator(&job).await
    }

    /// A later run of the coordinator, on any client's machine.
    fn start_coordinator(&self, job: &Rc<Job>) {
        let w = &self.w;
        let Some(on) = self.some_machine() else { return };
        let job = Rc::clone(job);
        w.rt.spawn(on.process, async move {
            on.w.rt.sleep(on.w.draw(|rng| rng.between(1, 40)) * SECOND).await;
            if let Err(error) = on.run_coordinator(&job).await {
                let session = &job.begin.session_id;
                on.w.trace(format!("{} coordinates {session}: {}, {}", on.slot.name, error.code, error.message));
            }
        });
    }

    /// A run of the coordinator, on this machine: it opens the session, or takes over the one that it finds.
    async fn run_coordinator(self: &Rc<Self>, job: &Rc<Job>) -> Result<(), BallastError> {
        let w = &self.w;
        let writer_id = WriterId::new(w.name("run-")).map_err(|error| unavailable(error.to_string()))?;
        let (command, shared) = (job.begin.clone(), (job.participants.clone(), writer_id));
        let begin = move |gateway: Rc<Gateway>, until| {
            let (command, shared) = (command.clone(), shared.clone());
            async move { gateway.begin_import(command, Some(shared), until).await }
        };
        let session = Rc::new(self.mutate(REQUEST_DEADLINE, begin).await?);
        let count = job.participants.len();
        for rank in 0..count {
            // Ranks outlive their coordinator, or come again with it.
            if session.epoch == 1 || w.draw(|rng| rng.chance(3_000)) {
                self.start_rank(job, &session, rank);
            }
        }
        let lost: Shared<bool> = Shared::default();
        let published = match either(self.coordinate(job, &session, &lost), self.keep_session(&session, &lost)).await {
            Either::First(published) => published,
            Either::Second(()) => Err(unavailable("the session was lost")),
        };
        // A rank of a job that is over comes back.
        if w.draw(|rng| rng.chance(3_000)) {
            self.start_rank(job, &session, w.draw(|rng| rng.index(count)));
        }
        // Even one that was replaced: nobody has told it.
        if published.is_err() && w.draw(|rng| rng.chance(7_000)) {
            let (identity, session_id) = (session.identity.clone(), session.session_id.clone());
            let coordinator = session.coordinator();
            self.submit(Command::AbortImport(AbortImport { identity, session_id, coordinator })).await?;
        }
        published
    }

    fn some_machine(&self) -> Option<Rc<Client>> {
        let running: Vec<Rc<Client>> = self.w.clients.iter().filter_map(|slot| slot.get()).collect();
        self.w.draw(|rng| rng.pick(&running).cloned())
    }

    /// A run of a rank, on any client's machine.
    fn start_rank(&self, job: &Rc<Job>, session: &Rc<ImportSession>, rank: usize) {
        let Some(on) = self.some_machine() else { return };
        let (job, session) = (Rc::clone(job), Rc::clone(session));
        self.w.rt.spawn(on.process, async move {
            if let Err(error) = on.run_rank(&job, &session, rank).await {
                on.w.trace(format!("{} {}: {}, {}", on.slot.name, job.participants[rank], error.code, error.message));
            }
        });
    }

    async fn run_rank(&self, job: &Job, session: &ImportSession, rank: usize) -> Result<(), BallastError> {
        let w = &self.w;
        w.work(SHORT * 2).await;
        let writer_id = WriterId::new(w.name("run-")).map_err(|error| unavailable(error.to_string()))?;
        let ImportSession { identity, session_id, placement_digest, .. } = session;
        let join = JoinImport {
            identity: identity.clone(),
            session_id: session_id.clone(),
            participant: job.participants[rank].clone(),
            writer_id,
            placement_digest: *placement_digest,
        };
        let Reply::Part(part) = self.submit(Command::JoinImport(join)).await? else {
            return Err(unavailable("not a participant"));
        };
        let own = PartWriter {
            identity: identity.clone(),
            session_id: session_id.clone(),
            participant: part.participant,
            instance: part.instance,
            epoch: part.epoch,
        };
        match either(self.bring(job, session, rank, &own), self.keep_part(session, &own)).await {
            Either::First(brought) => brought,
            Either::Second(error) => Err(error),
        }
    }

    async fn bring(
        &self,
        job: &Job,
        session: &ImportSession,
        rank: usize,
        own: &PartWriter,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let part = TokenPart { participant: own.participant.clone(), epoch: own.epoch };
        // The run of a rank that has computed something wrong, until another run computes it again.
        let wrong = job.spoiled.filter(|(spoiler, _)| *spoiler == rank && w.draw(|rng| rng.chance(6_000)));
        let bytes_of = |unit: u32| {
            let right = job.content.unit(unit).unwrap_or_default();
            if wrong.is_some_and(|(_, spoiled)| spoiled == unit) { right ^ 2 } else { right }
        };
        let held: Vec<(u32, u64)> = job.held[rank].iter().map(|unit| (*unit, bytes_of(*unit))).collect();
        for node in &session.placement {
            self.allocate(node, session, job.content.len()).await?;
            for unit in self.offer(node, session, &part, &held).await? {
                self.nap().await;
                if w.draw(|rng| rng.chance(300)) {
                    return Err(unavailable("killed"));
                }
                self.write_part(node, session, &part, (unit, bytes_of(unit))).await?;
            }
            if !self.offer(node, session, &part, &held).await?.is_empty() {
                return Err(BallastError::new(ErrorCode::ChecksumMismatch, "what was sent is not there"));
            }
        }
        self.nap().await;
        self.submit(Command::FinishPart(own.clone())).await.map(drop)
    }

    /// Says that a rank is at work. Ends when that is refused.
    async fn keep_part(&self, session: &ImportSession, own: &PartWriter) -> BallastError {
        loop {
            self.w.rt.sleep(session.ttl_ms * MS / 3).await;
            match self.submit(Command::RenewPart(own.clone())).await {
                Err(error) if error.code != ErrorCode::Unavailable => return error,
                _ => {}
            }
        }
    }

    /// Waits for the ranks, has others take the place of those that died, and commits.
    async fn coordinate(
        self: &Rc<Self>,
        job: &Rc<Job>,
        session: &Rc<ImportSession>,
        lost: &Shared<bool>,
    ) -> Result<(), BallastError> {
        let w = &self.w;
        let patience = w.draw(|rng| rng.between(10, 90)) * SECOND;
        let give_up_at = w.now() + patience;
        // A careless one commits as soon as the bytes are there, whoever may bring others yet.
        let careless = w.draw(|rng| rng.chance(2_000));
        loop {
            w.work(SECOND).await;
            if *lost.borrow() {
                return Err(BallastError::new(ErrorCode::LeaseExpired, "the session was lost"));
            }
            let identity = session.identity.clone();
            let parts = self.look(move |state| state.import_parts(&identity)).await?;
            let missing: Vec<usize> =
                (0..parts.len()).filter(|rank| parts.get(*rank).is_some_and(|part| !part.done)).collect();
            if !parts.is_empty() && (missing.is_empty() || (careless && self.all_held(job, session).await)) {
                break;
            }
            if w.now() > give_up_at {
                return Err(BallastError::new(ErrorCode::NotReady, format!("{} ranks are missing", missing.len())));
            }
            if let Some(rank) = w.draw(|rng| rng.pick(&missing).copied()).filter(|_| w.draw(|rng| rng.chance(700))) {
                self.start_rank(job, session, rank);
            }
        }
        for node in &session.placement {
            let offers = self.offers(node, session).await?;
            if let Some(offer) = offers.fragments.iter().find(|offer| !offer.held || offer.differs.is_some()) {
                let unit = offer.fragment.unit;
                return Err(BallastError::new(ErrorCode::Conflict, format!("unit {unit} is missing or not agreed on")));
            }
            self.seal(node, session, &job.content).await?;
        }
        self.nap().await;
        let record = self.commit(session, job.content.manifest.sha256).await?;
        w.trace(format!("{} published {} of {} ranks", self.slot.name, record.identity, job.participants.len()));
        Ok(())
    }

    /// Whether every unit is on every node, as far as the offers say.
    async fn all_held(&self, job: &Job, session: &ImportSession) -> bool {
        for node in &session.placement {
            let Ok(offers) = self.offers(node, session).await else { return false };
            let held = offers.fragments.iter().filter(|offer| offer.held && offer.differs.is_none());
            if held.count() < job.content.len() as usize {
                return false;
            }
        }
        true
    }

    async fn offer(
        &self,
        node: &NodeId,
        session: &ImportSession,
        part: &TokenPart,
        held: &[(u32, u64)],
    ) -> Result<Vec<u32>, BallastError> {
        let (id, session_id, part, held) =
            (session.instance.clone(), session.session_id.clone(), part.clone(), held.to_vec());
        self.on_node(node, move |store| {
            let (id, session_id, part, held) = (id.clone(), session_id.clone(), part.clone(), held.clone());
            async move { store.offer(&id, &session_id, &part, &held).await }
        })
        .await
    }

    async fn write_part(
        &self,
        node: &NodeId,
        session: &ImportSession,
        part: &TokenPart,
        (unit, bytes): (u32, u64),
    ) -> Result<(), BallastError> {
        let (id, session_id, part) = (session.instance.clone(), session.session_id.clone(), part.clone());
        self.on_node(node, move |store| {
            let (id, session_id, part) = (id.clone(), session_id.clone(), part.clone());
            async move { store.write_part(&id, &session_id, &part, unit, bytes).await }
        })
        .await
    }

    async fn offers(&self, node: &NodeId, session: &ImportSession) -> Result<Offers, BallastError> {
        let (id, session_id) = (session.instance.clone(), session.session_id.clone());
        self.on_node(node, move |store| {
            let (id, session_id) = (id.clone(), session_id.clone());
            async move { store.offers(&id, &session_id) }
        })
        .await
    }
}

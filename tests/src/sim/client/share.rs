//! Puts of several participants: one client coordinates, ranks run on whichever machines there are, die in the middle, fall
//! asleep and come back after another run has taken their place, or disagree about what several of them hold.

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
    session: ImportSession,
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
        let declared = participants.clone();
        let begin = move |gateway: Rc<Gateway>, until| {
            let (command, declared) = (command.clone(), declared.clone());
            async move { gateway.begin_import(command, declared, until).await }
        };
        let session = self.mutate(REQUEST_DEADLINE, begin).await?;
        let job = Rc::new(Job { session, content, participants, held, spoiled });
        for rank in 0..count {
            self.start_rank(&job, rank);
        }
        let lost: Shared<bool> = Shared::default();
        let published = match either(self.coordinate(&job, &lost), self.keep_session(&job.session, &lost)).await {
            Either::First(published) => published,
            Either::Second(()) => Err(unavailable("the session was lost")),
        };
        // A rank of a job that is over comes back.
        if w.draw(|rng| rng.chance(3_000)) {
            self.start_rank(&job, w.draw(|rng| rng.index(count)));
        }
        if published.is_err() && w.draw(|rng| rng.chance(7_000)) {
            self.submit(Command::AbortImport(AbortImport { identity, session_id })).await?;
        }
        published
    }

    /// A run of a rank, on any client's machine.
    fn start_rank(&self, job: &Rc<Job>, rank: usize) {
        let w = &self.w;
        let running: Vec<Rc<Client>> = w.clients.iter().filter_map(|slot| slot.get()).collect();
        let Some(on) = w.draw(|rng| rng.pick(&running).cloned()) else { return };
        let job = Rc::clone(job);
        w.rt.spawn(on.process, async move {
            if let Err(error) = on.run_rank(&job, rank).await {
                on.w.trace(format!("{} {}: {}, {}", on.slot.name, job.participants[rank], error.code, error.message));
            }
        });
    }

    async fn run_rank(&self, job: &Job, rank: usize) -> Result<(), BallastError> {
        let w = &self.w;
        w.work(SHORT * 2).await;
        let writer_id = WriterId::new(w.name("run-")).map_err(|error| unavailable(error.to_string()))?;
        let ImportSession { identity, session_id, placement_digest, .. } = &job.session;
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
        match either(self.bring(job, rank, &own), self.keep_part(job, &own)).await {
            Either::First(brought) => brought,
            Either::Second(error) => Err(error),
        }
    }

    async fn bring(&self, job: &Job, rank: usize, own: &PartWriter) -> Result<(), BallastError> {
        let w = &self.w;
        let part = TokenPart { participant: own.participant.clone(), epoch: own.epoch };
        // The run of a rank that has computed something wrong, until another run computes it again.
        let wrong = job.spoiled.filter(|(spoiler, _)| *spoiler == rank && w.draw(|rng| rng.chance(6_000)));
        let bytes_of = |unit: u32| {
            let right = job.content.unit(unit).unwrap_or_default();
            if wrong.is_some_and(|(_, spoiled)| spoiled == unit) { right ^ 2 } else { right }
        };
        let held: Vec<(u32, u64)> = job.held[rank].iter().map(|unit| (*unit, bytes_of(*unit))).collect();
        for node in &job.session.placement {
            self.allocate(node, &job.session, job.content.len()).await?;
            for unit in self.offer(node, &job.session, &part, &held).await? {
                self.nap().await;
                if w.draw(|rng| rng.chance(300)) {
                    return Err(unavailable("killed"));
                }
                self.write_part(node, &job.session, &part, (unit, bytes_of(unit))).await?;
            }
            if !self.offer(node, &job.session, &part, &held).await?.is_empty() {
                return Err(BallastError::new(ErrorCode::ChecksumMismatch, "what was sent is not there"));
            }
        }
        self.nap().await;
        self.submit(Command::FinishPart(own.clone())).await.map(drop)
    }

    /// Says that a rank is at work. Ends when that is refused.
    async fn keep_part(&self, job: &Job, own: &PartWriter) -> BallastError {
        loop {
            self.w.rt.sleep(job.session.ttl_ms * MS / 3).await;
            match self.submit(Command::RenewPart(own.clone())).await {
                Err(error) if error.code != ErrorCode::Unavailable => return error,
                _ => {}
            }
        }
    }

    /// Waits for the ranks, has others take the place of those that died, and commits.
    async fn coordinate(self: &Rc<Self>, job: &Rc<Job>, lost: &Shared<bool>) -> Result<(), BallastError> {
        let w = &self.w;
        let patience = w.draw(|rng| rng.between(10, 90)) * SECOND;
        let give_up_at = w.now() + patience;
        loop {
            w.work(SECOND).await;
            if *lost.borrow() {
                return Err(BallastError::new(ErrorCode::LeaseExpired, "the session was lost"));
            }
            let identity = job.session.identity.clone();
            let parts = self.look(move |state| state.import_parts(&identity)).await?;
            let missing: Vec<usize> =
                (0..parts.len()).filter(|rank| parts.get(*rank).is_some_and(|part| !part.done)).collect();
            if !parts.is_empty() && missing.is_empty() {
                break;
            }
            if w.now() > give_up_at {
                return Err(BallastError::new(ErrorCode::NotReady, format!("{} ranks are missing", missing.len())));
            }
            if let Some(rank) = w.draw(|rng| rng.pick(&missing).copied()).filter(|_| w.draw(|rng| rng.chance(700))) {
                self.start_rank(job, rank);
            }
        }
        for node in &job.session.placement {
            let offers = self.offers(node, &job.session).await?;
            if let Some(offer) = offers.fragments.iter().find(|offer| !offer.held || offer.differs.is_some()) {
                let unit = offer.fragment.unit;
                return Err(BallastError::new(ErrorCode::Conflict, format!("unit {unit} is missing or not agreed on")));
            }
            self.seal(node, &job.session, &job.content).await?;
        }
        self.nap().await;
        let (identity, session_id) = (job.session.identity.clone(), job.session.session_id.clone());
        let sha256 = job.content.manifest.sha256;
        let commit = move |gateway: Rc<Gateway>, until| {
            let (identity, session_id) = (identity.clone(), session_id.clone());
            async move { gateway.commit_import(&identity, &session_id, sha256, until).await }
        };
        let record = self.mutate(REQUEST_DEADLINE, commit).await?;
        w.trace(format!("{} published {} of {} ranks", self.slot.name, record.identity, job.participants.len()));
        Ok(())
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

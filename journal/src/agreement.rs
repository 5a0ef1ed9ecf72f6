//! Whether the replicas of a cluster decided alike: each says its digest now and then, and one that stands alone with its own stops.
//!
//! The digest chains every envelope and its outcomes (`State::chain`), so two replicas that ever decided anything differently
//! differ for ever after. A replica that hears another digest for an entry that it has folded says its own for that entry, and so
//! does everyone else; two seconds later each counts. Whoever is not in the majority stops. Two that disagree with nobody to
//! decide between them both stop: a wrong state that goes on answering is worse than none.
//! See ARCHITECTURE.md, The log and the fold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Client;
use ballast_schemas::subject::DIGEST_SUBJECT;
use ballast_schemas::{ClusterId, Digest, ReplicaId};
use ballast_workflows::State;
use bytes::Bytes;
use futures::StreamExt;
use serde::{Deserialize, Serialize};

use crate::replica::{ReplicaError, Shared};
use crate::streams::Streams;

const SAY_EVERY: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// From the first contradiction to the count: long enough for everyone's word to arrive.
const COUNT_AFTER: Duration = Duration::from_secs(2);
/// What was said longer ago does not count; a replica this far behind does not vote.
const WORD_AGE_MAX: Duration = Duration::from_secs(10);
const SUBSCRIBE_RETRY_EVERY: Duration = Duration::from_secs(1);
/// Digests of the last entries, to compare with what slower replicas say.
const CHAINS_KEPT: usize = 4_096;

/// Where replicas tell each other their digests.
#[derive(Debug, Clone)]
pub struct DigestExchange {
    client: Client,
    cluster_id: ClusterId,
}

impl DigestExchange {
    /// Among the replicas of this cluster.
    pub fn new(streams: &Streams) -> Self {
        Self { client: streams.client().clone(), cluster_id: streams.cluster_id().clone() }
    }
}

/// The digests after the last folded entries.
#[derive(Debug)]
pub(crate) struct Chains(VecDeque<(u64, Digest)>);

impl Chains {
    /// Of a state that was restored: it is the first that can be compared.
    pub fn since(state: &State) -> Self {
        Self(VecDeque::from([(state.log_seq(), state.chain())]))
    }

    pub fn note(&mut self, seq: u64, chain: Digest) {
        self.0.push_back((seq, chain));
        if self.0.len() > CHAINS_KEPT {
            self.0.pop_front();
        }
    }

    pub fn at(&self, seq: u64) -> Option<Digest> {
        let first = self.0.front()?.0;
        let index = usize::try_from(seq.checked_sub(first)?).ok()?;
        self.0.get(index).map(|(_, chain)| *chain)
    }
}

/// What a replica says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Word {
    cluster_id: ClusterId,
    replica_id: ReplicaId,
    seq: u64,
    chain: Digest,
}

/// A replica that has not the majority.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Alone {
    seq: u64,
    mine: Digest,
    theirs: Digest,
    with_me: usize,
    others: usize,
}

/// What was heard, by entry and replica.
#[derive(Debug, Default)]
struct Votes {
    heard: BTreeMap<u64, BTreeMap<ReplicaId, (Digest, Instant)>>,
    /// Entries about which somebody contradicts, since when.
    disputed: BTreeMap<u64, Instant>,
}

impl Votes {
    /// The word of one that stopped meanwhile counts too: two that disagree must both stop, whichever counts first.
    fn hear(&mut self, word: Word, now: Instant) {
        self.heard.entry(word.seq).or_default().insert(word.replica_id, (word.chain, now));
    }

    /// Entries that just became disputed, about which this replica must say its own; or that it stands alone.
    fn judge(&mut self, mine: impl Fn(u64) -> Option<Digest>, now: Instant) -> Result<BTreeSet<u64>, Alone> {
        for (seq, votes) in &mut self.heard {
            // Until the count nobody's word about a disputed entry is forgotten.
            if !self.disputed.contains_key(seq) {
                votes.retain(|_, (_, said)| now.duration_since(*said) < WORD_AGE_MAX);
            }
        }
        self.heard.retain(|_, votes| !votes.is_empty());
        let heard = &self.heard;
        self.disputed.retain(|seq, _| heard.contains_key(seq));
        let mut newly = BTreeSet::new();
        let mut settled = Vec::new();
        for (seq, votes) in &self.heard {
            let Some(mine) = mine(*seq) else { continue };
            let Some((theirs, _)) = votes.values().find(|(chain, _)| *chain != mine) else { continue };
            let since = *self.disputed.entry(*seq).or_insert_with(|| {
                newly.insert(*seq);
                now
            });
            if now.duration_since(since) < COUNT_AFTER {
                continue;
            }
            let with_me = 1 + votes.values().filter(|(chain, _)| *chain == mine).count();
            let others = votes.len() + 1 - with_me;
            if with_me <= others {
                return Err(Alone { seq: *seq, mine, theirs: *theirs, with_me, others });
            }
            tracing::warn!(seq, with_me, others, "a replica decided something else than the majority");
            settled.push(*seq);
        }
        for seq in settled {
            self.heard.remove(&seq);
            self.disputed.remove(&seq);
        }
        Ok(newly)
    }
}

/// Takes part for as long as the replica runs; ends only with the reason to stop it.
pub(crate) async fn run(shared: Arc<Shared>) -> ReplicaError {
    let Some(exchange) = &shared.options.digests else { return std::future::pending().await };
    loop {
        if let Some(alone) = take_part(&shared, exchange).await {
            let Alone { seq, mine, theirs, with_me, others } = alone;
            return ReplicaError::Disagreement { seq, mine, theirs, with_me, others };
        }
        tokio::time::sleep(SUBSCRIBE_RETRY_EVERY).await;
    }
}

async fn take_part(shared: &Shared, exchange: &DigestExchange) -> Option<Alone> {
    let mut words = exchange.client.subscribe(DIGEST_SUBJECT).await.ok()?;
    let me = &shared.options.replica_id;
    let mut votes = Votes::default();
    let mut look = tokio::time::interval(LOOK_EVERY);
    let mut say = tokio::time::interval(SAY_EVERY);
    loop {
        tokio::select! {
            message = words.next() => {
                // Another cluster's replica, or no replica at all, has no say.
                let word = serde_json::from_slice::<Word>(&message?.payload);
                if let Some(word) = word.ok().filter(|word| word.cluster_id == exchange.cluster_id && word.replica_id != *me) {
                    votes.hear(word, Instant::now());
                }
            }
            _ = say.tick() => {
                let (seq, chain) = shared.read(|state| (state.log_seq(), State::chain(state)));
                if seq > 0 {
                    tell(exchange, me, seq, chain).await;
                }
            }
            _ = look.tick() => match votes.judge(|seq| shared.chain_at(seq), Instant::now()) {
                Ok(newly) => {
                    for (seq, chain) in newly.into_iter().filter_map(|seq| Some((seq, shared.chain_at(seq)?))) {
                        tell(exchange, me, seq, chain).await;
                    }
                }
                Err(alone) => return Some(alone),
            }
        }
    }
}

async fn tell(exchange: &DigestExchange, me: &ReplicaId, seq: u64, chain: Digest) {
    let word = Word { cluster_id: exchange.cluster_id.clone(), replica_id: me.clone(), seq, chain };
    let Ok(bytes) = serde_json::to_vec(&word) else { return };
    // Unheard words are said again in three seconds.
    let _ = exchange.client.publish(DIGEST_SUBJECT, Bytes::from(bytes)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(replica: &str, seq: u64, chain: &[u8]) -> Word {
        Word { cluster_id: "c".parse().unwrap(), replica_id: replica.parse().unwrap(), seq, chain: Digest::of(chain) }
    }

    fn right(seq: u64) -> Option<Digest> {
        (seq <= 10).then(|| Digest::of(b"right"))
    }

    #[test]
    fn whoever_has_the_majority_goes_on_and_whoever_has_not_stops_with_both_digests() {
        let start = Instant::now();
        let later = start + COUNT_AFTER;
        let mut healthy = Votes::default();
        healthy.hear(word("wrong", 7, b"wrong"), start);
        assert_eq!(healthy.judge(right, start).unwrap(), BTreeSet::from([7]), "it says its own");
        healthy.hear(word("other", 7, b"right"), start);
        assert!(healthy.judge(right, later).unwrap().is_empty());
        assert!(healthy.heard.is_empty(), "settled");

        let mut wrong = Votes::default();
        wrong.hear(word("one", 7, b"right"), start);
        wrong.hear(word("other", 7, b"right"), start);
        let mine = |_| Some(Digest::of(b"wrong"));
        assert_eq!(wrong.judge(mine, start).unwrap(), BTreeSet::from([7]));
        let alone = wrong.judge(mine, later).unwrap_err();
        let (mine, theirs) = (Digest::of(b"wrong"), Digest::of(b"right"));
        assert_eq!(alone, Alone { seq: 7, mine, theirs, with_me: 1, others: 2 });
    }

    #[test]
    fn two_that_disagree_both_stop() {
        let start = Instant::now();
        let mut votes = Votes::default();
        votes.hear(word("other", 3, b"wrong"), start);
        assert_eq!(votes.judge(right, start).unwrap(), BTreeSet::from([3]));
        assert!(votes.judge(right, start + COUNT_AFTER).is_err());
    }

    #[test]
    fn what_is_not_folded_here_yet_is_compared_when_it_is_and_old_words_are_forgotten() {
        let start = Instant::now();
        let mut votes = Votes::default();
        votes.hear(word("ahead", 11, b"wrong"), start);
        assert!(votes.judge(right, start).unwrap().is_empty());
        assert_eq!(votes.judge(|_| Some(Digest::of(b"right")), start).unwrap(), BTreeSet::from([11]));
        let mut votes = Votes::default();
        votes.hear(word("ahead", 11, b"wrong"), start);
        votes.judge(right, start + WORD_AGE_MAX).unwrap();
        assert!(votes.heard.is_empty());
    }

    #[test]
    fn digests_of_the_last_entries_are_found_by_their_sequence() {
        let mut chains = Chains(VecDeque::from([(4, Digest::of(b"restored"))]));
        for seq in 5..10 {
            chains.note(seq, Digest::of(&seq.to_be_bytes()));
        }
        assert_eq!(chains.at(7), Some(Digest::of(&7_u64.to_be_bytes())));
        assert_eq!(chains.at(4), Some(Digest::of(b"restored")));
        assert_eq!((chains.at(3), chains.at(10)), (None, None));
    }
}

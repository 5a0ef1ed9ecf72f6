//! Group commit: commands that arrive while appends are in flight form the next envelope.
//!
//! One disk sync pays for a whole envelope, so the busier the gateway the cheaper a command. A caller is answered by the
//! fold of its own envelope ([`Waiters`]), never by the append's acknowledgement. See ARCHITECTURE.md, The log and the fold.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ballast_schemas::{CommandRecord, ENVELOPE_BYTES_MAX, ENVELOPE_COMMANDS_MAX, Envelope, LogPosition, Outcome};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{mpsc, oneshot};

use crate::log::{AppendError, Log};

/// Appends in flight. Two keep the disk busy while the next envelope fills; more would make envelopes smaller.
const IN_FLIGHT_MAX: usize = 2;
/// Commands that may wait; beyond, submitters wait.
const QUEUE_COMMANDS: usize = 8_192;
/// What an envelope needs beside its commands' bytes, generously.
const ENVELOPE_OVERHEAD_BYTES: usize = 256;

/// The answer to one submitted command.
pub(crate) type Answer = Result<(LogPosition, Outcome), Arc<AppendError>>;

/// A command on its way into an envelope.
pub(crate) struct Pending {
    pub record: CommandRecord,
    /// Its encoded size.
    pub bytes: usize,
    pub answer: oneshot::Sender<Answer>,
}

/// Callers whose envelope is on its way, by envelope id.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    by_envelope: Mutex<HashMap<String, Vec<oneshot::Sender<Answer>>>>,
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<oneshot::Sender<Answer>>>> {
        // A map is whole at any point where a panic could happen.
        self.by_envelope.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, envelope_id: &str, answers: Vec<oneshot::Sender<Answer>>) {
        self.lock().insert(envelope_id.to_owned(), answers);
    }

    /// Answers the callers of a folded envelope, if they are ours.
    pub(crate) fn resolve(&self, envelope_id: &str, seq: u64, outcomes: Vec<Outcome>) {
        let Some(answers) = self.lock().remove(envelope_id) else { return };
        for ((index, answer), outcome) in (0_u32..).zip(answers).zip(outcomes) {
            // A caller that gave up is not there any more.
            let _ = answer.send(Ok((LogPosition { seq, index }, outcome)));
        }
    }

    fn fail(&self, envelope_id: &str, error: AppendError) {
        let Some(answers) = self.lock().remove(envelope_id) else { return };
        let error = Arc::new(error);
        for answer in answers {
            let _ = answer.send(Err(Arc::clone(&error)));
        }
    }

    /// Drops every caller: nothing will be folded any more.
    pub(crate) fn abandon(&self) {
        self.lock().clear();
    }
}

/// The queue's entrance.
#[derive(Debug, Clone)]
pub(crate) struct Appender {
    queue: mpsc::Sender<Pending>,
}

impl Appender {
    /// Starts the task that appends; it ends when the last handle is dropped.
    pub(crate) fn start(log: Arc<dyn Log>, waiters: Arc<Waiters>) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE_COMMANDS);
        tokio::spawn(run(log, waiters, receiver));
        Self { queue }
    }

    /// Waits while the queue is full. An error means the appender ended.
    pub(crate) async fn enqueue(&self, pending: Pending) -> Result<(), ()> {
        self.queue.send(pending).await.map_err(drop)
    }
}

type InFlight<'a> = FuturesUnordered<BoxFuture<'a, (String, Result<u64, AppendError>)>>;

async fn run(log: Arc<dyn Log>, waiters: Arc<Waiters>, mut queue: mpsc::Receiver<Pending>) {
    let mut in_flight: InFlight<'_> = FuturesUnordered::new();
    // The first command that did not fit into the last envelope.
    let mut left_over: Option<Pending> = None;
    let mut open = true;
    while open || left_over.is_some() || !in_flight.is_empty() {
        let may_send = in_flight.len() < IN_FLIGHT_MAX;
        if may_send && left_over.is_some() {
            send_next(&*log, &waiters, &mut in_flight, left_over.take(), &mut queue, &mut left_over);
            continue;
        }
        tokio::select! {
            Some((envelope_id, appended)) = in_flight.next(), if !in_flight.is_empty() => {
                // What was stored is answered by the fold.
                if let Err(error) = appended {
                    waiters.fail(&envelope_id, error);
                }
            }
            received = queue.recv(), if may_send && open => match received {
                Some(first) => send_next(&*log, &waiters, &mut in_flight, Some(first), &mut queue, &mut left_over),
                None => open = false,
            },
        }
    }
}

/// Packs what is waiting into one envelope and sends it.
fn send_next<'a>(
    log: &'a dyn Log,
    waiters: &Waiters,
    in_flight: &mut InFlight<'a>,
    first: Option<Pending>,
    queue: &mut mpsc::Receiver<Pending>,
    left_over: &mut Option<Pending>,
) {
    let mut commands = Vec::new();
    let mut answers = Vec::new();
    let mut bytes = ENVELOPE_OVERHEAD_BYTES;
    let mut next = first;
    while let Some(pending) = next {
        // One command alone may be as large as it is; its sender bounds it.
        if !commands.is_empty() && bytes + pending.bytes > ENVELOPE_BYTES_MAX {
            *left_over = Some(pending);
            break;
        }
        bytes += pending.bytes;
        commands.push(pending.record);
        answers.push(pending.answer);
        if commands.len() >= ENVELOPE_COMMANDS_MAX {
            break;
        }
        next = queue.try_recv().ok();
    }
    if commands.is_empty() {
        return;
    }
    let id = uuid::Uuid::now_v7().to_string();
    // Registered before the append: the fold may see the entry before the acknowledgement arrives.
    waiters.register(&id, answers);
    match Envelope::seal(id.clone(), commands) {
        Ok((_, bytes)) => in_flight.push(Box::pin(async move {
            let appended = log.append(&id, Bytes::from(bytes), None).await;
            (id, appended)
        })),
        Err(error) => waiters.fail(&id, AppendError::Rejected { reason: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{Command, LogTime};

    use super::*;
    use crate::MemoryLog;

    /// Queues commands that claim to have `bytes` encoded bytes each, before the appender runs, and returns the envelopes.
    async fn packed(count: usize, bytes: usize) -> Vec<usize> {
        let log = MemoryLog::new();
        let (queue, receiver) = mpsc::channel(QUEUE_COMMANDS);
        let mut answers = Vec::new();
        for _ in 0..count {
            let record = CommandRecord { id: "c".parse().unwrap(), not_after: LogTime(0), command: Command::Tick };
            let (answer, receiver) = oneshot::channel();
            queue.send(Pending { record, bytes, answer }).await.unwrap();
            answers.push(receiver);
        }
        drop(queue);
        let waiters = Arc::new(Waiters::default());
        run(Arc::new(log.clone()), Arc::clone(&waiters), receiver).await;
        let last_seq = log.bounds().await.unwrap().last_seq;
        let mut tail = log.tail(1);
        let mut sizes = Vec::new();
        for seq in 1..=last_seq {
            let envelope = Envelope::decode(&tail.next().await.unwrap().unwrap().bytes).unwrap();
            sizes.push(envelope.commands().len());
            let outcomes = envelope.commands().iter().map(|_| Ok(ballast_schemas::Reply::Done)).collect();
            waiters.resolve(envelope.id(), seq, outcomes);
        }
        for answer in answers {
            answer.await.unwrap().unwrap().1.unwrap();
        }
        sizes
    }

    #[tokio::test]
    async fn what_waits_goes_into_one_envelope() {
        assert_eq!(packed(500, 100).await, [500]);
    }

    #[tokio::test]
    async fn an_envelope_is_bounded_by_commands_and_by_bytes() {
        assert_eq!(packed(2_500, 10).await, [ENVELOPE_COMMANDS_MAX, ENVELOPE_COMMANDS_MAX, 500]);
        assert_eq!(packed(5, 100 * 1024).await, [2, 2, 1]);
        assert_eq!(packed(2, ENVELOPE_BYTES_MAX).await, [1, 1], "one alone may be as large as it is");
    }
}

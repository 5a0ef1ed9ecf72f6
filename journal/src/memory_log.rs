//! The log in memory: the same trait and the same rules as JetStream's, for tests and simulation.
//!
//! Time is the caller's when it sets one ([`MemoryLog::set_time_ns`]), else the system's. Nothing survives the process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, watch};

use crate::log::{AppendError, Log, LogBounds, LogError, Record, Tail, TailError};

const TAIL_BUFFER: usize = 64;

/// A log that lives as long as its last clone.
#[derive(Debug, Clone)]
pub struct MemoryLog {
    inner: Arc<Mutex<Inner>>,
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    first_seq: u64,
    records: VecDeque<Record>,
    by_id: HashMap<String, u64>,
    bytes: u64,
    bytes_max: Option<u64>,
    time_ns: Option<u64>,
}

impl Inner {
    fn last_seq(&self) -> u64 {
        self.first_seq + self.records.len() as u64 - 1
    }

    fn now_ns(&self) -> u64 {
        self.time_ns.unwrap_or_else(|| {
            let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
        })
    }
}

impl Default for MemoryLog {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryLog {
    /// An empty log without a limit, on the system's clock.
    pub fn new() -> Self {
        let inner = Inner {
            first_seq: 1,
            records: VecDeque::new(),
            by_id: HashMap::new(),
            bytes: 0,
            bytes_max: None,
            time_ns: None,
        };
        Self { inner: Arc::new(Mutex::new(inner)), changed: watch::Sender::new(0) }
    }

    /// Refuses appends beyond this many bytes.
    pub fn set_bytes_max(&self, bytes_max: Option<u64>) {
        self.lock().bytes_max = bytes_max;
    }

    /// Stamps later appends with this time instead of the system's.
    pub fn set_time_ns(&self, time_ns: u64) {
        self.lock().time_ns = Some(time_ns);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics between two consistent states of `Inner`.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append_now(&self, id: &str, bytes: Bytes, expected_last_seq: Option<u64>) -> Result<u64, AppendError> {
        let mut inner = self.lock();
        if let Some(seq) = inner.by_id.get(id) {
            return Ok(*seq);
        }
        let last_seq = inner.last_seq();
        if let Some(expected) = expected_last_seq.filter(|expected| *expected != last_seq) {
            return Err(AppendError::WrongLastSequence { expected, description: format!("it is {last_seq}") });
        }
        let total = inner.bytes + bytes.len() as u64;
        if inner.bytes_max.is_some_and(|max| total > max) {
            return Err(AppendError::Full { description: "maximum bytes exceeded".to_owned() });
        }
        let seq = last_seq + 1;
        let timestamp_ns = inner.now_ns();
        inner.bytes = total;
        inner.by_id.insert(id.to_owned(), seq);
        inner.records.push_back(Record { seq, timestamp_ns, bytes });
        drop(inner);
        self.changed.send_replace(seq);
        Ok(seq)
    }

    /// The entry `seq`; `None` when it is not there yet.
    fn record_at(&self, seq: u64) -> Result<Option<Record>, TailError> {
        let inner = self.lock();
        if seq < inner.first_seq {
            return Err(TailError::TrimGap { expected: seq, first: inner.first_seq });
        }
        if seq > inner.last_seq() + 1 {
            return Err(TailError::Regressed { seen: seq - 1, last: inner.last_seq() });
        }
        let index = usize::try_from(seq - inner.first_seq).unwrap_or(usize::MAX);
        Ok(inner.records.get(index).cloned())
    }
}

impl Log for MemoryLog {
    fn append<'a>(
        &'a self,
        id: &'a str,
        bytes: Bytes,
        expected_last_seq: Option<u64>,
    ) -> BoxFuture<'a, Result<u64, AppendError>> {
        Box::pin(async move { self.append_now(id, bytes, expected_last_seq) })
    }

    fn tail(&self, from_seq: u64) -> Tail {
        let (sender, receiver) = mpsc::channel(TAIL_BUFFER);
        let log = self.clone();
        let reader = tokio::spawn(async move {
            let mut changed = log.changed.subscribe();
            let mut next = from_seq.max(1);
            loop {
                changed.borrow_and_update();
                let item = match log.record_at(next) {
                    Ok(Some(record)) => Ok(record),
                    Ok(None) => match changed.changed().await {
                        Ok(()) => continue,
                        Err(_) => return,
                    },
                    Err(error) => Err(error),
                };
                let last = item.is_err();
                if sender.send(item).await.is_err() || last {
                    return;
                }
                next += 1;
            }
        });
        Tail::new(receiver, reader)
    }

    fn bounds(&self) -> BoxFuture<'_, Result<LogBounds, LogError>> {
        Box::pin(async move {
            let inner = self.lock();
            Ok(LogBounds {
                first_seq: inner.first_seq,
                last_seq: inner.last_seq(),
                bytes: inner.bytes,
                bytes_max: inner.bytes_max,
            })
        })
    }

    fn trim(&self, up_to_seq: u64) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            let mut inner = self.lock();
            while inner.first_seq <= up_to_seq {
                let Some(record) = inner.records.pop_front() else { break };
                inner.bytes -= record.bytes.len() as u64;
                inner.first_seq = record.seq + 1;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tail_delivers_what_was_there_and_what_comes() {
        let log = MemoryLog::new();
        assert_eq!(log.append("a", Bytes::from_static(b"1"), Some(0)).await.unwrap(), 1);
        let mut tail = log.tail(1);
        assert_eq!(tail.next().await.unwrap().unwrap().bytes, "1");
        assert_eq!(log.append("a", Bytes::from_static(b"other"), None).await.unwrap(), 1, "same id, same sequence");
        log.append("b", Bytes::from_static(b"2"), None).await.unwrap();
        assert_eq!(tail.next().await.unwrap().unwrap().seq, 2);
        assert!(matches!(log.append("c", Bytes::new(), Some(0)).await, Err(AppendError::WrongLastSequence { .. })));
    }

    #[tokio::test]
    async fn a_trimmed_entry_is_a_named_gap_and_a_full_log_refuses() {
        let log = MemoryLog::new();
        for id in ["a", "b", "c"] {
            log.append(id, Bytes::from_static(b"xx"), None).await.unwrap();
        }
        log.trim(2).await.unwrap();
        assert_eq!(log.tail(1).next().await.unwrap().unwrap_err(), TailError::TrimGap { expected: 1, first: 3 });
        assert_eq!(log.tail(9).next().await.unwrap().unwrap_err(), TailError::Regressed { seen: 8, last: 3 });
        log.set_bytes_max(Some(3));
        assert!(matches!(log.append("d", Bytes::from_static(b"xx"), None).await, Err(AppendError::Full { .. })));
        assert_eq!(log.bounds().await.unwrap(), LogBounds { first_seq: 3, last_seq: 3, bytes: 2, bytes_max: Some(3) });
    }
}

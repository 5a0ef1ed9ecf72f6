//! The log on JetStream: appends, the tail through restarts, trimming, a full log.

use ballast_journal::{AppendError, JetStreamLog, Log, Record, StreamOptions, Tail, TailError};
use bytes::Bytes;
use std::time::{Duration, Instant};

use crate::{Cluster, eventually, in_time};

async fn append(log: &JetStreamLog, id: &str) -> u64 {
    log.append(id, Bytes::from(id.to_owned()), None).await.unwrap()
}

async fn next(tail: &mut Tail) -> Record {
    in_time("the next entry", tail.next()).await.unwrap().unwrap()
}

#[tokio::test]
async fn the_tail_delivers_every_entry_once_in_order() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    let mut tail = log.tail(1);
    for n in 1..=300_u64 {
        assert_eq!(append(&log, &format!("id-{n}")).await, n);
    }
    let mut timestamps = Vec::new();
    for n in 1..=300_u64 {
        let record = next(&mut tail).await;
        assert_eq!((record.seq, record.bytes), (n, Bytes::from(format!("id-{n}"))));
        timestamps.push(record.timestamp_ns);
    }
    assert!(timestamps.is_sorted());
    let mut middle = log.tail(200);
    assert_eq!(next(&mut middle).await.seq, 200);
    let bounds = log.bounds().await.unwrap();
    assert_eq!((bounds.first_seq, bounds.last_seq), (1, 300));
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_repeated_id_is_stored_once_and_the_expected_sequence_is_checked() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    assert_eq!(log.append("first", Bytes::from_static(b"a"), Some(0)).await.unwrap(), 1);
    let second = log.append("second", Bytes::from_static(b"b"), Some(0)).await;
    assert!(matches!(second, Err(AppendError::WrongLastSequence { expected: 0, .. })), "{second:?}");
    assert_eq!(append(&log, "third").await, 2);
    assert_eq!(append(&log, "third").await, 2);
    assert_eq!(log.bounds().await.unwrap().last_seq, 2);
    cluster.server.stop().await;
}

#[tokio::test]
async fn the_tail_goes_on_after_a_restart_of_the_server() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    let mut tail = log.tail(1);
    append(&log, "before").await;
    assert_eq!(next(&mut tail).await.seq, 1);
    let cluster = cluster.restart().await;
    let back = Instant::now();
    // The append waits for the connection; it is the first thing anybody does after the restart.
    assert_eq!(append(&log, "after").await, 2);
    assert_eq!(next(&mut tail).await.seq, 2);
    eprintln!("append and tail went on {} ms after the server was back", back.elapsed().as_millis());
    cluster.server.stop().await;
}

#[tokio::test]
async fn appends_during_a_restart_are_stored_exactly_once() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    let mut tail = log.tail(1);
    let appending = tokio::spawn({
        let log = log.clone();
        async move {
            let mut seqs = Vec::new();
            for n in 0..400 {
                seqs.push(append(&log, &format!("id-{n}")).await);
            }
            seqs
        }
    });
    assert_eq!(next(&mut tail).await.seq, 1);
    let cluster = cluster.restart().await;
    let seqs = in_time("all appended", appending).await.unwrap();
    assert_eq!(seqs, (1..=400).collect::<Vec<u64>>());
    for n in 2..=400 {
        assert_eq!(next(&mut tail).await.seq, n);
    }
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_full_log_refuses_by_name_and_takes_again_after_a_trim() {
    let options = StreamOptions { log_bytes_max: 64 * 1024, ..StreamOptions::default() };
    let cluster = Cluster::start_with(&options).await;
    let log = JetStreamLog::new(&cluster.streams);
    let body = Bytes::from(vec![7_u8; 8 * 1024]);
    let mut stored = 0;
    let error = loop {
        match log.append(&format!("id-{stored}"), body.clone(), None).await {
            Ok(seq) => stored = seq,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, AppendError::Full { .. }), "{error}");
    assert!(error.is_retryable() && !error.outcome_unknown());
    log.trim(stored).await.unwrap();
    assert_eq!(log.append("again", body, None).await.unwrap(), stored + 1);
    assert_eq!(log.bounds().await.unwrap().first_seq, stored + 1);
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_trimmed_entry_raises_a_gap_instead_of_going_on_silently() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    for n in 1..=10 {
        append(&log, &format!("id-{n}")).await;
    }
    log.trim(6).await.unwrap();
    let gap = in_time("a gap", log.tail(3).next()).await.unwrap();
    assert_eq!(gap, Err(TailError::TrimGap { expected: 3, first: 7 }));
    let mut tail = log.tail(7);
    assert_eq!(next(&mut tail).await.seq, 7);
    let beyond = in_time("regressed", log.tail(50).next()).await.unwrap();
    assert_eq!(beyond, Err(TailError::Regressed { seen: 49, last: 10 }));
    cluster.server.stop().await;
}

#[tokio::test]
async fn a_trim_under_a_stopped_reader_is_noticed_when_it_reads_on() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    let mut tail = log.tail(1);
    // More than the reader buffers, so that it has not read the trimmed entries when they go.
    for n in 1..=2_000 {
        append(&log, &format!("id-{n}")).await;
    }
    log.trim(1_990).await.unwrap();
    let mut last = 0;
    let error = loop {
        match in_time("an entry or the gap", tail.next()).await.unwrap() {
            Ok(record) => {
                assert_eq!(record.seq, last + 1);
                last = record.seq;
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error, TailError::TrimGap { expected: last + 1, first: 1_991 });
    cluster.server.stop().await;
}

#[tokio::test]
async fn an_unreachable_log_says_that_nothing_was_appended() {
    let cluster = Cluster::start().await;
    let log = JetStreamLog::new(&cluster.streams);
    append(&log, "one").await;
    let client = cluster.streams.client().clone();
    cluster.server.stop().await;
    eventually("the client notices", async || client.connection_state() != async_nats::connection::State::Connected)
        .await;
    let error = tokio::time::timeout(Duration::from_secs(40), log.append("two", Bytes::new(), None))
        .await
        .unwrap()
        .unwrap_err();
    assert!(matches!(error, AppendError::Unreachable { .. }), "{error}");
    assert!(error.is_retryable() && !error.outcome_unknown());
}

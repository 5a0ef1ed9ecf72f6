//! The event feed over a real stream: order, filters, resuming, a server that restarts.

use std::time::Duration;

use ballast_client::{ConnectOptions, EventFeed, EventFilter, EventStart, Gateway};
use ballast_journal::{EmbeddedServer, ServerOptions, StreamOptions, connect, open_streams};
use ballast_schemas::subject::events_of;
use ballast_schemas::{
    Availability, Event, EventBody, InstanceId, LogPosition, Residency, RevisionIdentity, WeightRevisionMetadata,
    WeightStoragePolicy,
};

use crate::cluster::{PATIENCE, identity};

fn event(identity: &RevisionIdentity, seq: u64) -> Event {
    let position = LogPosition { seq, index: 0 };
    let revision = WeightRevisionMetadata {
        identity: identity.clone(),
        instance: InstanceId { group_id: identity.group_id(), position },
        manifest: None,
        availability: Availability::Importing,
        residency: Residency::Unknown,
        observed_hot_ppm: 0,
        policy: WeightStoragePolicy::default(),
        operation_id: None,
        retired: false,
        metadata_generation: 1,
        placement: vec![],
        created_unix_ms: 0,
        updated_unix_ms: 0,
        last_accessed_unix_ms: 0,
    };
    Event { position, n: 0, unix_ms: 1, body: EventBody::RevisionImporting { revision: Box::new(revision) } }
}

#[tokio::test]
async fn events_come_in_order_filtered_and_from_where_one_left_off() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let server =
        EmbeddedServer::start(ServerOptions::new(folder.path())).await.unwrap_or_else(|error| panic!("{error}"));
    let nats = connect(&server.url(), "test", PATIENCE).await.unwrap();
    let streams = open_streams(nats.clone(), &StreamOptions::default()).await.unwrap();
    let jetstream = async_nats::jetstream::new(nats);
    let publish = |identity: RevisionIdentity, seq: u64| {
        let jetstream = jetstream.clone();
        async move {
            let body = serde_json::to_vec(&event(&identity, seq)).unwrap();
            jetstream.publish(events_of(&identity), body.into()).await.unwrap().await.unwrap();
        }
    };
    let gateway = Gateway::connect(&ConnectOptions::new(server.url())).await.unwrap();
    let other = RevisionIdentity::new("acme", "default", "m", "main", 1).unwrap();

    publish(identity(1), 1).await;
    let mut new = EventFeed::follow(&gateway, EventFilter::All, EventStart::New).await.unwrap();
    publish(other.clone(), 2).await;
    publish(identity(2), 3).await;
    publish(identity(1), 4).await;

    let seqs = async |feed: &mut EventFeed, count: usize| {
        let mut seqs = Vec::new();
        for _ in 0..count {
            let followed = tokio::time::timeout(PATIENCE, feed.next()).await.expect("an event in time");
            seqs.push(followed.event.position.seq);
        }
        seqs
    };
    assert_eq!(seqs(&mut new, 3).await, [2, 3, 4]);
    let mut all =
        EventFeed::follow(&gateway, EventFilter::Tenant(identity(1).tenant_id.clone()), EventStart::All).await.unwrap();
    assert_eq!(seqs(&mut all, 3).await, [1, 3, 4]);
    let mut one = EventFeed::follow(&gateway, EventFilter::Revision(identity(1)), EventStart::All).await.unwrap();
    let first = one.next().await;
    assert_eq!(seqs(&mut one, 1).await, [4]);
    let mut resumed =
        EventFeed::follow(&gateway, EventFilter::Revision(identity(1)), EventStart::After(first.stream_seq))
            .await
            .unwrap();
    assert_eq!(seqs(&mut resumed, 1).await, [4]);
    let nothing_more = tokio::time::timeout(Duration::from_millis(300), resumed.next()).await;
    assert!(nothing_more.is_err());
    drop(streams);
}

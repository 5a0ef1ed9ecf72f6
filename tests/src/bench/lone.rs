//! One mutation alone on an idle server, beside what it is made of at least: a durable append and its delivery.

use std::time::{Duration, Instant};

use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::consumer::pull::{self, Stream};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy};
use async_nats::jetstream::{self, stream};
use async_nats::{Client, HeaderMap, Subscriber};
use ballast_journal::fresh_command_id;
use ballast_schemas::{COMMAND_WINDOW_MS, CommandRecord, Envelope, RevisionIdentity, TenantId, subject};
use ballast_workflows::State;
use bytes::Bytes;
use futures::StreamExt;
use serde_json::{Value, json};

use super::report::{Row, Runs, shown};
use super::site::{GatewayAtWork, Site, publish, submit};
use super::world::{acquire, renew};
use super::{Error, Options};

/// A mutation may take one and a half times as long as the append and the delivery alone.
const GOAL: f64 = 1.0 / 1.5;
const PLAIN: &str = "BENCH_PLAIN";
const PLAIN_SUBJECT: &str = "bench.plain";
const ECHO_SUBJECT: &str = "bench.echo";
const LEASE: &str = "lease-of-the-benchmark";

pub(super) async fn measure(options: &Options) -> Result<Vec<Row>, Error> {
    let site = Site::start(options).await?;
    let gateway = site.gateway().await?;
    let revision = publish(&gateway.replica, 1).await?.remove(0);
    submit(&gateway.replica, acquire(&revision, LEASE)).await?;
    let payload = envelope(&gateway, &revision)?;
    let mut plain = Plain::start(&site).await?;
    let other_end = site.connect().await?;
    let requests = other_end.subscribe(ECHO_SUBJECT).await?;
    other_end.flush().await?;
    let echo = tokio::spawn(echo(other_end, requests));
    let (mut appends, mut requests) = (Vec::new(), Vec::new());
    let (mut through_replica, mut through_gateway) = (Vec::new(), Vec::new());
    // In turns, so that whatever else the machine does hits all of them alike. The first run only warms up.
    for run in 0..=options.runs {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..options.lone_mutations {
            let started = Instant::now();
            plain.append_and_hear(&payload).await?;
            times[0].push(started.elapsed());
            let started = Instant::now();
            submit(&gateway.replica, renew(&revision, LEASE)).await?;
            times[1].push(started.elapsed());
            let started = Instant::now();
            renew_by_request(&site, &revision).await?;
            times[2].push(started.elapsed());
            let started = Instant::now();
            site.client.request(ECHO_SUBJECT, payload.clone()).await?;
            times[3].push(started.elapsed());
        }
        if run > 0 {
            let [append, second, third, request] = times.map(micros);
            through_replica.push(second);
            through_gateway.push(third);
            appends.push(append);
            requests.push(append + request);
        }
    }
    echo.abort();
    gateway.stop().await?;
    let conditions = format!(
        "sync_interval: always, one server on this machine, one caller, {} renewals of a lease in turns with plain appends of {} bytes; medians of a run: appends {}",
        options.lone_mutations,
        payload.len(),
        appends.iter().map(|micros| shown(*micros)).collect::<Vec<_>>().join(", "),
    );
    let row = |name: &str, ours: Vec<f64>, limits: &[f64], limit: &str| {
        let ratios: Vec<f64> = ours.iter().zip(limits).map(|(ours, limit)| limit / ours).collect();
        Row::cost(name, "us", &Runs::new(ours), Runs::new(limits.to_vec()).median())
            .against(limit)
            .with_ratio(Runs::new(ratios).median())
            .against_target(GOAL)
            .under(&conditions)
    };
    Ok(vec![
        row("lone mutation, through a replica", through_replica, &appends, "append and delivery"),
        row("lone mutation, through a gateway in JSON", through_gateway, &requests, "the same and a bare request"),
    ])
}

/// Answers each request with what it brought, on a connection of its own as a gateway does.
async fn echo(client: Client, mut requests: Subscriber) {
    while let Some(request) = requests.next().await {
        if let Some(reply) = request.reply
            && client.publish(reply, request.payload).await.is_err()
        {
            return;
        }
    }
}

/// The median.
fn micros(times: Vec<Duration>) -> f64 {
    Runs::new(times.iter().map(|time| time.as_secs_f64() * 1e6).collect()).median()
}

/// The bytes that the log stores for one renewal.
fn envelope(gateway: &GatewayAtWork, revision: &RevisionIdentity) -> Result<Bytes, Error> {
    let not_after = gateway.replica.read(State::log_clock).plus_ms(COMMAND_WINDOW_MS);
    let record = CommandRecord { id: fresh_command_id(), not_after, command: renew(revision, LEASE) };
    let (_, bytes) = Envelope::seal(fresh_command_id().to_string(), vec![record])?;
    Ok(Bytes::from(bytes))
}

async fn renew_by_request(site: &Site, revision: &RevisionIdentity) -> Result<(), Error> {
    let body = json!({"identity": revision, "lease_id": LEASE, "ttl_ms": 60_000});
    call(site, "renew_lease", &body).await.map(drop)
}

/// A verb of the default tenant, which must be answered without an error.
pub(super) async fn call(site: &Site, verb: &str, body: &Value) -> Result<Value, Error> {
    let subject = subject::verb(&TenantId::default_tenant(), verb);
    let answer = site.client.request(subject, serde_json::to_vec(body)?.into()).await?;
    let answer: Value = serde_json::from_slice(&answer.payload)?;
    match answer.get("error") {
        None => Ok(answer),
        Some(error) => Err(format!("{verb} was refused: {error}").into()),
    }
}

/// The limit: a stream like the log, a publisher that waits for the acknowledgement, a consumer like the replica's.
struct Plain {
    client: async_nats::Client,
    delivered: Stream,
}

impl Plain {
    async fn start(site: &Site) -> Result<Self, Error> {
        let context = jetstream::new(site.client.clone());
        let config = stream::Config {
            name: PLAIN.to_owned(),
            subjects: vec![PLAIN_SUBJECT.to_owned()],
            storage: stream::StorageType::File,
            ..stream::Config::default()
        };
        context.create_stream(config).await?;
        let consumer = pull::Config {
            deliver_policy: DeliverPolicy::New,
            ack_policy: AckPolicy::None,
            memory_storage: true,
            ..pull::Config::default()
        };
        let consumer = context.create_consumer_on_stream(consumer, PLAIN).await?;
        let delivered =
            consumer.stream().max_messages_per_batch(256).heartbeat(Duration::from_secs(1)).messages().await?;
        Ok(Self { client: site.client.clone(), delivered })
    }

    async fn append_and_hear(&mut self, payload: &Bytes) -> Result<(), Error> {
        let mut headers = HeaderMap::new();
        headers.insert(NATS_MESSAGE_ID, fresh_command_id().as_str());
        let acknowledged = self.client.request_with_headers(PLAIN_SUBJECT, headers, payload.clone());
        let (acknowledged, delivered) = tokio::join!(acknowledged, self.delivered.next());
        let acknowledged: Value = serde_json::from_slice(&acknowledged?.payload)?;
        if acknowledged.get("seq").is_none() {
            return Err(format!("a plain append was refused: {acknowledged}").into());
        }
        delivered.ok_or("the plain consumer ended")??;
        Ok(())
    }
}

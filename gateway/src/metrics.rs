//! The gateway's figures in the OpenMetrics format. Counters and histograms grow as things happen; what the folded state, the
//! log and the nodes say is read when somebody asks (RFC, Observability).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ballast_journal::LogBounds;
use ballast_schemas::{Availability, ClaimPhase, MigrationTrigger, NodeStatus, Residency, UpsertMode};
use ballast_workflows::{AutomaticMigrations, Counts};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Label names and values, in a fixed order per metric.
type Labels = Vec<(&'static str, String)>;
type Latency = Family<Labels, Histogram, fn() -> Histogram>;

/// From 50 µs to 13 s.
fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(50e-6, 2.0, 19))
}

/// Every figure of one gateway.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    request_time: Latency,
    command_time: Histogram,
    in_flight: Gauge,
    seen: Seen,
    /// One scrape at a time: the figures below are set afresh for each.
    scraping: Mutex<()>,
}

/// What is looked up at each scrape.
#[derive(Debug, Default)]
struct Seen {
    by_availability: Family<Labels, Gauge>,
    by_residency: Family<Labels, Gauge>,
    active_operations: Gauge,
    active_leases: Gauge,
    claims: Family<Labels, Gauge>,
    automatic: Family<Labels, Counter>,
    folded_seq: Gauge,
    log_last_seq: Gauge,
    log_lag: Gauge,
    log_size: Gauge,
    log_size_max: Gauge,
    nodes: Gauge,
    node_memory: Family<Labels, Gauge>,
    node_cold: Family<Labels, Gauge>,
    node_objects: Family<Labels, Gauge>,
    guard_skips: Family<Labels, Counter>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("ballast");
        let requests = Family::default();
        let request_time: Latency = Family::new_with_constructor(latency_histogram);
        let command_time = latency_histogram();
        let in_flight = Gauge::default();
        let seen = Seen::default();
        let r = &mut registry;
        r.register(
            "gateway_requests",
            "Requests answered, by verb and outcome (OK or the error's code)",
            requests.clone(),
        );
        r.register_with_unit(
            "gateway_request_time",
            "From arrival to answer, by verb",
            Unit::Seconds,
            request_time.clone(),
        );
        r.register_with_unit(
            "log_command_time",
            "From submission to folded outcome, appends included",
            Unit::Seconds,
            command_time.clone(),
        );
        r.register("gateway_requests_in_flight", "Requests being worked on", in_flight.clone());
        r.register("revisions", "Revisions by availability", seen.by_availability.clone());
        r.register("revisions_by_residency", "Revisions by observed residency", seen.by_residency.clone());
        r.register("operations_active", "Operations that have not ended", seen.active_operations.clone());
        r.register("leases_active", "Leases that have not ended", seen.active_leases.clone());
        r.register("replacement_claims", "Latest claims of all lineages by mode and phase", seen.claims.clone());
        r.register(
            "automatic_migrations",
            "AUTO migrations that reached their target, by trigger and direction (PROMOTION, DEMOTION)",
            seen.automatic.clone(),
        );
        r.register("log_folded_seq", "Last log sequence that this replica has folded", seen.folded_seq.clone());
        r.register("log_last_seq", "Last sequence of the log", seen.log_last_seq.clone());
        r.register("log_fold_lag", "Log entries that this replica has yet to fold", seen.log_lag.clone());
        r.register_with_unit("log_size", "Stored in the log", Unit::Bytes, seen.log_size.clone());
        r.register_with_unit(
            "log_size_max",
            "At which the log refuses appends; 0 without a limit",
            Unit::Bytes,
            seen.log_size_max.clone(),
        );
        r.register("nodes_live", "Transfer workers heard of in the last five seconds", seen.nodes.clone());
        r.register_with_unit(
            "node_memory",
            "Memory tier by node and kind (capacity, used)",
            Unit::Bytes,
            seen.node_memory.clone(),
        );
        r.register_with_unit(
            "node_cold",
            "Cold tier by node and kind (capacity, used)",
            Unit::Bytes,
            seen.node_cold.clone(),
        );
        r.register_with_unit(
            "node_objects",
            "Ordinary objects by node, charged to its memory tier",
            Unit::Bytes,
            seen.node_objects.clone(),
        );
        r.register(
            "managed_group_guard_skips",
            "Keys of managed groups that a generic path met and left alone, by node and path, since the node started",
            seen.guard_skips.clone(),
        );
        Self { registry, requests, request_time, command_time, in_flight, seen, scraping: Mutex::new(()) }
    }

    /// A request was answered; `outcome` is `OK` or the error's code.
    pub(crate) fn answered(&self, verb: &'static str, outcome: &'static str, took: Duration) {
        self.requests.get_or_create(&vec![("verb", verb.to_owned()), ("outcome", outcome.to_owned())]).inc();
        self.request_time.get_or_create(&vec![("verb", verb.to_owned())]).observe(took.as_secs_f64());
    }

    /// A command was appended and folded.
    pub(crate) fn command_took(&self, took: Duration) {
        self.command_time.observe(took.as_secs_f64());
    }

    /// Counts a request as being worked on until the guard goes.
    pub(crate) fn enter(&self) -> InFlight {
        self.in_flight.inc();
        InFlight(self.in_flight.clone())
    }

    /// The text that a scrape hears. `log` is missing when the log does not answer.
    pub(crate) fn scrape(
        &self,
        folded_seq: u64,
        counts: &Counts,
        automatic: &Automatic,
        log: Option<&LogBounds>,
        nodes: &[NodeStatus],
    ) -> Result<String, fmt::Error> {
        // It guards nothing that a panic could leave half done.
        let _alone = self.scraping.lock().unwrap_or_else(PoisonError::into_inner);
        self.seen.set(folded_seq, counts, log, nodes);
        self.seen.set_automatic(automatic);
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl Seen {
    /// The log counts them; a counter here starts at what the log has counted so far.
    fn set_automatic(&self, automatic: &Automatic) {
        self.automatic.clear();
        for (trigger, counts) in automatic {
            for (direction, count) in [("PROMOTION", counts.promotions), ("DEMOTION", counts.demotions)] {
                let labels = vec![("trigger", trigger.name().to_owned()), ("direction", direction.to_owned())];
                self.automatic.get_or_create(&labels).inc_by(count);
            }
        }
    }

    fn set(&self, folded_seq: u64, counts: &Counts, log: Option<&LogBounds>, nodes: &[NodeStatus]) {
        let one = |name, value: &str| vec![(name, value.to_owned())];
        for availability in Availability::ALL {
            let count = counts.revisions.get(availability).copied().unwrap_or(0);
            self.by_availability.get_or_create(&one("availability", availability.name())).set(signed(count));
        }
        for residency in Residency::ALL {
            let count = counts.residency.get(residency).copied().unwrap_or(0);
            self.by_residency.get_or_create(&one("residency", residency.name())).set(signed(count));
        }
        for (mode, phase) in
            UpsertMode::ALL.iter().flat_map(|mode| ClaimPhase::ALL.iter().map(move |phase| (*mode, *phase)))
        {
            let count = counts.claims.get(&(mode, phase)).copied().unwrap_or(0);
            let labels = vec![("mode", mode.name().to_owned()), ("phase", phase.name().to_owned())];
            self.claims.get_or_create(&labels).set(signed(count));
        }
        self.active_operations.set(signed(counts.active_operations));
        self.active_leases.set(signed(counts.active_leases));
        self.folded_seq.set(signed(folded_seq));
        if let Some(bounds) = log {
            self.log_last_seq.set(signed(bounds.last_seq));
            self.log_lag.set(signed(bounds.last_seq.saturating_sub(folded_seq)));
            self.log_size.set(signed(bounds.bytes));
            self.log_size_max.set(signed(bounds.bytes_max.unwrap_or(0)));
        }
        self.nodes.set(i64::try_from(nodes.len()).unwrap_or(i64::MAX));
        // Nodes come and go: the gone ones must not stand there with their last figures.
        self.node_memory.clear();
        self.node_cold.clear();
        self.node_objects.clear();
        self.guard_skips.clear();
        for status in nodes {
            let labels = |kind: &str| vec![("node", status.endpoint.node.to_string()), ("kind", kind.to_owned())];
            self.node_memory.get_or_create(&labels("capacity")).set(signed(status.memory_capacity_bytes));
            self.node_memory.get_or_create(&labels("used")).set(signed(status.memory_used_bytes));
            self.node_cold.get_or_create(&labels("capacity")).set(signed(status.cold_capacity_bytes));
            self.node_cold.get_or_create(&labels("used")).set(signed(status.cold_used_bytes));
            let node = one("node", status.endpoint.node.as_str());
            self.node_objects.get_or_create(&node).set(signed(status.objects.bytes));
            for (path, count) in &status.objects.guard_skips {
                let labels = vec![("node", status.endpoint.node.to_string()), ("path", path.clone())];
                // The node counts; this is its count.
                self.guard_skips.get_or_create(&labels).inner().store(*count, Ordering::Relaxed);
            }
        }
    }
}

/// What the folded log counts of automatic migrations.
type Automatic = BTreeMap<MigrationTrigger, AutomaticMigrations>;

/// Gauges are signed.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A request being worked on.
#[derive(Debug)]
pub(crate) struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_shows_what_was_counted_and_what_is_there() {
        let metrics = Metrics::new();
        metrics.answered("list", "OK", Duration::from_micros(300));
        metrics.answered("list", "BUSY", Duration::from_micros(300));
        metrics.command_took(Duration::from_millis(1));
        let working = metrics.enter();
        let mut counts = Counts::default();
        counts.revisions.insert(Availability::Ready, 3);
        counts.claims.insert((UpsertMode::PutFirst, ClaimPhase::RetiringBase), 1);
        let bounds = LogBounds { first_seq: 1, last_seq: 12, bytes: 900, bytes_max: Some(1000) };
        let counted = AutomaticMigrations { promotions: 0, demotions: 2 };
        let automatic = Automatic::from([(MigrationTrigger::Pressure, counted)]);
        let text = metrics.scrape(10, &counts, &automatic, Some(&bounds), &[]).unwrap();
        for line in [
            "ballast_gateway_requests_total{verb=\"list\",outcome=\"BUSY\"} 1",
            "ballast_gateway_request_time_seconds_count{verb=\"list\"} 2",
            "ballast_gateway_requests_in_flight 1",
            "ballast_revisions{availability=\"READY\"} 3",
            "ballast_revisions{availability=\"DELETED\"} 0",
            "ballast_replacement_claims{mode=\"PUT_FIRST\",phase=\"RETIRING_BASE\"} 1",
            "ballast_automatic_migrations_total{trigger=\"PRESSURE\",direction=\"DEMOTION\"} 2",
            "ballast_log_fold_lag 2",
            "ballast_log_size_bytes 900",
        ] {
            assert!(text.contains(line), "{line} is not in:\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        drop(working);
        assert!(metrics.scrape(10, &counts, &automatic, None, &[]).unwrap().contains("requests_in_flight 0"));
    }
}

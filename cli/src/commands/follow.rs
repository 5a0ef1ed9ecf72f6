//! `ballast watch` and `ballast status`.

use ballast_client::{EventFeed, EventFilter, EventStart};
use ballast_schemas::{BallastError, Event, EventBody, StatusReply};

use super::{Context, tenant};
use crate::args::WatchArgs;
use crate::output::{bytes, percent, table, time};

pub async fn watch(context: &Context, args: WatchArgs) -> Result<(), BallastError> {
    let filter = match args.name {
        None => EventFilter::Tenant(tenant(&args.tenant)?),
        Some(name) => match name.generation {
            None => EventFilter::Lineage(name.lineage),
            Some(generation) => {
                let identity =
                    name.lineage.generation(generation).map_err(|error| BallastError::invalid(error.to_string()))?;
                EventFilter::Revision(identity)
            }
        },
    };
    let start = if args.from_start { EventStart::All } else { EventStart::New };
    let mut feed = EventFeed::follow(&context.gateway, filter, start).await?;
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        tokio::select! {
            followed = feed.next() => {
                context.out.show(&followed.event, || line(&followed.event));
                left -= 1;
            }
            _ = tokio::signal::ctrl_c() => break,
        }
    }
    Ok(())
}

fn line(event: &Event) -> String {
    let what = match &event.body {
        EventBody::RevisionReady { revision } | EventBody::PolicyUpdated { revision } => {
            format!(
                "{}, {} hot, generation {}",
                revision.residency,
                percent(revision.observed_hot_ppm),
                revision.metadata_generation
            )
        }
        EventBody::RevisionDegraded { reason, .. } => reason.clone(),
        EventBody::RevisionImporting { .. }
        | EventBody::RevisionRetired { .. }
        | EventBody::RevisionDeleting { .. }
        | EventBody::RevisionDeleted { .. } => String::new(),
        EventBody::OperationStarted { operation }
        | EventBody::OperationProgress { operation }
        | EventBody::OperationEnded { operation }
        | EventBody::OperationStuck { operation } => {
            let target = operation.target.map_or_else(String::new, |target| format!(" to {target}"));
            let progress = match operation.total_units {
                0 => String::new(),
                total => format!(", {}/{total} units, {}", operation.processed_units, bytes(operation.processed_bytes)),
            };
            format!("{} {}{target}: {}{progress}", operation.operation_id, operation.kind, operation.status)
        }
        EventBody::ClaimPhase { claim } => {
            format!("{} replaces #{}: {}", claim.mode, claim.base.weight_generation, claim.phase)
        }
    };
    format!(
        "{}  {:>8}  {:19} {}  {what}",
        time(event.unix_ms),
        event.position.to_string(),
        event.body.name(),
        event.body.identity()
    )
    .trim_end()
    .to_owned()
}

pub async fn status(context: &Context) -> Result<(), BallastError> {
    let status = context.admin.status().await?;
    context.out.show(&status, || status_text(&status));
    Ok(())
}

fn status_text(status: &StatusReply) -> String {
    let revisions: Vec<String> =
        status.revisions.iter().map(|(availability, count)| format!("{count} {availability}")).collect();
    let mut text = format!(
        "cluster {} (incarnation {}), {} at entry {}\nrevisions   {}\noperations  {} active\nleases      {} active\n\n",
        status.cluster_id,
        status.incarnation,
        status.replica_id,
        status.folded_seq,
        if revisions.is_empty() { "none".to_owned() } else { revisions.join(", ") },
        status.active_operations,
        status.active_leases,
    );
    if status.nodes.is_empty() {
        text.push_str("no nodes: start one with `ballast transfer-worker --memory 4GiB --cold DIR`");
        return text;
    }
    let rows: Vec<Vec<String>> = status
        .nodes
        .iter()
        .map(|node| {
            vec![
                node.endpoint.node.to_string(),
                node.not_serving.clone().unwrap_or_else(|| "serving".to_owned()),
                format!("{} of {}", bytes(node.memory_used_bytes), bytes(node.memory_capacity_bytes)),
                node.memory_kind.clone(),
                match node.cold_capacity_bytes {
                    0 => "none".to_owned(),
                    capacity => format!("{} of {}", bytes(node.cold_used_bytes), bytes(capacity)),
                },
                node.cold_engine.clone(),
                // The reason is in the node's ready line, and in JSON.
                if node.rdma.is_empty() || node.rdma.starts_with("none") { "no" } else { "yes" }.to_owned(),
                bytes(node.objects.bytes),
            ]
        })
        .collect();
    text.push_str(&table(&["NODE", "STATE", "MEMORY", "PAGES", "COLD", "ENGINE", "RDMA", "OBJECTS"], &rows));
    text
}

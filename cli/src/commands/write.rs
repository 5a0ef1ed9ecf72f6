//! `ballast put` and `ballast upsert`: publish a model, as a new revision or in place of an older one.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use ballast_client::{
    Progress, PutReport, PutWriter, Source, UpsertOptions, next_generation, plan_replacement, safetensors,
};
use ballast_schemas::{BallastError, RevisionIdentity, WeightRevisionMetadata, WeightStoragePolicy};
use serde_json::{Value, json};

use super::{Context, revisions, succeeded, wait_for};
use crate::args::{PutArgs, UpsertArgs};
use crate::output::{Output, bytes, speed};

/// Shows a transfer's progress: what it waits for as a note, bytes as a bar.
pub fn shown_progress(out: Output, what: &str) -> Progress {
    let bar = Mutex::new((out.bytes_bar(what), None::<String>));
    Progress::new(move |update| {
        let mut shown = bar.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(note) = &update.note {
            if shown.1.as_ref() != Some(note) {
                out.note(&format!("waiting: {note}"));
                shown.1 = Some(note.clone());
            }
        } else if update.total_bytes > 0 {
            shown.0.set(update.done_bytes, update.total_bytes);
        }
    })
}

/// Reads the headers of what is to be published, off the runtime's threads.
async fn source(path: &Path) -> Result<Source, BallastError> {
    let path = path.to_owned();
    let opened = tokio::task::spawn_blocking(move || safetensors::open(&path)).await;
    opened
        .map_err(|error| BallastError::invalid(format!("the model can not be read: {error}")))?
        .map_err(BallastError::from)
}

pub async fn put(context: &Context, args: PutArgs) -> Result<(), BallastError> {
    let source = source(&args.path).await?;
    let progress = shown_progress(context.out, "put");
    let Some(mode) = args.replace else {
        let identity = match args.name.generation {
            Some(generation) => {
                args.name.lineage.generation(generation).map_err(|error| BallastError::invalid(error.to_string()))?
            }
            None => next_generation(&context.store, &args.name.lineage).await?,
        };
        // What the flags leave out is the cluster's.
        let policy = match args.policy.is_partial() {
            true => args.policy.over(context.admin.status().await?.default_policy, context.out)?,
            false => args.policy.over(WeightStoragePolicy::default(), context.out)?,
        };
        let writer = context.store.weight_put(source, &identity, policy, progress).await?;
        return publish(context, writer, None, args.wait).await;
    };
    let plan = plan_replacement(&context.store, &args.name.lineage, args.name.generation, mode).await?;
    let replaced = context.store.weight_get_metadata(&plan.base).await?.metadata;
    let policy = args.policy.over(replaced.policy, context.out)?;
    let options =
        UpsertOptions { mode, policy, request_id: args.request_id.or(plan.request_id), wait_completed: args.wait };
    let (base, expected) = (plan.base, plan.expected_metadata_generation);
    let writer =
        context.store.weight_upsert(source, &base, plan.target_generation, expected, options, progress).await?;
    publish(context, writer, Some(base), args.wait).await
}

pub async fn upsert(context: &Context, args: UpsertArgs) -> Result<(), BallastError> {
    let source = source(&args.path).await?;
    let lineage = &args.name.lineage;
    let invalid = |error: ballast_schemas::IdentityError| BallastError::invalid(error.to_string());
    let base = lineage.generation(args.replacing).map_err(invalid)?;
    let target = match args.name.generation {
        Some(generation) => generation,
        None => next_generation(&context.store, lineage).await?.weight_generation,
    };
    let view = context.store.weight_get_metadata(&base).await?.metadata;
    let options = UpsertOptions {
        mode: args.upsert_mode,
        policy: args.policy.over(view.policy, context.out)?,
        request_id: args.request_id,
        wait_completed: args.wait,
    };
    let expected = args.expected.unwrap_or(view.metadata_generation);
    let progress = shown_progress(context.out, "upsert");
    let writer = context.store.weight_upsert(source, &base, target, expected, options, progress).await?;
    publish(context, writer, Some(base), args.wait).await
}

/// Moves the bytes, publishes, waits if asked to, and says what there is now.
async fn publish(
    context: &Context,
    writer: PutWriter,
    base: Option<RevisionIdentity>,
    wait: bool,
) -> Result<(), BallastError> {
    let identity = writer.identity().clone();
    let report = writer.commit().await?;
    let mut revision = report.revision.clone();
    if wait {
        if let Some(operation) = &revision.operation_id {
            succeeded(wait_for(context, &identity.tenant_id, operation).await?)?;
        }
        if let Some(base) = &base {
            revisions::gone(context, base).await?;
        }
        revision = context.store.weight_get_metadata(&identity).await?.metadata;
    }
    context.out.show(&put_json(&report, &revision), || put_text(&report, &revision, base.as_ref(), wait));
    Ok(())
}

fn put_json(report: &PutReport, revision: &WeightRevisionMetadata) -> Value {
    json!({
        "identity": revision.identity,
        "metadata": revision,
        "operation_id": revision.operation_id,
        "bytes": report.bytes,
        "seconds": report.elapsed.as_secs_f64(),
        "existed": report.existed,
        "transport": report.transport.map(|transport| transport.to_string()),
        "reused_bytes": report.reused_bytes,
        "claim": report.claim,
    })
}

fn put_text(
    report: &PutReport,
    revision: &WeightRevisionMetadata,
    base: Option<&RevisionIdentity>,
    waited: bool,
) -> String {
    let identity = &revision.identity;
    let mut text = match report.existed {
        true => format!("{identity} is there already with the same content ({})", bytes(report.bytes)),
        false => format!(
            "{identity} is {} and {}: {} in {:.2} s ({})",
            revision.availability,
            revision.residency,
            bytes(report.bytes),
            report.elapsed.as_secs_f64(),
            speed(report.bytes, report.elapsed)
        ),
    };
    if let Some(operation) = &revision.operation_id {
        text += &format!("; {operation} moves it to {}", revision.policy.preferred_residency);
    }
    match base {
        Some(base) if waited => text += &format!("; {base} is gone"),
        Some(base) => text += &format!("; {base} goes when its readers have left"),
        None => {}
    }
    text
}

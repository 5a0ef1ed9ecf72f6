//! `ballast ls`, `show`, `policy` and `rm`.

use ballast_client::resolve;
use ballast_schemas::{
    Availability, BallastError, Component, ErrorCode, LIST_LIMIT_MAX, ListRequest, RevisionIdentity, RevisionView,
    WeightRevisionMetadata,
};
use serde_json::json;

use super::{Context, LOOK_EVERY, tenant};
use crate::args::{LsArgs, Name, NameArgs, PolicyArgs, Prefix, RmArgs};
use crate::output::{REVISION_HEADER, bytes, revision_row, revision_text, table};

fn list_request(namespace: Option<Component>, resource_prefix: Option<String>, all: bool) -> ListRequest {
    ListRequest {
        namespace,
        resource_id: None,
        resource_prefix,
        revision: None,
        all,
        page_token: String::new(),
        limit: LIST_LIMIT_MAX,
    }
}

/// Every page of a listing.
async fn list_all(
    context: &Context,
    owner: &str,
    mut request: ListRequest,
) -> Result<Vec<WeightRevisionMetadata>, BallastError> {
    let owner = tenant(owner)?;
    let mut revisions = Vec::new();
    loop {
        let page = context.store.weight_list(&owner, &request).await?;
        revisions.extend(page.revisions);
        if page.next_page_token.is_empty() {
            return Ok(revisions);
        }
        request.page_token = page.next_page_token;
    }
}

pub async fn ls(context: &Context, args: LsArgs) -> Result<(), BallastError> {
    let Prefix { namespace, resource } = args.prefix.unwrap_or_default();
    let revisions = list_all(context, &args.tenant, list_request(namespace, resource, args.all)).await?;
    context.out.show(&revisions, || match revisions.is_empty() {
        true if args.all => "no revisions".to_owned(),
        true => "no READY revisions (--all shows imports in progress and tombstones too)".to_owned(),
        false => table(REVISION_HEADER, &revisions.iter().map(revision_row).collect::<Vec<_>>()),
    });
    Ok(())
}

/// The view of a named revision; without a generation the newest READY one or, if none is, the newest of all.
pub async fn view(context: &Context, name: &Name) -> Result<RevisionView, BallastError> {
    let identity = match resolve(&context.store, &name.text).await {
        Err(error) if error.code == ErrorCode::NotFound && name.generation.is_none() => {
            let mut request = list_request(Some(name.lineage.namespace.clone()), None, true);
            request.resource_id = Some(name.lineage.resource_id.clone());
            request.revision = Some(name.lineage.revision.clone());
            let all = list_all(context, name.lineage.tenant_id.as_str(), request).await?;
            all.last().map(|newest| newest.identity.clone()).ok_or(error)?
        }
        resolved => resolved?,
    };
    context.store.weight_get_metadata(&identity).await
}

pub async fn show(context: &Context, args: NameArgs) -> Result<(), BallastError> {
    let view = view(context, &args.name).await?;
    context.out.show(&view, || revision_text(&view));
    Ok(())
}

pub async fn policy(context: &Context, args: PolicyArgs) -> Result<(), BallastError> {
    let current = view(context, &args.name).await?.metadata;
    let Some(policy) = args.policy.over(current.policy, context.out)? else {
        let policy = current.policy;
        context.out.show(&policy, || {
            let ratio = f64::from(policy.mixed_hot_ratio);
            format!("preferred {}, hot ratio {ratio} when mixed, {}", policy.preferred_residency, policy.migration_mode)
        });
        return Ok(());
    };
    let expected = args.expected.unwrap_or(current.metadata_generation);
    let updated = context.store.weight_update_policy(&current.identity, policy, expected).await?;
    context.out.show(&updated, || table(REVISION_HEADER, &[revision_row(&updated)]));
    Ok(())
}

pub async fn rm(context: &Context, args: RmArgs) -> Result<(), BallastError> {
    let view = view(context, &args.name).await?;
    let identity = view.metadata.identity.clone();
    let size = view.metadata.manifest.as_ref().map_or(0, |manifest| manifest.logical_bytes);
    if args.dry_run && view.metadata.availability == Availability::Deleted {
        let plan = json!({"would_remove": null, "deleted": identity});
        context
            .out
            .show(&plan, || format!("nothing to remove: {identity} is deleted already; only its tombstone remains"));
        return Ok(());
    }
    if args.dry_run {
        let (leases, operation) = (view.active_lease_count, &view.metadata.operation_id);
        let plan = json!({"would_remove": identity, "bytes": size, "active_leases": leases, "operation_id": operation});
        context.out.show(&plan, || {
            let blocked = match (leases, operation) {
                (0, None) => String::new(),
                (0, Some(operation)) => format!("; refused while operation {operation} is active"),
                (count, _) => format!("; refused while {count} leases are active"),
            };
            format!("would remove {identity}: {} ({}){blocked}", view.metadata.availability, bytes(size))
        });
        return Ok(());
    }
    let expected = args.expected.unwrap_or(view.metadata.metadata_generation);
    let mut removed = context.store.weight_remove(&identity, expected).await?;
    if args.wait {
        removed = gone(context, &identity).await?;
    }
    context.out.show(&removed, || match removed.availability {
        Availability::Deleted => format!("removed {identity} ({}); a tombstone remains", bytes(size)),
        _ => {
            let operation = removed.operation_id.as_ref().map_or_else(String::new, |id| format!(" by operation {id}"));
            format!("removing {identity} ({}){operation}; `ballast show {identity}` tells when it is gone", bytes(size))
        }
    });
    Ok(())
}

/// Waits until a revision is a tombstone.
pub async fn gone(context: &Context, identity: &RevisionIdentity) -> Result<WeightRevisionMetadata, BallastError> {
    loop {
        let metadata = context.store.weight_get_metadata(identity).await?.metadata;
        if metadata.availability == Availability::Deleted {
            return Ok(metadata);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

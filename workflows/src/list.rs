//! Listing: one page of a tenant's revisions from an ordered index, never a scan of everything (RFC, Python API: `weight_list`).

use std::ops::Bound;

use ballast_schemas::{
    BallastError, Component, IdentityParts, LIST_LIMIT_MAX, ListRequest, RevisionIdentity, RevisionPage, TenantId,
    WeightRevisionMetadata,
};

use crate::state::State;

/// Revisions looked at for one page; a page that filters out more than it finds ends early, with a token.
const LOOKED_AT_MAX: usize = 10_000;
/// Separates the parts of a token; no component holds a control character.
const SEPARATOR: char = '\u{1f}';

pub(crate) fn page(state: &State, tenant: &TenantId, request: &ListRequest) -> Result<RevisionPage, BallastError> {
    if !(1..=LIST_LIMIT_MAX).contains(&request.limit) {
        return Err(BallastError::invalid(format!("limit is {}; give 1 to {LIST_LIMIT_MAX}", request.limit)));
    }
    let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(read_token(tenant, token)?),
    };
    let begin = match after {
        Some(after) => Bound::Excluded(after),
        None => first(tenant, request).map_or(Bound::Unbounded, Bound::Included),
    };
    let mut page = RevisionPage { revisions: Vec::new(), next_page_token: String::new() };
    let mut looked_at: usize = 0;
    let mut last = None;
    let records = &state.record.revisions;
    let mut every =
        records.range((begin.clone(), Bound::Unbounded)).map(|(identity, revision)| (identity, &revision.metadata));
    let mut listed = state
        .index
        .listed
        .range((begin, Bound::Unbounded))
        .filter_map(|identity| records.get(identity).map(|revision| (identity, &revision.metadata)));
    let candidates: &mut dyn Iterator<Item = (&RevisionIdentity, &WeightRevisionMetadata)> =
        if request.all { &mut every } else { &mut listed };
    for (identity, metadata) in candidates {
        if is_beyond(tenant, request, identity) {
            return Ok(page);
        }
        if page.revisions.len() >= limit || looked_at >= LOOKED_AT_MAX {
            // There is at least this one more.
            page.next_page_token = last.map(write_token).unwrap_or_default();
            return Ok(page);
        }
        looked_at = looked_at.saturating_add(1);
        last = Some(identity);
        if matches(request, identity) {
            page.revisions.push(metadata.clone());
        }
    }
    Ok(page)
}

fn matches(request: &ListRequest, identity: &RevisionIdentity) -> bool {
    let is = |wanted: &Option<Component>, found: &Component| wanted.as_ref().is_none_or(|wanted| wanted == found);
    is(&request.namespace, &identity.namespace)
        && is(&request.resource_id, &identity.resource_id)
        && is(&request.revision, &identity.revision)
        && request
            .resource_prefix
            .as_ref()
            .is_none_or(|prefix| identity.resource_id.as_str().starts_with(prefix.as_str()))
}

/// The lowest identity that could match, as far as the request fixes the leading parts.
fn first(tenant: &TenantId, request: &ListRequest) -> Option<RevisionIdentity> {
    // A single space is the lowest text that a component may be.
    let lowest = || Component::new("lowest", " ").ok();
    let namespace = request.namespace.clone();
    let resource = request.resource_id.clone().or_else(|| {
        let prefix = request.resource_prefix.as_deref().filter(|prefix| !prefix.is_empty())?;
        Component::new("resource_prefix", prefix).ok()
    });
    let resource = resource.filter(|_| namespace.is_some());
    Some(RevisionIdentity::of(IdentityParts {
        tenant_id: tenant.clone(),
        namespace: namespace.or_else(lowest)?,
        resource_id: resource.or_else(lowest)?,
        revision: lowest()?,
        weight_generation: 0,
    }))
}

/// Whether neither this identity nor any later one can match.
fn is_beyond(tenant: &TenantId, request: &ListRequest, identity: &RevisionIdentity) -> bool {
    if identity.tenant_id != *tenant {
        return true;
    }
    let Some(namespace) = &request.namespace else { return false };
    if identity.namespace != *namespace {
        return identity.namespace > *namespace;
    }
    let resource = identity.resource_id.as_str();
    let past = |wanted: &str, prefix: bool| resource > wanted && !(prefix && resource.starts_with(wanted));
    request.resource_id.as_ref().is_some_and(|wanted| past(wanted.as_str(), false))
        || request.resource_prefix.as_ref().is_some_and(|wanted| past(wanted, true))
}

fn write_token(identity: &RevisionIdentity) -> String {
    let generation = identity.weight_generation.to_string();
    [identity.namespace.as_str(), identity.resource_id.as_str(), identity.revision.as_str(), &generation]
        .join(&SEPARATOR.to_string())
}

fn read_token(tenant: &TenantId, token: &str) -> Result<RevisionIdentity, BallastError> {
    let wrong = || BallastError::invalid("page_token is not one that a page gave; begin with an empty one".to_owned());
    let mut parts = token.split(SEPARATOR);
    let mut next = || parts.next().ok_or_else(wrong);
    let (namespace, resource, revision, generation) = (next()?, next()?, next()?, next()?);
    let generation = generation.parse().map_err(|_| wrong())?;
    if parts.next().is_some() {
        return Err(wrong());
    }
    RevisionIdentity::new(tenant.as_str(), namespace, resource, revision, generation).map_err(|_| wrong())
}

#[cfg(test)]
mod tests;

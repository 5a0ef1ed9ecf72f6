//! `ballast replay`: the state as it was after any entry of the log, and what changed between two; `ballast snapshots`.

use std::collections::{BTreeMap, BTreeSet};

use ballast_journal::History;
use ballast_schemas::{BallastError, RevisionIdentity};
use ballast_workflows::State;
use serde::Serialize;
use serde_json::{Value, json};

use super::past::failed;
use crate::args::{Name, ReplayArgs};
use crate::output::{OPERATION_HEADER, Output, REVISION_HEADER, bytes, operation_row, revision_row, table, time};

pub async fn replay(history: &History, args: ReplayArgs, out: Output) -> Result<(), BallastError> {
    let only = args.revision.as_ref();
    if let Some([from, to]) = args.diff.as_deref() {
        let (before, after) =
            (history.state_at(*from).await.map_err(failed)?, history.state_at(*to).await.map_err(failed)?);
        let changes = changes(&records(&before, only), &records(&after, only));
        out.show(&json!({"from": from, "to": to, "changes": changes}), || diff_text(&changes));
        return Ok(());
    }
    let seq = match args.to {
        Some(seq) => seq,
        None => history.bounds().await.map_err(failed)?.last_seq,
    };
    let state = history.state_at(seq).await.map_err(failed)?;
    out.show(&document(&state, only), || text(&state, only));
    Ok(())
}

fn takes(only: Option<&Name>, identity: &RevisionIdentity) -> bool {
    only.is_none_or(|name| name.means(identity))
}

/// Every record of the state by kind and name, as JSON.
fn records(state: &State, only: Option<&Name>) -> BTreeMap<(&'static str, String), Value> {
    let mut records = BTreeMap::new();
    let mut add = |kind: &'static str, name: String, value: Value| records.insert((kind, name), value);
    if only.is_none() {
        add("config", "cluster".to_owned(), json!(state.config()));
        add("fold version", "cluster".to_owned(), json!({"fold_version": state.fold_version()}));
        for capability in state.capabilities() {
            add("capability", capability.to_string(), json!({"confirmed": true}));
        }
        for (id, replica) in state.replicas() {
            add("replica", id.to_string(), json!(replica));
        }
        for snapshot in state.snapshots() {
            add("snapshot", snapshot.seq.to_string(), json!(snapshot));
        }
    }
    for (lineage, watermark, claim) in state.lineages() {
        if only.is_none_or(|name| name.lineage == *lineage) {
            add("lineage", lineage.to_string(), json!({"watermark": watermark, "claim": claim}));
        }
    }
    for revision in state.revisions().filter(|revision| takes(only, &revision.identity)) {
        add("revision", revision.identity.to_string(), json!(revision));
        if let Some(session) = state.import(&revision.identity) {
            add("import", revision.identity.to_string(), json!(session));
        }
        for lease in state.leases(&revision.identity) {
            add("lease", format!("{} of {}", lease.lease_id, lease.identity), json!(lease));
        }
    }
    for operation in state.all_operations().filter(|operation| takes(only, &operation.identity)) {
        add("operation", operation.operation_id.to_string(), json!(operation));
    }
    records
}

/// The whole state as one document: lists of records by kind.
fn document(state: &State, only: Option<&Name>) -> Value {
    let mut lists: BTreeMap<String, Value> = BTreeMap::new();
    let names = [
        ("lineage", "lineages"),
        ("revision", "revisions"),
        ("import", "imports"),
        ("lease", "leases"),
        ("operation", "operations"),
        ("replica", "replicas"),
        ("snapshot", "snapshots"),
    ];
    for (_, list) in names {
        lists.insert(list.to_owned(), json!([]));
    }
    for ((kind, name), mut value) in records(state, only) {
        let Some((_, list)) = names.iter().find(|(single, _)| *single == kind) else { continue };
        if let ("lineage" | "replica", Some(fields)) = (kind, value.as_object_mut()) {
            fields.insert("name".to_owned(), name.into());
        }
        if let Some(list) = lists.get_mut(*list).and_then(Value::as_array_mut) {
            list.push(value);
        }
    }
    let cluster = state.cluster().map(|cluster| json!(cluster));
    let mut whole = json!({
        "seq": state.log_seq(),
        "unix_ms": state.unix_ms(),
        "log_clock_ms": state.log_clock().0,
        "fold_version": state.fold_version(),
        "chain": state.chain(),
        "cluster": cluster,
        "config": state.config(),
        "capabilities": state.capabilities().map(|capability| capability.to_string()).collect::<Vec<_>>(),
    });
    if let Some(fields) = whole.as_object_mut() {
        fields.extend(lists);
    }
    whole
}

fn text(state: &State, only: Option<&Name>) -> String {
    let cluster = state.cluster_id().map_or_else(String::new, ToString::to_string);
    let gates: Vec<String> = state.capabilities().map(|capability| capability.to_string()).collect();
    let mut text = format!(
        "after entry {} of cluster {cluster}, {}, log clock {} ms, fold version {}\nchain  {}\ngates  {}\n",
        state.log_seq(),
        time(state.unix_ms()),
        state.log_clock().0,
        state.fold_version(),
        state.chain(),
        if gates.is_empty() { "none open".to_owned() } else { gates.join(", ") },
    );
    let mut section = |title: &str, header: &[&str], rows: Vec<Vec<String>>| {
        if rows.is_empty() {
            text.push_str(&format!("\nno {title}\n"));
        } else {
            text.push_str(&format!("\n{}", table(header, &rows)));
        }
    };
    let revisions: Vec<_> = state.revisions().filter(|revision| takes(only, &revision.identity)).collect();
    section("revisions", REVISION_HEADER, revisions.iter().map(|revision| revision_row(revision)).collect());
    let operations = state.all_operations().filter(|operation| takes(only, &operation.identity));
    section("operations", OPERATION_HEADER, operations.map(operation_row).collect());
    let lineages = state.lineages().filter(|(lineage, ..)| only.is_none_or(|name| name.lineage == **lineage));
    let lineages = lineages.map(|(lineage, watermark, claim)| {
        let claim = claim.map_or_else(
            || "-".to_owned(),
            |claim| {
                format!(
                    "{} #{} by #{}: {}",
                    claim.mode, claim.base.weight_generation, claim.target.weight_generation, claim.phase
                )
            },
        );
        vec![lineage.to_string(), watermark.to_string(), claim]
    });
    section("lineages", &["LINEAGE", "WATERMARK", "CLAIM"], lineages.collect());
    let leases = revisions.iter().flat_map(|revision| state.leases(&revision.identity)).map(|lease| {
        let left = lease.expires_at.since(state.log_clock());
        vec![lease.lease_id.to_string(), lease.holder.clone(), format!("{left} ms"), lease.identity.to_string()]
    });
    section("leases", &["LEASE", "HOLDER", "LEFT", "REVISION"], leases.collect());
    if only.is_none() {
        let config = json!(state.config());
        text.push_str(&format!("\nconfig\n{}", fields_text(&config)));
    }
    text
}

fn fields_text(value: &Value) -> String {
    let mut fields = BTreeMap::new();
    flatten("", value, &mut fields);
    fields.iter().map(|(name, value)| format!("  {name:40}  {value}\n")).collect()
}

/// A change of one record.
#[derive(Serialize)]
struct Change {
    kind: &'static str,
    name: String,
    change: &'static str,
    /// Changed fields by their path: what was there and what is.
    fields: BTreeMap<String, (Value, Value)>,
}

fn changes(
    before: &BTreeMap<(&'static str, String), Value>,
    after: &BTreeMap<(&'static str, String), Value>,
) -> Vec<Change> {
    let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let mut changes = Vec::new();
    for key in names {
        let (old, new) = (before.get(key), after.get(key));
        let change = match (old, new) {
            (None, _) => "added",
            (_, None) => "removed",
            (old, new) if old == new => continue,
            _ => "changed",
        };
        let fields = changed_fields(old.unwrap_or(&Value::Null), new.unwrap_or(&Value::Null));
        changes.push(Change { kind: key.0, name: key.1.clone(), change, fields });
    }
    changes
}

fn changed_fields(old: &Value, new: &Value) -> BTreeMap<String, (Value, Value)> {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    flatten("", old, &mut before);
    flatten("", new, &mut after);
    let names: BTreeSet<String> = before.keys().chain(after.keys()).cloned().collect();
    let value = |fields: &BTreeMap<String, Value>, name: &String| fields.get(name).cloned().unwrap_or_default();
    let pairs = names.into_iter().map(|name| {
        let pair = (value(&before, &name), value(&after, &name));
        (name, pair)
    });
    pairs.filter(|(_, (old, new))| old != new).collect()
}

/// The leaves of a document by their path.
fn flatten(path: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, into);
            }
        }
        Value::Null => {}
        leaf => {
            into.insert(path.to_owned(), leaf.clone());
        }
    }
}

fn diff_text(changes: &[Change]) -> String {
    if changes.is_empty() {
        return "nothing changed".to_owned();
    }
    let shown = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut text = String::new();
    for change in changes {
        text.push_str(&format!("{} {} {}\n", change.change, change.kind, change.name));
        // What a record had when it came or went is in the document; here only what a change changed.
        for (name, (old, new)) in change.fields.iter().filter(|_| change.change == "changed") {
            text.push_str(&format!("  {name:32}  {} -> {}\n", shown(old), shown(new)));
        }
    }
    text
}

/// `ballast snapshots`.
pub async fn snapshots(history: &History, out: Output) -> Result<(), BallastError> {
    let bounds = history.bounds().await.map_err(failed)?;
    let found = history.snapshots().await.map_err(failed)?;
    let usable = |seq: u64| seq + 1 >= bounds.first_seq && seq <= bounds.last_seq;
    let list: Vec<Value> = found
        .iter()
        .map(|stored| {
            json!({
                "seq": stored.name.seq,
                "digest": stored.name.digest,
                "bytes": stored.bytes,
                "verified": stored.verified.is_ok(),
                "reason": stored.verified.as_ref().err().map(ToString::to_string),
                "log_goes_on": usable(stored.name.seq),
            })
        })
        .collect();
    out.show(&json!({"snapshots": list, "first_seq": bounds.first_seq, "last_seq": bounds.last_seq}), || {
        let rows: Vec<Vec<String>> = found
            .iter()
            .map(|stored| {
                let state = match &stored.verified {
                    Ok(()) if usable(stored.name.seq) => "verified".to_owned(),
                    Ok(()) => "verified, but the log does not go on from it".to_owned(),
                    Err(error) => error.to_string(),
                };
                vec![stored.name.seq.to_string(), stored.name.digest.to_string(), bytes(stored.bytes), state]
            })
            .collect();
        let log = format!("the log holds entries {} to {}\n", bounds.first_seq, bounds.last_seq);
        match rows.is_empty() {
            true => format!("{log}no snapshots"),
            false => format!("{log}{}", table(&["SEQ", "DIGEST", "SIZE", "STATE"], &rows)),
        }
    });
    Ok(())
}

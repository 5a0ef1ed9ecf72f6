//! `ballast object`: ordinary objects of a node.

use std::path::Path;

use ballast_client::NodeObjects;
use ballast_schemas::{BallastError, ErrorCode, NodeId, ObjectKey, ObjectReply};
use serde_json::json;

use super::Context;
use crate::args::{ObjectAction, ObjectArgs};
use crate::output::{bytes, table};

pub async fn object(context: &Context, args: ObjectArgs) -> Result<(), BallastError> {
    let objects = NodeObjects::new(context.gateway.clone(), node(context, args.node).await?);
    match args.action {
        ObjectAction::Put { key, file } => put(context, &objects, key, &file).await,
        ObjectAction::Get { key, to } => get(context, &objects, key, &to).await,
        ObjectAction::Rm { key } => {
            let size = objects.remove(key.clone()).await?;
            context.out.show(&json!({"key": key, "bytes": size}), || format!("removed {key} ({})", bytes(size)));
            Ok(())
        }
        ObjectAction::Ls => {
            let all = objects.list().await?;
            context.out.show(&all, || match all.is_empty() {
                true => "no objects".to_owned(),
                false => {
                    let rows: Vec<_> = all.iter().map(|entry| vec![entry.key.clone(), bytes(entry.bytes)]).collect();
                    table(&["KEY", "SIZE"], &rows)
                }
            });
            Ok(())
        }
        ObjectAction::Clear { dry_run } => {
            let cleared = objects.clear(dry_run).await?;
            context.out.show(&cleared, || cleared_text(&cleared, dry_run));
            Ok(())
        }
    }
}

fn cleared_text(cleared: &ObjectReply, dry_run: bool) -> String {
    let ObjectReply::Cleared { objects, bytes: size, skipped } = cleared else { return String::new() };
    let did = if dry_run { "would remove" } else { "removed" };
    let left = match (skipped, dry_run) {
        (0, _) => String::new(),
        (count, true) => format!("; would leave {count} keys of managed groups alone (`ballast rm` deletes weights)"),
        (count, false) => format!("; left {count} keys of managed groups alone (`ballast rm` deletes weights)"),
    };
    format!("{did} {objects} objects ({}){left}", bytes(*size))
}

async fn put(context: &Context, objects: &NodeObjects, key: ObjectKey, file: &Path) -> Result<(), BallastError> {
    let content = tokio::fs::read(file)
        .await
        .map_err(|error| BallastError::invalid(format!("{} can not be read: {error}; name a file", file.display())))?;
    let evicted = objects.put(key.clone(), &content).await?;
    let size = content.len() as u64;
    context.out.show(&json!({"key": key, "bytes": size, "evicted": evicted}), || match evicted {
        0 => format!("stored {key} ({})", bytes(size)),
        count => format!("stored {key} ({}); {count} objects were evicted for it", bytes(size)),
    });
    Ok(())
}

async fn get(context: &Context, objects: &NodeObjects, key: ObjectKey, to: &Path) -> Result<(), BallastError> {
    let content = objects.get(key.clone()).await?;
    tokio::fs::write(to, &content).await.map_err(|error| {
        BallastError::invalid(format!("{} can not be written: {error}; name another file with --to", to.display()))
    })?;
    let size = content.len() as u64;
    let said = json!({"key": key, "bytes": size, "to": to});
    context.out.show(&said, || format!("{key} is in {} ({})", to.display(), bytes(size)));
    Ok(())
}

/// The node that was named, or the only one that serves.
async fn node(context: &Context, named: Option<NodeId>) -> Result<NodeId, BallastError> {
    if let Some(node) = named {
        return Ok(node);
    }
    let nodes = context.admin.status().await?.nodes;
    let serving: Vec<&NodeId> =
        nodes.iter().filter(|node| node.not_serving.is_none()).map(|node| &node.endpoint.node).collect();
    match serving.as_slice() {
        [only] => Ok((*only).clone()),
        [] => Err(BallastError::new(ErrorCode::Unavailable, "no node serves; `ballast transfer-worker` starts one")),
        several => {
            let names: Vec<&str> = several.iter().map(|node| node.as_str()).collect();
            Err(BallastError::invalid(format!(
                "objects belong to one node; say which with --node: {}",
                names.join(", ")
            )))
        }
    }
}

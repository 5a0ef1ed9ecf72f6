//! `ballast repair` and `ballast verify`.

use ballast_schemas::{BallastError, ErrorCode, NodeCheck};

use super::revisions::view;
use super::{Context, succeeded, wait_for};
use crate::args::{NameArgs, RepairArgs};
use crate::output::operation_text;

pub async fn repair(context: &Context, args: RepairArgs) -> Result<(), BallastError> {
    // By its name even when it is DEGRADED, which no reader's name finds.
    let identity = view(context, &args.name).await?.metadata.identity;
    let mut operation = context.admin.repair(&identity, args.expected).await?;
    if let Some(started) = operation.as_ref().filter(|_| args.wait) {
        operation = Some(succeeded(wait_for(context, &identity.tenant_id, &started.operation_id).await?)?);
    }
    context.out.show(&operation, || match &operation {
        Some(operation) => operation_text(operation),
        None => format!("{identity} lacks nothing: there is nothing to repair"),
    });
    Ok(())
}

pub async fn verify(context: &Context, args: NameArgs) -> Result<(), BallastError> {
    let identity = view(context, &args.name).await?.metadata.identity;
    let mut found: Vec<NodeCheck> = Vec::new();
    let mut from = Some(0);
    while let Some(first) = from {
        let round = context.admin.verify(&identity, first).await?;
        for check in round.nodes {
            match found.iter_mut().find(|all| all.node == check.node) {
                Some(all) => {
                    for (all, more) in [(&mut all.memory, check.memory), (&mut all.cold, check.cold)] {
                        all.right += more.right;
                        all.wrong.extend(more.wrong);
                    }
                }
                None => found.push(NodeCheck { next: None, ..check }),
            }
        }
        from = round.next;
    }
    let report = found.iter().map(line).collect::<Vec<_>>().join("\n");
    let wrong: usize = found.iter().map(|check| check.memory.wrong.len() + check.cold.wrong.len()).sum();
    match wrong {
        0 => {
            context.out.show(&found, || report);
            Ok(())
        }
        _ => {
            let message = format!(
                "{wrong} copies of {identity} were wrong; they are no longer served, and are made again where another copy is\n{report}"
            );
            let details = serde_json::to_value(&found).unwrap_or_default();
            Err(BallastError::new(ErrorCode::ChecksumMismatch, message).with_details(details))
        }
    }
}

fn line(check: &NodeCheck) -> String {
    let (memory, cold) = (&check.memory, &check.cold);
    format!(
        "{}: memory {} right, {} wrong; disk {} right, {} wrong",
        check.node,
        memory.right,
        memory.wrong.len(),
        cold.right,
        cold.wrong.len()
    )
}

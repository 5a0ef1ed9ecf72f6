//! `ballast migrate` and `ballast op`.

use ballast_client::resolve;
use ballast_schemas::{BallastError, OperationId, Residency};

use super::{Context, succeeded, tenant, wait_for};
use crate::args::{MigrateArgs, OpAction, OpArgs};
use crate::output::{OPERATION_HEADER, operation_row, operation_text, table};

const OPERATIONS_SHOWN: u32 = 100;

pub async fn migrate(context: &Context, args: MigrateArgs) -> Result<(), BallastError> {
    if args.hot_ratio.is_some() && args.target != Residency::Mixed {
        return Err(BallastError::invalid(format!(
            "--hot-ratio is the hot share of a mixed revision, the target is {}; leave it out, or migrate to mixed",
            args.target
        )));
    }
    let identity = resolve(&context.store, &args.name.text).await?;
    let expected = match args.expected {
        Some(expected) => expected,
        None => context.store.weight_get_metadata(&identity).await?.metadata.metadata_generation,
    };
    let mut operation = context.store.weight_migrate(&identity, args.target, args.hot_ratio, expected).await?;
    if args.wait {
        operation = succeeded(wait_for(context, &identity.tenant_id, &operation.operation_id).await?)?;
    }
    context.out.show(&operation, || operation_text(&operation));
    Ok(())
}

pub(super) fn operation_id(text: &str) -> Result<OperationId, BallastError> {
    OperationId::new(text).map_err(|error| BallastError::invalid(error.to_string()))
}

pub async fn op(context: &Context, args: OpArgs) -> Result<(), BallastError> {
    if let Some(action) = args.action {
        return act(context, action).await;
    }
    let owner = tenant(&args.tenant)?;
    match args.id {
        Some(id) => {
            let id = operation_id(&id)?;
            let operation = match args.wait {
                true => succeeded(wait_for(context, &owner, &id).await?)?,
                false => context.store.weight_get_operation(&owner, &id).await?,
            };
            context.out.show(&operation, || operation_text(&operation));
        }
        None => {
            let operations = context.admin.list_operations(&owner, args.all, OPERATIONS_SHOWN).await?;
            context.out.show(&operations, || match operations.is_empty() {
                true if args.all => "no operations".to_owned(),
                true => "no active operations (--all shows those that have ended)".to_owned(),
                false => table(OPERATION_HEADER, &operations.iter().map(operation_row).collect::<Vec<_>>()),
            });
        }
    }
    Ok(())
}

async fn act(context: &Context, action: OpAction) -> Result<(), BallastError> {
    let admin = &context.admin;
    let operation = match &action {
        // Reads the log itself (`life.rs`) and never reaches this place.
        OpAction::History(_) => return Ok(()),
        OpAction::Cancel(args) => admin.cancel_operation(&tenant(&args.tenant)?, &operation_id(&args.id)?).await?,
        OpAction::Pause(args) => admin.pause_operation(&tenant(&args.tenant)?, &operation_id(&args.id)?).await?,
        OpAction::Resume(args) => admin.resume_operation(&tenant(&args.tenant)?, &operation_id(&args.id)?).await?,
        OpAction::Retry(args) => admin.retry_operation(&tenant(&args.tenant)?, &operation_id(&args.id)?).await?,
    };
    context.out.show(&operation, || operation_text(&operation));
    Ok(())
}

//! Durable operations of three recorded steps that have nothing to do, beside a workflow engine that is asked for the same.

use std::sync::Arc;

use ballast_journal::Replica;
use ballast_schemas::{OperationStatus, Reply, RevisionIdentity, WeightOperation};
use ballast_workflows::State;

use super::many::{Deadline, total};
use super::report::{Row, Runs};
use super::site::{Site, publish, submit};
use super::world::{next_target, node, of_an_operation, start};
use super::{Error, Options, dbos};

const IN_FLIGHT: usize = 256;
const GOAL: f64 = 3_000.0;

pub(super) async fn measure(options: &Options, notes: &mut Vec<String>) -> Result<Vec<Row>, Error> {
    let site = Site::start(options).await?;
    let replica = site.replica().await?;
    let revisions = Arc::new(publish(&replica, IN_FLIGHT).await?);
    let mut rates = Vec::new();
    let mut rival = Vec::new();
    let mut database = String::new();
    for run in 0..options.runs {
        let deadline = Deadline::after(options);
        let callers =
            (0..IN_FLIGHT).map(|n| tokio::spawn(run_operations(replica.clone(), revisions[n].clone(), deadline)));
        rates.push(deadline.rate(total(callers).await?));
        let Some((python, script)) = &options.dbos else { continue };
        match dbos::measure(python, script, &options.folder, IN_FLIGHT, options.run_time) {
            Ok(measured) => {
                rival.push(measured.workflows_per_second);
                database = measured.database;
            }
            Err(error) => notes.push(format!("DBOS was not measured in run {run}: {error}")),
        }
    }
    if options.dbos.is_none() {
        notes.push("DBOS was not measured: no Python with it was named".to_owned());
    }
    let conditions = format!(
        "sync_interval: always, one server, one replica as a workflow worker runs it, {IN_FLIGHT} operations in flight: started, claimed, three steps recorded, finished, one command and one wait for its outcome each; {:?} a run",
        options.run_time
    );
    let rates = Runs::new(rates);
    let mut rows = vec![Row::rate("operations of three recorded steps", "/s", &rates, GOAL).under(&conditions)];
    if !rival.is_empty() {
        let row = Row::rate("operations of three recorded steps", "/s", &rates, Runs::new(rival).median());
        rows.push(row.against("DBOS workflows").under(format!("{conditions}; in turns with DBOS, {database}")));
    }
    Ok(rows)
}

async fn run_operations(replica: Replica, revision: RevisionIdentity, deadline: Deadline) -> Result<usize, Error> {
    let mut count = 0;
    while !deadline.is_over() {
        let metadata = replica.read(|state: &State| state.revision(&revision).cloned()).ok_or("a revision is gone")?;
        let begin = start(&revision, next_target(&metadata), metadata.metadata_generation);
        let mut operation = operation_of(submit(&replica, begin).await?)?;
        while operation.status != OperationStatus::Succeeded {
            operation = operation_of(submit(&replica, of_an_operation(&operation, &node(0))).await?)?;
        }
        count += 1;
    }
    Ok(count)
}

fn operation_of(reply: Reply) -> Result<WeightOperation, Error> {
    match reply {
        Reply::Operation(operation) => Ok(operation.into_inner()),
        other => Err(format!("a step was not answered with its operation: {other:?}").into()),
    }
}

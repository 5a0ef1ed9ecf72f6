//! `ballast admin`: gates, the fold's rules and the cluster's settings. Whoever may append to the log may do this; tenants have no
//! verb for it. Showing changes nothing; the rest appends one command through a replica of its own and prints what was decided.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ballast_journal::{
    JetStreamLog, JetStreamSnapshots, Replica, ReplicaOptions, StreamOptions, UpkeepOptions, connect, fresh_command_id,
    open_streams,
};
use ballast_schemas::{
    BallastError, Capability, Command, ConfirmCapability, ErrorCode, RaiseFoldVersion, ReplicaId, SETTINGS, Setting,
    Settings,
};
use ballast_workflows::State;
use serde_json::{Map, Value, json};

use super::past;
use crate::args::{AdminAction, ConfigAction};
use crate::output::{Output, table};

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

pub async fn admin(nats: &str, action: AdminAction, out: Output) -> Result<(), BallastError> {
    match action {
        AdminAction::Capabilities => show_capabilities(&newest(nats).await?, out),
        AdminAction::ConfirmCapability(args) => {
            let command = Command::ConfirmCapability(ConfirmCapability { capability: args.capability });
            show_capabilities(&decide(nats, command).await?, out);
        }
        AdminAction::RaiseFoldVersion(args) => {
            let command = Command::RaiseFoldVersion(RaiseFoldVersion { fold_version: args.fold_version });
            show_capabilities(&decide(nats, command).await?, out);
        }
        AdminAction::Config(args) => match args.action {
            None => show_config(&newest(nats).await?, out),
            Some(ConfigAction::Set(args)) => show_config(&set(nats, &args.settings).await?, out),
        },
    }
    Ok(())
}

/// The state after the newest entry.
async fn newest(nats: &str) -> Result<State, BallastError> {
    let history = past::open(nats).await?;
    let last = history.bounds().await.map_err(past::failed)?.last_seq;
    history.state_at(last).await.map_err(past::failed)
}

/// Follows the log to append to it; nothing else is done for the cluster.
async fn replica(nats: &str) -> Result<Replica, BallastError> {
    let unavailable = |reason: String| BallastError::new(ErrorCode::Unavailable, reason);
    let client =
        connect(nats, "ballast admin", CONNECT_PATIENCE).await.map_err(|error| unavailable(error.to_string()))?;
    let options = StreamOptions { create: false, ..StreamOptions::default() };
    let streams = open_streams(client, &options).await.map_err(|error| unavailable(error.to_string()))?;
    let name = format!("admin-{}", fresh_command_id());
    let id = ReplicaId::new(name).map_err(|error| BallastError::invalid(error.to_string()))?;
    let options = ReplicaOptions {
        cluster_id: Some(streams.cluster_id().clone()),
        upkeep: UpkeepOptions { announce: false, ticks: false, snapshots: None },
        ..ReplicaOptions::new(id)
    };
    let snapshots = Arc::new(JetStreamSnapshots::new(&streams));
    let started = Replica::start(Arc::new(JetStreamLog::new(&streams)), Some(snapshots), options).await;
    started.map_err(|error| unavailable(error.to_string()))
}

/// Appends a command and gives the state after it.
async fn decide(nats: &str, command: Command) -> Result<State, BallastError> {
    submit(&replica(nats).await?, command).await
}

async fn submit(replica: &Replica, command: Command) -> Result<State, BallastError> {
    let (_, outcome) = replica.submit(command).await?;
    outcome?;
    Ok(replica.read(State::clone))
}

/// Changes the settings that are named and leaves the others.
async fn set(nats: &str, settings: &[(String, String)]) -> Result<State, BallastError> {
    let replica = replica(nats).await?;
    let (config, capabilities) = replica.read(|state| (state.config().clone(), state.capabilities().collect()));
    let mut changed = Settings { config, capabilities };
    for (key, value) in settings {
        let setting = Setting::named(key).map_err(BallastError::invalid)?;
        if let Some(capability) = setting.gate() {
            return Err(BallastError::invalid(format!(
                "{key} is a gate: `ballast admin confirm-capability {capability}` opens it, and nothing closes it again"
            )));
        }
        setting.set(&mut changed, &Value::from(value.as_str())).map_err(BallastError::invalid)?;
    }
    submit(&replica, Command::SetConfig(changed.config)).await
}

fn show_capabilities(state: &State, out: Output) {
    let clock = state.log_clock();
    let gates: Vec<Value> = Capability::ALL
        .iter()
        .map(|gate| json!({"capability": gate.name(), "confirmed": state.has_capability(*gate), "families": gate.families()}))
        .collect();
    let replicas: Vec<Value> = state
        .replicas()
        .map(|(id, replica)| {
            json!({
                "replica_id": id,
                "version": replica.version,
                "families": replica.families,
                "fold_version": replica.fold_version,
                "live": replica.is_live(clock),
                "announced_ms_ago": clock.since(replica.announced_at),
            })
        })
        .collect();
    let document = json!({"fold_version": state.fold_version(), "capabilities": gates, "replicas": replicas});
    out.show(&document, || {
        let list = |families: &[u8]| families.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let gates: Vec<Vec<String>> = Capability::ALL
            .iter()
            .map(|gate| {
                let is_open = if state.has_capability(*gate) { "confirmed" } else { "closed" };
                vec![gate.name().to_owned(), is_open.to_owned(), list(gate.families())]
            })
            .collect();
        let replicas: Vec<Vec<String>> = state
            .replicas()
            .map(|(id, replica)| {
                let seconds = clock.since(replica.announced_at) / 1_000;
                let standing = if replica.is_live(clock) { "live" } else { "silent" };
                vec![
                    id.to_string(),
                    format!("{standing}, {seconds} s of the log clock ago"),
                    list(&replica.families),
                    replica.fold_version.to_string(),
                    replica.version.clone(),
                ]
            })
            .collect();
        format!(
            "fold version {}\n\n{}\n{}",
            state.fold_version(),
            table(&["CAPABILITY", "GATE", "FAMILIES"], &gates),
            table(&["REPLICA", "ANNOUNCED", "FAMILIES", "FOLD VERSION", "BUILD"], &replicas)
        )
    });
}

fn show_config(state: &State, out: Output) {
    let capabilities: BTreeSet<Capability> = state.capabilities().collect();
    let values = SETTINGS.iter().map(|setting| (setting.key, setting.get(state.config(), &capabilities)));
    let document: Map<String, Value> = values.map(|(key, value)| (key.to_owned(), value)).collect();
    out.show(&document, || {
        // As a configuration file has it.
        SETTINGS
            .iter()
            .filter_map(|setting| Some(format!("{}: {}\n", setting.key, document.get(setting.key)?)))
            .collect()
    });
}

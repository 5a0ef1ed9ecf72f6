//! A whole cluster, as users run it: `ballast dev` of this very build, in a process of its own.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use ballast_client::{ConnectOptions, Gateway, Route};
use tempfile::TempDir;

use super::{Error, Options};

/// Ended with this value.
pub(super) struct Cluster {
    process: Child,
    nats: String,
    memory_folder: Option<String>,
    _data: TempDir,
}

impl Cluster {
    /// Starts one whose node has `memory` bytes.
    pub async fn start(options: &Options, memory: u64) -> Result<Self, Error> {
        let data = tempfile::Builder::new().prefix("dev-").tempdir_in(&options.folder)?;
        let errors = std::fs::File::create(data.path().join("log"))?;
        let process = Command::new(&options.program)
            .args([
                "ballast",
                "dev",
                "--port",
                "0",
                "--http",
                "127.0.0.1:0",
                "-o",
                "json",
                "--memory",
                &memory.to_string(),
            ])
            .arg("--data")
            .arg(data.path().join("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()?;
        let mut cluster = Self { process, nats: String::new(), memory_folder: None, _data: data };
        let Some(said) = cluster.process.stdout.take() else { return Err("it has no output".into()) };
        // One JSON value on several lines says that it is ready.
        let ready = tokio::task::spawn_blocking(move || {
            serde_json::Deserializer::from_reader(said).into_iter::<serde_json::Value>().next()
        });
        match ready.await? {
            Some(Ok(ready)) => {
                cluster.nats = ready["nats"].as_str().unwrap_or_default().to_owned();
                cluster.memory_folder = ready["report"]["memory"]["folder"].as_str().map(str::to_owned);
                Ok(cluster)
            }
            _ => {
                let log = std::fs::read_to_string(cluster._data.path().join("log")).unwrap_or_default();
                Err(format!("`ballast dev` did not start: {log}").into())
            }
        }
    }

    /// A client that reads by `route`.
    pub async fn connect(&self, route: Route) -> Result<Gateway, Error> {
        Ok(Gateway::connect(&ConnectOptions { route, ..ConnectOptions::new(&self.nats) }).await?)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // In order, so that its nats-server ends with it.
        if let Some(process) = rustix::process::Pid::from_raw(self.process.id().cast_signed()) {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
        }
        let _ = self.process.wait();
        if let Some(folder) = &self.memory_folder {
            let _ = rustix::mount::unmount(Path::new(folder), rustix::mount::UnmountFlags::DETACH);
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

//! A second, real process against a node: what it maps stays until it ends, however it ends.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_schemas::{ErrorCode, NodeEndpoint, NodeId, TokenRight, UnitEffect, UnitRange};

use crate::client_end::{ConnectOptions, NodeConnection, host_id};
use crate::cold::Progress;
use crate::layout::GroupLayout;
use crate::node_store::NodeStore;
use crate::protocol_tests::{Node, SIZES, named, token};
use crate::testing::*;

/// What a second process of this test binary does, when a test starts one with these variables set. It says what it
/// has done on standard output and goes on when it is told to on standard input.
#[test]
fn second_process() {
    let Ok(job) = std::env::var("BALLAST_TEST_JOB") else { return };
    let path = std::env::var("BALLAST_TEST_PATH").unwrap();
    let mut line = String::new();
    match job.as_str() {
        "map" => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let endpoint = NodeEndpoint {
                node: NodeId::new("node-1").unwrap(),
                host_id: host_id().unwrap(),
                unix_socket: Some(path),
                tcp: None,
            };
            let id = named(1);
            let mapped = runtime.block_on(async {
                let options = ConnectOptions::default();
                let token = token(&id, TokenRight::Read);
                let mut reader = NodeConnection::connect(&endpoint, &token, &options).await.unwrap();
                reader.map(Arc::new(GroupLayout::new(&SIZES).unwrap())).await.unwrap()
            });
            println!("\nmapped");
            std::io::stdin().read_line(&mut line).unwrap();
            for (unit, &bytes) in SIZES.iter().enumerate() {
                assert!(mapped.view(unit as u32).unwrap() == content(unit as u32, bytes), "unit {unit}");
            }
            println!("\nstill right");
            std::io::stdin().read_line(&mut line).unwrap();
        }
        "hold" => {
            let memory = tempfile::tempdir_in("/dev/shm").unwrap();
            let _store = NodeStore::open(&options(memory.path(), Some(Path::new(&path)))).unwrap();
            println!("\nholding");
            std::io::stdin().read_line(&mut line).unwrap();
        }
        other => panic!("unknown job {other}"),
    }
}

struct SecondProcess {
    child: std::process::Child,
    output: std::io::BufReader<std::process::ChildStdout>,
}

impl SecondProcess {
    fn start(job: &str, path: &str) -> Self {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process_tests::second_process", "--nocapture"])
            .env("BALLAST_TEST_JOB", job)
            .env("BALLAST_TEST_PATH", path)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn wait_for(&mut self, wanted: &str) {
        use std::io::BufRead;
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if line.trim() == wanted {
                return;
            }
            line.clear();
        }
        panic!("the second process ended without saying {wanted:?}");
    }

    fn tell(&mut self) {
        use std::io::Write;
        self.child.stdin.as_mut().unwrap().write_all(b"go on\n").unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for SecondProcess {
    fn drop(&mut self) {
        // Ends it when a test fails; one that has ended is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_guards_what_it_maps_until_it_is_killed() {
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut reader = SecondProcess::start("map", node.endpoint.unix_socket.as_ref().unwrap());
    reader.wait_for("mapped");
    let effect = UnitEffect { instance: id.clone(), fence: at(50), units: vec![UnitRange { start: 0, end: 4 }] };
    node.store.copy_to_cold(&effect, &Progress::default()).unwrap();
    let busy = node.store.release_memory(&effect, Duration::ZERO, &Progress::default()).unwrap_err();
    assert_eq!(busy.code(), ErrorCode::Busy, "{busy}");
    reader.tell();
    reader.wait_for("still right");
    reader.kill();
    let inventory = node.store.release_memory(&effect, Duration::from_secs(20), &Progress::default()).unwrap();
    assert!(inventory.hot.is_empty());
    assert_eq!(node.store.usage().memory.used_bytes, 0);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_under_another_process_leaves_its_view_valid() {
    let node = Node::start().await;
    let id = named(1);
    import(&node.store, &id, &SIZES);
    let mut reader = SecondProcess::start("map", node.endpoint.unix_socket.as_ref().unwrap());
    reader.wait_for("mapped");
    node.store.delete_instance(&id, at(50), &Progress::default()).unwrap();
    assert!(node.store.usage().lingering_bytes > 0);
    reader.tell();
    reader.wait_for("still right");
    reader.kill();
    let deadline = Instant::now() + Duration::from_secs(20);
    while node.store.usage().memory.used_bytes > 0 {
        assert!(Instant::now() < deadline, "the bytes never come back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    node.stop().await;
}

#[test]
fn a_cold_folder_in_use_by_another_process_names_it() {
    let folders = Folders::new();
    let mut holder = SecondProcess::start("hold", folders.cold.path().to_str().unwrap());
    holder.wait_for("holding");
    let error = NodeStore::open(&folders.options()).unwrap_err();
    let wanted = format!("is in use by process {}; stop it or name another folder with --cold", holder.child.id());
    assert!(error.to_string().contains(&wanted), "{error}");
    holder.kill();
    folders.open();
}

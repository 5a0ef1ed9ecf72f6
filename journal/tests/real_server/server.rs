//! The embedded server: ports, restarts, locks.

use std::time::Duration;

use ballast_journal::{EmbeddedServer, ServerOptions, ServerStatus, StartServerError, connect};
use rustix::process::{Pid, Signal, kill_process};

use crate::{PATIENCE, eventually, in_time, start_server};

#[tokio::test]
async fn a_folder_keeps_its_port_and_is_free_again_after_stop() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let port = server.port();
    assert!(server.pid().is_some());
    connect(&server.url(), "test", PATIENCE).await.unwrap();
    server.stop().await;
    let again = start_server(&folder).await;
    assert_eq!(again.port(), port);
    again.stop().await;
}

#[tokio::test]
async fn a_killed_server_is_started_again_and_the_embedder_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let client = connect(&server.url(), "test", PATIENCE).await.unwrap();
    let mut status = server.status();
    let pid = i32::try_from(server.pid().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    in_time("told of the end", status.wait_for(|status| matches!(status, ServerStatus::Restarting { .. })))
        .await
        .unwrap();
    in_time("running again", status.wait_for(|status| matches!(status, ServerStatus::Running { restarts: 1, .. })))
        .await
        .unwrap();
    in_time("the client is back", async {
        while client.flush().await.is_err() || client.request("$JS.API.INFO", "".into()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    server.stop().await;
}

#[tokio::test]
async fn two_servers_never_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let server = start_server(&folder).await;
    let second = EmbeddedServer::start(ServerOptions::new(folder.path())).await;
    let error = second.unwrap_err();
    assert!(matches!(error, StartServerError::InUse { .. }), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "names the holder: {error}");
    server.stop().await;
}

/// Not a test by itself: what [`a_server_dies_with_its_parent_and_leaves_the_folder_free`] runs as another process.
#[tokio::test]
async fn holds_a_server_for_another_test() {
    let Some(folder) = std::env::var_os(HELD_FOLDER) else { return };
    let _server = EmbeddedServer::start(ServerOptions::new(&folder)).await.unwrap();
    std::fs::write(std::path::Path::new(&folder).join("held"), "").unwrap();
    std::future::pending::<()>().await;
}

const HELD_FOLDER: &str = "BALLAST_TEST_HELD_FOLDER";

#[tokio::test]
async fn a_server_dies_with_its_parent_and_leaves_the_folder_free() {
    let folder = tempfile::tempdir().unwrap();
    let mut parent = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "server::holds_a_server_for_another_test"])
        .env(HELD_FOLDER, folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let held = folder.path().join("held");
    eventually("the other process holds a server", async || held.exists()).await;
    parent.kill().unwrap();
    parent.wait().unwrap();
    // The folder's lock is the child's as well: it is free only once the server is gone.
    let server = start_server(&folder).await;
    server.stop().await;
}

#[tokio::test]
async fn a_wanted_port_that_is_taken_is_a_named_error() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let options = ServerOptions { port, ..ServerOptions::new(folder.path()) };
    let error = EmbeddedServer::start(options).await.unwrap_err();
    assert!(matches!(error, StartServerError::Port { .. }), "{error}");
}

#[tokio::test]
async fn no_server_is_one_sentence_that_says_what_to_do() {
    let error = connect("nats://127.0.0.1:1", "test", Duration::ZERO).await.unwrap_err();
    assert!(error.is_retryable());
    assert!(error.to_string().contains("ballast dev"), "{error}");
}

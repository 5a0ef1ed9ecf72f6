//! The command line of Ballast as a library, so that the `ballast` binary and the Python package run the same one. Parses,
//! calls, prints; what things mean is decided elsewhere.

mod args;
mod commands;
mod output;
mod services;
mod settings;

use std::ffi::OsString;

use ballast_schemas::BallastError;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};
use output::Output;

/// Runs one command line, whose first word is the program's name, and answers the exit code. Help and a wrong command line
/// end the process by themselves.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    let cli = Cli::parse_from(arguments);
    let is_service = matches!(
        cli.command,
        Command::Dev(_) | Command::Gateway(_) | Command::WorkflowWorker(_) | Command::TransferWorker(_)
    );
    let filter = EnvFilter::try_from_env("BALLAST_LOG")
        .unwrap_or_else(|_| EnvFilter::new(if is_service { "info,async_nats=warn" } else { "error,async_nats=off" }));
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_writer(std::io::stderr).init();
    let out = Output { format: cli.output, progress: cli.progress };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the runtime does not start: {error}");
            return 1;
        }
    };
    let result = runtime.block_on(run(cli, out));
    // What still runs in the background (a dropped read's release, say) gets a moment.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match result {
        Ok(()) => 0,
        Err(error) => output::fail(out.format, &error),
    }
}

async fn run(cli: Cli, out: Output) -> Result<(), BallastError> {
    match cli.command {
        Command::Dev(args) => services::dev(args, out).await,
        Command::Gateway(args) => services::gateway(&cli.nats, args, out).await,
        Command::WorkflowWorker(args) => services::workflow_worker(&cli.nats, args, out).await,
        Command::TransferWorker(args) => services::transfer_worker(&cli.nats, args, out).await,
        Command::Failpoints => {
            let places = ballast_workers::failpoints();
            out.show(&places, || places.join("\n"));
            Ok(())
        }
        command => commands::run(&cli.nats, command, out).await,
    }
}

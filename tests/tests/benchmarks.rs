//! The benchmarks in sizes at which their figures mean nothing: every line still has to give one.

use ballast_tests::bench::{Options, run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_of_the_benchmarks_gives_a_figure() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options::short(env!("CARGO_BIN_EXE_bench").into(), folder.path().to_owned());
    let report = run(&options, |row| println!("{}", row.line())).await.unwrap();
    let names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    for line in [
        "delta of 1 % until READY, no wire",
        "delta of 1 % until READY, 10 Gbit/s",
        "bytes of that delta over the wire",
        "fold of decoded envelopes",
        "fold with checksum and decoding",
        "lone mutation, through a replica",
        "lone mutation, through a gateway in JSON",
        "lease commands, callers that send 64 at a time",
        "lease commands, 256 callers that send one each",
        "lease commands, 256 callers through the gateway in JSON",
        "operations of three recorded steps",
        "restore of a snapshot",
        "memory of a revision at rest",
        "list page of 100",
        "list page of 100 that begins anywhere",
        "lease command",
        "lease command on any revision",
        "AUTO tick that looks",
        "AUTO tick that moves 16",
        "reshard TP4 on dim 0 to TP8 on dim 0",
        "reshard TP4 on dim 0 to TP8 on dim 1",
        "reshard TP4 on dim 0 to TP8 on dim 2",
        "plan of one rank of TP8",
        "plan of all ranks of TP8",
        "manifest parsed and checked",
    ] {
        assert!(names.contains(&line), "no figure for {line:?} among {names:?}");
    }
    for row in &report.rows {
        assert!(row.ours.is_finite() && row.other.is_finite() && row.other > 0.0, "{row:?}");
    }
}

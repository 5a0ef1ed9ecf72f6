//! `ballast`: the command line of Ballast.

fn main() {
    std::process::exit(ballast_cli::main(std::env::args_os()));
}

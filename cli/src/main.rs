//! `ballast`: the command line of Ballast.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    std::process::exit(ballast_cli::main(std::env::args_os()));
}

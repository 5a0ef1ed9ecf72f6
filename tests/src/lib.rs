//! Proofs about the system as a whole. Here: the deterministic simulation ([`sim`]) and the fuzzer ([`fuzz`]). The tests on
//! real processes are in `e2e/`, in Python, because independent clients drive them.

pub mod fuzz;
pub mod sim;

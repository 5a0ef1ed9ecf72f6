//! Proofs about the system as a whole. Here: the deterministic simulation ([`sim`]), the fuzzer ([`fuzz`]) and the measurements
//! of the engine's speed ([`bench`]). The tests on real processes are in `e2e/`, in Python, because independent clients drive
//! them.

#[cfg(feature = "bench")]
pub mod bench;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod sim;

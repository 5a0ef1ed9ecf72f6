//! Proofs about the system as a whole. Here: the deterministic simulation ([`sim`]). The tests on real processes are in
//! `e2e/`, in Python, because independent clients drive them.

pub mod sim;

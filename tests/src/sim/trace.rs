//! What happened, in order: a digest over every line (equal digests mean equal runs), the last lines for people, and how
//! often each kind of fault struck.

use std::collections::{BTreeMap, VecDeque};

/// Lines kept for the report of a violation.
const KEPT: usize = 160;

/// FNV-1a over 128 bits: two runs that differ in one line differ here.
const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

#[derive(Debug)]
pub(crate) struct Trace {
    digest: u128,
    lines: u64,
    last: VecDeque<String>,
    echo: bool,
    pub faults: BTreeMap<&'static str, u64>,
}

impl Trace {
    pub fn new(echo: bool) -> Self {
        Self { digest: OFFSET, lines: 0, last: VecDeque::new(), echo, faults: BTreeMap::new() }
    }

    pub fn line(&mut self, now_ns: u64, text: &str) {
        let line = format!("{:>10.3} {text}", now_ns as f64 / 1e9);
        for byte in line.bytes().chain([b'\n']) {
            self.digest = (self.digest ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        self.lines += 1;
        if self.echo {
            println!("{line}");
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    pub fn fault(&mut self, kind: &'static str) {
        *self.faults.entry(kind).or_default() += 1;
    }

    pub fn digest(&self) -> String {
        format!("{:032x}-{}", self.digest, self.lines)
    }

    pub fn last(&self) -> Vec<String> {
        self.last.iter().cloned().collect()
    }
}

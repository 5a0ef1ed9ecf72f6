//! The only source of chance in a simulation: a small generator (xoshiro256**) whose stream is part of the crate, so that a
//! seed means the same run in every build.

/// Chance is counted in parts of this.
pub(crate) const CERTAIN: u32 = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct Rng([u64; 4]);

impl Rng {
    pub fn new(seed: u64) -> Self {
        // splitmix64, as the generator's authors advise for seeding.
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self([next(), next(), next(), next()])
    }

    pub fn next(&mut self) -> u64 {
        let [_, s1, ..] = self.0;
        let result = s1.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s1 << 17;
        self.0[2] ^= self.0[0];
        self.0[3] ^= self.0[1];
        self.0[1] ^= self.0[2];
        self.0[0] ^= self.0[3];
        self.0[2] ^= t;
        self.0[3] = self.0[3].rotate_left(45);
        result
    }

    /// From 0 to `n - 1`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        // The bias is far below anything that a simulation could notice.
        if n == 0 { 0 } else { self.next() % n }
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in `parts` of [`CERTAIN`] cases.
    pub fn chance(&mut self, parts: u32) -> bool {
        self.below(CERTAIN.into()) < parts.into()
    }

    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        if items.is_empty() { None } else { items.get(self.index(items.len())) }
    }

    /// An item by weight.
    pub fn weighted<T: Copy>(&mut self, items: &[(u32, T)]) -> Option<T> {
        let total: u64 = items.iter().map(|(weight, _)| u64::from(*weight)).sum();
        let mut at = self.below(total);
        items.iter().find_map(|(weight, item)| match at.checked_sub(u64::from(*weight)) {
            None => Some(*item),
            Some(rest) => {
                at = rest;
                None
            }
        })
    }
}

//! MessagePack as it comes from the log, from other processes and from disk: read with a bound on its nesting, which would
//! otherwise be a bound on whoever's stack reads it.

use serde::Deserialize;

/// Maps, lists, options and variants inside each other. Our own records have about twenty.
const DEPTH_MAX: usize = 128;

/// Reads a value; bytes behind it are ignored.
///
/// # Errors
/// When the bytes are no such value, or nest deeper than any of ours.
pub fn from_messagepack<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, rmp_serde::decode::Error> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
    reader.set_max_depth(DEPTH_MAX);
    T::deserialize(&mut reader)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Bitmap;

    #[test]
    fn what_nests_without_end_is_refused_on_a_small_stack() {
        let nested = [[0x81, 0xa1, b'x'].repeat(100_000), vec![0xc0]].concat();
        let read = std::thread::Builder::new()
            .stack_size(512 << 10)
            .spawn(move || from_messagepack::<Bitmap>(&nested).is_err());
        assert!(read.unwrap().join().unwrap());
        let unknown = [[0x91].repeat(100_000), vec![0xc0]].concat();
        let read = std::thread::Builder::new()
            .stack_size(512 << 10)
            .spawn(move || from_messagepack::<serde::de::IgnoredAny>(&unknown).is_err());
        assert!(read.unwrap().join().unwrap());
    }
}

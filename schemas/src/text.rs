//! How validated texts are read and written: straight from and to the bytes, without a `String` of their own. Every entry of the
//! log is full of them, and each replica encodes its outcomes for the digest chain.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, Visitor};

struct Text<T, E> {
    read: fn(&str) -> Result<T, E>,
    error: PhantomData<E>,
}

impl<T, E: fmt::Display> Visitor<'_> for Text<T, E> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<D: Error>(self, text: &str) -> Result<T, D> {
        (self.read)(text).map_err(D::custom)
    }
}

/// Reads a text and validates it.
pub(crate) fn deserialize<'de, T, E: fmt::Display, D: Deserializer<'de>>(
    deserializer: D,
    read: fn(&str) -> Result<T, E>,
) -> Result<T, D::Error> {
    deserializer.deserialize_str(Text { read, error: PhantomData })
}

/// Serialises a type as its `as_str()` and reads it through `$read: fn(&str) -> Result<Self, _>`.
macro_rules! serde_as_text {
    ($name:ident, $read:expr) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                crate::text::deserialize(deserializer, $read)
            }
        }
    };
}

pub(crate) use serde_as_text;

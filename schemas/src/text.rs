//! How validated texts are read and written: straight from and to the bytes, without a `String` of their own. Every entry of the
//! log is full of them, and each replica encodes its outcomes for the digest chain.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, Unexpected, Visitor};

/// Characters of a name that is none of those taken.
const NAME_CHARS_SHOWN: usize = 100;

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

/// One of some values, by its name.
struct OneOf<T: 'static> {
    among: &'static [T],
    name: fn(T) -> &'static str,
}

impl<T: Copy> Visitor<'_> for OneOf<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one of the strings")?;
        for (index, value) in self.among.iter().enumerate() {
            write!(f, "{} {:?}", if index == 0 { "" } else { "," }, (self.name)(*value))?;
        }
        Ok(())
    }

    fn visit_str<D: Error>(self, text: &str) -> Result<T, D> {
        let found = self.among.iter().copied().find(|value| (self.name)(*value) == text);
        found.ok_or_else(|| {
            let shown: String = text.chars().take(NAME_CHARS_SHOWN).collect();
            D::invalid_value(Unexpected::Str(&shown), &self)
        })
    }
}

/// Reads one of the names of `among`, as a string and in no other form: derived readers of enums also take `{"HOT": null}`.
pub(crate) fn one_of<'de, T: Copy, D: Deserializer<'de>>(
    deserializer: D,
    among: &'static [T],
    name: fn(T) -> &'static str,
) -> Result<T, D::Error> {
    deserializer.deserialize_str(OneOf { among, name })
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

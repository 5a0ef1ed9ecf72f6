//! The header of one safetensors file, read strictly: where every tensor lies, with no gap, overlap, repeated name or
//! byte too many. Format: <https://huggingface.co/docs/safetensors>, "Format". Element types are the safetensors crate's.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::Dtype;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::error::SafetensorsError;

/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// First byte in the file.
    pub(crate) offset: u64,
    pub(crate) nbytes: u64,
}

/// The header of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Its text as it stands in the file, padding included.
    pub(crate) text: String,
    /// The tensors, in the order of their bytes.
    pub(crate) tensors: Vec<HeaderTensor>,
    /// Length of the whole file.
    pub(crate) file_bytes: u64,
}

impl Header {
    /// Reads the header of an open file.
    pub(crate) fn read(file: &File, path: &Path) -> Result<Self, SafetensorsError> {
        let wrong = |reason: String| SafetensorsError::file(path, reason);
        let found = file.metadata().map_err(SafetensorsError::io("look at", path))?.len();
        if found < LENGTH_BYTES {
            return Err(wrong(format!("it has {found} bytes, not even the {LENGTH_BYTES} of the header's length")));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut length, 0).map_err(SafetensorsError::io("read", path))?;
        let length = u64::from_le_bytes(length);
        let room = found - LENGTH_BYTES;
        if length > room {
            return Err(wrong(format!(
                "the header's length is {length}, but only {room} bytes follow: truncated, or another format"
            )));
        }
        if length > HEADER_BYTES_MAX {
            return Err(wrong(format!("the header's length is {length}; the format allows {HEADER_BYTES_MAX}")));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, LENGTH_BYTES).map_err(SafetensorsError::io("read", path))?;
        let text = String::from_utf8(text).map_err(|error| {
            wrong(format!(
                "the header is not UTF-8 from byte {}",
                LENGTH_BYTES + error.utf8_error().valid_up_to() as u64
            ))
        })?;
        let header = Self::parse(text).map_err(wrong)?;
        match found.cmp(&header.file_bytes) {
            std::cmp::Ordering::Equal => Ok(header),
            std::cmp::Ordering::Less => {
                Err(wrong(format!("truncated: the header describes {} bytes, the file has {found}", header.file_bytes)))
            }
            std::cmp::Ordering::Greater => {
                Err(wrong(format!("{} bytes follow the last tensor and belong to none", found - header.file_bytes)))
            }
        }
    }

    /// Reads a header's text and checks that the tensors follow each other without gap or overlap.
    pub(crate) fn parse(text: String) -> Result<Self, String> {
        if !text.starts_with('{') {
            return Err("the header does not begin with '{'".to_owned());
        }
        let mut json = serde_json::Deserializer::from_str(&text);
        let entries = json.deserialize_map(HeaderVisitor).and_then(|entries| json.end().map(|()| entries));
        let mut entries = entries.map_err(|error| format!("the header is wrong: {error}"))?;
        let data = LENGTH_BYTES + text.len() as u64;
        entries.sort_by_key(|(_, a)| a.data_offsets);
        let mut tensors: Vec<HeaderTensor> = Vec::with_capacity(entries.len());
        let mut end = 0;
        for (name, entry) in entries {
            let (start, stop) = entry.data_offsets;
            let dtype = dtype_named(&entry.dtype)
                .ok_or_else(|| format!("tensor {name:?} has the unknown dtype {:?}", entry.dtype))?;
            let nbytes = tensor_bytes(dtype, &entry.shape).ok_or_else(|| {
                format!(
                    "tensor {name:?} of {} {:?} is not a whole number of bytes below 2^64",
                    entry.dtype, entry.shape
                )
            })?;
            if stop < start || stop - start != nbytes {
                return Err(format!(
                    "tensor {name:?} has the range {start}..{stop}, but {} {:?} needs {nbytes} bytes",
                    entry.dtype, entry.shape
                ));
            }
            if start < end {
                let other = tensors.last().map_or("", |tensor| &tensor.name);
                return Err(format!(
                    "tensor {name:?} at {start}..{stop} overlaps tensor {other:?}, which ends at {end}"
                ));
            }
            if start > end {
                return Err(format!("bytes {end}..{start} belong to no tensor: there is a gap before {name:?}"));
            }
            end = stop;
            let offset = data.checked_add(start).ok_or_else(|| format!("tensor {name:?} lies past 2^64"))?;
            tensors.push(HeaderTensor { name, dtype, shape: entry.shape, offset, nbytes });
        }
        let file_bytes = data.checked_add(end).ok_or("the tensors end past 2^64")?;
        Ok(Self { text, tensors, file_bytes })
    }

    /// The bytes of the file that come before its tensors.
    pub(crate) fn prefix(&self) -> Vec<u8> {
        let mut bytes = (self.text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(self.text.as_bytes());
        bytes
    }

    /// A header for tensors that have none: by falling alignment, then by name, padded to 8 bytes, as the format's own
    /// library writes it.
    pub(crate) fn generate(tensors: &[(String, Dtype, Vec<u64>)]) -> Result<Self, String> {
        let mut order: Vec<_> = tensors.iter().collect();
        order.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut fields = serde_json::Map::new();
        let mut text = String::from("{");
        let mut end = 0_u64;
        for (name, dtype, shape) in order {
            let nbytes = tensor_bytes(*dtype, shape).ok_or_else(|| format!("tensor {name:?} is too large"))?;
            let stop = end.checked_add(nbytes).ok_or("the tensors end past 2^64")?;
            let entry = Entry { dtype: dtype.to_string(), shape: shape.clone(), data_offsets: (end, stop) };
            fields.clear();
            fields.insert(name.clone(), serde_json::to_value(entry).map_err(|error| error.to_string())?);
            let one = serde_json::to_string(&fields).map_err(|error| error.to_string())?;
            if text.len() > 1 {
                text.push(',');
            }
            text.push_str(&one[1..one.len() - 1]);
            end = stop;
        }
        text.push('}');
        while text.len() % 8 != 0 {
            text.push(' ');
        }
        Self::parse(text)
    }
}

/// The element type of that name.
pub(crate) fn dtype_named(name: &str) -> Option<Dtype> {
    let name: serde::de::value::StrDeserializer<'_, serde::de::value::Error> = name.into_deserializer();
    Dtype::deserialize(name).ok()
}

/// Bytes of a tensor; `None` when they are not whole or do not fit in 64 bits.
pub(crate) fn tensor_bytes(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    let elements = shape.iter().try_fold(1_u64, |elements, dim| elements.checked_mul(*dim))?;
    let bits = u128::from(elements) * dtype.bitsize() as u128;
    if bits.is_multiple_of(8) { u64::try_from(bits / 8).ok() } else { None }
}

#[derive(Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Reads the header's entries and refuses a name that stands twice, which a map would swallow.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<(String, Entry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("the name {name:?} stands twice")));
            }
            if name == "__metadata__" {
                map.next_value_seed(Metadata)?;
                continue;
            }
            let entry = map.next_value().map_err(|error| A::Error::custom(format!("tensor {name:?}: {error}")))?;
            entries.push((name, entry));
        }
        Ok(entries)
    }
}

/// `__metadata__`: an object of strings. It travels in the header's text.
struct Metadata;

impl<'de> DeserializeSeed<'de> for Metadata {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Metadata {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("__metadata__ as an object of strings")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("__metadata__ has {name:?} twice")));
            }
            map.next_value::<String>().map_err(|error| A::Error::custom(format!("__metadata__ {name:?}: {error}")))?;
        }
        Ok(())
    }
}

/// The `weight_map` of an index: tensor name to shard, in the order of the document, no name twice.
pub(crate) fn parse_index(text: &[u8]) -> Result<Vec<(String, String)>, String> {
    struct Index;
    impl<'de> Visitor<'de> for Index {
        type Value = Option<Vec<(String, String)>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with a weight_map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut found = None;
            while let Some(name) = map.next_key::<String>()? {
                if name != "weight_map" {
                    map.next_value::<IgnoredAny>()?;
                } else if found.replace(map.next_value_seed(WeightMap)?).is_some() {
                    return Err(A::Error::custom("weight_map stands twice"));
                }
            }
            Ok(found)
        }
    }
    struct WeightMap;
    impl<'de> DeserializeSeed<'de> for WeightMap {
        type Value = Vec<(String, String)>;

        fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
            deserializer.deserialize_map(self)
        }
    }
    impl<'de> Visitor<'de> for WeightMap {
        type Value = Vec<(String, String)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("weight_map as an object from tensor names to file names")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            let mut names = HashSet::new();
            while let Some((name, shard)) = map.next_entry::<String, String>()? {
                if !names.insert(name.clone()) {
                    return Err(A::Error::custom(format!("tensor {name:?} stands twice in weight_map")));
                }
                entries.push((name, shard));
            }
            Ok(entries)
        }
    }
    let mut json = serde_json::Deserializer::from_slice(text);
    let found = json.deserialize_map(Index).and_then(|found| json.end().map(|()| found));
    found.map_err(|error| error.to_string())?.ok_or_else(|| "it has no weight_map".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refuse(text: &str) -> String {
        Header::parse(text.to_owned()).unwrap_err()
    }

    #[test]
    fn a_header_with_a_wrong_entry_is_refused_by_the_tensors_name() {
        let cases = [
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#,
                "\"a\" stands twice",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
                "\"b\" at 4..12 overlaps tensor \"a\"",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[9,17]}}"#,
                "bytes 8..9 belong to no tensor",
            ),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#, "bytes 0..4 belong to no tensor"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}"#, "needs 8 bytes"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, "needs 8 bytes"),
            (r#"{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#, "unknown dtype \"F33\""),
            (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, "whole number of bytes"),
            (r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#, "2^64"),
            (r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}"#, "\"a\""),
            (r#"{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}"#, "\"a\""),
            (r#"{"a":{"dtype":"F32","shape":[2]}}"#, "data_offsets"),
            (r#"{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, "duplicate"),
            (r#"{"a":7}"#, "\"a\""),
            (r#"{"__metadata__":{"x":1}}"#, "\"x\""),
            (r#"{"__metadata__":{"x":"1","x":"2"}}"#, "twice"),
            (r#"{"a":{}"#, "\"a\""),
            (r#"{} x"#, "trailing"),
            (" {}", "'{'"),
            ("", "'{'"),
        ];
        for (text, word) in cases {
            let reason = refuse(text);
            assert!(reason.contains(word), "{text}: {reason}");
        }
    }

    #[test]
    fn scalars_and_empty_tensors_have_their_places() {
        let text = r#"{"s":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"e":{"dtype":"F32","shape":[3,0],"data_offsets":[2,2]},"f":{"dtype":"F4","shape":[4],"data_offsets":[2,4]}}   "#;
        let header = Header::parse(text.to_owned()).unwrap();
        let places: Vec<_> = header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.nbytes)).collect();
        assert_eq!(places, [("s", 2), ("e", 0), ("f", 2)]);
        assert_eq!(header.file_bytes, 8 + text.len() as u64 + 4);
        assert_eq!(&header.prefix()[8..], text.as_bytes());
    }

    #[test]
    fn a_generated_header_is_what_the_formats_own_library_reads() {
        let tensors = [
            ("b".to_owned(), Dtype::F32, vec![2, 3]),
            ("é\"".to_owned(), Dtype::U8, vec![5]),
            ("a".to_owned(), Dtype::F32, vec![]),
        ];
        let header = Header::generate(&tensors).unwrap();
        let mut file = header.prefix();
        file.resize(header.file_bytes as usize, 7);
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.tensor("b").unwrap().shape(), [2, 3]);
        assert_eq!(read.tensor("é\"").unwrap().data(), [7; 5]);
        let order: Vec<_> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(order, ["a", "b", "é\""]);
    }

    #[test]
    fn an_index_without_a_map_or_with_a_name_twice_is_refused() {
        assert_eq!(
            parse_index(br#"{"metadata":{"total_size":1},"weight_map":{"a":"x"}}"#).unwrap(),
            [("a".to_owned(), "x".to_owned())]
        );
        for (text, word) in [
            (r#"{"weight_map":{"a":"x","a":"y"}}"#, "\"a\" stands twice"),
            (r#"{"weight_map":{},"weight_map":{}}"#, "twice"),
            (r#"{}"#, "no weight_map"),
            (r#"{"weight_map":{"a":1}}"#, "string"),
            ("[]", "map"),
            ("{", "EOF"),
        ] {
            let reason = parse_index(text.as_bytes()).unwrap_err();
            assert!(reason.contains(word), "{text}: {reason}");
        }
    }
}

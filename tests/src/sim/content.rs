//! What an importer uploads: a made-up model of a few units. The bytes of a unit are one number that no other import has, so
//! that a reader that gets another import's bytes, or none, notices.

use ballast_schemas::{
    AffinityIndex, AffinityUnit, Digest, ManifestRef, RevisionIdentity, SessionId, affinity_digest, affinity_id,
    hash_list,
};

use super::rng::Rng;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub session_id: SessionId,
    /// The bytes of every unit.
    pub units: Vec<u64>,
    pub manifest: ManifestRef,
    pub affinity: AffinityIndex,
}

impl Content {
    pub fn new(identity: &RevisionIdentity, session_id: &SessionId, units: u64, rng: &mut Rng) -> Self {
        let names: Vec<String> = (0..units).map(|unit| format!("layer.{unit}.weight")).collect();
        // Never 0, so that a hole in a segment is never taken for bytes.
        let bytes: Vec<u64> = names.iter().map(|_| rng.next() | 1).collect();
        let affinity: Vec<AffinityUnit> = names
            .iter()
            .zip(&bytes)
            .map(|(name, crc64)| {
                let logical_bytes = rng.between(1, 40) * 1_000;
                let affinity_id = affinity_id(&[name]);
                AffinityUnit { affinity_id, extent_bytes: logical_bytes, logical_bytes, crc64: *crc64 }
            })
            .collect();
        let affinity = AffinityIndex { units: affinity };
        let groups: Vec<Vec<&str>> = names.iter().map(|name| vec![name.as_str()]).collect();
        let numbers: Vec<[u8; 8]> = bytes.iter().map(|bytes| bytes.to_be_bytes()).collect();
        let manifest = ManifestRef {
            key: identity.manifest_key(),
            sha256: hash_list(numbers.iter().map(<[u8; 8]>::as_slice).chain([session_id.as_str().as_bytes()])),
            group_id: identity.group_id(),
            payload_keys_sha256: Digest::of(b"keys"),
            payload_count: units,
            logical_bytes: affinity.logical_bytes(),
            affinity_count: affinity.len(),
            affinity_digest: affinity_digest(&groups),
        };
        Self { session_id: session_id.clone(), units: bytes, manifest, affinity }
    }

    pub fn len(&self) -> u32 {
        self.affinity.len()
    }

    pub fn unit(&self, unit: u32) -> Option<u64> {
        self.units.get(unit as usize).copied()
    }
}

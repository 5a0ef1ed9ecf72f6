//! Revision identity, lineage and the keys derived from them (RFC, Revision Identity and Object Layout).

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::digest::{Digest, hash_list, hash_prefixed};
use crate::limits::COMPONENT_BYTES_MAX;
use crate::state::UpsertMode;
use crate::text::serde_as_text;

/// Characters that stay as they are in a key: letters, digits and `._-`.
const KEY_ESCAPES: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');
/// As [`KEY_ESCAPES`], but `~` may also stand in a short name.
const NAME_ESCAPES: &AsciiSet = &KEY_ESCAPES.remove(b'~');

/// Why a text can not be part of an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Empty text.
    #[error("{part} is empty; give 1 to {COMPONENT_BYTES_MAX} bytes")]
    Empty {
        /// Which part of the identity.
        part: &'static str,
    },
    /// More bytes than a component may have.
    #[error("{part} has {bytes} bytes; at most {COMPONENT_BYTES_MAX} are allowed")]
    TooLong {
        /// Which part of the identity.
        part: &'static str,
        /// How many bytes it has.
        bytes: usize,
    },
    /// A control character.
    #[error("{part} holds the control character U+{code:04X} at byte {at}; remove it")]
    Control {
        /// Which part of the identity.
        part: &'static str,
        /// The character's code.
        code: u32,
        /// Its byte offset.
        at: usize,
    },
    /// A tenant that begins with `_`.
    #[error("tenant {tenant:?} begins with '_', which is reserved; choose another name")]
    ReservedTenant {
        /// The tenant given.
        tenant: String,
    },
    /// Generation zero.
    #[error("weight_generation is 0; generations start at 1")]
    GenerationZero,
    /// A short name that does not parse.
    #[error("{text:?} is not [tenant:][namespace/]resource[@revision][#generation]: {reason}")]
    ShortName {
        /// The text given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}

fn check(part: &'static str, text: &str) -> Result<(), IdentityError> {
    if text.is_empty() {
        return Err(IdentityError::Empty { part });
    }
    if text.len() > COMPONENT_BYTES_MAX {
        return Err(IdentityError::TooLong { part, bytes: text.len() });
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, c)) => Err(IdentityError::Control { part, code: c.into(), at }),
        None => Ok(()),
    }
}

/// One part of an identity: 1–1024 bytes of UTF-8 without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Component(Arc<str>);

impl Component {
    /// Validates `text`; `part` names it in the error.
    ///
    /// # Errors
    /// When the text is empty, too long or holds a control character.
    pub fn new(part: &'static str, text: &str) -> Result<Self, IdentityError> {
        check(part, text)?;
        Ok(Self(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Who owns a revision; one subject token on the wire. Must not begin with `_`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TenantId(Arc<str>);

impl TenantId {
    /// Validates `text`.
    ///
    /// # Errors
    /// As for [`Component::new`], and when it begins with `_`.
    pub fn new(text: &str) -> Result<Self, IdentityError> {
        check("tenant_id", text)?;
        if text.starts_with('_') {
            return Err(IdentityError::ReservedTenant { tenant: text.to_owned() });
        }
        Ok(Self(text.into()))
    }

    /// The tenant `default`.
    #[must_use]
    pub fn default_tenant() -> Self {
        Self("default".into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text_conversions {
    ($name:ident, |$text:ident| $new:expr) => {
        impl TryFrom<String> for $name {
            type Error = IdentityError;
            fn try_from($text: String) -> Result<Self, IdentityError> {
                $new
            }
        }
        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.as_str().to_owned()
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// Ordered as texts; one that is shared is not looked at.
macro_rules! ordered_as_text {
    ($name:ident) => {
        impl Ord for $name {
            fn cmp(&self, other: &Self) -> Ordering {
                if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
    };
}

ordered_as_text!(Component);
ordered_as_text!(TenantId);
text_conversions!(Component, |text| Component::new("identity component", &text));
text_conversions!(TenantId, |text| TenantId::new(&text));
text_conversions!(GroupId, |text| GroupId::parse(&text));
serde_as_text!(Component, |text| Component::new("identity component", text));
serde_as_text!(TenantId, TenantId::new);
serde_as_text!(GroupId, GroupId::parse);

/// The managed group of a revision: `weight:` and 64 hex digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(Arc<str>);

impl GroupId {
    fn parse(text: &str) -> Result<Self, IdentityError> {
        let hex = text.strip_prefix("weight:").unwrap_or_default();
        match Digest::read(hex) {
            Ok(_) => Ok(Self(text.into())),
            Err(_) => Err(IdentityError::ShortName {
                text: text.to_owned(),
                reason: "a group id is weight:<64 hex digits>".into(),
            }),
        }
    }

    /// The whole id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its 64 hex digits, fit for a file name or a subject token.
    #[must_use]
    pub fn hex(&self) -> &str {
        self.0.strip_prefix("weight:").unwrap_or(&self.0)
    }
}

/// The five-tuple that uniquely identifies a weight revision. One pointer wide and cheap to hand on: records, indexes, outcomes
/// and events are full of them. Its parts are read as fields.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RevisionIdentity(Arc<IdentityParts>);

/// The parts of a [`RevisionIdentity`], in the order that identities are sorted by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct IdentityParts {
    /// Who owns it.
    pub tenant_id: TenantId,
    /// The namespace within the tenant.
    pub namespace: Component,
    /// The model.
    pub resource_id: Component,
    /// The logical revision (a branch, a checkpoint name).
    pub revision: Component,
    /// The generation within the lineage, from 1.
    pub weight_generation: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of fields (a JSON object)")]
struct RawIdentity<'a> {
    #[serde(borrow, default = "default_tenant_text")]
    tenant_id: Cow<'a, str>,
    #[serde(borrow)]
    namespace: Cow<'a, str>,
    #[serde(borrow)]
    resource_id: Cow<'a, str>,
    #[serde(borrow)]
    revision: Cow<'a, str>,
    weight_generation: u64,
}

fn default_tenant_text() -> Cow<'static, str> {
    "default".into()
}

impl Deref for RevisionIdentity {
    type Target = IdentityParts;

    fn deref(&self) -> &IdentityParts {
        &self.0
    }
}

impl Ord for RevisionIdentity {
    fn cmp(&self, other: &Self) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
    }
}

impl PartialOrd for RevisionIdentity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for RevisionIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RevisionIdentity({self})")
    }
}

impl Serialize for RevisionIdentity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RevisionIdentity {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawIdentity::deserialize(deserializer)?;
        RevisionIdentity::new(&raw.tenant_id, &raw.namespace, &raw.resource_id, &raw.revision, raw.weight_generation)
            .map_err(serde::de::Error::custom)
    }
}

impl RevisionIdentity {
    /// Validates all five parts.
    ///
    /// # Errors
    /// Naming the part that is wrong.
    pub fn new(
        tenant_id: &str,
        namespace: &str,
        resource_id: &str,
        revision: &str,
        weight_generation: u64,
    ) -> Result<Self, IdentityError> {
        if weight_generation == 0 {
            return Err(IdentityError::GenerationZero);
        }
        Ok(Self::of(IdentityParts {
            tenant_id: TenantId::new(tenant_id)?,
            namespace: Component::new("namespace", namespace)?,
            resource_id: Component::new("resource_id", resource_id)?,
            revision: Component::new("revision", revision)?,
            weight_generation,
        }))
    }

    /// The identity with these parts.
    #[must_use]
    pub fn of(parts: IdentityParts) -> Self {
        Self(Arc::new(parts))
    }

    /// Another generation of the same lineage. Any number: 0 and the highest one bound the range of them all.
    #[must_use]
    pub fn with_generation(&self, weight_generation: u64) -> Self {
        Self::of(IdentityParts { weight_generation, ..IdentityParts::clone(self) })
    }

    /// The same identity, which shares with `other` the texts that both have: a neighbour's are mostly the same, and a text that
    /// is shared takes no memory and no time to compare.
    #[must_use]
    pub fn sharing(&self, other: &Self) -> Self {
        fn shared<T: Clone + PartialEq>(mine: &T, other: &T) -> T {
            if mine == other { other.clone() } else { mine.clone() }
        }
        Self::of(IdentityParts {
            tenant_id: shared(&self.tenant_id, &other.tenant_id),
            namespace: shared(&self.namespace, &other.namespace),
            resource_id: shared(&self.resource_id, &other.resource_id),
            revision: shared(&self.revision, &other.revision),
            weight_generation: self.weight_generation,
        })
    }

    /// The identity without its generation.
    #[must_use]
    pub fn lineage(&self) -> LineageKey {
        LineageKey {
            tenant_id: self.tenant_id.clone(),
            namespace: self.namespace.clone(),
            resource_id: self.resource_id.clone(),
            revision: self.revision.clone(),
        }
    }

    /// `weights/<ns>/<resource>/<revision>/<generation>`, each component percent-encoded.
    #[must_use]
    pub fn key_base(&self) -> String {
        let quote = |part: &Component| utf8_percent_encode(part.as_str(), KEY_ESCAPES).to_string();
        format!(
            "weights/{}/{}/{}/{}",
            quote(&self.namespace),
            quote(&self.resource_id),
            quote(&self.revision),
            self.weight_generation
        )
    }

    /// The canonical manifest key: the key base and `/manifest`.
    #[must_use]
    pub fn manifest_key(&self) -> String {
        format!("{}/manifest", self.key_base())
    }

    /// The managed group: `weight:` and H([tenant, namespace, resource, revision, generation]).
    #[must_use]
    pub fn group_id(&self) -> GroupId {
        let generation = self.weight_generation.to_string();
        let digest = hash_list([
            self.tenant_id.as_str().as_bytes(),
            self.namespace.as_str().as_bytes(),
            self.resource_id.as_str().as_bytes(),
            self.revision.as_str().as_bytes(),
            generation.as_bytes(),
        ]);
        GroupId(format!("weight:{digest}").into())
    }
}

impl fmt::Display for RevisionIdentity {
    /// The full short name, `[tenant:]namespace/resource@revision#generation`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.lineage(), self.weight_generation)
    }
}

/// `(tenant_id, namespace, resource_id, revision)`: every generation of one logical revision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LineageKey {
    /// Who owns it.
    pub tenant_id: TenantId,
    /// The namespace within the tenant.
    pub namespace: Component,
    /// The model.
    pub resource_id: Component,
    /// The logical revision.
    pub revision: Component,
}

impl LineageKey {
    /// One generation of this lineage.
    ///
    /// # Errors
    /// When the generation is zero.
    pub fn generation(&self, weight_generation: u64) -> Result<RevisionIdentity, IdentityError> {
        if weight_generation == 0 {
            return Err(IdentityError::GenerationZero);
        }
        Ok(RevisionIdentity::of(IdentityParts {
            tenant_id: self.tenant_id.clone(),
            namespace: self.namespace.clone(),
            resource_id: self.resource_id.clone(),
            revision: self.revision.clone(),
            weight_generation,
        }))
    }

    /// Parses `[tenant:][namespace/]resource[@revision][#generation]`; what is left out is tenant `default`,
    /// namespace `default`, revision `main` and no generation. Special characters are percent-encoded.
    ///
    /// # Errors
    /// Naming what is wrong with the text.
    pub fn parse_short_name(text: &str) -> Result<(LineageKey, Option<u64>), IdentityError> {
        let wrong = |reason: &str| IdentityError::ShortName { text: text.to_owned(), reason: reason.to_owned() };
        let (rest, generation) = match text.rsplit_once('#') {
            Some((rest, digits)) => {
                let value: u64 = digits.parse().map_err(|_| wrong("the generation after '#' is not a whole number"))?;
                if value == 0 {
                    return Err(IdentityError::GenerationZero);
                }
                (rest, Some(value))
            }
            None => (text, None),
        };
        let (rest, revision) = rest.rsplit_once('@').unwrap_or((rest, "main"));
        let (tenant, rest) = rest.split_once(':').unwrap_or(("default", rest));
        let (namespace, resource) = rest.split_once('/').unwrap_or(("default", rest));
        if resource.contains('/') {
            return Err(wrong("at most one '/' is allowed; write others as %2F"));
        }
        let decode = |part: &str| {
            percent_decode_str(part)
                .decode_utf8()
                .map(|t| t.into_owned())
                .map_err(|_| wrong("not UTF-8 after decoding"))
        };
        let key = LineageKey {
            tenant_id: TenantId::new(&decode(tenant)?)?,
            namespace: Component::new("namespace", &decode(namespace)?)?,
            resource_id: Component::new("resource_id", &decode(resource)?)?,
            revision: Component::new("revision", &decode(revision)?)?,
        };
        Ok((key, generation))
    }
}

impl fmt::Display for LineageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = |text: &str| utf8_percent_encode(text, NAME_ESCAPES).to_string();
        if self.tenant_id.as_str() != "default" {
            write!(f, "{}:", quote(self.tenant_id.as_str()))?;
        }
        write!(
            f,
            "{}/{}@{}",
            quote(self.namespace.as_str()),
            quote(self.resource_id.as_str()),
            quote(self.revision.as_str())
        )
    }
}

impl FromStr for LineageKey {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        match LineageKey::parse_short_name(text)? {
            (key, None) => Ok(key),
            (_, Some(_)) => {
                Err(IdentityError::ShortName { text: text.to_owned(), reason: "a lineage has no generation".into() })
            }
        }
    }
}

/// The request id of a replacement whose caller gave none (RFC, Generation Replacement): the same arguments give the same id.
#[must_use]
pub fn default_upsert_request_id(
    base: &RevisionIdentity,
    target: &RevisionIdentity,
    mode: UpsertMode,
    expected_metadata_generation: u64,
) -> String {
    let numbers = [
        base.weight_generation.to_string(),
        target.weight_generation.to_string(),
        mode.wire_number().to_string(),
        expected_metadata_generation.to_string(),
    ];
    let parts = |identity: &'_ RevisionIdentity| {
        [
            identity.tenant_id.as_str().to_owned(),
            identity.namespace.as_str().to_owned(),
            identity.resource_id.as_str().to_owned(),
            identity.revision.as_str().to_owned(),
        ]
    };
    let mut fields = vec!["weight-upsert-request-v1".to_owned()];
    fields.extend(parts(base));
    fields.push(numbers[0].clone());
    fields.extend(parts(target));
    fields.extend(numbers[1..].iter().cloned());
    hash_prefixed(fields.iter().map(|f| f.as_bytes())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minilm() -> RevisionIdentity {
        RevisionIdentity::new("default", "default", "minilm", "main", 1).unwrap()
    }

    #[test]
    fn the_manifest_key_percent_encodes_each_component() {
        let identity = RevisionIdentity::new("t", "a/b", "ré", "v1.0_x-y", 7).unwrap();
        assert_eq!(identity.manifest_key(), "weights/a%2Fb/r%C3%A9/v1.0_x-y/7/manifest");
    }

    #[test]
    fn the_group_id_is_the_digest_of_the_five_tuple() {
        let by_hand = Digest::of(b"7:default\n7:default\n6:minilm\n4:main\n1:1\n");
        assert_eq!(minilm().group_id().as_str(), format!("weight:{by_hand}"));
    }

    #[test]
    fn an_identity_with_a_hostile_part_is_refused_by_name() {
        let refuse =
            |ns: &str, generation| RevisionIdentity::new("t", ns, "r", "v", generation).unwrap_err().to_string();
        assert!(refuse("a\u{7}b", 1).contains("U+0007"));
        assert!(refuse(&"x".repeat(1025), 1).contains("1025"));
        assert!(refuse("", 1).contains("namespace"));
        assert!(refuse("n", 0).contains("start at 1"));
        assert!(TenantId::new("_sys").is_err());
        assert!(RevisionIdentity::new("t", &"x".repeat(1024), "r", "v", 1).is_ok());
    }

    #[test]
    fn short_names_fill_in_what_is_left_out_and_read_back() {
        let (key, generation) = LineageKey::parse_short_name("minilm").unwrap();
        assert_eq!((key.to_string().as_str(), generation), ("default/minilm@main", None));
        let (key, generation) = LineageKey::parse_short_name("acme:prod/llama@v2#9").unwrap();
        assert_eq!((key.to_string().as_str(), generation), ("acme:prod/llama@v2", Some(9)));
        let odd = RevisionIdentity::new("t:x", "a/b", "r@s", "v#1", 3).unwrap();
        assert_eq!(LineageKey::parse_short_name(&odd.to_string()).unwrap(), (odd.lineage(), Some(3)));
        for wrong in ["", "a/b/c", "m#0", "m#x", "m@"] {
            assert!(LineageKey::parse_short_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_identity_in_json_refuses_unknown_fields() {
        let text = r#"{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1,"color":2}"#;
        assert!(serde_json::from_str::<RevisionIdentity>(text).is_err());
        let text = r#"{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1}"#;
        assert_eq!(serde_json::from_str::<RevisionIdentity>(text).unwrap().tenant_id.as_str(), "default");
    }

    #[test]
    fn the_default_request_id_depends_on_every_argument() {
        let (base, target) = (minilm(), minilm().lineage().generation(2).unwrap());
        let id = default_upsert_request_id(&base, &target, UpsertMode::PutFirst, 4);
        assert_eq!(id, default_upsert_request_id(&base, &target, UpsertMode::PutFirst, 4));
        assert_ne!(id, default_upsert_request_id(&base, &target, UpsertMode::DeleteFirst, 4));
        assert_ne!(id, default_upsert_request_id(&base, &target, UpsertMode::PutFirst, 5));
    }
}

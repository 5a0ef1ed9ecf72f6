//! Planted bugs whose rule lives in the fold. The product has no switches for them: before or after an entry is folded, a wrapper
//! changes what is said, or the state through its own serialised form, as a wrong fold would have taken or left it.

use std::fmt;

use ballast_schemas::{
    AbortImport, Availability, ClaimPhase, Command, CommitImport, Envelope, ImportSession, RenewImport,
    ReplacementClaim, RevisionIdentity, TenantId, UpsertMode, WeightRevisionMetadata,
};
use ballast_workflows::{Applied, FoldHalt, State, fold};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::bugs::Bug;

/// Any MessagePack value.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Nil => serializer.serialize_none(),
            Value::Bool(value) => serializer.serialize_bool(*value),
            Value::Unsigned(value) => serializer.serialize_u64(*value),
            Value::Signed(value) => serializer.serialize_i64(*value),
            Value::Text(value) => serializer.serialize_str(value),
            Value::Bytes(value) => serializer.serialize_bytes(value),
            Value::List(values) => {
                let mut list = serializer.serialize_seq(Some(values.len()))?;
                values.iter().try_for_each(|value| list.serialize_element(value))?;
                list.end()
            }
            Value::Map(entries) => {
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Nil)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Nil)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Unsigned(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Signed(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Value, E> {
        Ok(Value::Bytes(value.to_vec()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element()? {
            values.push(value);
        }
        Ok(Value::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Value::Map(entries))
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

impl Value {
    fn text(text: &str) -> Self {
        Value::Text(text.to_owned())
    }

    fn field(&mut self, name: &str) -> Option<&mut Value> {
        let Value::Map(entries) = self else { return None };
        entries.iter_mut().find(|(key, _)| *key == Value::text(name)).map(|(_, value)| value)
    }

    fn set(&mut self, name: &str, to: Value) {
        if let Some(field) = self.field(name) {
            *field = to;
        }
    }

    fn bump(&mut self, name: &str, by: i64) {
        if let Some(Value::Unsigned(number)) = self.field(name) {
            *number = number.saturating_add_signed(by);
        }
    }

    fn entries(&mut self) -> impl Iterator<Item = &mut Value> {
        let entries = match self {
            Value::Map(entries) => entries.as_mut_slice(),
            _ => &mut [],
        };
        entries.iter_mut().map(|(_, value)| value)
    }
}

/// Whether a planted bug is a wrong fold.
pub(crate) fn is_of_the_fold(bug: Bug) -> bool {
    matches!(
        bug,
        Bug::OtherManifestIdentity
            | Bug::ReadyWhileImporting
            | Bug::ManifestChanges
            | Bug::GenerationStands
            | Bug::WatermarkFalls
            | Bug::TombstoneKeepsOperation
            | Bug::BaseRetiredEarly
            | Bug::ReadyAndAbsent
            | Bug::RoundNotAwaited
            | Bug::ProgressGoesBack
            | Bug::CommitWithoutAPart
            | Bug::ReplacedPartIsHeard
            | Bug::ReplacedCoordinatorIsHeard
    )
}

/// Folds an entry as every replica of a build with this bug would: what the fold should refuse is said so that it does not.
pub(crate) fn fold_with(
    bug: Option<Bug>,
    state: &mut State,
    seq: u64,
    unix_ns: u64,
    envelope: &Envelope,
) -> Result<Applied, FoldHalt> {
    let said_so = [Bug::CommitWithoutAPart, Bug::ReplacedPartIsHeard, Bug::ReplacedCoordinatorIsHeard];
    let Some(bug) = bug.filter(|bug| said_so.contains(bug)) else { return fold(state, seq, unix_ns, envelope) };
    let mut commands = envelope.commands().to_vec();
    for record in &mut commands {
        match (&mut record.command, bug) {
            (Command::RenewPart(own) | Command::FinishPart(own), Bug::ReplacedPartIsHeard) => {
                let parts = state.import_parts(&own.identity);
                let joined = parts.iter().find(|part| part.participant == own.participant && part.epoch > own.epoch);
                own.epoch = joined.map_or(own.epoch, |part| part.epoch);
            }
            (Command::RenewImport(RenewImport { identity, coordinator, .. }), Bug::ReplacedCoordinatorIsHeard)
            | (Command::CommitImport(CommitImport { identity, coordinator, .. }), Bug::ReplacedCoordinatorIsHeard)
            | (Command::AbortImport(AbortImport { identity, coordinator, .. }), Bug::ReplacedCoordinatorIsHeard) => {
                let open = state.import(identity).and_then(ImportSession::coordinator);
                if let (Some(own), Some(open)) = (coordinator, open)
                    && own.instance == open.instance
                {
                    *own = open;
                }
            }
            (Command::CommitImport(commit), Bug::CommitWithoutAPart) => {
                on_revision(state, Some(commit.identity.clone()), |revision| {
                    let parts = revision.field("import").and_then(|import| import.field("parts"));
                    for part in parts.into_iter().flat_map(Value::entries) {
                        if part.field("epoch").is_some_and(|epoch| *epoch != Value::Unsigned(0)) {
                            part.set("done", Value::Bool(true));
                        }
                    }
                });
            }
            _ => {}
        }
    }
    match Envelope::seal(envelope.id().to_owned(), commands) {
        Ok((changed, _)) => fold(state, seq, unix_ns, &changed),
        Err(_) => fold(state, seq, unix_ns, envelope),
    }
}

/// Leaves `state` as a fold with this bug would, where the entry gave it the occasion.
pub(crate) fn apply(bug: Bug, before: &State, state: &mut State) {
    if !is_of_the_fold(bug) || state.log_seq() < 20 {
        return;
    }
    let all = records(state);
    let changed = |record: &WeightRevisionMetadata| before.revision(&record.identity) != Some(record);
    let became = |record: &WeightRevisionMetadata, availability| {
        record.availability == availability
            && before.revision(&record.identity).map(|was| was.availability) != Some(availability)
    };
    let chosen = |found: Option<&WeightRevisionMetadata>| found.map(|record| record.identity.clone());
    let published = chosen(all.iter().find(|record| became(record, Availability::Ready)));
    match bug {
        Bug::OtherManifestIdentity => on_revision(state, published, |revision| {
            if let Some(manifest) = revision.field("metadata").and_then(|it| it.field("manifest")) {
                manifest.set("key", Value::text("weights/another/manifest"));
            }
        }),
        Bug::ReadyWhileImporting => {
            let found = chosen(all.iter().find(|record| became(record, Availability::Importing)));
            on_revision(state, found, |revision| set_metadata(revision, "availability", Value::text("READY")));
        }
        Bug::ManifestChanges => {
            let ready = |record: &&WeightRevisionMetadata| {
                changed(record)
                    && record.manifest.is_some()
                    && before.revision(&record.identity).is_some_and(|was| was.manifest.is_some())
            };
            on_revision(state, chosen(all.iter().find(ready)), |revision| {
                if let Some(manifest) = revision.field("metadata").and_then(|it| it.field("manifest")) {
                    manifest.bump("payload_count", 1);
                }
            });
        }
        Bug::GenerationStands => {
            let grown = |record: &&WeightRevisionMetadata| changed(record) && record.metadata_generation > 2;
            on_revision(state, chosen(all.iter().find(grown)), |revision| {
                if let Some(metadata) = revision.field("metadata") {
                    metadata.bump("metadata_generation", -1);
                }
            });
        }
        Bug::WatermarkFalls => {
            let raised = all.iter().any(|record| before.watermark(&record.identity.lineage()) >= 2 && changed(record));
            if raised {
                rewrite(state, |record| {
                    if let Some(lineages) = record.field("lineages") {
                        lineages.entries().for_each(|lineage| lineage.bump("watermark", -1));
                    }
                });
            }
        }
        Bug::TombstoneKeepsOperation => {
            let dead = all.iter().find(|record| became(record, Availability::Deleted));
            let was = dead.and_then(|record| before.revision(&record.identity)?.operation_id.clone());
            let (Some(id), found) = (was, chosen(dead)) else { return };
            on_revision(state, found, |revision| set_metadata(revision, "operation_id", Value::text(id.as_str())));
        }
        Bug::BaseRetiredEarly => {
            let early = all.iter().find(|record| {
                // Once the target is READY it would not be early.
                let is_early = |claim: &&ReplacementClaim| {
                    claim.mode == UpsertMode::PutFirst
                        && matches!(claim.phase, ClaimPhase::PreparingTarget | ClaimPhase::TargetImporting)
                };
                let claim = state.claim(&record.identity.lineage()).filter(is_early);
                record.availability == Availability::Ready
                    && claim.is_some_and(|claim| claim.base == record.identity && changed_claim(before, claim))
            });
            on_revision(state, chosen(early), |revision| {
                set_metadata(revision, "retired", Value::Bool(true));
                if let Some(metadata) = revision.field("metadata") {
                    metadata.bump("metadata_generation", 1);
                }
            });
        }
        Bug::ReadyAndAbsent => {
            on_revision(state, published, |revision| set_metadata(revision, "residency", Value::text("ABSENT")));
        }
        Bug::RoundNotAwaited => rewrite(state, |record| {
            let rounds = record.field("rounds");
            rounds.into_iter().flat_map(Value::entries).for_each(|rounds| rounds.set("moved_at", Value::Unsigned(0)));
        }),
        Bug::ProgressGoesBack => {
            let advanced = state
                .operations(&TenantId::default_tenant(), false, 100)
                .into_iter()
                .any(|is| before.operation(&is.operation_id).is_some_and(|was| was.cursor > 0));
            if advanced {
                rewrite(state, |record| {
                    let operations = record.field("operations");
                    operations.into_iter().flat_map(Value::entries).for_each(|operation| {
                        if let Some(view) = operation.field("view") {
                            view.bump("cursor", -1);
                        }
                    });
                });
            }
        }
        _ => {}
    }
}

fn changed_claim(before: &State, claim: &ReplacementClaim) -> bool {
    before.claim(&claim.lineage) != Some(claim)
}

fn records(state: &State) -> Vec<WeightRevisionMetadata> {
    super::invariants::every_revision(state)
}

fn set_metadata(revision: &mut Value, name: &str, to: Value) {
    if let Some(metadata) = revision.field("metadata") {
        metadata.set(name, to);
    }
}

fn on_revision<T>(state: &mut State, identity: Option<RevisionIdentity>, change: impl FnOnce(&mut Value) -> T) {
    let Some(identity) = identity else { return };
    let Ok(key) = rmp_serde::to_vec_named(&identity) else { return };
    let Ok(key) = rmp_serde::from_slice::<Value>(&key) else { return };
    rewrite(state, |record| {
        let Some(Value::Map(revisions)) = record.field("revisions") else { return };
        if let Some((_, revision)) = revisions.iter_mut().find(|(at, _)| *at == key) {
            change(revision);
        }
    });
}

fn rewrite(state: &mut State, change: impl FnOnce(&mut Value)) {
    let bytes = rmp_serde::to_vec_named(state).expect("a state has a MessagePack form");
    let mut value: Value = rmp_serde::from_slice(&bytes).expect("MessagePack is a value");
    change(&mut value);
    let bytes = rmp_serde::to_vec_named(&value).expect("a value has a MessagePack form");
    *state = rmp_serde::from_slice(&bytes).expect("a changed field keeps its type");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_nothing_was_changed_in_is_the_same_state() {
        let mut state = State::new();
        let before = state.clone();
        rewrite(&mut state, |_| {});
        assert_eq!(state, before);
        assert_eq!(state.digest(), before.digest());
    }
}

//! The page for callers in other languages, `schemas/API.md`, says what the code does: the verbs, the fields of bodies, replies and
//! records, the errors, the values.

use std::collections::BTreeSet;

use ballast_schemas::{
    AcquireLeaseReply, Availability, BeginImportReply, ClaimPhase, ClaimReply, ClockReply, Coordinator, ErrorCode,
    GetSizeReply, ImportPart, ImportReply, ImportSession, ImportView, InstanceId, IsExistReply, JoinImportReply,
    LeaseGrant, LeaseReply, LogPosition, ManifestRef, MigrationMode, MigrationTrigger, NodeCheck, NodeEndpoint,
    NodeStatus, ObjectCounts, ObjectReply, ObjectRequest, OperationKind, OperationReply, OperationStatus,
    OperationsReply, ParkReason, PartReply, PartState, PartView, ReleaseLeaseReply, RepairReply, ReplacementClaim,
    RequestOptions, Residency, RevisionIdentity, RevisionPage, RevisionReply, RevisionView, SessionReply, StatusReply,
    TierCheck, UpsertMode, VERBS, VerifyReply, WeightOperation, WeightRevisionMetadata, WeightStoragePolicy,
};
use futures::StreamExt;
use serde::de::{self, DeserializeOwned, Deserializer, Visitor};
use serde_json::{Value, json};

use super::fixture::*;

const REFERENCE: &str = include_str!("../../../schemas/API.md");

type Names = BTreeSet<String>;

fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Names {
    names.into_iter().map(str::to_owned).collect()
}

/// What stands between backquotes, outside of parentheses.
fn quoted(text: &str) -> Names {
    let outside: String = text
        .split('(')
        .enumerate()
        .map(|(n, part)| if n == 0 { part } else { part.split_once(')').unwrap().1 })
        .collect();
    names(outside.split('`').skip(1).step_by(2))
}

/// Headings and what is below them.
fn sections() -> Vec<(&'static str, &'static str)> {
    let parts = REFERENCE.split("\n## ").flat_map(|part| part.split("\n### "));
    parts.filter_map(|part| part.split_once('\n')).collect()
}

fn section(title: &str) -> &'static str {
    sections().into_iter().find(|(found, _)| *found == title).unwrap_or_else(|| panic!("no section {title}")).1
}

/// The verbs of each section that has some, and what it says of them.
fn verb_sections() -> Vec<(Names, &'static str)> {
    let named = sections().into_iter().map(|(title, text)| (quoted(title), text));
    named.filter(|(verbs, _)| !verbs.is_empty()).collect()
}

/// The cells of the tables' rows.
fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter_map(|line| Some(line.strip_prefix('|')?.split('|').map(str::trim).collect()))
}

/// The fields that a section's table has in its first column.
fn fields_of(text: &str) -> Names {
    rows(text).flat_map(|cells| quoted(cells[0])).collect()
}

/// What the row of a section's table has in its second column.
fn row_of(title: &str, first: &str) -> Names {
    let found = rows(section(title)).find(|cells| cells[0] == first);
    quoted(found.unwrap_or_else(|| panic!("no {first} in {title}"))[1])
}

/// A reader that takes nothing and tells what it was asked for.
struct Asked;

/// The names of a structure's fields, or of an enumeration's variants.
#[derive(Debug, thiserror::Error)]
#[error("asked for {0:?}")]
struct Shape(&'static [&'static str]);

impl de::Error for Shape {
    fn custom<T: std::fmt::Display>(_: T) -> Self {
        Self(&[])
    }
}

impl<'de> Deserializer<'de> for Asked {
    type Error = Shape;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Shape> {
        Err(Shape(&[]))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Shape> {
        Err(Shape(fields))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Shape> {
        Err(Shape(variants))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

fn shape<T: DeserializeOwned>() -> Names {
    let Err(Shape(fields)) = T::deserialize(Asked) else { panic!("read from nothing") };
    assert!(!fields.is_empty(), "{} is read in another way", std::any::type_name::<T>());
    names(fields.iter().copied())
}

fn reply_of(verb: &str) -> Names {
    match verb {
        "begin_import" => shape::<BeginImportReply>(),
        "join_import" => shape::<JoinImportReply>(),
        "renew_part" | "finish_part" => shape::<PartReply>(),
        "get_import" => shape::<ImportReply>(),
        "renew_import" => shape::<SessionReply>(),
        "commit_import" | "abort_import" | "update_policy" | "remove" => shape::<RevisionReply>(),
        "acquire_lease" => shape::<AcquireLeaseReply>(),
        "renew_lease" => shape::<LeaseReply>(),
        "release_lease" => shape::<ReleaseLeaseReply>(),
        "is_exist" => shape::<IsExistReply>(),
        "get_metadata" => shape::<RevisionView>(),
        "get_size" => shape::<GetSizeReply>(),
        "list" => shape::<RevisionPage>(),
        "upsert" | "abort_upsert" | "get_upsert" => shape::<ClaimReply>(),
        "migrate" | "get_operation" | "cancel_operation" | "pause_operation" | "resume_operation"
        | "retry_operation" => shape::<OperationReply>(),
        "list_operations" => shape::<OperationsReply>(),
        "repair" => shape::<RepairReply>(),
        "verify" => shape::<VerifyReply>(),
        "clock" => shape::<ClockReply>(),
        "status" => shape::<StatusReply>(),
        "purge" => Names::new(),
        other => panic!("which reply has {other}?"),
    }
}

#[test]
fn the_reference_has_a_section_of_every_verb_and_of_no_other() {
    let described: Vec<String> = verb_sections().into_iter().flat_map(|(verbs, _)| verbs).collect();
    assert_eq!(described.iter().cloned().collect::<Names>(), names(VERBS.iter().copied()));
    assert_eq!(described.len(), VERBS.len(), "a verb is described twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reference_has_the_fields_that_the_gateway_takes() {
    let fixture = Fixture::start().await;
    for (verbs, text) in verb_sections() {
        for verb in verbs {
            // A refusal of a field that there is not lists those that there are.
            let error = fixture.refuse(&verb, json!({"?": 0}), ErrorCode::InvalidArgument).await;
            let (_, expected) = error.message.split_once("unknown field `?`, ").unwrap();
            assert_eq!(
                fields_of(text),
                quoted(expected),
                "fields of {verb}: what the page has, what the gateway takes"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reference_lists_what_may_be_left_in_the_inbox() {
    let fixture = Fixture::start().await;
    let mut outcomes = fixture.client.subscribe("ballast.events.default.outcome.*").await.unwrap();
    fixture.client.publish("ballast.submit.default.list", "{}".into()).await.unwrap();
    let outcome = tokio::time::timeout(PATIENCE, outcomes.next()).await.unwrap().unwrap();
    let outcome: Value = serde_json::from_slice(&outcome.payload).unwrap();
    let (_, taken) = outcome["error"]["message"].as_str().unwrap().split_once("the inbox takes ").unwrap();
    let (_, listed) = section("The inbox").split_once("Taken there:").unwrap();
    assert_eq!(quoted(listed), names(taken.split(", ")));
}

#[test]
fn the_reference_has_the_fields_of_every_reply() {
    for (verbs, text) in verb_sections() {
        let (_, reply) = text.split_once("\nReply:").unwrap();
        let reply = quoted(reply.split("\n\n").next().unwrap());
        for verb in verbs {
            assert_eq!(reply, reply_of(&verb), "fields of the reply of {verb}: what the page has, what the code has");
        }
    }
}

#[test]
fn the_reference_has_the_fields_of_every_record() {
    for (title, fields) in [
        ("Options", shape::<RequestOptions>()),
        ("Object requests", shape::<ObjectRequest>()),
        ("Object replies", shape::<ObjectReply>()),
        ("Identity", shape::<RevisionIdentity>()),
        ("Policy", shape::<WeightStoragePolicy>()),
        ("Revision", shape::<WeightRevisionMetadata>()),
        ("Operation", shape::<WeightOperation>()),
        ("Lease", shape::<LeaseGrant>()),
        ("Claim", shape::<ReplacementClaim>()),
        ("Session", shape::<ImportSession>()),
        ("Part", shape::<ImportPart>()),
        ("Node", shape::<NodeStatus>()),
    ] {
        assert_eq!(fields_of(section(title)), fields, "{title}: what the page has, what the code has");
    }
    for (record, fields) in [
        ("Position", shape::<LogPosition>()),
        ("Instance", shape::<InstanceId>()),
        ("Coordinator", shape::<Coordinator>()),
        ("Endpoint", shape::<NodeEndpoint>()),
        ("Manifest", shape::<ManifestRef>()),
        ("Import", shape::<ImportView>()),
        ("ImportPart", shape::<PartView>()),
        ("NodeCheck", shape::<NodeCheck>()),
        ("TierCheck", shape::<TierCheck>()),
        ("ObjectCounts", shape::<ObjectCounts>()),
    ] {
        assert_eq!(row_of("Small records", record), fields, "{record}: what the page has, what the code has");
    }
}

#[test]
fn the_reference_has_every_error_and_every_value() {
    let errors: Vec<(String, Names)> = rows(section("Errors"))
        .filter(|cells| cells[0].parse::<u16>().is_ok())
        .map(|cells| (cells[0].to_owned(), quoted(cells[1])))
        .collect();
    let expected: Vec<(String, Names)> =
        ErrorCode::ALL.iter().map(|code| (code.number().to_string(), names([code.name()]))).collect();
    assert_eq!(errors, expected);
    macro_rules! expect_values {
        ($($set:ident)+) => {
            $(assert_eq!(row_of("Values", stringify!($set)), names($set::ALL.iter().map(|value| value.name())));)+
        };
    }
    expect_values! {
        Availability Residency MigrationMode OperationKind OperationStatus ParkReason MigrationTrigger UpsertMode ClaimPhase PartState
    }
}

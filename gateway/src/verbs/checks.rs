//! Limits that no state could lift: times, lengths, counts. A request beyond one is refused before the log, naming the field.

use std::collections::BTreeSet;

use ballast_schemas::{
    BallastError, BeginImportRequest, IMPORT_PARTICIPANT_NAMES_BYTES_MAX, IMPORT_PARTICIPANTS_MAX, IMPORT_TTL_MS_MAX,
    LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN, LIST_LIMIT_MAX, ListRequest, MigrateRequest, ParticipantId, Residency,
    TEXT_BYTES_MAX, UNITS_MAX, UpsertRequest,
};

/// A page token is made of an identity, which is longer than other texts.
const PAGE_TOKEN_BYTES_MAX: usize = 16 * 1024;

fn within(field: &str, value: u64, min: u64, max: u64) -> Result<(), BallastError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(BallastError::invalid(format!("{field} is {value}; it must be {min} to {max}")))
    }
}

fn bytes(field: &str, text: &str, bytes_max: usize) -> Result<(), BallastError> {
    if text.len() <= bytes_max {
        Ok(())
    } else {
        Err(BallastError::invalid(format!("{field} has {} bytes; at most {bytes_max} are allowed", text.len())))
    }
}

/// Text for people, or a caller's key: bounded, without control characters.
fn text(field: &str, text: &str, bytes_max: usize) -> Result<(), BallastError> {
    bytes(field, text, bytes_max)?;
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, c)) => {
            let code = u32::from(c);
            Err(BallastError::invalid(format!(
                "{field} holds the control character U+{code:04X} at byte {at}; remove it"
            )))
        }
        None => Ok(()),
    }
}

pub(super) fn lease_ttl(ttl_ms: u64) -> Result<(), BallastError> {
    within("ttl_ms", ttl_ms, LEASE_TTL_MS_MIN, LEASE_TTL_MS_MAX)
}

pub(super) fn holder(holder: &str) -> Result<(), BallastError> {
    text("holder", holder, TEXT_BYTES_MAX)
}

pub(super) fn begin_import(request: &BeginImportRequest) -> Result<(), BallastError> {
    within("ttl_ms", request.ttl_ms, 1, IMPORT_TTL_MS_MAX)?;
    within("unit_count", u64::from(request.unit_count), 1, u64::from(UNITS_MAX))?;
    let different: BTreeSet<&ParticipantId> = request.participants.iter().collect();
    if different.len() != request.participants.len() {
        return Err(BallastError::invalid("participants names one twice; name each once"));
    }
    within("the number of participants", different.len() as u64, 0, IMPORT_PARTICIPANTS_MAX as u64)?;
    let names_bytes: usize = different.iter().map(|name| name.as_str().len()).sum();
    within("bytes of the participants' names", names_bytes as u64, 0, IMPORT_PARTICIPANT_NAMES_BYTES_MAX as u64)?;
    match (request.participants.is_empty(), &request.writer_id) {
        (true, Some(_)) => {
            return Err(BallastError::invalid("writer_id is given without participants; it only goes with them"));
        }
        (false, None) => {
            return Err(BallastError::invalid(
                "writer_id is missing; with participants it names the run of the coordinator, chosen by it",
            ));
        }
        _ => {}
    }
    if request.reserved_bytes < request.logical_bytes {
        let (reserved, logical) = (request.reserved_bytes, request.logical_bytes);
        return Err(BallastError::invalid(format!(
            "reserved_bytes is {reserved}, less than logical_bytes {logical}; it is the size of every unit's extent in the layout"
        )));
    }
    Ok(())
}

pub(super) fn list_limit(limit: u32) -> Result<(), BallastError> {
    within("limit", u64::from(limit), 1, u64::from(LIST_LIMIT_MAX))
}

pub(super) fn list(request: &ListRequest) -> Result<(), BallastError> {
    list_limit(request.limit)?;
    text("resource_prefix", request.resource_prefix.as_deref().unwrap_or_default(), TEXT_BYTES_MAX)?;
    bytes("page_token", &request.page_token, PAGE_TOKEN_BYTES_MAX)
}

pub(super) fn migrate(request: &MigrateRequest) -> Result<(), BallastError> {
    let target = request.target;
    if !matches!(target, Residency::Hot | Residency::Cold | Residency::Mixed) {
        return Err(BallastError::invalid(format!("target is {target}; it must be HOT, COLD or MIXED")));
    }
    if request.mixed_hot_ratio.is_some() && target != Residency::Mixed {
        return Err(BallastError::invalid(format!(
            "mixed_hot_ratio is given but target is {target}; it only goes with MIXED"
        )));
    }
    Ok(())
}

/// A replacement's request id.
pub(super) fn replacement_request_id(id: &str) -> Result<(), BallastError> {
    if id.is_empty() {
        return Err(BallastError::invalid("replacement_request_id is empty; leave it out or give 1 to 1024 bytes"));
    }
    text("replacement_request_id", id, TEXT_BYTES_MAX)
}

pub(super) fn upsert(request: &UpsertRequest) -> Result<(), BallastError> {
    let (base, target) = (&request.base, &request.target);
    if base.lineage() != target.lineage() {
        let message = format!("target {target} is not of base {base}'s lineage; only the generation may differ");
        return Err(BallastError::invalid(message));
    }
    if target.weight_generation <= base.weight_generation {
        let message = format!(
            "the target's weight_generation is {}, the base's {}; it must be greater",
            target.weight_generation, base.weight_generation
        );
        return Err(BallastError::invalid(message));
    }
    request.replacement_request_id.as_deref().map_or(Ok(()), replacement_request_id)
}

#[cfg(test)]
mod tests {
    use ballast_schemas::Request;
    use serde_json::{Value, json};

    use super::*;

    fn identity(generation: u64) -> Value {
        json!({"namespace": "n", "resource_id": "r", "revision": "v", "weight_generation": generation})
    }

    fn read<B: serde::de::DeserializeOwned>(body: Value) -> B {
        Request::from_json(body.to_string().as_bytes()).unwrap().body
    }

    fn begin(field: &str, value: Value) -> Result<(), BallastError> {
        let digest = "0".repeat(64);
        let mut body = json!({"identity": identity(1), "session_id": "s", "placement_digest": digest,
            "logical_bytes": 10, "reserved_bytes": 4096, "unit_count": 2});
        body[field] = value;
        begin_import(&read(body))
    }

    #[test]
    fn an_import_beyond_a_limit_is_refused_by_field() {
        assert!(begin("ttl_ms", json!(15_000)).is_ok());
        for (field, value) in [
            ("ttl_ms", json!(0)),
            ("ttl_ms", json!(3_600_001)),
            ("unit_count", json!(0)),
            ("unit_count", json!(1_000_001)),
            ("reserved_bytes", json!(9)),
            ("writer_id", json!("run")),
        ] {
            assert!(begin(field, value).unwrap_err().message.contains(field), "{field}");
        }
    }

    #[test]
    fn participants_are_named_once_and_within_limits_and_come_with_a_run_of_their_coordinator() {
        let check = |participants: Vec<String>, writer_id: Value| {
            let digest = "0".repeat(64);
            let body = json!({"identity": identity(1), "session_id": "s", "placement_digest": digest, "logical_bytes": 10,
                "reserved_bytes": 4096, "unit_count": 2, "participants": participants, "writer_id": writer_id});
            begin_import(&read(body))
        };
        let names = |count: usize, width: usize| (0..count).map(|n| format!("{n:0>width$}")).collect::<Vec<_>>();
        assert!(check(names(1024, 16), json!("run")).is_ok() && check(names(128, 128), json!("run")).is_ok());
        let refused = |participants, writer_id| check(participants, writer_id).unwrap_err().message;
        assert!(refused(names(1025, 5), json!("run")).contains("number of participants is 1025"));
        assert!(refused(names(129, 128), json!("run")).contains("names is 16512"));
        assert!(refused(vec!["a".into(), "a".into()], json!("run")).contains("twice"));
        assert!(refused(names(2, 1), Value::Null).contains("writer_id is missing"));
    }

    #[test]
    fn lease_times_end_at_a_day() {
        assert!(lease_ttl(1).is_ok() && lease_ttl(86_400_000).is_ok());
        assert!(lease_ttl(0).is_err() && lease_ttl(86_400_001).is_err());
        assert!(holder("trainer 7").is_ok());
        assert!(holder("a\nb").unwrap_err().message.contains("U+000A"));
        assert!(holder(&"x".repeat(1025)).unwrap_err().message.contains("1025"));
    }

    #[test]
    fn a_page_has_1_to_1000_entries() {
        let check = |body: Value| list(&read(body));
        assert!(check(json!({})).is_ok() && check(json!({"limit": 1000})).is_ok());
        assert!(check(json!({"limit": 0})).unwrap_err().message.contains("limit"));
        assert!(check(json!({"limit": 1001})).is_err());
        assert!(check(json!({"resource_prefix": "x".repeat(1025)})).unwrap_err().message.contains("resource_prefix"));
    }

    #[test]
    fn a_migration_needs_a_reachable_target() {
        let check = |target: &str, ratio: Value| {
            let body = json!({"identity": identity(1), "target": target, "mixed_hot_ratio": ratio, "expected_metadata_generation": 1});
            migrate(&read(body))
        };
        assert!(check("MIXED", json!(0.25)).is_ok() && check("COLD", Value::Null).is_ok());
        assert!(check("ABSENT", Value::Null).unwrap_err().message.contains("ABSENT"));
        assert!(check("HOT", json!(0.5)).unwrap_err().message.contains("mixed_hot_ratio"));
    }

    #[test]
    fn a_replacement_stays_in_its_lineage_and_goes_up() {
        let check = |target: Value, id: Value| {
            let body = json!({"base": identity(2), "target": target, "expected_metadata_generation": 1, "replacement_request_id": id});
            upsert(&read(body))
        };
        assert!(check(identity(3), Value::Null).is_ok());
        assert!(check(identity(2), Value::Null).unwrap_err().message.contains("greater"));
        let mut other = identity(3);
        other["revision"] = json!("w");
        assert!(check(other, Value::Null).unwrap_err().message.contains("lineage"));
        assert!(check(identity(3), json!("")).unwrap_err().message.contains("replacement_request_id"));
    }
}

//! How the body of a gateway's request is read: strictly, and what is wrong is named by the path of its field. Here too is what every
//! request may carry. Not here: the verbs' own fields (`api.rs`).

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::BallastError;
use crate::limits::REQUEST_BYTES_MAX;
use crate::text;
use crate::time::LogTime;

/// Characters of the place where a request is wrong; names in it may be the caller's own.
const PATH_CHARS_SHOWN: usize = 100;

/// Characters of a message about a wrong request.
const MESSAGE_CHARS_MAX: usize = 500;

/// In messages.
const WHAT: &str = "the request body";

/// How fresh a query's answer must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// Whatever this gateway has folded (and at least `min_log_seq`).
    #[default]
    Local,
    /// Everything that was durable when the query arrived.
    Linearizable,
}

impl<'de> Deserialize<'de> for Consistency {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const ALL: &[Consistency] = &[Consistency::Local, Consistency::Linearizable];
        text::one_of(deserializer, ALL, |value| match value {
            Self::Local => "local",
            Self::Linearizable => "linearizable",
        })
    }
}

/// What every request may carry beside its own fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of fields (a JSON object)")]
pub struct RequestOptions {
    /// Idempotency key of a mutation; a random one otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Of a mutation: refused after this moment of the log clock (`clock` tells it), however late the request arrives. Good
    /// for a minute and a half at most; without it, a minute from when a gateway reads the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<LogTime>,
    /// Answer only after having folded this sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_log_seq: Option<u64>,
    /// For queries.
    #[serde(default, skip_serializing_if = "is_default")]
    pub consistency: Consistency,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A request: its own fields and, under `options`, what every request may carry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request<B> {
    /// The verb's own fields.
    #[serde(flatten)]
    pub body: B,
    /// What every request may carry.
    #[serde(skip_serializing_if = "is_default")]
    pub options: RequestOptions,
}

impl<B: DeserializeOwned> Request<B> {
    /// Reads a request body strictly. An empty body is an empty object.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it is too large, not a JSON object, or has a wrong or unknown field.
    pub fn from_json(bytes: &[u8]) -> Result<Self, BallastError> {
        if bytes.len() > REQUEST_BYTES_MAX {
            let message = format!("the request has {} bytes; at most {REQUEST_BYTES_MAX} are allowed", bytes.len());
            return Err(BallastError::invalid(message));
        }
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
        // Flattening would let unknown fields pass, so `options` is taken out by hand and both parts are read strictly.
        let Once(Value::Object(mut fields)) = read_json(WHAT, text)? else {
            return Err(wrong_at(WHAT, "", &"it is no map of fields (a JSON object)"));
        };
        let options = match fields.remove("options") {
            Some(options) => {
                refuse_lists("options", &options)?;
                from_value("options", options)?
            }
            None => RequestOptions::default(),
        };
        // The one list that a verb takes: of names, which no reader takes a list for.
        let mut others = fields.iter().filter(|(name, _)| *name != "participants");
        others.try_for_each(|(name, value)| refuse_lists(name, value))?;
        Ok(Self { body: from_value("", Value::Object(fields))?, options })
    }
}

/// Reads JSON. What is wrong is named by the path of its field, also where the text is no JSON.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn read_json<T: DeserializeOwned>(what: &str, text: &[u8]) -> Result<T, BallastError> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| wrong(what, "", error))?;
    reader.end().map_err(|error| wrong_at(what, "", &error))?;
    Ok(value)
}

/// Reads the part of a request that stands at `within`.
fn from_value<T: DeserializeOwned>(within: &str, value: Value) -> Result<T, BallastError> {
    serde_path_to_error::deserialize(value).map_err(|error| wrong(WHAT, within, error))
}

fn wrong(what: &str, within: &str, error: serde_path_to_error::Error<serde_json::Error>) -> BallastError {
    let path = error.path().to_string();
    // A question mark stands for a field whose name is not read yet.
    let path = path.trim_end_matches('?').trim_end_matches('.');
    let path = match (within, path) {
        (within, "") => within.to_owned(),
        ("", path) => path.to_owned(),
        (within, path) => format!("{within}.{path}"),
    };
    wrong_at(what, &path, &error.into_inner())
}

/// What is wrong may hold as much text as the caller sent; the message does not.
fn wrong_at(what: &str, path: &str, why: &dyn std::fmt::Display) -> BallastError {
    let mut message = match path {
        "" => format!("{what} is wrong: {why}"),
        path => format!("{what} is wrong at `{}`: {why}", shown(path)),
    };
    if let Some((at, _)) = message.char_indices().nth(MESSAGE_CHARS_MAX) {
        message.truncate(at);
        message.push('…');
    }
    BallastError::invalid(message)
}

fn shown(path: &str) -> String {
    path.chars().take(PATH_CHARS_SHOWN).collect()
}

/// Any JSON in which no object names a field twice: the last one would win, whatever the first one said.
pub(crate) struct Once(pub(crate) Value);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceVisitor).map(Self)
    }
}

struct OnceVisitor;

impl<'de> serde::de::Visitor<'de> for OnceVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Once(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut fields = serde_json::Map::new();
        while let Some((name, Once(value))) = entries.next_entry::<String, Once>()? {
            if fields.contains_key(&name) {
                return Err(serde::de::Error::custom(format_args!("the field `{}` is there twice", shown(&name))));
            }
            fields.insert(name, value);
        }
        Ok(fields.into())
    }
}

/// Derived readers take a list for an object, field by position: `"policy": []` would be the default policy.
fn refuse_lists(name: &str, value: &Value) -> Result<(), BallastError> {
    path_to_list(name, value)
        .map_or(Ok(()), |path| Err(wrong_at(WHAT, &path, &"it holds a list, which this field never is")))
}

fn path_to_list(path: &str, value: &Value) -> Option<String> {
    match value {
        Value::Array(_) => Some(path.to_owned()),
        Value::Object(fields) => {
            fields.iter().find_map(|(name, value)| path_to_list(name, value)).map(|within| format!("{path}.{within}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{MigrateRequest, OperationRequest, SessionRequest, UpdatePolicyRequest};

    /// A body of `migrate` with some JSON in place of a field.
    fn migrate(field: &str, json: &str) -> BallastError {
        let identity = r#"{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1}"#;
        let mut fields = vec![("identity", identity), ("target", "\"COLD\""), ("expected_metadata_generation", "1")];
        fields.retain(|(name, _)| *name != field);
        fields.push((field, json));
        let fields: Vec<String> = fields.iter().map(|(name, json)| format!("\"{name}\":{json}")).collect();
        Request::<MigrateRequest>::from_json(format!("{{{}}}", fields.join(",")).as_bytes()).unwrap_err()
    }

    #[test]
    fn what_is_no_json_is_named_by_its_field_too() {
        let deep = "[".repeat(200);
        let deeper = "{\"a\":".repeat(200);
        for wrong in [
            "NaN",
            "Infinity",
            "-Infinity",
            "1e400",
            "01",
            "'x'",
            "\"\\ud800\"",
            "\"\u{1}\"",
            "tru",
            &deep,
            &deeper,
            "",
        ] {
            for field in ["mixed_hot_ratio", "expected_metadata_generation", "target", "identity"] {
                let error = migrate(field, wrong);
                assert_eq!(error.code, crate::ErrorCode::InvalidArgument);
                assert!(error.message.contains(&format!(" at `{field}")), "{field} {wrong}: {error}");
            }
            let error = migrate("options", &format!("{{\"min_log_seq\":{wrong}}}"));
            assert!(error.message.contains(" at `options.min_log_seq"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_choice_is_a_string_and_the_error_lists_what_is_taken() {
        for wrong in [r#"{"COLD":null}"#, "1", "null", "true", r#""cold""#, r#""UNKNOWN""#, r#""ABSENT""#, r#""""#] {
            let error = migrate("target", wrong);
            let lists = error.message.contains(r#"at `target`"#) && error.message.contains(r#""HOT", "COLD", "MIXED""#);
            assert!(lists && !error.message.contains("expected one of the strings \"UNKNOWN"), "{wrong}: {error}");
        }
        for wrong in [r#"{"LOCAL":null}"#, r#"{"local":null}"#, "1", r#""Local""#] {
            let error = migrate("options", &format!("{{\"consistency\":{wrong}}}"));
            assert!(error.message.contains(r#"at `options.consistency`"#), "{wrong}: {error}");
            assert!(error.message.contains(r#""local", "linearizable""#), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_list_is_no_object_anywhere() {
        for wrong in ["[]", r#"["x"]"#, "[null,5]", r#"{"request_id":["x"]}"#, r#"{"min_log_seq":[]}"#] {
            let error = migrate("options", wrong);
            assert!(error.message.contains("at `options") && error.message.contains("a list"), "{wrong}: {error}");
        }
        let wrong = [("coordinator", r#"{"instance":[],"epoch":1}"#), ("options", "[]")];
        for (field, json) in wrong {
            let body = format!(r#"{{"identity":{{}},"session_id":"s","{field}":{json}}}"#);
            let error = Request::<SessionRequest>::from_json(body.as_bytes()).unwrap_err();
            assert!(error.message.contains(&format!("at `{field}")), "{error}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused_however_deep_it_stands() {
        let identity = r#"{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1}"#;
        let read = |instance: &str| {
            let body = format!(
                r#"{{"identity":{identity},"session_id":"s","coordinator":{{"instance":{instance},"epoch":1}}}}"#
            );
            Request::<SessionRequest>::from_json(body.as_bytes())
        };
        let group = format!("weight:{}", "0".repeat(64));
        let good = format!(r#"{{"group_id":"{group}","position":{{"seq":1,"index":0}}}}"#);
        read(&good).unwrap();
        for wrong in [good.replacen('{', r#"{"zzz":1,"#, 1), good.replace(r#"{"seq""#, r#"{"zzz":1,"seq""#)] {
            let error = read(&wrong).unwrap_err();
            assert!(error.message.contains("unknown field `zzz`"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_message_does_not_echo_a_long_request() {
        let long = "é".repeat(50_000);
        let text = format!("\"{long}\"");
        let errors = [
            Request::<OperationRequest>::from_json(format!("{{\"{long}\":1}}").as_bytes()).unwrap_err(),
            migrate("identity", &text),
            migrate("target", &text),
            migrate(&long, "1"),
            migrate("options", &format!("{{{text}:{text}}}")),
            migrate("mixed_hot_ratio", "1e308"),
        ];
        for error in errors {
            assert!(error.message.chars().count() <= MESSAGE_CHARS_MAX + 1, "{error}");
        }
        assert!(migrate("target", &text).message.contains("MIXED"));
        assert!(migrate("mixed_hot_ratio", "1e308").message.contains("1e308"));
    }

    #[test]
    fn a_request_with_a_wrong_or_unknown_field_is_refused_by_name() {
        let read = |text: &str| Request::<OperationRequest>::from_json(text.as_bytes());
        assert!(read(r#"{"operation_id":"op-1.0","options":{"min_log_seq":3}}"#).is_ok());
        for (text, word) in [
            (r#"{"operation_id":"op-1.0","color":1}"#, "color"),
            (r#"{"operation_id":"op-1.0","options":{"color":1}}"#, "color"),
            (r#"{"operation_id":""}"#, "OperationId"),
            (r#"{"operation_id":7}"#, "`operation_id`"),
            (r#"{"operation_id":"op-1.0","options":{"min_log_seq":"x"}}"#, "`options.min_log_seq`"),
            ("{}", "operation_id"),
            ("[]", "map"),
            (r#"{"operation_id":"op-1.0","operation_id":"op-2.0"}"#, "`operation_id` is there twice"),
            (
                r#"{"operation_id":"op-1.0","options":{"min_log_seq":1,"min_log_seq":2}}"#,
                "`min_log_seq` is there twice",
            ),
            ("not json", "is wrong: expected"),
            ("{", "is wrong: EOF"),
            (r#"{"options":{"min"#, "at `options`: EOF"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message.contains(word), "{text}: {error}");
        }
        let policy = r#"{"identity":{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1},"policy":[],"expected_metadata_generation":1}"#;
        let error = Request::<UpdatePolicyRequest>::from_json(policy.as_bytes()).unwrap_err();
        assert!(error.message.contains("`policy`: it holds a list"), "{error}");
        assert!(
            migrate("identity", r#"{"namespace":{"a":[]}}"#)
                .message
                .contains("`identity.namespace.a`: it holds a list")
        );
        assert!(read(&" ".repeat(2 << 20)).unwrap_err().message.contains("2097152"));
    }
}

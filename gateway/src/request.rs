//! One call of a verb: whose it is, what it asks, and the answer's form.
//!
//! The tenant is a token of the subject, so that plain NATS permissions keep tenants apart; an identity in the body must name
//! the same one. Not here: what the verbs do (`verbs/`). See ARCHITECTURE.md, The rooms.

use ballast_schemas::subject::{self, token};
use ballast_schemas::{BallastError, ErrorCode, REQUEST_BYTES_MAX, Request, RevisionIdentity, TenantId, VERBS};
use bytes::Bytes;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::verbs::checks;

/// Fields of a request body that hold an identity.
const IDENTITY_FIELDS: [&str; 3] = ["identity", "base", "target"];

/// Characters of a verb that is none.
const VERB_CHARS_SHOWN: usize = 64;

/// The tenant that a subject names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallTenant {
    /// By its name.
    Named(TenantId),
    /// By the digest that stands for a name too long for a subject token.
    Hashed(String),
}

impl CallTenant {
    /// Reads a subject token.
    pub(crate) fn from_token(text: &str) -> Result<Self, BallastError> {
        if text.starts_with('~') {
            return Ok(Self::Hashed(text.to_owned()));
        }
        let decoded = percent_decode_str(text).decode_utf8();
        let decoded = decoded.map_err(|_| {
            BallastError::invalid(format!("the subject's tenant {text:?} is not UTF-8 once percent-decoded"))
        })?;
        let tenant = TenantId::new(&decoded)
            .map_err(|error| BallastError::invalid(format!("the subject's tenant is wrong: {error}")))?;
        // Two spellings of one tenant would make permissions on the subject worthless.
        let expected = token(tenant.as_str());
        if expected == text {
            Ok(Self::Named(tenant))
        } else {
            Err(BallastError::invalid(format!(
                "the subject names tenant {tenant} as {text:?}; write it as {expected:?}"
            )))
        }
    }

    /// Whether the subject's tenant is this one.
    pub(crate) fn is(&self, tenant: &TenantId) -> bool {
        match self {
            Self::Named(named) => named == tenant,
            Self::Hashed(hashed) => token(tenant.as_str()) == *hashed,
        }
    }

    /// For people.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Named(tenant) => tenant.as_str(),
            Self::Hashed(hashed) => hashed,
        }
    }
}

/// One call of a verb.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub tenant: CallTenant,
    pub verb: &'static str,
    pub payload: Bytes,
    /// The request id when the body names none.
    pub own_request_id: Option<String>,
}

impl Call {
    /// Takes `<prefix>.<tenant>.<verb>` apart.
    ///
    /// # Errors
    /// `NOT_FOUND` with the list of verbs when there is no such verb, `INVALID_ARGUMENT` when the tenant is none.
    pub(crate) fn new(subject: &str, payload: Bytes) -> Result<Self, BallastError> {
        let tokens: Vec<&str> = subject.split('.').collect();
        let [_, _, tenant, verb] = tokens.as_slice() else { return Err(unknown_verb(subject)) };
        let verb = known_verb(verb).ok_or_else(|| unknown_verb(verb))?;
        Ok(Self { tenant: CallTenant::from_token(tenant)?, verb, payload, own_request_id: None })
    }

    /// Reads the body strictly and checks what every request may carry.
    pub(crate) fn read<B: DeserializeOwned>(&self) -> Result<Request<B>, BallastError> {
        let mut request: Request<B> = match self.with_tenant() {
            Some(filled) => Request::from_json(&filled)?,
            None => Request::from_json(&self.payload)?,
        };
        let options = &mut request.options;
        if options.request_id.is_none() {
            options.request_id.clone_from(&self.own_request_id);
        }
        checks::request_id(options.request_id.as_deref())?;
        Ok(request)
    }

    /// An identity that leaves its tenant out means the subject's, not `default`. `None`: the body is right as it is.
    fn with_tenant(&self) -> Option<Vec<u8>> {
        let CallTenant::Named(tenant) = &self.tenant else { return None };
        if *tenant == TenantId::default_tenant() || self.payload.len() > REQUEST_BYTES_MAX {
            return None;
        }
        // What is no JSON object is named by the strict reader.
        let mut fields: serde_json::Map<String, Value> = serde_json::from_slice(&self.payload).ok()?;
        let mut is_filled = false;
        for name in IDENTITY_FIELDS {
            let Some(identity) = fields.get_mut(name).and_then(Value::as_object_mut) else { continue };
            if !identity.contains_key("tenant_id") {
                identity.insert("tenant_id".to_owned(), Value::String(tenant.as_str().to_owned()));
                is_filled = true;
            }
        }
        if is_filled { serde_json::to_vec(&fields).ok() } else { None }
    }

    /// The tenant's name, for requests whose body names no identity.
    pub(crate) fn named_tenant(&self) -> Result<&TenantId, BallastError> {
        match &self.tenant {
            CallTenant::Named(tenant) => Ok(tenant),
            CallTenant::Hashed(_) => {
                let message = format!(
                    "{} needs the tenant's name in the subject, and a digest stands there: tenants of more than 128 encoded bytes can not ask this",
                    self.verb
                );
                Err(BallastError::invalid(message))
            }
        }
    }

    /// Refuses an identity of another tenant than the subject's.
    pub(crate) fn check_tenant(&self, identity: &RevisionIdentity) -> Result<(), BallastError> {
        if self.tenant.is(&identity.tenant_id) {
            return Ok(());
        }
        let message = format!(
            "the body names tenant {:?} but the subject allows tenant {:?}; call {} instead",
            identity.tenant_id.as_str(),
            self.tenant.name(),
            subject::verb(&identity.tenant_id, self.verb)
        );
        Err(BallastError::new(ErrorCode::Unauthorized, message))
    }
}

/// The verb's entry in [`VERBS`].
pub(crate) fn known_verb(text: &str) -> Option<&'static str> {
    VERBS.iter().copied().find(|verb| *verb == text)
}

/// There is no such verb: these are.
pub(crate) fn unknown_verb(text: &str) -> BallastError {
    let text: String = text.chars().take(VERB_CHARS_SHOWN).collect();
    let message =
        format!("there is no verb {text:?}; call ballast.v1.<tenant>.<verb> with one of: {}", VERBS.join(", "));
    BallastError::new(ErrorCode::NotFound, message).with_details(serde_json::json!({ "verbs": VERBS }))
}

/// A good answer, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The body, with `log_seq` in it.
    pub body: Bytes,
}

#[derive(Serialize)]
struct Face<'a, B> {
    #[serde(flatten)]
    body: &'a B,
    log_seq: u64,
}

impl Answer {
    /// `body` and the log sequence that it reflects.
    pub(crate) fn new(log_seq: u64, body: &impl Serialize) -> Result<Self, BallastError> {
        let encoded = serde_json::to_vec(&Face { body, log_seq });
        let encoded = encoded.map_err(|error| {
            BallastError::new(ErrorCode::Unavailable, format!("the answer cannot be encoded: {error}"))
        })?;
        Ok(Self { body: Bytes::from(encoded) })
    }
}

/// The body of a bad answer: `{"error":{…},"log_seq":…}`.
pub(crate) fn error_body(error: &BallastError, log_seq: u64) -> Bytes {
    let mut body = error.to_body();
    body["log_seq"] = log_seq.into();
    Bytes::from(body.to_string())
}

#[cfg(test)]
mod tests {
    use ballast_schemas::{IdentityRequest, ListRequest};

    use super::*;

    fn call(subject: &str, body: &str) -> Result<Call, BallastError> {
        Call::new(subject, Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn a_subject_names_tenant_and_verb() {
        let long = "é".repeat(500);
        let names = [("default", "default"), ("a.b", "a%2Eb"), (long.as_str(), &token(&long))];
        for (tenant, token) in names {
            let call = call(&format!("ballast.v1.{token}.list"), "").unwrap();
            assert!(call.tenant.is(&TenantId::new(tenant).unwrap()), "{tenant}");
            assert_eq!(call.verb, "list");
        }
        assert!(!call("ballast.v1.a.list", "").unwrap().tenant.is(&TenantId::new("b").unwrap()));
    }

    #[test]
    fn a_wrong_subject_is_refused_with_what_to_write() {
        let refuse = |subject: &str| call(subject, "{}").unwrap_err();
        let error = refuse("ballast.v1.default.fly");
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(error.message.contains("get_metadata") && error.details["verbs"].as_array().is_some());
        assert_eq!(refuse("ballast.v1.default.list.more").code, ErrorCode::NotFound);
        assert!(refuse("ballast.v1.%64efault.list").message.contains("\"default\""));
        assert!(refuse("ballast.v1._sys.list").message.contains("reserved"));
        assert!(refuse("ballast.v1.%FF.list").message.contains("UTF-8"));
    }

    #[test]
    fn an_identity_without_a_tenant_means_the_subjects() {
        let body = r#"{"identity":{"namespace":"n","resource_id":"r","revision":"v","weight_generation":1}}"#;
        let call = call("ballast.v1.acme.get_metadata", body).unwrap();
        let request = call.read::<IdentityRequest>().unwrap();
        assert_eq!(request.body.identity.tenant_id.as_str(), "acme");
        assert!(call.check_tenant(&request.body.identity).is_ok());
    }

    #[test]
    fn an_identity_of_another_tenant_is_unauthorized() {
        let body = r#"{"identity":{"tenant_id":"other","namespace":"n","resource_id":"r","revision":"v","weight_generation":1}}"#;
        for subject in ["ballast.v1.acme.get_metadata", "ballast.v1.default.get_metadata"] {
            let call = call(subject, body).unwrap();
            let identity = call.read::<IdentityRequest>().unwrap().body.identity;
            let error = call.check_tenant(&identity).unwrap_err();
            assert_eq!(error.code, ErrorCode::Unauthorized);
            assert!(error.message.contains("ballast.v1.other.get_metadata"), "{error}");
        }
    }

    #[test]
    fn a_request_id_has_a_length() {
        let read = |id: &str| {
            let body = serde_json::json!({"options": {"request_id": id}}).to_string();
            call("ballast.v1.default.list", &body).unwrap().read::<ListRequest>()
        };
        assert_eq!(read("r1").unwrap().options.request_id.as_deref(), Some("r1"));
        for wrong in ["", "a\0b", "a\nb", &"x".repeat(1025)] {
            assert!(read(wrong).unwrap_err().message.contains("request_id"));
        }
        let mut own = call("ballast.v1.default.list", "").unwrap();
        own.own_request_id = Some("inbox-7".to_owned());
        assert_eq!(own.read::<ListRequest>().unwrap().options.request_id.as_deref(), Some("inbox-7"));
    }

    #[test]
    fn an_error_does_not_echo_a_long_verb() {
        let error = call(&format!("ballast.v1.default.{}", "x".repeat(2000)), "{}").unwrap_err();
        assert!(error.message.len() < 1000);
    }

    #[test]
    fn every_answer_carries_the_log_sequence() {
        let answer = Answer::new(9, &serde_json::json!({"exists": true})).unwrap();
        assert_eq!(&answer.body[..], br#"{"exists":true,"log_seq":9}"#);
        let body: Value = serde_json::from_slice(&error_body(&BallastError::invalid("no"), 4)).unwrap();
        assert_eq!((body["log_seq"].as_u64(), body["error"]["number"].as_u64()), (Some(4), Some(1)));
    }
}

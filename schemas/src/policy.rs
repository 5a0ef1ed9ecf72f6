//! The residency policy of a revision (RFC, Residency Policy). Ratios are integer parts per million inside;
//! the JSON face shows them as a number between 0 and 1.

use serde::{Deserialize, Serialize};

use crate::state::{MigrationMode, Residency};
use crate::text;

/// Why a policy is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// A ratio outside (0, 1), or not a number.
    #[error("mixed_hot_ratio is {given}; it must be a number above 0 and below 1 (default 0.5)")]
    Ratio {
        /// What was given.
        given: String,
    },
    /// A preferred residency that nothing can be moved to.
    #[error("preferred_residency is {given}; it must be HOT, COLD or MIXED")]
    Preferred {
        /// What was given.
        given: Residency,
    },
}

/// Hot logical payload bytes over all logical payload bytes, in parts per million, above 0 and below 1,000,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HotRatio(u32);

impl Serialize for HotRatio {
    /// A number between 0 and 1 in JSON; parts per million in MessagePack, so that no float enters the log.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.serialize_f64((*self).into())
        } else {
            serializer.serialize_u32(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for HotRatio {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ratio = if deserializer.is_human_readable() {
            match RatioFace::deserialize(deserializer)? {
                RatioFace::Number(number) => Self::from_f64(number),
                RatioFace::Other(_) => Err(PolicyError::Ratio { given: "not a number".into() }),
            }
        } else {
            Self::from_ppm(u32::deserialize(deserializer)?)
        };
        ratio.map_err(serde::de::Error::custom)
    }
}

/// What JSON may hold for a ratio.
#[derive(Deserialize)]
#[serde(untagged)]
enum RatioFace {
    Number(f64),
    Other(serde::de::IgnoredAny),
}

impl HotRatio {
    /// One half.
    pub const HALF: HotRatio = HotRatio(500_000);

    /// From parts per million.
    ///
    /// # Errors
    /// When it is not above 0 and below 1,000,000.
    pub fn from_ppm(ppm: u32) -> Result<Self, PolicyError> {
        if (1..1_000_000).contains(&ppm) {
            Ok(Self(ppm))
        } else {
            Err(PolicyError::Ratio { given: (f64::from(ppm) / 1e6).to_string() })
        }
    }

    /// From a number between 0 and 1, rounded to parts per million.
    ///
    /// # Errors
    /// When it is not a number above 0 and below 1.
    pub fn from_f64(ratio: f64) -> Result<Self, PolicyError> {
        let error = || PolicyError::Ratio { given: format!("{ratio:?}") };
        if !ratio.is_finite() || ratio <= 0.0 || ratio >= 1.0 {
            return Err(error());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 1,000,000")]
        let ppm = (ratio * 1e6).round() as u32;
        Self::from_ppm(ppm.clamp(1, 999_999))
    }

    /// Parts per million.
    #[must_use]
    pub fn ppm(self) -> u32 {
        self.0
    }
}

impl From<HotRatio> for f64 {
    fn from(ratio: HotRatio) -> f64 {
        f64::from(ratio.0) / 1e6
    }
}

/// The persisted policy of one revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct WeightStoragePolicy {
    /// HOT, COLD or MIXED: where the revision should converge.
    pub preferred_residency: Residency,
    /// The hot share when MIXED.
    pub mixed_hot_ratio: HotRatio,
    /// What may change residency after the initial convergence.
    pub migration_mode: MigrationMode,
}

impl Default for WeightStoragePolicy {
    fn default() -> Self {
        Self {
            preferred_residency: Residency::Mixed,
            mixed_hot_ratio: HotRatio::HALF,
            migration_mode: MigrationMode::Auto,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of fields (a JSON object)")]
struct RawPolicy {
    #[serde(default = "default_preferred", deserialize_with = "preferred")]
    preferred_residency: Residency,
    #[serde(default = "default_ratio")]
    mixed_hot_ratio: HotRatio,
    #[serde(default = "default_mode")]
    migration_mode: MigrationMode,
}

/// Reads a residency that something can be moved to.
pub(crate) fn preferred<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Residency, D::Error> {
    text::one_of(deserializer, &[Residency::Hot, Residency::Cold, Residency::Mixed], Residency::name)
}

fn default_preferred() -> Residency {
    Residency::Mixed
}

fn default_ratio() -> HotRatio {
    HotRatio::HALF
}

fn default_mode() -> MigrationMode {
    MigrationMode::Auto
}

impl<'de> Deserialize<'de> for WeightStoragePolicy {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawPolicy::deserialize(deserializer)?;
        Self::new(raw.preferred_residency, raw.mixed_hot_ratio, raw.migration_mode).map_err(serde::de::Error::custom)
    }
}

impl WeightStoragePolicy {
    /// A policy whose preferred residency can be reached.
    ///
    /// # Errors
    /// When `preferred_residency` is UNKNOWN or ABSENT.
    pub fn new(
        preferred_residency: Residency,
        mixed_hot_ratio: HotRatio,
        migration_mode: MigrationMode,
    ) -> Result<Self, PolicyError> {
        match preferred_residency {
            Residency::Hot | Residency::Cold | Residency::Mixed => {
                Ok(Self { preferred_residency, mixed_hot_ratio, migration_mode })
            }
            given => Err(PolicyError::Preferred { given }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_zero_one_or_not_a_number_is_refused() {
        for wrong in [0.0, 1.0, -0.1, 1.5, f64::NAN, f64::INFINITY] {
            assert!(HotRatio::from_f64(wrong).is_err(), "{wrong}");
        }
        assert_eq!(HotRatio::from_f64(0.25).unwrap().ppm(), 250_000);
        for wrong in ["0", "1", "\"NaN\"", "null", "true"] {
            let text = format!(r#"{{"mixed_hot_ratio":{wrong}}}"#);
            let error = serde_json::from_str::<WeightStoragePolicy>(&text).unwrap_err().to_string();
            assert!(error.contains("mixed_hot_ratio"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_policy_survives_json_and_messagepack() {
        let policy =
            WeightStoragePolicy::new(Residency::Cold, HotRatio::from_ppm(333_333).unwrap(), MigrationMode::Pinned)
                .unwrap();
        let json = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<WeightStoragePolicy>(&json).unwrap(), policy);
        let packed = rmp_serde::to_vec_named(&policy).unwrap();
        assert_eq!(rmp_serde::from_slice::<WeightStoragePolicy>(&packed).unwrap(), policy);
        assert!(serde_json::from_str::<WeightStoragePolicy>(r#"{"preferred_residency":"ABSENT"}"#).is_err());
    }
}

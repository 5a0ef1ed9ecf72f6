//! The cluster's settings and the keys people name them by (RFC, Configuration). A key is one line of [`SETTINGS`].
//!
//! Not here: where the values come from (files, environment, flags: the command line).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::policy::{HotRatio, WeightStoragePolicy};
use crate::state::{Capability, MigrationMode, Residency};

/// Cluster-wide settings (RFC, Configuration). A published revision always uses its own persisted policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// For revisions whose caller gives none.
    pub default_policy: WeightStoragePolicy,
    /// Shortest time between two AUTO migrations of one revision.
    pub migration_cooldown_ms: u64,
    /// Units of one migration round.
    pub migration_max_members_per_round: u32,
    /// Logical bytes of one migration round.
    pub migration_max_bytes_per_round: u64,
    /// Units of one deletion batch.
    pub deletion_max_members_per_round: u32,
    /// Share of a node's memory tier, in parts per million, above which AUTO revisions are demoted.
    pub memory_high_watermark_ppm: u32,
    /// Down to this share they are demoted, and up to it they are promoted again.
    pub memory_low_watermark_ppm: u32,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            default_policy: WeightStoragePolicy::default(),
            migration_cooldown_ms: 30_000,
            migration_max_members_per_round: 64,
            migration_max_bytes_per_round: 1 << 30,
            deletion_max_members_per_round: 64,
            memory_high_watermark_ppm: 900_000,
            memory_low_watermark_ppm: 800_000,
        }
    }
}

impl ClusterConfig {
    /// Refuses what would stop every migration, or never let one rest.
    ///
    /// # Errors
    /// Naming the key, its value and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let mut config = self.clone();
        let too_small = SETTINGS.iter().find_map(|setting| match setting.place {
            Place::U64(at, min) => Some((setting, *at(&mut config))).filter(|(_, count)| *count < min),
            Place::U32(at, min) => {
                Some((setting, u64::from(*at(&mut config)))).filter(|(_, count)| *count < u64::from(min))
            }
            Place::Share(at) => Some((setting, u64::from(*at(&mut config)))).filter(|(_, ppm)| !is_share(*ppm)),
            // Whatever such a place can hold is allowed.
            Place::Residency(_) | Place::Ratio(_) | Place::Mode(_) | Place::Gate(_) => None,
        });
        if let Some((setting, count)) = too_small {
            return Err(setting.refusal(&setting.spelled(count)));
        }
        let (low, high) = (self.memory_low_watermark_ppm, self.memory_high_watermark_ppm);
        if low >= high {
            return Err(format!(
                "weight_memory_low_watermark is {} and weight_memory_high_watermark {}; the low one must be below the high one",
                share(low),
                share(high)
            ));
        }
        Ok(())
    }
}

/// What a cluster is created with: its settings, and the gates that are open from the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The settings.
    pub config: ClusterConfig,
    /// The open gates. A new log has no older replica that could not fold them, so by default all are.
    pub capabilities: BTreeSet<Capability>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { config: ClusterConfig::default(), capabilities: Capability::ALL.iter().copied().collect() }
    }
}

/// One key of the settings.
#[derive(Debug)]
pub struct Setting {
    /// As the RFC writes it.
    pub key: &'static str,
    place: Place,
}

/// Where a key's value lives, and with it what values it takes.
#[derive(Debug)]
enum Place {
    Residency(fn(&mut ClusterConfig) -> &mut Residency),
    Ratio(fn(&mut ClusterConfig) -> &mut HotRatio),
    Mode(fn(&mut ClusterConfig) -> &mut MigrationMode),
    /// With the least that is allowed.
    U64(fn(&mut ClusterConfig) -> &mut u64, u64),
    U32(fn(&mut ClusterConfig) -> &mut u32, u32),
    /// In parts per million; written as a fraction of 1.
    Share(fn(&mut ClusterConfig) -> &mut u32),
    Gate(Capability),
}

const fn setting(key: &'static str, place: Place) -> Setting {
    Setting { key, place }
}

/// Every key.
pub const SETTINGS: &[Setting] = &[
    setting("default_weight_preferred_residency", Place::Residency(|c| &mut c.default_policy.preferred_residency)),
    setting("default_weight_mixed_hot_ratio", Place::Ratio(|c| &mut c.default_policy.mixed_hot_ratio)),
    setting("default_weight_migration_mode", Place::Mode(|c| &mut c.default_policy.migration_mode)),
    setting("weight_management_oplog_capability_confirmed", Place::Gate(Capability::WeightManagement)),
    setting("weight_lineage_oplog_capability_confirmed", Place::Gate(Capability::WeightLineage)),
    setting("weight_sharing_oplog_capability_confirmed", Place::Gate(Capability::WeightSharing)),
    setting("weight_migration_cooldown_ms", Place::U64(|c| &mut c.migration_cooldown_ms, 0)),
    setting("weight_migration_max_members_per_round", Place::U32(|c| &mut c.migration_max_members_per_round, 1)),
    setting("weight_migration_max_bytes_per_round", Place::U64(|c| &mut c.migration_max_bytes_per_round, 1)),
    setting("weight_deletion_max_members_per_round", Place::U32(|c| &mut c.deletion_max_members_per_round, 1)),
    setting("weight_memory_high_watermark", Place::Share(|c| &mut c.memory_high_watermark_ppm)),
    setting("weight_memory_low_watermark", Place::Share(|c| &mut c.memory_low_watermark_ppm)),
];

const PPM: f64 = 1_000_000.0;

fn is_share(ppm: u64) -> bool {
    (1..=1_000_000).contains(&ppm)
}

/// Parts per million as a fraction of 1.
fn share(ppm: u32) -> f64 {
    f64::from(ppm) / PPM
}

impl Setting {
    /// The setting of that key.
    ///
    /// # Errors
    /// Naming the key and those that there are.
    pub fn named(key: &str) -> Result<&'static Self, String> {
        SETTINGS.iter().find(|setting| setting.key == key).ok_or_else(|| {
            let known: Vec<&str> = SETTINGS.iter().map(|setting| setting.key).collect();
            format!("{key:?} is no setting; there are: {}", known.join(", "))
        })
    }

    /// What values it takes.
    #[must_use]
    pub fn allowed(&self) -> String {
        match self.place {
            Place::Residency(_) => "hot, cold or mixed".to_owned(),
            Place::Ratio(_) => "a number above 0 and below 1".to_owned(),
            Place::Mode(_) => "pinned, manual or auto".to_owned(),
            Place::U64(_, min) => format!("a whole number of at least {min}"),
            Place::U32(_, min) => format!("a whole number from {min} to {}", u32::MAX),
            Place::Share(_) => "a number above 0 and at most 1".to_owned(),
            Place::Gate(_) => "true or false".to_owned(),
        }
    }

    /// The gate that it opens, if it is one.
    #[must_use]
    pub fn gate(&self) -> Option<Capability> {
        match self.place {
            Place::Gate(capability) => Some(capability),
            _ => None,
        }
    }

    /// Its value.
    #[must_use]
    pub fn get(&self, config: &ClusterConfig, capabilities: &BTreeSet<Capability>) -> Value {
        let mut config = config.clone();
        match self.place {
            Place::Residency(at) => at(&mut config).name().to_ascii_lowercase().into(),
            Place::Ratio(at) => json!(*at(&mut config)),
            Place::Mode(at) => at(&mut config).name().to_ascii_lowercase().into(),
            Place::U64(at, _) => (*at(&mut config)).into(),
            Place::U32(at, _) => (*at(&mut config)).into(),
            Place::Share(at) => share(*at(&mut config)).into(),
            Place::Gate(capability) => capabilities.contains(&capability).into(),
        }
    }

    /// Sets it; text is read as the value it spells.
    ///
    /// # Errors
    /// Naming the key, the value and what is allowed.
    pub fn set(&self, settings: &mut Settings, value: &Value) -> Result<(), String> {
        let text = match value {
            Value::String(text) => text.trim().to_owned(),
            other => other.to_string(),
        };
        let config = &mut settings.config;
        let is_set = match self.place {
            Place::Residency(at) => match Residency::from_name(&text) {
                Some(found @ (Residency::Hot | Residency::Cold | Residency::Mixed)) => put(at(config), Some(found)),
                _ => false,
            },
            Place::Ratio(at) => put(at(config), text.parse().ok().and_then(|ratio| HotRatio::from_f64(ratio).ok())),
            Place::Mode(at) => put(at(config), MigrationMode::from_name(&text)),
            Place::U64(at, min) => put(at(config), text.parse().ok().filter(|count| *count >= min)),
            Place::U32(at, min) => put(at(config), text.parse().ok().filter(|count| *count >= min)),
            Place::Share(at) => {
                let ppm = text.parse().ok().map(|share: f64| (share * PPM).round());
                // Of a number that is none, or out of range, the cast makes 0 or the largest one; neither is a share.
                put(at(config), ppm.map(|ppm| ppm as u32).filter(|ppm| is_share((*ppm).into())))
            }
            Place::Gate(capability) => match text.as_str() {
                "true" => {
                    settings.capabilities.insert(capability);
                    true
                }
                "false" => {
                    settings.capabilities.remove(&capability);
                    true
                }
                _ => false,
            },
        };
        if is_set { Ok(()) } else { Err(self.refusal(&text)) }
    }

    /// A stored number as people write it.
    fn spelled(&self, stored: u64) -> String {
        match self.place {
            Place::Share(_) => (stored as f64 / PPM).to_string(),
            _ => stored.to_string(),
        }
    }

    fn refusal(&self, value: &str) -> String {
        format!("{} is {value}; it must be {}", self.key, self.allowed())
    }
}

fn put<T>(place: &mut T, value: Option<T>) -> bool {
    let is_valid = value.is_some();
    if let Some(value) = value {
        *place = value;
    }
    is_valid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_reads_back_what_it_was_set_to_and_refuses_what_it_can_not_be() {
        let values = [
            ("default_weight_preferred_residency", json!("cold"), json!("absent")),
            ("default_weight_mixed_hot_ratio", json!(0.25), json!(1)),
            ("default_weight_migration_mode", json!("pinned"), json!("sometimes")),
            ("weight_management_oplog_capability_confirmed", json!(false), json!("maybe")),
            ("weight_lineage_oplog_capability_confirmed", json!(false), json!(0)),
            ("weight_sharing_oplog_capability_confirmed", json!(false), json!("")),
            ("weight_migration_cooldown_ms", json!(0), json!(-1)),
            ("weight_migration_max_members_per_round", json!(7), json!(0)),
            ("weight_migration_max_bytes_per_round", json!(1), json!(0)),
            ("weight_deletion_max_members_per_round", json!(u32::MAX), json!(1_u64 << 32)),
            ("weight_memory_high_watermark", json!(0.95), json!(1.5)),
            ("weight_memory_low_watermark", json!(0.25), json!(0)),
        ];
        let mut settings = Settings::default();
        for (key, good, bad) in values {
            let setting = Setting::named(key).unwrap();
            setting.set(&mut settings, &good).unwrap();
            assert_eq!(setting.get(&settings.config, &settings.capabilities), good, "{key}");
            let before = settings.clone();
            let error = setting.set(&mut settings, &bad).unwrap_err();
            assert!(error.contains(key) && error.contains(&setting.allowed()), "{error}");
            assert_eq!(settings, before);
        }
        settings.config.validate().unwrap();
        let text = Setting::named("weight_migration_cooldown_ms").unwrap();
        text.set(&mut settings, &json!(" 12 ")).unwrap();
        assert_eq!(settings.config.migration_cooldown_ms, 12, "environment variables are text");
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = Setting::named("weight_migration_coldown_ms").unwrap_err();
        assert!(
            error.contains("weight_migration_coldown_ms") && error.contains("weight_migration_cooldown_ms"),
            "{error}"
        );
    }

    #[test]
    fn a_limit_of_zero_is_refused_by_name() {
        let config = ClusterConfig { migration_max_bytes_per_round: 0, ..ClusterConfig::default() };
        let error = config.validate().unwrap_err();
        assert!(error.contains("weight_migration_max_bytes_per_round is 0"), "{error}");
    }

    #[test]
    fn watermarks_that_would_never_let_a_revision_rest_are_refused() {
        let config = ClusterConfig { memory_low_watermark_ppm: 900_000, ..ClusterConfig::default() };
        let error = config.validate().unwrap_err();
        assert!(error.contains("weight_memory_low_watermark is 0.9") && error.contains("below"), "{error}");
        let config = ClusterConfig { memory_high_watermark_ppm: 1_000_001, ..ClusterConfig::default() };
        assert!(config.validate().unwrap_err().contains("at most 1"));
    }
}

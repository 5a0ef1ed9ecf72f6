//! Where a service's settings come from: a flag, before the environment, before a file (RFC, Configuration). They are what a new
//! cluster is created with. A cluster that exists keeps its own, and a service that was given others says so.

use std::collections::BTreeMap;

use ballast_schemas::{BallastError, Setting, Settings};
use ballast_workflows::State;
use serde_json::Value;

use crate::args::ConfigArgs;

/// Environment variables that begin like this are settings, whatever follows.
const OURS: [&str; 2] = ["BALLAST_WEIGHT_", "BALLAST_DEFAULT_WEIGHT_"];

/// What was given, and what it makes of the defaults.
#[derive(Debug)]
pub struct Given {
    /// To create a cluster with.
    pub settings: Settings,
    keys: Vec<&'static Setting>,
}

/// Reads every source. An unknown key or an impossible value is refused by name.
pub fn given(args: &ConfigArgs) -> Result<Given, BallastError> {
    let file = match &args.config {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|error| {
                BallastError::invalid(format!("the configuration file {} can not be read: {error}", path.display()))
            })?;
            Some((path.display().to_string(), text))
        }
        None => None,
    };
    let file = file.as_ref().map(|(path, text)| (path.as_str(), text.as_str()));
    layered(file, std::env::vars(), &args.set).map_err(BallastError::invalid)
}

fn layered(
    file: Option<(&str, &str)>,
    environment: impl Iterator<Item = (String, String)>,
    flags: &[(String, String)],
) -> Result<Given, String> {
    let mut values: BTreeMap<&'static str, (&'static Setting, Value, String)> = BTreeMap::new();
    let mut put = |key: &str, value: Value, source: String| -> Result<(), String> {
        let setting = Setting::named(key).map_err(|reason| format!("{source}: {reason}"))?;
        values.insert(setting.key, (setting, value, source));
        Ok(())
    };
    if let Some((path, text)) = file {
        let keys: Option<BTreeMap<String, Value>> =
            serde_saphyr::from_str(text).map_err(|error| format!("the configuration file {path} is wrong: {error}"))?;
        for (key, value) in keys.unwrap_or_default() {
            put(&key, value, format!("the configuration file {path}"))?;
        }
    }
    for (variable, value) in environment.filter(|(name, _)| OURS.iter().any(|ours| name.starts_with(ours))) {
        let key = variable.trim_start_matches("BALLAST_").to_ascii_lowercase();
        put(&key, value.into(), format!("the environment variable {variable}"))?;
    }
    for (key, value) in flags {
        put(key, value.as_str().into(), "--set".to_owned())?;
    }
    let mut given = Given { settings: Settings::default(), keys: Vec::new() };
    for (setting, value, source) in values.into_values() {
        setting.set(&mut given.settings, &value).map_err(|reason| format!("{source}: {reason}"))?;
        given.keys.push(setting);
    }
    Ok(given)
}

impl Given {
    /// One line about the settings that were given but are not the cluster's.
    pub fn differs_from(&self, state: &State) -> Option<String> {
        let capabilities = state.capabilities().collect();
        let other: Vec<String> = self
            .keys
            .iter()
            .filter_map(|setting| {
                let wanted = setting.get(&self.settings.config, &self.settings.capabilities);
                let found = setting.get(state.config(), &capabilities);
                (wanted != found).then(|| format!("{} is {found} here, not {wanted}", setting.key))
            })
            .collect();
        (!other.is_empty()).then(|| {
            format!(
                "the cluster keeps its own settings: {}; `ballast admin config set KEY=VALUE` changes one, `ballast admin confirm-capability` opens a gate",
                other.join("; ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &str, environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Given, String> {
        let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        layered(Some(("ballast.yaml", file)), owned(environment).into_iter(), &owned(flags))
    }

    const RFC: &str = r#"
default_weight_preferred_residency: "mixed"
default_weight_mixed_hot_ratio: 0.5
default_weight_migration_mode: "auto"
weight_management_oplog_capability_confirmed: false
weight_lineage_oplog_capability_confirmed: false
weight_migration_cooldown_ms: 30000
weight_migration_max_members_per_round: 64
weight_migration_max_bytes_per_round: 1073741824
"#;

    #[test]
    fn the_file_of_the_rfc_is_read() {
        let given = read(RFC, &[], &[]).unwrap();
        assert_eq!(given.settings.config, ballast_schemas::ClusterConfig::default());
        assert_eq!(given.settings.capabilities, [ballast_schemas::Capability::WeightSharing].into());
        assert_eq!(read("# nothing\n", &[], &[]).unwrap().settings, Settings::default());
    }

    #[test]
    fn a_flag_goes_before_the_environment_and_that_before_the_file() {
        let environment = [
            ("BALLAST_WEIGHT_MIGRATION_COOLDOWN_MS", "2"),
            ("BALLAST_WEIGHT_MIGRATION_MAX_MEMBERS_PER_ROUND", "2"),
            ("BALLAST_NATS", "not a setting"),
        ];
        let config = read(RFC, &environment, &[("weight_migration_cooldown_ms", "3")]).unwrap().settings.config;
        assert_eq!(config.migration_cooldown_ms, 3);
        assert_eq!(config.migration_max_members_per_round, 2);
        assert_eq!(config.migration_max_bytes_per_round, 1 << 30);
    }

    #[test]
    fn what_is_wrong_is_refused_by_source_key_value_and_what_is_allowed() {
        let error = read("weight_migration_max_bytes_per_round: 0\n", &[], &[]).unwrap_err();
        for word in ["ballast.yaml", "weight_migration_max_bytes_per_round", " 0;", "at least 1"] {
            assert!(error.contains(word), "{word}: {error}");
        }
        let error = read("", &[("BALLAST_WEIGHT_COLDOWN", "1")], &[]).unwrap_err();
        assert!(error.contains("BALLAST_WEIGHT_COLDOWN") && error.contains("weight_coldown"), "{error}");
        let error = read("", &[], &[("default_weight_mixed_hot_ratio", "1")]).unwrap_err();
        assert!(error.contains("--set") && error.contains("above 0 and below 1"), "{error}");
        assert!(read("speed: fast\n", &[], &[]).unwrap_err().contains("speed"));
        assert!(read("- a list\n", &[], &[]).is_err());
        assert!(read("weight_migration_cooldown_ms: 1\nweight_migration_cooldown_ms: 2\n", &[], &[]).is_err());
    }
}

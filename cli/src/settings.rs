//! Where a service's settings come from: a flag, before the environment, before a file (RFC, Configuration). They are what a new
//! cluster is created with. A cluster that exists keeps its own, and a service that was given others says so. What is a node's
//! own may stand in the same file.

use std::collections::BTreeMap;
use std::path::Path;

use ballast_schemas::{BallastError, Setting, Settings};
use ballast_workflows::State;
use serde_json::Value;

use crate::args::ConfigArgs;

/// Environment variables that begin like this are settings, whatever follows.
const OURS: [&str; 2] = ["BALLAST_WEIGHT_", "BALLAST_DEFAULT_WEIGHT_"];

/// The key of a node's own setting in the file: where its cold tier is in object storage.
const COLD_URL: &str = "cold_url";

/// What was given, and what it makes of the defaults.
#[derive(Debug)]
pub struct Given {
    /// To create a cluster with.
    pub settings: Settings,
    keys: Vec<&'static Setting>,
}

/// Reads every source. An unknown key or an impossible value is refused by name.
pub fn given(args: &ConfigArgs) -> Result<Given, BallastError> {
    let file = args.config.as_deref().map(read).transpose()?;
    let file = file.as_ref().map(|(path, text)| (path.as_str(), text.as_str()));
    layered(file, std::env::vars(), &args.set).map_err(BallastError::invalid)
}

/// Where a node's cold tier is in object storage, if it is: what the flag or the environment says, before the file.
pub fn cold_url(given: Option<&str>, config: Option<&Path>) -> Result<Option<String>, BallastError> {
    match (given, config) {
        (Some(url), _) => Ok(Some(url.to_owned())),
        (None, Some(path)) => {
            let (path, text) = read(path)?;
            cold_url_in(&path, &text).map_err(BallastError::invalid)
        }
        (None, None) => Ok(None),
    }
}

fn read(path: &Path) -> Result<(String, String), BallastError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        BallastError::invalid(format!("the configuration file {} can not be read: {error}", path.display()))
    })?;
    Ok((path.display().to_string(), text))
}

fn keys_of(path: &str, text: &str) -> Result<BTreeMap<String, Value>, String> {
    let keys: Option<BTreeMap<String, Value>> =
        serde_saphyr::from_str(text).map_err(|error| format!("the configuration file {path} is wrong: {error}"))?;
    Ok(keys.unwrap_or_default())
}

fn cold_url_in(path: &str, text: &str) -> Result<Option<String>, String> {
    let mut keys = keys_of(path, text)?;
    let url = keys.remove(COLD_URL);
    // The others are a cluster's; one that is nobody's is refused here too.
    for key in keys.keys() {
        Setting::named(key).map_err(|reason| format!("the configuration file {path}: {reason}"))?;
    }
    match url {
        None => Ok(None),
        Some(Value::String(url)) => Ok(Some(url)),
        // Not repeated: somebody may have put a secret into it.
        Some(_) => Err(format!("the configuration file {path}: {COLD_URL} is not a text; write s3://BUCKET/PREFIX")),
    }
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
        for (key, value) in keys_of(path, text)?.into_iter().filter(|(key, _)| key != COLD_URL) {
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
    fn a_file_serves_the_cluster_and_its_nodes() {
        let file = format!("{RFC}cold_url: s3://models/ballast\n");
        assert_eq!(read(&file, &[], &[]).unwrap().settings.config, ballast_schemas::ClusterConfig::default());
        assert_eq!(cold_url_in("ballast.yaml", &file).unwrap().as_deref(), Some("s3://models/ballast"));
        assert_eq!(cold_url_in("ballast.yaml", RFC).unwrap(), None);
        let error = cold_url_in("ballast.yaml", "cold_url: [secret]\n").unwrap_err();
        assert!(error.contains("ballast.yaml") && error.contains("s3://") && !error.contains("secret"), "{error}");
        assert!(cold_url_in("ballast.yaml", "cold_ulr: s3://models\n").unwrap_err().contains("cold_ulr"));
        assert_eq!(
            cold_url(Some("s3://given"), Some(Path::new("no such file"))).unwrap().as_deref(),
            Some("s3://given")
        );
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

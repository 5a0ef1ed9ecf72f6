//! Finds a nats-server binary that is new enough, and says in one sentence what to do when there is none.
//!
//! Order: `BALLAST_NATS_SERVER`, `PATH`, the project's cache folder (where `ops/fetch-nats-server` puts it), the user's.
//! Not here: starting it (`embedded.rs`).

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// The version that `ops/fetch-nats-server` installs.
const PINNED_VERSION: &str = "2.15.1";

/// What Ballast needs at least: JetStream's strict API, consumer and stream metadata, and the fix for whole-stream loss on
/// a process crash (2.10.23) all came after Debian's 2.9.
pub(crate) const OLDEST_VERSION: ServerVersion = ServerVersion { major: 2, minor: 12, patch: 0 };

/// From here on replicated streams sync to disk in groups; older servers are correct but slow with `sync_interval: always`.
pub(crate) const RECOMMENDED_VERSION: ServerVersion = ServerVersion { major: 2, minor: 15, patch: 0 };

/// A nats-server version, ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for ServerVersion {
    type Err = ();

    /// Reads `2.15.1`, `v2.15.1` and `2.15.0-dev`; the suffix is ignored.
    fn from_str(text: &str) -> Result<Self, ()> {
        let text = text.trim().trim_start_matches('v');
        let core = text.split(['-', '+']).next().unwrap_or_default();
        let mut numbers = core.split('.').map(|part| part.parse::<u32>().map_err(|_| ()));
        let mut next = || numbers.next().unwrap_or(Err(()));
        Ok(Self { major: next()?, minor: next()?, patch: next()? })
    }
}

/// A binary that answered `--version` with a version that is new enough.
#[derive(Debug, Clone)]
pub struct NatsServerBinary {
    pub path: PathBuf,
    pub version: ServerVersion,
}

/// Why there is no nats-server to start.
#[derive(Debug, thiserror::Error)]
pub enum LocateError {
    #[error(
        "no nats-server found (looked at BALLAST_NATS_SERVER, PATH and {searched}): run `ops/fetch-nats-server`, or set BALLAST_NATS_SERVER to a nats-server >= {OLDEST_VERSION}"
    )]
    NotFound { searched: String },
    #[error(
        "{} is nats-server {found}, and Ballast needs >= {OLDEST_VERSION}: older servers (Debian ships 2.9) lack stream metadata, the strict JetStream API and fixes for lost streams; run `ops/fetch-nats-server`",
        path.display()
    )]
    TooOld { path: PathBuf, found: ServerVersion },
    #[error("{} could not be run as nats-server ({reason}): set BALLAST_NATS_SERVER to a nats-server >= {OLDEST_VERSION}, or run `ops/fetch-nats-server`", path.display())]
    Unusable { path: PathBuf, reason: String },
}

/// The first usable nats-server of the places above.
///
/// `BALLAST_NATS_SERVER` is binding: if it names something unusable that is an error, never a silent second choice. A server
/// on `PATH` that is too old is passed over when a cache folder has a newer one, and is the error otherwise.
pub fn locate_nats_server() -> Result<NatsServerBinary, LocateError> {
    if let Some(path) = std::env::var_os("BALLAST_NATS_SERVER").filter(|value| !value.is_empty()) {
        return probe(Path::new(&path));
    }
    let mut refused = None;
    let on_path = std::env::var_os("PATH").map(|path| candidates_on_path(&path)).unwrap_or_default();
    let cached = cache_candidates();
    for candidate in on_path.iter().chain(&cached) {
        if !candidate.is_file() {
            continue;
        }
        match probe(candidate) {
            Ok(binary) => return Ok(binary),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| LocateError::NotFound {
        searched: cached.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
    }))
}

fn candidates_on_path(path: &OsString) -> Vec<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join("nats-server")).collect()
}

/// The cache folders: of the checkout around the working folder, of the checkout around this executable, of the user.
fn cache_candidates() -> Vec<PathBuf> {
    let below = Path::new("nats-server").join(PINNED_VERSION).join("nats-server");
    let mut found = Vec::new();
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    for start in starts.into_iter().flatten() {
        // A checkout is known by the script that fills its cache folder.
        if let Some(root) = start.ancestors().find(|folder| folder.join("ops/fetch-nats-server").is_file()) {
            found.push(root.join(".cache").join(&below));
        }
    }
    let user_cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    if let Some(folder) = user_cache {
        found.push(folder.join("ballast").join(&below));
    }
    found.dedup();
    found
}

fn probe(path: &Path) -> Result<NatsServerBinary, LocateError> {
    let unusable = |reason: String| LocateError::Unusable { path: path.to_owned(), reason };
    let output = Command::new(path).arg("--version").output().map_err(|error| unusable(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The answer is `nats-server: v2.15.1`.
    let version = text
        .split_whitespace()
        .find_map(|word| word.parse::<ServerVersion>().ok())
        .ok_or_else(|| unusable(format!("`--version` answered {:?}", text.trim())))?;
    if version < OLDEST_VERSION {
        return Err(LocateError::TooOld { path: path.to_owned(), found: version });
    }
    Ok(NatsServerBinary { path: path.to_owned(), version })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_with_prefix_and_suffix_and_ordered() {
        let read = |text: &str| text.parse::<ServerVersion>();
        assert_eq!(read("v2.15.1"), Ok(ServerVersion { major: 2, minor: 15, patch: 1 }));
        assert_eq!(read("2.15.0-dev"), Ok(ServerVersion { major: 2, minor: 15, patch: 0 }));
        assert_eq!(read("nats"), Err(()));
        assert_eq!(read("2.15"), Err(()));
        assert!(read("2.9.10").unwrap() < OLDEST_VERSION);
        assert!(read("2.12.0").unwrap() >= OLDEST_VERSION);
    }

    #[test]
    fn a_server_older_than_2_12_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let old = folder.path().join("nats-server");
        std::fs::write(&old, "#!/bin/sh\necho 'nats-server: v2.9.10'\n").unwrap();
        let mut mode = std::fs::metadata(&old).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
        std::fs::set_permissions(&old, mode).unwrap();
        let error = probe(&old).unwrap_err();
        assert!(matches!(error, LocateError::TooOld { .. }));
        assert!(error.to_string().contains("2.9.10") && error.to_string().contains("2.12.0"), "{error}");
    }
}

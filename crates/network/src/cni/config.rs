//! Configurations of networks: chooses the file and parses it. No process is started here.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Versions of the specification that we speak.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// No configuration is larger.
const MAX_BYTES: u64 = 1 << 20;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("it is no JSON object: {0}")]
    Json(String),
    #[error("{0:?} is missing or is not text")]
    Missing(&'static str),
    #[error(
        "{what} {value:?} may have letters, digits, '.', '-' and '_' only, and begins with a letter or digit"
    )]
    BadName { what: &'static str, value: String },
    #[error("cniVersion {0:?} is not supported: 0.3.0 to 1.1.0 are")]
    Version(String),
    #[error("the list has no plugins")]
    NoPlugins,
}

/// One plugin of a network.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginConfig {
    /// The name of its program.
    pub kind: String,
    /// The plugin's configuration, without the caller's additions.
    pub object: Map<String, Value>,
}

impl PluginConfig {
    fn new(object: &Value) -> Result<Self, ConfigError> {
        let Value::Object(object) = object else {
            return Err(ConfigError::Json("a plugin is no object".into()));
        };
        let kind = object.get("type").and_then(Value::as_str).ok_or(ConfigError::Missing("type"))?;
        check_name("type", kind)?;
        Ok(Self { kind: kind.to_owned(), object: object.clone() })
    }

    /// Returns true if it asks for a capability.
    pub fn has(&self, capability: &str) -> bool {
        self.object.get("capabilities").and_then(|all| all.get(capability)).and_then(Value::as_bool)
            == Some(true)
    }
}

/// A network: its plugins are called one after the other.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkConfig {
    pub name: String,
    pub version: String,
    pub disable_check: bool,
    pub disable_gc: bool,
    /// Never empty.
    pub plugins: Vec<PluginConfig>,
}

fn check_name(what: &'static str, value: &str) -> Result<(), ConfigError> {
    let first = value.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    match first && value.bytes().all(good) && value.len() <= 255 {
        true => Ok(()),
        false => Err(ConfigError::BadName { what, value: value.to_owned() }),
    }
}

impl NetworkConfig {
    /// Reads a list of plugins, or one plugin, which is a list of one.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let object: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|error| ConfigError::Json(error.to_string()))?;
        let name = object.get("name").and_then(Value::as_str).ok_or(ConfigError::Missing("name"))?;
        check_name("name", name)?;
        let flag = |key: &str| match object.get(key) {
            Some(Value::Bool(value)) => *value,
            Some(Value::String(text)) => text.eq_ignore_ascii_case("true"),
            _ => false,
        };
        let plugins = match object.get("plugins") {
            Some(Value::Array(plugins)) => {
                plugins.iter().map(PluginConfig::new).collect::<Result<Vec<_>, _>>()?
            }
            Some(_) => return Err(ConfigError::Json("plugins is no list".into())),
            None => vec![PluginConfig::new(&Value::Object(object.clone()))?],
        };
        if plugins.is_empty() {
            return Err(ConfigError::NoPlugins);
        }
        Ok(Self {
            name: name.to_owned(),
            version: version(&object)?,
            disable_check: flag("disableCheck"),
            disable_gc: flag("disableGC"),
            plugins,
        })
    }

    /// Returns true if the network's version is at least `version`.
    pub fn is_at_least(&self, version: &str) -> bool {
        let rank = |version: &str| VERSIONS.iter().position(|known| *known == version);
        rank(&self.version) >= rank(version)
    }
}

/// The highest version of `cniVersions` and `cniVersion` that we speak.
fn version(object: &Map<String, Value>) -> Result<String, ConfigError> {
    let one = object.get("cniVersion").map(|value| value.as_str().ok_or(ConfigError::Missing("cniVersion")));
    // As libcni: a configuration without a version is of the first one, which nobody speaks any more.
    let one = one.transpose()?.unwrap_or("0.1.0");
    let many = object.get("cniVersions").and_then(Value::as_array);
    let all = many.into_iter().flatten().filter_map(Value::as_str).chain([one]);
    let known = all.filter_map(|version| VERSIONS.iter().position(|known| *known == version)).max();
    match known.and_then(|rank| VERSIONS.get(rank)) {
        Some(version) => Ok((*version).to_owned()),
        None => Err(ConfigError::Version(one.to_owned())),
    }
}

/// The files of a directory that may be configurations, in the order in which they count.
fn candidates(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("conf" | "conflist" | "json")) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The network of a directory: the first file by name that can be used. Others are skipped with a warning.
pub fn discover(dir: &Path) -> Result<Option<NetworkConfig>, ConfigError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| ConfigError::Read { path, source }
    };
    let files = match candidates(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(fail(dir))?,
    };
    for path in files {
        let mut bytes = Vec::new();
        let read = fs::File::open(&path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
        match read.map_err(fail(&path)).and_then(|_| NetworkConfig::parse(&bytes)) {
            Ok(config) => return Ok(Some(config)),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "a network configuration is skipped")
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations() {
        type Want = Result<(&'static str, &'static str, usize), &'static str>;
        let rows: [(&str, Want); 11] = [
            (r#"{"cniVersion":"0.3.1","name":"net","type":"bridge"}"#, Ok(("net", "0.3.1", 1))),
            (
                r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"a"},{"type":"b"}]}"#,
                Ok(("net", "1.0.0", 2)),
            ),
            (
                r#"{"cniVersion":"0.4.0","cniVersions":["0.4.0","1.1.0","2.0.0"],"name":"n","type":"a"}"#,
                Ok(("n", "1.1.0", 1)),
            ),
            (r#"{"cniVersion":"1.1.0","name":"net","plugins":[]}"#, Err("no plugins")),
            (r#"{"cniVersion":"1.1.0","name":"net","plugins":7}"#, Err("no list")),
            (r#"{"cniVersion":"0.2.0","name":"net","type":"a"}"#, Err("not supported")),
            (r#"{"name":"net","type":"a"}"#, Err("not supported")),
            (r#"{"cniVersion":"1.0.0","type":"a"}"#, Err("\"name\"")),
            (r#"{"cniVersion":"1.0.0","name":"../x","type":"a"}"#, Err("name")),
            (r#"{"cniVersion":"1.0.0","name":"x","type":"../../bin/sh"}"#, Err("type")),
            ("[1]", Err("JSON")),
        ];
        for (text, want) in rows {
            match (NetworkConfig::parse(text.as_bytes()), want) {
                (Ok(seen), Ok((name, version, plugins))) => {
                    assert_eq!(
                        (seen.name.as_str(), seen.version.as_str(), seen.plugins.len()),
                        (name, version, plugins)
                    );
                }
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{text}: {error}"),
                (seen, want) => panic!("{text}: {seen:?}, not {want:?}"),
            }
        }
    }

    #[test]
    fn the_first_file_that_can_be_used_counts() {
        let dir = tempfile::tempdir().unwrap();
        let name = || discover(dir.path()).unwrap().map(|config| config.name);
        assert_eq!(discover(&dir.path().join("missing")).unwrap(), None);
        assert_eq!(name(), None);
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        write("calico-kubeconfig", "not for us");
        write("00-broken.conf", "{");
        write("10-x.conf", r#"{"cniVersion":"0.3.1","name":"x","type":"a"}"#);
        assert_eq!(name().as_deref(), Some("x"));
        write("05-y.conflist", r#"{"cniVersion":"1.0.0","name":"y","plugins":[{"type":"a"}]}"#);
        assert_eq!(name().as_deref(), Some("y"));
        fs::remove_file(dir.path().join("05-y.conflist")).unwrap();
        assert_eq!(name().as_deref(), Some("x"));
    }
}

//! The file that configures plugins: `--admission-control-config-file`.

use ferrite_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Configurations of plugins, by the plugins' names.
pub type Configurations = BTreeMap<String, Value>;

/// Why plugins cannot be configured as the file says.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not YAML: {why}")]
    Yaml { path: PathBuf, why: String },
    #[error("{path} is no AdmissionConfiguration of apiserver.config.k8s.io/v1")]
    Kind { path: PathBuf },
    #[error("{path}: a plugin needs a name and either a path or a configuration of its own")]
    Plugin { path: PathBuf },
}

/// A configuration is a page; whatever is larger is something else.
const MAX_BYTES: u64 = 1 << 20;

fn read_yaml(path: &Path) -> Result<Value, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let wrong = |why: String| ConfigError::Yaml { path: path.to_owned(), why };
    if std::fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
        return Err(wrong("it is too large".into()));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    ferrite_api::codec::yaml::decode_any(&bytes)
        .map(|decoded| decoded.value)
        .map_err(|e| wrong(e.to_string()))
}

/// Reads the file and those it names. Their paths are taken from the file's own directory.
pub fn read(path: &Path) -> Result<Configurations, ConfigError> {
    let file = read_yaml(path)?;
    let known = matches!(
        file["apiVersion"].as_str(),
        Some("apiserver.config.k8s.io/v1" | "apiserver.config.k8s.io/v1alpha1" | "apiserver.k8s.io/v1alpha1")
    );
    if !known || file["kind"] != "AdmissionConfiguration" {
        return Err(ConfigError::Kind { path: path.to_owned() });
    }
    let mut found = Configurations::new();
    for plugin in file["plugins"].as_array().into_iter().flatten() {
        let elsewhere = plugin["path"].as_str().filter(|p| !p.is_empty());
        let configuration = match (elsewhere, &plugin["configuration"]) {
            (None, configuration @ Value::Object(_)) => configuration.clone(),
            (Some(elsewhere), Value::Null) => {
                read_yaml(&path.parent().unwrap_or(Path::new(".")).join(elsewhere))?
            }
            _ => return Err(ConfigError::Plugin { path: path.to_owned() }),
        };
        let name = plugin["name"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| ConfigError::Plugin { path: path.to_owned() })?;
        found.insert(name.to_owned(), configuration);
    }
    Ok(found)
}

/// Checks that a plugin's configuration is of this kind, in any version of its group.
pub(super) fn check_kind(configuration: &Value, group: &str, kind: &str) -> Result<(), String> {
    let version = configuration["apiVersion"].as_str().unwrap_or_default();
    if version.split_once('/').is_some_and(|(found, _)| found == group) && configuration["kind"] == kind {
        return Ok(());
    }
    Err(format!("the configuration must be a {kind} of {group}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_file_configures_here_and_elsewhere() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
        write("limits.yaml", "kind: Configuration\nlimits: []\n");
        write(
            "all.yaml",
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n\
             - name: EventRateLimit\n  path: limits.yaml\n- name: PodSecurity\n  configuration: {kind: X}\n",
        );
        let found = read(&dir.path().join("all.yaml")).expect("configurations");
        assert_eq!(found["EventRateLimit"], json!({"kind": "Configuration", "limits": []}));
        assert_eq!(found["PodSecurity"], json!({"kind": "X"}));
        for (text, why) in [
            ("kind: Pod", "no AdmissionConfiguration"),
            ("a: [", "not YAML"),
            (
                "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: [{name: a}]",
                "needs a name",
            ),
        ] {
            write("bad.yaml", text);
            let error = read(&dir.path().join("bad.yaml")).expect_err(text).to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(read(&dir.path().join("none.yaml")).is_err());
    }
}

//! Configuration files of components: YAML or JSON with `apiVersion` and `kind`, read strictly.

use std::io::Read;
use std::path::{Path, PathBuf};

use ferrite_json::Value;
use serde::de::DeserializeOwned;

use crate::nearest;

/// A larger file is no configuration.
const MAX_BYTES: u64 = 1 << 20;

/// The version and kind that a file must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeMeta {
    pub api_version: &'static str,
    pub kind: &'static str,
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is larger than 1 MiB", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}: {problem}", path.display())]
    Form { path: PathBuf, problem: String },
    #[error("{}: it is a {found}, not a {} of {}", path.display(), wanted.kind, wanted.api_version)]
    Kind { path: PathBuf, found: String, wanted: TypeMeta },
}

/// Reads a file of the type `wanted` into `T`, which refuses unknown fields (`deny_unknown_fields`) and does not have
/// `apiVersion` and `kind` itself.
pub fn read_config<T: DeserializeOwned>(path: &Path, wanted: TypeMeta) -> Result<T, ConfigError> {
    let read_error = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(read_error)?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(read_error)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(ConfigError::TooLarge { path: path.to_owned() });
    }
    parse(&text, path, wanted)
}

fn parse<T: DeserializeOwned>(text: &str, path: &Path, wanted: TypeMeta) -> Result<T, ConfigError> {
    let form = |problem: String| ConfigError::Form { path: path.to_owned(), problem };
    let value: Value = serde_saphyr::from_str(text).map_err(|error| form(error.to_string()))?;
    let Value::Object(mut members) = value else { return Err(form("it is no object".to_owned())) };
    let mut text_of = |name: &str| match members.remove(name) {
        Some(Value::String(text)) => text.to_string(),
        _ => String::new(),
    };
    let (api_version, kind) = (text_of("apiVersion"), text_of("kind"));
    if api_version != wanted.api_version || kind != wanted.kind {
        let found = match (api_version.as_str(), kind.as_str()) {
            ("", _) | (_, "") => "file without apiVersion or kind".to_owned(),
            (version, kind) => format!("{kind} of {version}"),
        };
        return Err(ConfigError::Kind { path: path.to_owned(), found, wanted });
    }
    ferrite_json::from_value(members.into()).map_err(|error| form(with_suggestion(&error.to_string())))
}

/// Names the field that was probably meant: serde lists all there are.
fn with_suggestion(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let Some(unknown) = message.starts_with("unknown field").then(|| quoted.next()).flatten() else {
        return message.to_owned();
    };
    match nearest(unknown, quoted) {
        Some(known) => format!("unknown field {unknown:?}: did you mean {known:?}?"),
        None => format!("unknown field {unknown:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GoDuration;
    use std::time::Duration;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "camelCase", default)]
    struct Sample {
        leader_elect: bool,
        resync_period: GoDuration,
    }

    impl Default for Sample {
        fn default() -> Self {
            Self { leader_elect: true, resync_period: GoDuration(Duration::from_secs(12)) }
        }
    }

    const WANTED: TypeMeta = TypeMeta { api_version: "example.io/v1", kind: "Sample" };

    #[test]
    fn files_are_read_strictly() {
        let head = "apiVersion: example.io/v1\nkind: Sample\n";
        let read = |text: &str| parse::<Sample>(text, Path::new("f"), WANTED).map_err(|e| e.to_string());
        assert_eq!(read(head), Ok(Sample::default()));
        assert_eq!(read(&format!("{head}resyncPeriod: 1m30s\n")).unwrap().resync_period.0.as_secs(), 90);
        for (text, problem) in [
            ("a: 1\n", "f: it is a file without apiVersion or kind, not a Sample of example.io/v1"),
            ("apiVersion: v1\nkind: Pod\n", "f: it is a Pod of v1, not a Sample of example.io/v1"),
            ("[]", "f: it is no object"),
        ] {
            assert_eq!(read(text).unwrap_err(), problem);
        }
        let typo = read(&format!("{head}leaderElct: false\n")).unwrap_err();
        assert_eq!(typo, "f: unknown field \"leaderElct\": did you mean \"leaderElect\"?");
        let strange = read(&format!("{head}zzzzzzzz: 1\n")).unwrap_err();
        assert_eq!(strange, "f: unknown field \"zzzzzzzz\"");
        assert!(read(&format!("{head}resyncPeriod: soon\n")).unwrap_err().contains("is not a duration"));
        assert!(read(&format!("{head}leaderElect: [\n")).is_err());
    }
}

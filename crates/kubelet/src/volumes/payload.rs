//! Computes the files of a volume: a pure function of the objects that it projects.

use crate::container::fields::{self, Addresses, FieldError, NodeLimits};
use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, KeyToPath, Pod};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub data: Vec<u8>,
    pub mode: u32,
    /// The file's owner; root without one.
    pub user: Option<u32>,
}

impl File {
    pub(crate) fn new(data: Vec<u8>, mode: u32) -> Self {
        Self { data, mode, user: None }
    }
}

/// Files by their path beneath the volume.
pub(crate) type Payload = BTreeMap<String, File>;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum PayloadError {
    #[error("references non-existent {kind} key: {key}")]
    NoKey { kind: &'static str, key: String },
    #[error("invalid path \"{0}\": must be relative, without \"..\", and must not start with \"..\"")]
    BadPath(String),
    #[error(transparent)]
    Field(#[from] FieldError),
}

pub(crate) fn mode(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|m| u32::try_from(m).ok()).map_or(default, |m| m & 0o777)
}

/// Files of a ConfigMap or Secret: every key, or the listed ones at the listed paths.
pub(crate) fn from_data(
    kind: &'static str,
    data: &BTreeMap<String, Vec<u8>>,
    items: Option<&Vec<KeyToPath>>,
    default_mode: u32,
    optional: bool,
) -> Result<Payload, PayloadError> {
    let mut payload = Payload::new();
    let Some(items) = items.filter(|i| !i.is_empty()) else {
        for (key, value) in data {
            payload.insert(checked(key)?, File::new(value.clone(), default_mode));
        }
        return Ok(payload);
    };
    for item in items {
        match data.get(&item.key) {
            Some(value) => {
                let file = File::new(value.clone(), mode(item.mode, default_mode));
                payload.insert(checked(&item.path)?, file);
            }
            None if optional => {}
            None => return Err(PayloadError::NoKey { kind, key: item.key.clone() }),
        }
    }
    Ok(payload)
}

/// Files of the downward API.
pub(crate) fn from_fields(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    default_mode: u32,
    node: &NodeLimits,
) -> Result<Payload, PayloadError> {
    let mut payload = Payload::new();
    for item in items {
        let text = if let Some(r) = &item.field_ref {
            fields::field(pod, &r.field_path, &Addresses::default())?
        } else if let Some(r) = &item.resource_field_ref {
            fields::resource(pod, None, r, node)?
        } else {
            continue;
        };
        let file = File::new(text.into_bytes(), mode(item.mode, default_mode));
        payload.insert(checked(&item.path)?, file);
    }
    Ok(payload)
}

/// A path that stays beneath the volume and does not touch the writer's own entries (`..data`).
pub(crate) fn checked(path: &str) -> Result<String, PayloadError> {
    let bad = path.is_empty()
        || path.starts_with('/')
        || path.starts_with("..")
        || path.contains('\0')
        || path.len() > 4096
        || path.split('/').any(|part| matches!(part, "" | "." | ".."));
    if bad { Err(PayloadError::BadPath(path.into())) } else { Ok(path.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_files() {
        let data = BTreeMap::from([("a".to_string(), b"1".to_vec()), ("b".to_string(), b"2".to_vec())]);
        let item = |key: &str, path: &str, mode| KeyToPath { key: key.into(), path: path.into(), mode };
        let shown = |items: Option<Vec<KeyToPath>>, optional| match from_data(
            "secret",
            &data,
            items.as_ref(),
            0o644,
            optional,
        ) {
            Ok(p) => p.iter().map(|(k, f)| format!("{k}:{:o}", f.mode)).collect::<Vec<_>>().join(" "),
            Err(e) => e.to_string(),
        };
        assert_eq!(shown(None, false), "a:644 b:644");
        assert_eq!(shown(Some(vec![item("a", "x/y", Some(0o400))]), false), "x/y:400");
        assert_eq!(shown(Some(vec![item("no", "x", None)]), false), "references non-existent secret key: no");
        assert_eq!(shown(Some(vec![item("no", "x", None)]), true), "");
        for path in ["", "/x", "../x", "a/../b", "a//b", "..data", "a/."] {
            assert!(checked(path).is_err(), "{path}");
        }
    }
}

//! Levels and versions, and the labels that choose them.

use ferrite_api::field::{FieldError, Path};
use ferrite_json::Value;
use std::fmt;

/// From everything to next to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Privileged,
    Baseline,
    Restricted,
}

/// A level as of a minor version of Kubernetes; without one, as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    pub level: Level,
    pub version: Option<u32>,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Privileged => "privileged",
            Level::Baseline => "baseline",
            Level::Restricted => "restricted",
        };
        match self.version {
            None => write!(f, "{level}:latest"),
            Some(minor) => write!(f, "{level}:v1.{minor}"),
        }
    }
}

impl Default for Rule {
    fn default() -> Self {
        Self { level: Level::Privileged, version: None }
    }
}

/// The rules of a namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Policy {
    pub enforce: Rule,
    pub audit: Rule,
    pub warn: Rule,
}

const DOMAIN: &str = "pod-security.kubernetes.io";

impl Policy {
    /// The policy of a namespace, and the errors in its labels. Wrong labels enforce the strictest level;
    /// missing ones take the value from `defaults`.
    pub fn of(namespace: &Value, defaults: &Self) -> (Self, Vec<FieldError>) {
        let mut errors = Vec::new();
        let label = |name: &str| {
            namespace["metadata"]["labels"].get(format!("{DOMAIN}/{name}")).and_then(Value::as_str)
        };
        let mut refuse = |name: &str, value: &str, why: &str| {
            let path = Path::new("metadata").child("labels").key(&format!("{DOMAIN}/{name}"));
            errors.push(FieldError::invalid(&path, value, why));
        };
        let mut read = |mode: &str, fallback: Level| {
            let level = label(mode).map(|text| {
                level(text).unwrap_or_else(|| {
                    refuse(mode, text, "must be one of privileged, baseline, restricted");
                    fallback
                })
            });
            let key = format!("{mode}-version");
            let version = label(&key).map(|text| {
                version(text).unwrap_or_else(|| {
                    refuse(&key, text, r#"must be "latest" or "v1.x""#);
                    None
                })
            });
            (level, version)
        };
        let (enforce_level, enforce_version) = read("enforce", Level::Restricted);
        let (audit_level, audit_version) = read("audit", Level::Privileged);
        let (warn_level, warn_version) = read("warn", Level::Privileged);
        let enforce = Rule {
            level: enforce_level.unwrap_or(defaults.enforce.level),
            version: enforce_version.unwrap_or(defaults.enforce.version),
        };
        // As upstream: with only `enforce` set, its level also produces warnings.
        let fallback = if enforce_level.is_some() { enforce } else { defaults.warn };
        let warn = match warn_level {
            Some(level) => Rule { level, version: warn_version.unwrap_or(defaults.warn.version) },
            None => Rule { level: fallback.level, version: warn_version.unwrap_or(fallback.version) },
        };
        let audit = Rule {
            level: audit_level.unwrap_or(defaults.audit.level),
            version: audit_version.unwrap_or(defaults.audit.version),
        };
        (Self { enforce, audit, warn }, errors)
    }
}

impl Policy {
    /// The `defaults` of a configuration.
    pub fn read(defaults: &Value) -> Result<Self, String> {
        let text = |key: &str| defaults[key].as_str().filter(|text| !text.is_empty());
        let rule = |mode: &str| -> Result<Rule, String> {
            let wrong = |key: &str, text: &str| format!("defaults.{key}: {text:?} is not known");
            let key = format!("{mode}-version");
            let level = match text(mode) {
                None => Level::Privileged,
                Some(text) => level(text).ok_or_else(|| wrong(mode, text))?,
            };
            let version = match text(&key) {
                None => None,
                Some(text) => version(text).ok_or_else(|| wrong(&key, text))?,
            };
            Ok(Rule { level, version })
        };
        Ok(Self { enforce: rule("enforce")?, audit: rule("audit")?, warn: rule("warn")? })
    }
}

fn level(text: &str) -> Option<Level> {
    match text {
        "privileged" => Some(Level::Privileged),
        "baseline" => Some(Level::Baseline),
        "restricted" => Some(Level::Restricted),
        _ => None,
    }
}

/// `latest` is no version in particular.
fn version(text: &str) -> Option<Option<u32>> {
    if text == "latest" {
        return Some(None);
    }
    let minor = text.strip_prefix("v1.")?;
    let plain = minor.bytes().all(|b| b.is_ascii_digit()) && (minor.len() == 1 || !minor.starts_with('0'));
    plain.then(|| minor.parse().ok()).flatten().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn labels_choose_and_wrong_ones_are_told() {
        let of = |labels: Value| {
            let labels: ferrite_json::Map = labels
                .as_object()
                .unwrap()
                .iter()
                .map(|(k, v)| (format!("{DOMAIN}/{k}"), v.clone()))
                .collect();
            Policy::of(&json!({"metadata": {"labels": labels}}), &Policy::default())
        };
        for (labels, enforce, warn, wrong) in [
            (json!({}), "privileged:latest", "privileged:latest", 0),
            (json!({"enforce": "baseline"}), "baseline:latest", "baseline:latest", 0),
            (
                json!({"enforce": "baseline", "enforce-version": "v1.24"}),
                "baseline:v1.24",
                "baseline:v1.24",
                0,
            ),
            (json!({"enforce": "baseline", "warn": "restricted"}), "baseline:latest", "restricted:latest", 0),
            (json!({"enforce": "baseline", "warn": "privileged"}), "baseline:latest", "privileged:latest", 0),
            (json!({"enforce": "x", "warn": "x"}), "restricted:latest", "privileged:latest", 2),
            (json!({"enforce-version": "v1.01"}), "privileged:latest", "privileged:latest", 1),
            (json!({"audit": "nope"}), "privileged:latest", "privileged:latest", 1),
        ] {
            let (policy, errors) = of(labels.clone());
            let shown = (policy.enforce.to_string(), policy.warn.to_string(), errors.len());
            assert_eq!(shown, (enforce.into(), warn.into(), wrong), "{labels}");
        }
    }

    #[test]
    fn what_no_label_says_is_configured() {
        let defaults = json!({"enforce": "baseline", "enforce-version": "v1.30", "warn": "restricted"});
        let defaults = Policy::read(&defaults).unwrap();
        for (labels, enforce, warn) in [
            (json!({}), "baseline:v1.30", "restricted:latest"),
            (
                json!({"pod-security.kubernetes.io/enforce": "privileged"}),
                "privileged:v1.30",
                "privileged:v1.30",
            ),
            (json!({"pod-security.kubernetes.io/warn": "baseline"}), "baseline:v1.30", "baseline:latest"),
        ] {
            let policy = Policy::of(&json!({"metadata": {"labels": labels}}), &defaults).0;
            assert_eq!(
                (policy.enforce.to_string(), policy.warn.to_string()),
                (enforce.into(), warn.into()),
                "{labels}"
            );
        }
        assert!(Policy::read(&json!({"enforce": "some"})).is_err());
        assert!(Policy::read(&json!({"audit-version": "1"})).is_err());
    }
}

//! LeaseCandidates: components that ask to be elected.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, immutable};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::common::semver::Version;
use crate::meta_validation::{config_map_key, qualified_name};
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

const OLDEST: &str = "OldestEmulationVersion";

pub(in crate::kinds) struct LeaseCandidates;

impl Strategy for LeaseCandidates {
    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        config_map_key(name)
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let (binary, emulated) = (text(spec, "binaryVersion"), text(spec, "emulationVersion"));
        let (binary_path, emulated_path) = (path.child("binaryVersion"), path.child("emulationVersion"));
        let mut errors = Vec::new();
        // As upstream: a version that cannot be read counts as 0.0.0 from there on.
        let mut read = |version: &str, path: &Path| {
            let read = Version::parse(version);
            if read.is_none() && !version.is_empty() {
                errors.push(FieldError::invalid(path, version, "must be a valid semantic version"));
            }
            read.unwrap_or_default()
        };
        let emulated_version = read(emulated, &emulated_path);
        let binary_version = read(binary, &binary_path);
        if binary.is_empty() {
            errors.push(FieldError::required(&binary_path, ""));
        } else if !emulated.is_empty() && binary_version < emulated_version {
            let why = "must be greater than or equal to `emulationVersion`";
            errors.push(FieldError::invalid(&binary_path, binary, why));
        }
        if text(spec, "leaseName").is_empty() {
            errors.insert(0, FieldError::required(&path.child("leaseName"), ""));
        }
        let (strategy, strategy_path) = (text(spec, "strategy"), path.child("strategy"));
        match strategy {
            "" => errors.push(FieldError::required(&strategy_path, "")),
            OLDEST if emulated_version == Version::default() => {
                let why = "must be specified when `strategy` is 'OldestEmulationVersion'";
                errors.push(FieldError::required(&emulated_path, why));
            }
            OLDEST => {}
            other => errors.extend(validate_strategy(other, &strategy_path)),
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let lease = |object: &Value| Value::from(text(&object["spec"], "leaseName"));
        errors.extend(immutable(&lease(new), &lease(old), &Path::new("spec").child("leaseName")));
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("LeaseName"), shown("BinaryVersion"), shown("EmulationVersion"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let field = |key: &str| text(&object["spec"], key).into();
        vec![
            cell::name(object),
            field("leaseName"),
            field("binaryVersion"),
            field("emulationVersion"),
            cell::age(object, now),
        ]
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

/// The name of a way to elect: one of Kubernetes' own, or any with a domain. As upstream: the path names the field twice.
fn validate_strategy(strategy: &str, path: &Path) -> FieldErrors {
    let path = path.child("strategy");
    match strategy.contains('/') {
        true => complaints(&path, strategy, qualified_name(strategy)),
        false => vec![FieldError::not_supported(&path, strategy, &[OLDEST])],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_candidate_says_what_it_runs() {
        let good = json!({"leaseName": "l", "binaryVersion": "1.2.0", "emulationVersion": "1.1.0", "strategy": OLDEST});
        for (changes, told) in [
            (json!({}), vec![]),
            (json!({"leaseName": ""}), vec!["spec.leaseName: Required value"]),
            (json!({"binaryVersion": ""}), vec!["spec.binaryVersion: Required value"]),
            (
                json!({"binaryVersion": "1.0.0"}),
                vec![
                    "spec.binaryVersion: Invalid value: \"1.0.0\": must be greater than or equal to `emulationVersion`",
                ],
            ),
            (
                json!({"binaryVersion": "1"}),
                vec![
                    "spec.binaryVersion: Invalid value: \"1\": must be a valid semantic version",
                    "spec.binaryVersion: Invalid value: \"1\": must be greater than or equal to `emulationVersion`",
                ],
            ),
            (
                json!({"emulationVersion": ""}),
                vec![
                    "spec.emulationVersion: Required value: must be specified when `strategy` is 'OldestEmulationVersion'",
                ],
            ),
            (json!({"strategy": ""}), vec!["spec.strategy: Required value"]),
            (
                json!({"strategy": "Mine"}),
                vec![
                    "spec.strategy.strategy: Unsupported value: \"Mine\": supported values: \"OldestEmulationVersion\"",
                ],
            ),
            (json!({"strategy": "x.example/Mine", "emulationVersion": ""}), vec![]),
        ] {
            let mut spec = good.clone();
            for (key, value) in changes.as_object().expect("changes") {
                spec[key.as_str()] = value.clone();
            }
            assert_eq!(texts(LeaseCandidates.validate(&json!({"spec": spec}))), told, "{changes}");
        }
        let (old, mut new) = (json!({"spec": good}), json!({"spec": good}));
        new["spec"]["leaseName"] = "m".into();
        assert_eq!(
            texts(LeaseCandidates.validate_update(&new, &old)),
            ["spec.leaseName: Invalid value: \"m\": field is immutable"]
        );
    }
}

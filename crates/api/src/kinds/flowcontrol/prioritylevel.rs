//! PriorityLevelConfigurations.

use super::{prepare_status, validate_conditions};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, default_int, ensure_object, int, object, object_mut, present, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use crate::table::NONE;
use ferrite_json::{Value, json};
use jiff::Timestamp;

const SHARES: i64 = 30;
const QUEUES_MAX: i64 = 10_000_000;
/// Bits of the hash a request is dealt to queues by.
const HASH_BITS: f64 = 60.0;

pub(in crate::kinds) struct PriorityLevels;

impl Strategy for PriorityLevels {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        if text(spec, "type") == "Exempt" {
            let exempt = ensure_object(spec, "exempt");
            default_field(exempt, "nominalConcurrencyShares", 0);
            default_field(exempt, "lendablePercent", 0);
        }
        let Some(limited) = object_mut(spec, "limited") else { return };
        default_field(limited, "nominalConcurrencyShares", SHARES);
        default_field(limited, "lendablePercent", 0);
        if let Some(queuing) = object_mut(ensure_object(limited, "limitResponse"), "queuing") {
            for (key, value) in [("queues", 64), ("handSize", 8), ("queueLengthLimit", 50)] {
                default_int(queuing, key, value);
            }
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        prepare_status(new, old);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let kind = text(spec, "type");
        let mut errors = Vec::new();
        if kind.is_empty() {
            errors.push(FieldError::required(&path.child("type"), ""));
        } else {
            if (crate::meta::name(object) == "exempt") != (kind == "Exempt") {
                errors.push(FieldError::invalid(
                    &path.child("type"),
                    kind,
                    "must be 'Exempt' if and only if `name` is 'exempt'",
                ));
            }
            errors.extend(validate_kind(spec, kind, &path));
        }
        errors.extend(validate_mandatory(crate::meta::name(object), spec, &path));
        errors.extend(validate_conditions(&object["status"]));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_conditions(&new["status"])
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Type"),
                shown("NominalConcurrencyShares"),
                shown("Queues"),
                shown("HandSize"),
                shown("QueueLengthLimit"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let queuing = &spec["limited"]["limitResponse"]["queuing"];
        let number = |from: &Value, key: &str| match from[key].as_i64() {
            Some(number) => number.into(),
            None => Value::from(NONE),
        };
        vec![
            cell::name(object),
            text(spec, "type").into(),
            number(&spec["limited"], "nominalConcurrencyShares"),
            number(queuing, "queues"),
            number(queuing, "handSize"),
            number(queuing, "queueLengthLimit"),
            cell::age(object, now),
        ]
    }
}

/// The mandatory levels stay as they are; the administrator may set how much the exempt one lends.
fn validate_mandatory(name: &str, spec: &Value, path: &Path) -> Option<FieldError> {
    let (fixed, why) = match name {
        "exempt" => (
            json!({"type": "Exempt", "exempt": spec["exempt"]}),
            "spec of 'exempt' except the 'spec.exempt' field must equal the fixed value",
        ),
        "catch-all" => (
            json!({"type": "Limited", "limited": {"nominalConcurrencyShares": 5, "lendablePercent": 0,
                "limitResponse": {"type": "Reject"}}}),
            "spec of 'catch-all' must equal the fixed value",
        ),
        _ => return None,
    };
    let shown = go::compact("PriorityLevelConfigurationSpec", spec);
    (go::compact("PriorityLevelConfigurationSpec", &fixed) != shown)
        .then(|| FieldError::invalid(path, spec.clone(), why).rendered_as(shown))
}

fn validate_kind(spec: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match kind {
        "Exempt" => {
            if present(spec, "limited") {
                errors.push(FieldError::forbidden(
                    &path.child("limited"),
                    "must be nil if the type is not Limited",
                ));
            }
            if let Some(exempt) = object(spec, "exempt") {
                let path = path.child("exempt");
                errors.extend(validate_shares(exempt, 0, &path));
                errors.extend(validate_lendable(exempt, &path));
            }
        }
        "Limited" => {
            if present(spec, "exempt") {
                errors
                    .push(FieldError::forbidden(&path.child("exempt"), "must be nil if the type is Limited"));
            }
            match object(spec, "limited") {
                Some(limited) => errors.extend(validate_limited(limited, &path.child("limited"))),
                None => errors.push(FieldError::required(
                    &path.child("limited"),
                    "must not be empty when type is Limited",
                )),
            }
        }
        other => errors.push(FieldError::not_supported(&path.child("type"), other, &["Exempt", "Limited"])),
    }
    errors
}

fn validate_shares(level: &Value, min: i64, path: &Path) -> Option<FieldError> {
    let (shares, path) = (int(level, "nominalConcurrencyShares"), path.child("nominalConcurrencyShares"));
    (shares < min).then(|| FieldError::invalid(&path, shares, "must be a non-negative integer"))
}

fn validate_lendable(level: &Value, path: &Path) -> Option<FieldError> {
    let (percent, path) = (int(level, "lendablePercent"), path.child("lendablePercent"));
    let fits = (0..=100).contains(&percent);
    (!fits).then(|| FieldError::invalid(&path, percent, "must be between 0 and 100, inclusive"))
}

fn validate_limited(limited: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = validate_shares(limited, 0, path).into_iter().collect();
    let (response, response_path) = (&limited["limitResponse"], path.child("limitResponse"));
    let queuing = object(response, "queuing");
    let queuing_path = response_path.child("queuing");
    match (text(response, "type"), queuing) {
        ("Reject", Some(_)) => errors.push(FieldError::forbidden(
            &queuing_path,
            "must be nil if limited.limitResponse.type is not Limited",
        )),
        ("Reject", None) => {}
        ("Queue", Some(queuing)) => errors.extend(validate_queuing(queuing, &queuing_path)),
        ("Queue", None) => errors.push(FieldError::required(
            &queuing_path,
            "must not be empty if limited.limitResponse.type is Limited",
        )),
        ("", _) => errors.push(FieldError::required(&response_path.child("type"), "")),
        (other, _) => {
            errors.push(FieldError::not_supported(&response_path.child("type"), other, &["Queue", "Reject"]))
        }
    }
    errors.extend(validate_lendable(limited, path));
    if let Some(percent) = limited["borrowingLimitPercent"].as_i64().filter(|p| *p < 0) {
        errors.push(FieldError::invalid(
            &path.child("borrowingLimitPercent"),
            percent,
            "if specified, must be a non-negative integer",
        ));
    }
    errors
}

fn validate_queuing(queuing: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let [length, queues, hand] = ["queueLengthLimit", "queues", "handSize"].map(|key| int(queuing, key));
    if length <= 0 {
        errors.push(FieldError::invalid(&path.child("queueLengthLimit"), length, "must be positive"));
    }
    if queues <= 0 {
        errors.push(FieldError::invalid(&path.child("queues"), queues, "must be positive"));
    } else if queues > QUEUES_MAX {
        errors.push(FieldError::invalid(
            &path.child("queues"),
            queues,
            format!("must not be greater than {QUEUES_MAX}"),
        ));
    }
    // Dealing a hand without repetition takes this much of the hash.
    let entropy: f64 = (0..hand.clamp(0, 1000)).map(|dealt| ((queues - dealt).max(1) as f64).log2()).sum();
    if hand <= 0 {
        errors.push(FieldError::invalid(&path.child("handSize"), hand, "must be positive"));
    } else if hand > queues {
        errors.push(FieldError::invalid(
            &path.child("handSize"),
            hand,
            format!("should not be greater than queues ({queues})"),
        ));
    } else if entropy.ceil() > HASH_BITS {
        errors.push(FieldError::invalid(
            &path.child("handSize"),
            hand,
            format!(
                "required entropy bits of deckSize {queues} and handSize {hand} should not be greater than {HASH_BITS}"
            ),
        ));
    }
    errors
}

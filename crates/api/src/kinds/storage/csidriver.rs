//! CSIDrivers.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, list, present, remove, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{immutable, one_of_if_set};
use crate::kinds::common::row::{NAME, boolean, shown};
use crate::resource::{Column, Strategy};
use crate::table::NONE;
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::HashSet;

const TOKEN_SECONDS_MIN: i64 = 600;
const UPDATE_SECONDS_MIN: i64 = 10;
const MODES: &[&str] = &["Persistent", "Ephemeral"];

pub(in crate::kinds) struct CsiDrivers;

impl Strategy for CsiDrivers {
    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "attachRequired", true);
        default_field(spec, "podInfoOnMount", false);
        default_field(spec, "storageCapacity", false);
        default_field(spec, "fsGroupPolicy", "ReadWriteOnceWithFSType");
        if list(spec, "volumeLifecycleModes").is_empty() {
            spec["volumeLifecycleModes"] = json!(["Persistent"]);
        }
        default_field(spec, "requiresRepublish", false);
        default_field(spec, "seLinuxMount", false);
    }

    /// As upstream without the gate VolumeLimitScaling.
    fn prepare_create(&self, object: &mut Value) {
        remove(&mut object["spec"], "preventPodSchedulingIfMissing");
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if !present(&old["spec"], "preventPodSchedulingIfMissing") {
            remove(&mut new["spec"], "preventPodSchedulingIfMissing");
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        for (key, shown) in [
            ("attachRequired", "attachedRequired"),
            ("podInfoOnMount", "podInfoOnMount"),
            ("storageCapacity", "storageCapacity"),
        ] {
            if !present(spec, key) {
                errors.push(FieldError::required(&path.child(shown), ""));
            }
        }
        errors.extend(one_of_if_set(
            spec,
            "fsGroupPolicy",
            &path,
            &["File", "None", "ReadWriteOnceWithFSType"],
        ));
        errors.extend(validate_token_requests(list(spec, "tokenRequests"), &path.child("tokenRequests")));
        for mode in strings(spec, "volumeLifecycleModes") {
            if !MODES.contains(&mode) {
                errors.push(FieldError::not_supported(&path.child("volumeLifecycleModes"), mode, MODES));
            }
        }
        if !present(spec, "seLinuxMount") {
            errors.push(FieldError::required(&path.child("seLinuxMount"), ""));
        }
        if let Some(seconds) = spec["nodeAllocatableUpdatePeriodSeconds"].as_i64()
            && seconds < UPDATE_SECONDS_MIN
        {
            errors.push(FieldError::invalid(
                &path.child("nodeAllocatableUpdatePeriodSeconds"),
                seconds,
                format!("must be greater than or equal to {UPDATE_SECONDS_MIN} seconds"),
            ));
        }
        if let Some(set) = spec["serviceAccountTokenInSecrets"].as_bool()
            && list(spec, "tokenRequests").is_empty()
        {
            errors.push(FieldError::invalid(
                &path.child("serviceAccountTokenInSecrets"),
                set,
                "serviceAccountTokenInSecrets is set but no tokenRequests are specified",
            ));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let (is, was) = (&new["spec"], &old["spec"]);
        let mut errors = self.validate(new);
        errors.extend(immutable(
            &is["attachRequired"],
            &was["attachRequired"],
            &path.child("attachedRequired"),
        ));
        errors.extend(immutable(
            &is["volumeLifecycleModes"],
            &was["volumeLifecycleModes"],
            &path.child("volumeLifecycleModes"),
        ));
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let spec = &object["spec"];
        if list(spec, "tokenRequests").is_empty() || present(spec, "serviceAccountTokenInSecrets") {
            return Vec::new();
        }
        vec![
            "spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent \
             possible logging of tokens in volume attributes"
                .to_owned(),
        ]
    }

    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        match new["spec"]["tokenRequests"] == old["spec"]["tokenRequests"] {
            true => Vec::new(),
            false => self.warnings(new),
        }
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                boolean("AttachRequired"),
                boolean("PodInfoOnMount"),
                boolean("StorageCapacity"),
                shown("TokenRequests"),
                boolean("RequiresRepublish"),
                shown("Modes"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let modes = match strings(spec, "volumeLifecycleModes").join(",") {
            modes if modes.is_empty() => NONE.to_owned(),
            modes => modes,
        };
        let audiences = list(spec, "tokenRequests");
        let tokens = if audiences.is_empty() {
            "<unset>".to_owned()
        } else {
            audiences.iter().map(|t| text(t, "audience")).collect::<Vec<_>>().join(",")
        };
        vec![
            cell::name(object),
            spec["attachRequired"].as_bool().unwrap_or(true).into(),
            cell::boolean(spec, "podInfoOnMount"),
            cell::boolean(spec, "storageCapacity"),
            tokens.into(),
            cell::boolean(spec, "requiresRepublish"),
            modes.into(),
            cell::age(object, now),
        ]
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn starts_generation(&self) -> bool {
        false
    }

    fn returns_deleted(&self) -> bool {
        true
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn validate_token_requests(requests: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut audiences = HashSet::new();
    for (index, request) in requests.iter().enumerate() {
        let path = path.index(index);
        let audience = text(request, "audience");
        if !audiences.insert(audience) {
            errors.push(FieldError::duplicate(&path.child("audience"), audience));
            continue;
        }
        let Some(seconds) = request["expirationSeconds"].as_i64() else { continue };
        let path = path.child("expirationSeconds");
        if seconds < TOKEN_SECONDS_MIN {
            errors.push(FieldError::invalid(
                &path,
                seconds,
                "may not specify a duration less than 10 minutes",
            ));
        }
        if seconds > 1 << 32 {
            errors.push(FieldError::invalid(
                &path,
                seconds,
                "may not specify a duration larger than 2^32 seconds",
            ));
        }
    }
    errors
}

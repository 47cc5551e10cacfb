//! LimitRanges.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, list_mut, map, text};
use crate::kinds::common::check::complaints;
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::{
    Amounts, amounts, may_overcommit, validate_container_resource_name, validate_resource_name,
};
use crate::meta_validation::qualified_name;
use crate::quantity::Quantity;
use crate::resource::{MetadataUse, Strategy};
use ferrite_json::{Map, Value};
use std::collections::{BTreeSet, HashSet};

const LISTS: [&str; 5] = ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];

pub(in crate::kinds) struct LimitRanges;

impl Strategy for LimitRanges {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn default(&self, object: &mut Value) {
        for item in list_mut(ensure_object(object, "spec"), "limits") {
            for key in LISTS {
                if let Some(amounts) = item.get_mut(key) {
                    default_resource_list(amounts);
                }
            }
            if text(item, "type") == "Container" {
                fill(item, "default", "max");
                fill(item, "defaultRequest", "default");
                fill(item, "defaultRequest", "min");
            }
        }
    }

    /// A range without a name gets its uid for one.
    fn prepare_create(&self, object: &mut Value) {
        if crate::meta::name(object).is_empty() {
            let uid = crate::meta::uid(object).to_owned();
            crate::meta::set_str(object, "name", &uid);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("limits");
        let mut types = HashSet::new();
        let mut errors = Vec::new();
        for (index, item) in list(&object["spec"], "limits").iter().enumerate() {
            let path = path.index(index);
            let kind = text(item, "type");
            errors.extend(validate_type(kind, &path.child("type")));
            if !types.insert(kind) {
                errors.push(FieldError::duplicate(&path.child("type"), kind));
            }
            errors.extend(validate_item(item, kind, &path));
        }
        errors
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

/// Copies entries that `from` has and `into` lacks.
fn fill(item: &mut Value, into: &str, from: &str) {
    let Some(amounts) = map(item, from).filter(|m| !m.is_empty()).cloned() else { return };
    let Some(target) = ensure_object(item, into).as_object_mut() else { return };
    for (name, amount) in amounts {
        target.entry(name).or_insert(amount);
    }
}

fn validate_type(kind: &str, path: &Path) -> FieldErrors {
    let errors = complaints(path, kind, qualified_name(kind));
    let standard = matches!(kind, "Pod" | "Container" | "PersistentVolumeClaim");
    if errors.is_empty() && !kind.contains('/') && !standard {
        return vec![FieldError::invalid(path, kind, "must be a standard limit type or fully qualified")];
    }
    errors
}

fn validate_name(kind: &str, name: &str, path: &Path) -> FieldErrors {
    match kind {
        "Pod" | "Container" => validate_container_resource_name(name, path),
        _ => validate_resource_name(name, path),
    }
}

fn validate_item(item: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let names = |key: &str, errors: &mut FieldErrors| {
        for name in map(item, key).into_iter().flat_map(Map::keys) {
            errors.extend(validate_name(kind, name, &path.child(key).key(name)));
        }
    };
    names("max", &mut errors);
    names("min", &mut errors);
    for key in ["default", "defaultRequest"] {
        if kind != "Pod" {
            names(key, &mut errors);
        } else if map(item, key).is_some_and(|m| !m.is_empty()) {
            errors.push(FieldError::forbidden(&path.child(key), "may not be specified when `type` is 'Pod'"));
        }
    }
    let has_storage = |key: &str| map(item, key).is_some_and(|m| m.contains_key("storage"));
    if kind == "PersistentVolumeClaim" && !has_storage("min") && !has_storage("max") {
        errors.push(FieldError::required(
            &path.child("limits"),
            "either minimum or maximum storage value is required, but neither was provided",
        ));
    }
    names("maxLimitRequestRatio", &mut errors);
    errors.extend(validate_order(item, kind, path));
    errors
}

/// Minimum ≤ default request ≤ default ≤ maximum, for every resource.
fn validate_order(item: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let of = |key: &str| {
        if kind == "Pod" && key.starts_with("default") { Amounts::new() } else { amounts(item, key) }
    };
    let [max, min, default, request, ratio] = LISTS.map(of);
    let names: BTreeSet<&ferrite_json::Text> =
        [&max, &min, &default, &request, &ratio].into_iter().flat_map(|m| m.keys()).collect();
    for name in names {
        let [max, min, default, request, ratio] =
            [&max, &min, &default, &request, &ratio].map(|m| m.get(name).copied());
        let mut above = |high: Option<Quantity>,
                         low: Option<Quantity>,
                         at: &str,
                         shown: Option<Quantity>,
                         words: [&str; 2]| {
            if let (Some(high), Some(low), Some(shown)) = (high, low, shown)
                && high > low
            {
                errors.push(FieldError::invalid(
                    &path.child(at).key(name),
                    shown.to_string(),
                    format!("{} {high} is greater than {} {low}", words[0], words[1]),
                ));
            }
        };
        above(min, max, "min", min, ["min value", "max value"]);
        above(min, request, "defaultRequest", request, ["min value", "default request value"]);
        above(request, max, "defaultRequest", request, ["default request value", "max value"]);
        above(request, default, "defaultRequest", request, ["default request value", "default limit value"]);
        above(min, default, "default", min, ["min value", "default value"]);
        above(default, max, "default", max, ["default value", "max value"]);
        if let Some(ratio) = ratio {
            let path = path.child("maxLimitRequestRatio").key(name);
            if ratio.milli_value() < 1000 {
                errors.push(FieldError::invalid(
                    &path,
                    ratio.to_string(),
                    format!("ratio {ratio} is less than 1"),
                ));
            }
            if let (Some(min), Some(max)) = (min, max) {
                let limit = max.milli_value() as f64 / min.milli_value() as f64;
                if ratio.milli_value() as f64 / 1000.0 > limit {
                    errors.push(FieldError::invalid(
                        &path,
                        ratio.to_string(),
                        format!("ratio {ratio} is greater than max/min = {limit:.6}"),
                    ));
                }
            }
        }
        if let (Some(default), Some(request)) = (default, request)
            && !may_overcommit(name)
            && default != request
        {
            errors.push(FieldError::invalid(
                &path.child("defaultRequest").key(name),
                request.to_string(),
                format!("default value {default} must equal to defaultRequest value {request} in {name}"),
            ));
        }
    }
    errors
}

//! StorageClasses.

use super::{class_name, validate_parameters, validate_provisioner};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, list, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, immutable, one_of, repeated};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::pod::old_label;
use crate::meta_validation::qualified_name;
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet, HashSet};

pub(in crate::kinds) struct StorageClasses;

impl Strategy for StorageClasses {
    fn warnings(&self, object: &Value) -> Vec<String> {
        let mut warnings = Vec::new();
        for (index, term) in list(object, "allowedTopologies").iter().enumerate() {
            let path = Path::new("allowedTopologies").index(index).child("matchLabelExpressions");
            for (index, expression) in list(term, "matchLabelExpressions").iter().enumerate() {
                let why = old_label(text(expression, "key"));
                warnings.extend(why.map(|why| format!("{}: {why}", path.index(index).child("key"))));
            }
        }
        warnings
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_field(object, "reclaimPolicy", "Delete");
        default_field(object, "volumeBindingMode", "Immediate");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let root = Path::default();
        let mut errors = validate_provisioner(object, "provisioner");
        errors.extend(validate_parameters(object, false));
        if !text(object, "reclaimPolicy").is_empty() {
            errors.extend(one_of(object, "reclaimPolicy", &root, &["Delete", "Retain"]));
        }
        const MODES: &[&str] = &["Immediate", "WaitForFirstConsumer"];
        // A mode that is sent empty is there, and is none of them.
        let mode = text(object, "volumeBindingMode");
        if !MODES.contains(&mode) {
            errors.push(FieldError::not_supported(&root.child("volumeBindingMode"), mode, MODES));
        }
        errors
            .extend(validate_topologies(list(object, "allowedTopologies"), &root.child("allowedTopologies")));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let changed = ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"]
            .iter()
            .filter_map(|key| immutable(&new[*key], &old[*key], &Path::new(key)));
        self.validate(new).into_iter().chain(changed).collect()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Provisioner"),
                shown("ReclaimPolicy"),
                shown("VolumeBindingMode"),
                shown("AllowVolumeExpansion"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            class_name(object),
            text(object, "provisioner").into(),
            cell::text_or(object, "reclaimPolicy", "Delete"),
            cell::text_or(object, "volumeBindingMode", "Immediate"),
            cell::boolean(object, "allowVolumeExpansion"),
            cell::age(object, now),
        ]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_topologies(terms: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    // As upstream: the list of terms seen so far begins with an empty one for each, so that an empty term is
    // never the first of its like.
    let mut seen = vec![BTreeMap::new(); terms.len()];
    for (index, term) in terms.iter().enumerate() {
        let path = path.index(index);
        let expressions: BTreeMap<&str, BTreeSet<&str>> = list(term, "matchLabelExpressions")
            .iter()
            .map(|expression| (text(expression, "key"), strings(expression, "values").into_iter().collect()))
            .collect();
        for _ in seen.iter().filter(|other| **other == expressions) {
            errors.push(FieldError::duplicate(&path.child("matchLabelExpressions"), ""));
        }
        seen.push(expressions);
        let mut keys = HashSet::new();
        for (index, expression) in list(term, "matchLabelExpressions").iter().enumerate() {
            let path = path.child("matchLabelExpressions").index(index);
            let key = text(expression, "key");
            let values = strings(expression, "values");
            if values.is_empty() {
                errors.push(FieldError::required(&path.child("values"), ""));
            }
            let again = repeated(values.iter());
            for (index, value) in values.iter().enumerate() {
                if again[index] {
                    errors.push(FieldError::duplicate(&path.child("values").index(index), *value));
                }
            }
            errors.extend(complaints(&path.child("key"), key, qualified_name(key)));
            if !keys.insert(key) {
                errors.push(FieldError::duplicate(&path.child("key"), key));
            }
        }
    }
    errors
}

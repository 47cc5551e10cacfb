//! RoleBindings and ClusterRoleBindings.

use super::GROUP;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_text, ensure_object, list, list_mut, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::complaints;
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::meta_validation::{dns1123_subdomain, path_segment};
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct Bindings {
    pub namespaced: bool,
}

impl Strategy for Bindings {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_text(ensure_object(object, "roleRef"), "apiGroup", GROUP);
        for subject in list_mut(object, "subjects") {
            if matches!(text(subject, "kind"), "User" | "Group") {
                default_text(subject, "apiGroup", GROUP);
            }
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (role, path) = (&object["roleRef"], Path::new("roleRef"));
        let mut errors = Vec::new();
        let group = text(role, "apiGroup");
        if group != GROUP {
            errors.push(FieldError::not_supported(&path.child("apiGroup"), group, &[GROUP]));
        }
        let kinds: &[&str] = if self.namespaced { &["Role", "ClusterRole"] } else { &["ClusterRole"] };
        let kind = text(role, "kind");
        if !kinds.contains(&kind) {
            errors.push(FieldError::not_supported(&path.child("kind"), kind, kinds));
        }
        match text(role, "name") {
            "" => errors.push(FieldError::required(&path.child("name"), "")),
            name => errors.extend(complaints(&path.child("name"), name, path_segment(name))),
        }
        for (index, subject) in list(object, "subjects").iter().enumerate() {
            errors.extend(validate_subject(subject, self.namespaced, &Path::new("subjects").index(index)));
        }
        errors
    }

    /// A binding to another role is another binding: a user who may change subjects must not gain rights.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        if new["roleRef"] != old["roleRef"] {
            errors.push(
                FieldError::invalid(&Path::new("roleRef"), new["roleRef"].clone(), "cannot change roleRef")
                    .rendered_as(go::compact("RoleRef", &new["roleRef"])),
            );
        }
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        path_segment(name)
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Role"), shown("Age"), wide("Users"), wide("Groups"), wide("ServiceAccounts")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let of = |kind: &str| -> Value {
            list(object, "subjects")
                .iter()
                .filter(|s| text(s, "kind") == kind)
                .map(|s| match text(s, "namespace") {
                    namespace if kind == "ServiceAccount" && !namespace.is_empty() => {
                        format!("{namespace}/{}", text(s, "name"))
                    }
                    _ => text(s, "name").to_owned(),
                })
                .collect::<Vec<_>>()
                .join(", ")
                .into()
        };
        let role = &object["roleRef"];
        vec![
            cell::name(object),
            format!("{}/{}", text(role, "kind"), text(role, "name")).into(),
            cell::age(object, now),
            of("User"),
            of("Group"),
            of("ServiceAccount"),
        ]
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

fn validate_subject(subject: &Value, namespaced: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (name, group) = (text(subject, "name"), text(subject, "apiGroup"));
    if name.is_empty() {
        errors.push(FieldError::required(&path.child("name"), ""));
    }
    match text(subject, "kind") {
        "ServiceAccount" => {
            if !name.is_empty() {
                errors.extend(complaints(&path.child("name"), name, dns1123_subdomain(name)));
            }
            if !group.is_empty() {
                errors.push(FieldError::not_supported(&path.child("apiGroup"), group, &[""]));
            }
            if !namespaced && text(subject, "namespace").is_empty() {
                errors.push(FieldError::required(&path.child("namespace"), ""));
            }
        }
        "User" | "Group" => {
            if group != GROUP {
                errors.push(FieldError::not_supported(&path.child("apiGroup"), group, &[GROUP]));
            }
        }
        other => errors.push(FieldError::not_supported(
            &path.child("kind"),
            other,
            &["ServiceAccount", "User", "Group"],
        )),
    }
    errors
}

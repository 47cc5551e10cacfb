//! Reviews: questions to the server about a user's rights. Created, answered, not stored.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, object, strings, text};
use crate::kinds::common::check::complaints;
use crate::kinds::common::go;
use crate::meta_validation::{label_value, qualified_name};
use crate::resource::Strategy;
use ferrite_json::Value;

/// Reviews that ask if somebody may do something.
pub(in crate::kinds) struct AccessReviews {
    /// The question is about the user who asks.
    pub own: bool,
    /// The question is about one namespace.
    pub local: bool,
}

impl Strategy for AccessReviews {
    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        let (resource, url) =
            (self::object(spec, "resourceAttributes"), self::object(spec, "nonResourceAttributes"));
        let render = || url.map_or_else(|| "null".to_owned(), |u| go::compact("NonResourceAttributes", u));
        let shown = url.cloned().unwrap_or_default();
        match (resource, url) {
            (Some(_), Some(_)) => errors.push(
                FieldError::invalid(
                    &path.child("nonResourceAttributes"),
                    shown,
                    "cannot be specified in combination with resourceAttributes",
                )
                .rendered_as(render()),
            ),
            (None, None) => errors.push(
                FieldError::invalid(
                    &path.child("resourceAttributes"),
                    shown,
                    "exactly one of nonResourceAttributes or resourceAttributes must be specified",
                )
                .rendered_as(render()),
            ),
            _ => {}
        }
        if !self.own && text(spec, "user").is_empty() && list(spec, "groups").is_empty() {
            errors.push(FieldError::invalid(
                &path.child("user"),
                text(spec, "user"),
                "at least one of user or group must be specified",
            ));
        }
        if let Some(resource) = resource {
            errors.extend(validate_selectors(resource, &path.child("resourceAttributes")));
        }
        if self.local {
            let namespace = resource.map_or("", |r| text(r, "namespace"));
            if resource.is_some() && namespace != crate::meta::namespace(object) {
                errors.push(FieldError::invalid(
                    &path.child("resourceAttributes").child("namespace"),
                    namespace,
                    "must match metadata.namespace",
                ));
            }
            if let Some(url) = url {
                errors.push(
                    FieldError::invalid(
                        &path.child("nonResourceAttributes"),
                        url.clone(),
                        "disallowed on this kind of request",
                    )
                    .rendered_as(render()),
                );
            }
        }
        errors
    }

    fn validate_name(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }
}

/// A selector is given as text or as requirements, not both.
fn validate_selectors(resource: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["fieldSelector", "labelSelector"] {
        let Some(selector) = object(resource, key) else { continue };
        let path = path.child(key);
        let (raw, requirements) = (text(selector, "rawSelector"), list(selector, "requirements"));
        match (raw.is_empty(), requirements.is_empty()) {
            (false, false) => errors.push(FieldError::invalid(
                &path.child("rawSelector"),
                raw,
                "may not specified at the same time as requirements",
            )),
            (true, true) => errors.push(FieldError::required(
                &path.child("requirements"),
                format!("when {path} is specified, requirements or rawSelector is required"),
            )),
            _ => {}
        }
        for (index, requirement) in requirements.iter().enumerate() {
            let path = path.child("requirements").index(index);
            if key == "fieldSelector" && text(requirement, "key").is_empty() {
                errors.push(FieldError::required(&path.child("key"), "must be specified"));
            }
            let values = !list(requirement, "values").is_empty();
            match text(requirement, "operator") {
                "In" | "NotIn" if !values => errors.push(FieldError::required(
                    &path.child("values"),
                    "must be specified when `operator` is 'In' or 'NotIn'",
                )),
                "Exists" | "DoesNotExist" if values => errors.push(FieldError::forbidden(
                    &path.child("values"),
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                )),
                // As upstream: operators of newer clients are taken, and the requirement is ignored.
                _ => {}
            }
            if key == "labelSelector" {
                let key = text(requirement, "key");
                errors.extend(complaints(&path.child("key"), key, qualified_name(key)));
                for (index, value) in strings(requirement, "values").into_iter().enumerate() {
                    errors.extend(complaints(&path.child("values").index(index), value, label_value(value)));
                }
            }
        }
    }
    errors
}

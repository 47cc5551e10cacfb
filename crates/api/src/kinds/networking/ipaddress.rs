//! IPAddresses: which address is whose.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, object, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, strict_ip};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_subdomain, path_segment};
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct IpAddresses;

impl Strategy for IpAddresses {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("parentRef");
        let Some(parent) = self::object(&object["spec"], "parentRef") else {
            return vec![FieldError::required(&path, "")];
        };
        let mut errors = Vec::new();
        let group = text(parent, "group");
        if !group.is_empty() {
            errors.extend(complaints(&path.child("group"), group, dns1123_subdomain(group)));
        }
        for (key, needed) in [("resource", true), ("name", true), ("namespace", false)] {
            match text(parent, key) {
                "" if needed => errors.push(FieldError::required(&path.child(key), "")),
                value => errors.extend(complaints(&path.child(key), value, path_segment(value))),
            }
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let (is, was) = (&new["spec"]["parentRef"], &old["spec"]["parentRef"]);
        let mut errors = self.validate(new);
        if is != was {
            let shown = if is.is_object() { go::compact("ParentReference", is) } else { "null".to_owned() };
            let path = Path::new("spec").child("parentRef");
            errors.push(FieldError::invalid(&path, is.clone(), IMMUTABLE).rendered_as(shown));
        }
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        strict_ip(name)
    }

    fn supports_generate_name(&self) -> bool {
        false
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("ParentRef")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let parent = self::object(&object["spec"], "parentRef").map_or(String::new(), |parent| {
            let mut resource = text(parent, "resource").to_lowercase();
            let group = text(parent, "group");
            if !group.is_empty() {
                resource = format!("{resource}.{}", group.to_lowercase());
            }
            match text(parent, "namespace") {
                "" => format!("{resource}/{}", text(parent, "name")),
                namespace => format!("{resource}/{namespace}/{}", text(parent, "name")),
            }
        });
        // As upstream: a row has an age for which there is no column.
        vec![cell::name(object), parent.into(), cell::age(object, now)]
    }
}

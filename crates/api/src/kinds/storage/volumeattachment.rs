//! VolumeAttachments.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, map, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, required};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, boolean, shown};
use crate::kinds::common::volume_source::validate_driver_name;
use crate::kinds::core::persistentvolume;
use crate::meta_validation::dns1123_subdomain;
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

const ONE_OF: &str = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
const METADATA_MAX: usize = 256 * 1024;
const MESSAGE_MAX: usize = 1024;

pub(in crate::kinds) struct VolumeAttachments;

impl Strategy for VolumeAttachments {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn default(&self, object: &mut Value) {
        ensure_object(ensure_object(object, "spec"), "source");
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors: FieldErrors = required(spec, "attacher", &path).into_iter().collect();
        errors.extend(validate_source(&spec["source"], &path.child("source")));
        let node = text(spec, "nodeName");
        errors.extend(complaints(&path.child("nodeName"), node, dns1123_subdomain(node)));
        errors.extend(validate_status(&object["status"]));
        let attacher = text(spec, "attacher");
        if !attacher.is_empty() {
            errors.extend(validate_driver_name(attacher, &path.child("attacher")));
        }
        if let Some(name) = spec["source"]["persistentVolumeName"].as_str() {
            let path = path.child("source").child("persistentVolumeName");
            errors.extend(complaints(&path, name, dns1123_subdomain(name)));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        if new["spec"] != old["spec"] {
            errors.push(
                FieldError::invalid(&Path::new("spec"), new["spec"].clone(), IMMUTABLE)
                    .rendered_as(go::compact("VolumeAttachmentSpec", &new["spec"])),
            );
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_status(&new["status"])
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                Column::new("Attacher", "string", "name", 0),
                shown("PV"),
                shown("Node"),
                boolean("Attached"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        vec![
            cell::name(object),
            text(spec, "attacher").into(),
            text(&spec["source"], "persistentVolumeName").into(),
            text(spec, "nodeName").into(),
            cell::boolean(&object["status"], "attached"),
            cell::age(object, now),
        ]
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_source(source: &Value, path: &Path) -> FieldErrors {
    let (inline, name) = (present(source, "inlineVolumeSpec"), source["persistentVolumeName"].as_str());
    match (inline, name) {
        (false, None) => vec![FieldError::required(path, ONE_OF)],
        (true, Some(_)) => vec![FieldError::forbidden(path, ONE_OF)],
        (true, None) => {
            persistentvolume::validate_inline(&source["inlineVolumeSpec"], &path.child("inlineVolumeSpec"))
        }
        (false, Some("")) => vec![FieldError::required(
            &path.child("persistentVolumeName"),
            "must specify non empty persistentVolumeName",
        )],
        (false, Some(_)) => Vec::new(),
    }
}

fn validate_status(status: &Value) -> FieldErrors {
    let path = Path::new("status");
    let mut errors = Vec::new();
    let size: usize = map(status, "attachmentMetadata")
        .into_iter()
        .flatten()
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum();
    if size > METADATA_MAX {
        errors.push(FieldError::too_long(&path.child("attachmentMetadata"), METADATA_MAX));
    }
    for key in ["attachError", "detachError"] {
        if text(&status[key], "message").len() > MESSAGE_MAX {
            // As upstream: the limit it names is another one's.
            errors.push(FieldError::too_long(&path.child(key).child("message"), METADATA_MAX));
        }
        if let Some(code) = status[key]["errorCode"].as_i64().filter(|code| *code < 0) {
            errors.push(FieldError::invalid(
                &path.child(key).child("errorCode"),
                code,
                "must be between 0 and 2147483647, inclusive",
            ));
        }
    }
    errors
}

//! ControllerRevisions.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, int, list, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, immutable, not_negative};
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::NONE;
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct ControllerRevisions;

impl Strategy for ControllerRevisions {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("data");
        let mut errors: FieldErrors = match &object["data"] {
            Value::Null => vec![FieldError::required(&path, "data is mandatory")],
            Value::Object(_) => Vec::new(),
            _ => vec![FieldError::required(&path, "data must be a valid JSON object")],
        };
        errors.extend(not_negative(object, "revision", &Path::default()));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        // As upstream: data that are taken away are only told to be immutable.
        if new["data"].is_null() && !old["data"].is_null() {
            errors.retain(|error| error.path != Path::new("data"));
        }
        errors.extend(immutable(&new["data"], &old["data"], &Path::new("data")));
        errors
    }

    /// As upstream: a patch reads the data as the object it says to be, which never equals the stored bytes.
    fn validate_patch(&self, new: &Value) -> FieldErrors {
        let data = &new["data"];
        let gvk = crate::Gvk::from_api_version(text(data, "apiVersion"), text(data, "kind"));
        match gvk.is_some_and(|gvk| crate::schema::of(&gvk).is_some()) {
            true => vec![FieldError::invalid(&Path::new("data"), data.clone(), IMMUTABLE)],
            false => Vec::new(),
        }
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Controller"), shown("Revision"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let owner = list(&object["metadata"], "ownerReferences").iter().find(|o| flag(o, "controller"));
        let controller = owner.map_or_else(
            || NONE.to_owned(),
            |owner| {
                let kind = text(owner, "kind").to_lowercase();
                let name = text(owner, "name");
                match text(owner, "apiVersion").split_once('/') {
                    Some((group, _)) => format!("{kind}.{group}/{name}"),
                    None => format!("{kind}/{name}"),
                }
            },
        );
        vec![cell::name(object), controller.into(), int(object, "revision").into(), cell::age(object, now)]
    }
}

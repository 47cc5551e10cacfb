//! CSIStorageCapacities.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::text;
use crate::kinds::common::check::{NOT_NEGATIVE, complaints, immutable};
use crate::meta_validation::dns1123_subdomain;
use crate::quantity::{Quantity, canonicalise};
use crate::resource::{MetadataUse, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::Value;

pub(in crate::kinds) struct CsiStorageCapacities;

impl Strategy for CsiStorageCapacities {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        for key in ["capacity", "maximumVolumeSize"] {
            if let Some(amount) = object.get_mut(key) {
                canonicalise(amount);
            }
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_label_selector(&object["nodeTopology"], &Path::new("nodeTopology"));
        let class = text(object, "storageClassName");
        errors.extend(complaints(&Path::new("storageClassName"), class, dns1123_subdomain(class)));
        let capacity = object["capacity"].as_str().and_then(|a| Quantity::parse(a).ok());
        if let Some(amount) = capacity.filter(Quantity::is_negative) {
            errors.push(FieldError::invalid(&Path::new("capacity"), amount.to_string(), NOT_NEGATIVE));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let fixed = ["nodeTopology", "storageClassName"];
        errors.extend(fixed.iter().filter_map(|key| immutable(&new[*key], &old[*key], &Path::new(key))));
        errors
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

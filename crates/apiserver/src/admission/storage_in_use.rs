//! Volumes and claims stay for as long as somebody uses them: a finalizer holds them.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};

pub(super) struct StorageObjectInUseProtection;

const FINALIZERS: [(&str, &str, &str); 3] = [
    ("", "persistentvolumes", "kubernetes.io/pv-protection"),
    ("", "persistentvolumeclaims", "kubernetes.io/pvc-protection"),
    ("storage.k8s.io", "volumeattributesclasses", "kubernetes.io/vac-protection"),
];

impl Plugin for StorageObjectInUseProtection {
    fn name(&self) -> &'static str {
        "StorageObjectInUseProtection"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        !validating && operation == Operation::Create
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        let held = |(group, plural, _): &&(&str, &str, &str)| attributes.creates_in(group, plural);
        let Some((_, _, finalizer)) = FINALIZERS.iter().find(held) else { return Ok(()) };
        if meta::finalizers(object).any(|f| f == *finalizer) {
            return Ok(());
        }
        let finalizers = meta::metadata_mut(object).entry("finalizers").or_insert_with(|| json!([]));
        if let Some(finalizers) = finalizers.as_array_mut() {
            finalizers.push((*finalizer).into());
        }
        Ok(())
    }
}

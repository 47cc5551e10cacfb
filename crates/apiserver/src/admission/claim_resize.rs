//! Claims grow only where their class lets them.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::quota::amounts::amounts;
use ferrite_json::Value;

pub(super) struct PersistentVolumeClaimResize;

impl Plugin for PersistentVolumeClaimResize {
    fn name(&self) -> &'static str {
        "PersistentVolumeClaimResize"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        validating && operation == Operation::Update
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let updates =
            attributes.operation == Operation::Update && attributes.is("", "persistentvolumeclaims");
        let (Some(new), Some(old), true) = (object, attributes.old, updates) else { return Ok(()) };
        let size = |claim: &Value| amounts(&claim["spec"]["resources"]["requests"]).get("storage").copied();
        if size(new) <= size(old) {
            return Ok(());
        }
        if old["status"]["phase"] != "Bound" {
            return Err(attributes.forbid("Only bound persistent volume claims can be expanded"));
        }
        let class = |claim: &Value| {
            let annotated = claim["metadata"]["annotations"].get("volume.beta.kubernetes.io/storage-class");
            let name = annotated.or_else(|| claim["spec"].get("storageClassName"));
            name.and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let expands = !class(old).is_empty()
            && view
                .get("storage.k8s.io", "storageclasses", "", &class(new))
                .is_some_and(|class| class["allowVolumeExpansion"] == true);
        match expands {
            true => Ok(()),
            false => Err(attributes.forbid(
                "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
            )),
        }
    }
}

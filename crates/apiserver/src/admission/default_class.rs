//! Claims and ingresses that name no class get the one that is marked as the default.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use std::cmp::Reverse;

/// The newest class that is marked as the default; of those of one age the first by name.
fn default_class(view: &View, group: &str, plural: &str, marks: &[&str]) -> Option<String> {
    let marked = |class: &Value| {
        let annotations = &class["metadata"]["annotations"];
        marks.iter().any(|mark| annotations.get(mark).is_some_and(|v| v == "true"))
    };
    view.few(group, plural, "")
        .filter(|class| marked(class))
        .min_by_key(|c| (Reverse(meta::str(c, "creationTimestamp").to_owned()), meta::name(c).to_owned()))
        .map(|class| meta::name(&class).to_owned())
}

fn annotated(object: &Value, key: &str) -> bool {
    object["metadata"]["annotations"].get(key).is_some()
}

pub(super) struct DefaultStorageClass;

impl Plugin for DefaultStorageClass {
    fn name(&self) -> &'static str {
        "DefaultStorageClass"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        !validating && operation == Operation::Create
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        const MARKS: [&str; 2] = [
            "storageclass.kubernetes.io/is-default-class",
            "storageclass.beta.kubernetes.io/is-default-class",
        ];
        let named = object["spec"]["storageClassName"].is_string()
            || annotated(object, "volume.beta.kubernetes.io/storage-class");
        if !attributes.creates("persistentvolumeclaims") || named {
            return Ok(());
        }
        if let Some(class) = default_class(view, "storage.k8s.io", "storageclasses", &MARKS) {
            object["spec"]["storageClassName"] = class.into();
        }
        Ok(())
    }
}

pub(super) struct DefaultIngressClass;

impl Plugin for DefaultIngressClass {
    fn name(&self) -> &'static str {
        "DefaultIngressClass"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        !validating && operation == Operation::Create
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        const MARK: &str = "ingressclass.kubernetes.io/is-default-class";
        const GROUP: &str = "networking.k8s.io";
        let named = object["spec"]["ingressClassName"].is_string()
            || annotated(object, "kubernetes.io/ingress.class");
        if !attributes.creates_in(GROUP, "ingresses") || named {
            return Ok(());
        }
        if let Some(class) = default_class(view, GROUP, "ingressclasses", &[MARK]) {
            object["spec"]["ingressClassName"] = class.into();
        }
        Ok(())
    }
}

//! DeviceClasses, and the extended resources that they stand behind.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClass;

/// The prefix of the extended resource that every class has by its name.
pub(crate) const IMPLICIT_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

#[derive(Debug, Default)]
pub(super) struct Classes {
    by_name: HashMap<String, Arc<DeviceClass>>,
    /// Names of classes by the extended resource that they name.
    by_resource: HashMap<String, BTreeMap<String, Arc<DeviceClass>>>,
}

fn name_of(class: &DeviceClass) -> &str {
    class.metadata.name.as_deref().unwrap_or_default()
}

impl Classes {
    pub fn set(&mut self, class: Arc<DeviceClass>) {
        self.remove(name_of(&class));
        if let Some(resource) = &class.spec.extended_resource_name {
            let classes = self.by_resource.entry(resource.clone()).or_default();
            classes.insert(name_of(&class).to_owned(), class.clone());
        }
        self.by_name.insert(name_of(&class).to_owned(), class);
    }

    pub fn remove(&mut self, name: &str) {
        let Some(old) = self.by_name.remove(name) else { return };
        let Some(resource) = &old.spec.extended_resource_name else { return };
        if let Some(classes) = self.by_resource.get_mut(resource) {
            classes.remove(name);
            if classes.is_empty() {
                self.by_resource.remove(resource);
            }
        }
    }

    pub fn get(&self, name: &str) -> Option<Arc<DeviceClass>> {
        self.by_name.get(name).cloned()
    }

    /// The class behind an extended resource. Of several the newest counts, then the first by name.
    pub fn behind(&self, resource: &str) -> Option<Arc<DeviceClass>> {
        if let Some(name) = resource.strip_prefix(IMPLICIT_PREFIX) {
            return self.get(name);
        }
        let created = |class: &DeviceClass| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let classes = self.by_resource.get(resource)?;
        // Of equal ones `max_by_key` takes the last: the first by name.
        classes.values().rev().max_by_key(|class| created(class)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn class(name: &str, created: &str, resource: Option<&str>) -> Arc<DeviceClass> {
        let class = json!({"metadata": {"name": name, "creationTimestamp": created},
            "spec": {"extendedResourceName": resource}});
        Arc::new(ferrite_json::from_value(class).unwrap())
    }

    #[test]
    fn the_newest_class_stands_behind_a_resource() {
        let mut classes = Classes::default();
        let behind = |classes: &Classes, resource: &str| {
            classes.behind(resource).and_then(|class| class.metadata.name.clone()).unwrap_or_default()
        };
        classes.set(class("old", "2026-01-01T00:00:00Z", Some("example.com/gpu")));
        classes.set(class("b", "2026-01-02T00:00:00Z", Some("example.com/gpu")));
        classes.set(class("a", "2026-01-02T00:00:00Z", Some("example.com/gpu")));
        assert_eq!(behind(&classes, "example.com/gpu"), "a");
        assert_eq!(behind(&classes, "deviceclass.resource.kubernetes.io/old"), "old");
        classes.set(class("a", "2026-01-02T00:00:00Z", None));
        assert_eq!(behind(&classes, "example.com/gpu"), "b");
        classes.remove("b");
        assert_eq!(behind(&classes, "example.com/gpu"), "old");
        classes.remove("old");
        assert_eq!(behind(&classes, "example.com/gpu"), "");
        assert_eq!(behind(&classes, "deviceclass.resource.kubernetes.io/old"), "");
    }
}

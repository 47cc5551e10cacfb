//! What tests of the registry share.

use ferrite_api::resource::{Resource, Scope, Strategy};
use std::sync::Arc;

/// Pods that behave as `strategy` says.
pub(super) fn pods(strategy: impl Strategy) -> Resource {
    Resource {
        group: "".into(),
        version: "v1".into(),
        kind: "Pod".into(),
        schema: ferrite_api::schema::kind("", "v1", "Pod"),
        plural: "pods".into(),
        singular: "pod".into(),
        custom: None,
        short_names: (&[]).into(),
        categories: (&[]).into(),
        scope: Scope::Namespaced,
        verbs: (&[]).into(),
        subresources: (&[]).into(),
        strategy: Arc::new(strategy),
        on_by_default: true,
        storage: None,
    }
}

//! Common parts of the registry's tests.

use ferrite_api::resource::{Resource, Scope, Strategy};
use std::sync::Arc;

/// A registry with every built-in resource and no objects.
pub(crate) fn registry() -> super::Registry {
    let table = Arc::new(super::ResourceMap::new(ferrite_api::kinds::built_in()));
    let services = super::ServiceAllocator::new(Vec::new(), 30000..=32767);
    let outbound = Arc::new(crate::outbound::Outbound::new(Arc::default()));
    let admission =
        crate::admission::Chain::new(&crate::AdmissionPlugins::default(), &outbound, None).expect("a chain");
    super::Registry::new(
        Arc::new(ferrite_store::Store::memory()),
        table,
        services,
        3600,
        admission,
        crate::auth::usual_modes(),
        outbound,
    )
}

/// Pods that behave as `strategy` says.
pub(super) fn pods(strategy: impl Strategy) -> Resource {
    Resource {
        group: "".into(),
        version: "v1".into(),
        kind: "Pod".into(),
        schema: ferrite_api::schema::kind("", "v1", "Pod"),
        plural: "pods".into(),
        singular: "pod".into(),
        hooks: ferrite_api::resource::Hooks::default(),
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

//! The labels of series.

use super::RequestKind;
use crate::registry::ResourceMap;
use ferrite_api::resource::Resource;

/// The labels of a series. They are copies: a series outlives the definition of its resource.
pub(super) struct Labels {
    pub resource: Option<ResourceName>,
    pub verb: &'static str,
    subresource: &'static str,
    pub scope: &'static str,
    pub dry_run: bool,
}

/// The names of a resource, by which metrics know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResourceName {
    pub group: Box<str>,
    pub version: Box<str>,
    pub plural: Box<str>,
}

impl ResourceName {
    pub fn of(resource: &Resource) -> Self {
        let copy = |name: &str| name.into();
        Self {
            group: copy(&resource.group),
            version: copy(&resource.version),
            plural: copy(&resource.plural),
        }
    }

    pub fn is_served(&self, table: &ResourceMap) -> bool {
        table.find(&self.group, &self.version, &self.plural).is_some()
    }
}

impl Labels {
    pub fn of(kind: &RequestKind) -> Self {
        Self {
            resource: kind.resource.as_deref().map(ResourceName::of),
            verb: kind.verb,
            subresource: kind.subresource,
            scope: kind.scope,
            dry_run: kind.dry_run,
        }
    }

    pub fn names(&self) -> (&str, &str, &str) {
        self.resource.as_ref().map_or(("", "", ""), |name| (&name.group, &name.version, &name.plural))
    }

    /// Labels in alphabetical order, as upstream's. Not all metrics separate dry runs.
    pub fn text(&self, with_dry_run: bool) -> String {
        let dry_run = match (with_dry_run, self.dry_run) {
            (false, _) => "",
            (true, false) => "dry_run=\"\",",
            (true, true) => "dry_run=\"All\",",
        };
        let (group, version, plural) = self.names();
        format!(
            "component=\"apiserver\",{dry_run}group={group:?},resource={plural:?},scope={:?},subresource={:?},verb={:?},version={version:?}",
            self.scope, self.subresource, self.verb,
        )
    }
}

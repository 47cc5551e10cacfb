//! Which resources there are.

use kube::Client;
use kube::discovery::{ApiCapabilities, ApiGroup, ApiResource, Discovery, Scope};

use crate::error::{During, SyncError};

/// A resource in the version the server prefers, and its verbs.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    pub(crate) resource: ApiResource,
    pub(crate) capabilities: ApiCapabilities,
}

impl Served {
    pub(crate) fn can(&self, verbs: &[&str]) -> bool {
        verbs.iter().all(|verb| self.capabilities.operations.iter().any(|known| known == verb))
    }

    pub(crate) fn is_namespaced(&self) -> bool {
        self.capabilities.scope == Scope::Namespaced
    }
}

/// Every resource the server serves, once, in its preferred version.
pub(crate) async fn served(client: &Client) -> Result<Vec<Served>, SyncError> {
    let discovery = Discovery::new(client.clone()).run().await.during(|| "discover resources".to_owned())?;
    let mut all: Vec<Served> = discovery
        .groups()
        .flat_map(resources_of)
        .map(|(resource, capabilities)| Served { resource, capabilities })
        .collect();
    all.sort_by(|a, b| (&a.resource.group, &a.resource.plural).cmp(&(&b.resource.group, &b.resource.plural)));
    Ok(all)
}

/// The resources of a group: those of its preferred version, and as upstream those that only other versions have.
fn resources_of(group: &ApiGroup) -> Vec<(ApiResource, ApiCapabilities)> {
    let mut all = group.recommended_resources();
    for (resource, capabilities) in group.resources_by_stability() {
        if all.iter().all(|(known, _)| known.plural != resource.plural) {
            all.push((resource, capabilities));
        }
    }
    all
}

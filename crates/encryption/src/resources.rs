//! The resource that a key of the store belongs to.

use std::collections::HashMap;
use std::fmt;

/// A resource and its group. Either may be `*` in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupResource {
    pub group: String,
    pub resource: String,
}

impl GroupResource {
    pub fn new(group: &str, resource: &str) -> Self {
        Self { group: group.to_owned(), resource: resource.to_owned() }
    }

    /// Reads `resource.group`; `*.` is everything of the core group.
    pub fn parse(text: &str) -> Self {
        let (resource, group) = text.split_once('.').unwrap_or((text, ""));
        Self::new(group, resource)
    }
}

/// As a configuration writes it.
impl fmt::Display for GroupResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.group.as_str(), self.resource.as_str()) {
            ("", "*") => f.write_str("*."),
            ("", resource) => f.write_str(resource),
            (group, resource) => write!(f, "{resource}.{group}"),
        }
    }
}

/// The place of a built-in resource's objects: `secrets`, `services/specs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAt {
    pub path: String,
    pub resource: GroupResource,
}

/// Keys that are no objects of an API, by upstream's names of their resources.
const OTHERS: &[(&str, &str)] = &[
    ("masterleases", "apiServerIPInfo"),
    ("ranges/serviceips", "serviceipallocations"),
    ("ranges/servicenodeports", "servicenodeportallocations"),
];

/// Finds the resource of a key.
#[derive(Debug)]
pub(crate) struct Places(HashMap<String, GroupResource>);

impl Places {
    pub fn new(built_in: impl IntoIterator<Item = StoredAt>) -> Self {
        let mut places: HashMap<String, GroupResource> = HashMap::new();
        for StoredAt { path, resource } in built_in {
            // As upstream: what two groups share belongs to the older one, as events do to the core group.
            let known = places.entry(path).or_insert_with(|| resource.clone());
            if resource.group.is_empty() {
                *known = resource;
            }
        }
        let others = OTHERS.iter().map(|(path, name)| ((*path).to_owned(), GroupResource::new("", name)));
        places.extend(others);
        Self(places)
    }

    /// None for a key that is no resource's.
    pub fn of(&self, key: &[u8]) -> Option<GroupResource> {
        let rest = std::str::from_utf8(key.strip_prefix(b"/registry/")?).ok()?;
        let mut slashes = rest.match_indices('/').map(|(at, _)| at);
        let first = &rest[..slashes.next()?];
        let second = &rest[..slashes.next().unwrap_or(rest.len())];
        if let Some(known) = self.0.get(second).or_else(|| self.0.get(first)) {
            return Some(known.clone());
        }
        // Objects of custom kinds lie below group and resource.
        let resource = &second[first.len() + 1..];
        (first.contains('.') && !resource.is_empty()).then(|| GroupResource::new(first, resource))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_belong_to_resources() {
        let at = |path: &str, group: &str, resource: &str| StoredAt {
            path: path.into(),
            resource: GroupResource::new(group, resource),
        };
        let places = Places::new([
            at("secrets", "", "secrets"),
            at("events", "events.k8s.io", "events"),
            at("events", "", "events"),
            at("services/specs", "", "services"),
            at("services/endpoints", "", "endpoints"),
            at("deployments", "apps", "deployments"),
            at("apiregistration.k8s.io/apiservices", "apiregistration.k8s.io", "apiservices"),
        ]);
        for (key, expected) in [
            ("/registry/secrets/default/a", Some("secrets")),
            ("/registry/events/default/a", Some("events")),
            ("/registry/services/specs/default/a", Some("services")),
            ("/registry/services/endpoints/default/a", Some("endpoints")),
            ("/registry/deployments/default/a", Some("deployments.apps")),
            ("/registry/apiregistration.k8s.io/apiservices/v1.", Some("apiservices.apiregistration.k8s.io")),
            ("/registry/bears.example/pandas/default/a", Some("pandas.bears.example")),
            ("/registry/bears.example/pandas/a", Some("pandas.bears.example")),
            ("/registry/masterleases/10.0.0.1", Some("apiServerIPInfo")),
            ("/registry/ranges/serviceips", Some("serviceipallocations")),
            ("/registry/ferrite/authority", None),
            ("/registry/secrets", None),
            ("/elsewhere/secrets/a/b", None),
        ] {
            assert_eq!(places.of(key.as_bytes()).map(|r| r.to_string()).as_deref(), expected, "{key}");
        }
        assert_eq!(GroupResource::parse("*.").to_string(), "*.");
        assert_eq!(GroupResource::parse("*.*"), GroupResource::new("*", "*"));
        assert_eq!(GroupResource::parse("a.b.c"), GroupResource::new("b.c", "a"));
    }
}

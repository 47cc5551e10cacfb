//! APIServices as requests and discovery read them: the server of a group's version, and the order of
//! versions.

use super::mounted::MountedGroup;
use super::remote::Remote;
use ferrite_api::gvk::maturity;
use ferrite_api::meta;
use ferrite_json::Value;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A group and one of its versions.
pub(crate) type GroupVersion = (String, String);

/// The rank of a group among groups and of a version within its group. Higher ranks come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Priority {
    pub group: i64,
    pub version: i64,
}

/// Upstream's rank of custom groups.
pub(super) const CUSTOM: Priority = Priority { group: 1000, version: 100 };

/// Upstream's ranks of its own groups: group, version, rank of the group, rank of the version.
const BUILT_IN: &[(&str, &str, i64, i64)] = &[
    ("", "v1", 18000, 1),
    ("apps", "v1", 17800, 15),
    ("events.k8s.io", "v1", 17750, 15),
    ("events.k8s.io", "v1beta1", 17750, 5),
    ("authentication.k8s.io", "v1", 17700, 15),
    ("authentication.k8s.io", "v1beta1", 17700, 9),
    ("authentication.k8s.io", "v1alpha1", 17700, 1),
    ("authorization.k8s.io", "v1", 17600, 15),
    ("autoscaling", "v1", 17500, 15),
    ("autoscaling", "v2", 17500, 30),
    ("batch", "v1", 17400, 15),
    ("certificates.k8s.io", "v1", 17300, 15),
    ("certificates.k8s.io", "v1beta1", 17300, 9),
    ("certificates.k8s.io", "v1alpha1", 17300, 1),
    ("networking.k8s.io", "v1", 17200, 15),
    ("networking.k8s.io", "v1beta1", 17200, 9),
    ("policy", "v1", 17100, 15),
    ("rbac.authorization.k8s.io", "v1", 17000, 15),
    ("storage.k8s.io", "v1", 16800, 15),
    ("storage.k8s.io", "v1beta1", 16800, 9),
    ("storage.k8s.io", "v1alpha1", 16800, 1),
    ("admissionregistration.k8s.io", "v1", 16700, 15),
    ("admissionregistration.k8s.io", "v1beta1", 16700, 12),
    ("admissionregistration.k8s.io", "v1alpha1", 16700, 9),
    ("apiextensions.k8s.io", "v1", 16700, 15),
    ("scheduling.k8s.io", "v1", 16600, 15),
    ("scheduling.k8s.io", "v1alpha2", 16600, 2),
    ("coordination.k8s.io", "v1", 16500, 15),
    ("coordination.k8s.io", "v1beta1", 16500, 13),
    ("coordination.k8s.io", "v1alpha2", 16500, 12),
    ("node.k8s.io", "v1", 16300, 15),
    ("discovery.k8s.io", "v1", 16200, 15),
    ("resource.k8s.io", "v1", 16200, 21),
    ("resource.k8s.io", "v1beta2", 16200, 15),
    ("resource.k8s.io", "v1beta1", 16200, 9),
    ("resource.k8s.io", "v1alpha3", 16200, 1),
    ("flowcontrol.apiserver.k8s.io", "v1", 16100, 21),
    ("internal.apiserver.k8s.io", "v1alpha1", 16000, 9),
    ("storagemigration.k8s.io", "v1beta1", 15800, 9),
];

/// The rank of a group version that upstream's API server serves itself.
pub(super) fn built_in_priority(group: &str, version: &str) -> Option<Priority> {
    let row = BUILT_IN.iter().find(|row| row.0 == group && row.1 == version)?;
    Some(Priority { group: row.2, version: row.3 })
}

/// The name of the APIService of a group version.
pub(super) fn name_of(group: &str, version: &str) -> String {
    format!("{version}.{group}")
}

/// One APIService.
pub(crate) struct ApiService {
    pub group: String,
    pub version: String,
    pub priority: Priority,
    /// None if this server serves the group version itself.
    pub remote: Option<Arc<Remote>>,
    /// Set if this process serves it without storage.
    pub mounted: Option<Arc<dyn MountedGroup>>,
}

/// All APIServices at one moment.
#[derive(Default)]
pub(crate) struct ApiServices {
    by_version: BTreeMap<GroupVersion, ApiService>,
    has_remote: bool,
    has_mounted: bool,
}

impl ApiServices {
    pub fn new(all: impl IntoIterator<Item = ApiService>) -> Self {
        let by_version: BTreeMap<_, _> =
            all.into_iter().map(|api| ((api.group.clone(), api.version.clone()), api)).collect();
        let has_remote = by_version.values().any(|api| api.remote.is_some());
        let has_mounted = by_version.values().any(|api| api.mounted.is_some());
        Self { by_version, has_remote, has_mounted }
    }

    pub fn all(&self) -> impl Iterator<Item = &ApiService> {
        self.by_version.values()
    }

    /// The server behind a path, unless it is this one.
    pub fn remote_of_path(&self, path: &str) -> Option<&Arc<Remote>> {
        if !self.has_remote {
            return None;
        }
        let mut segments = path.strip_prefix("/apis/")?.splitn(3, '/');
        let (group, version) = (segments.next()?, segments.next()?);
        self.remote_of(group, version)
    }

    pub fn remote_of(&self, group: &str, version: &str) -> Option<&Arc<Remote>> {
        if !self.has_remote {
            return None;
        }
        self.by_version.get(&(group.to_owned(), version.to_owned()))?.remote.as_ref()
    }

    /// The group behind a path that this process serves without storage.
    pub fn mounted_of_path(&self, path: &str) -> Option<&Arc<dyn MountedGroup>> {
        if !self.has_mounted {
            return None;
        }
        let mut segments = path.strip_prefix("/apis/")?.splitn(3, '/');
        let (group, version) = (segments.next()?, segments.next()?);
        self.mounted_of(group, version)
    }

    pub fn mounted_of(&self, group: &str, version: &str) -> Option<&Arc<dyn MountedGroup>> {
        if !self.has_mounted {
            return None;
        }
        self.by_version.get(&(group.to_owned(), version.to_owned()))?.mounted.as_ref()
    }

    fn priority(&self, group: &str, version: &str) -> Priority {
        match self.by_version.get(&(group.to_owned(), version.to_owned())) {
            Some(api) => api.priority,
            None => built_in_priority(group, version).unwrap_or(CUSTOM),
        }
    }

    /// Sorts groups and the versions of each as upstream's discovery lists them.
    pub fn sort(&self, groups: &mut [(String, Vec<String>)]) {
        for (group, versions) in groups.iter_mut() {
            versions.sort_by_cached_key(|version| {
                let rank = self.priority(group, version).version;
                (Reverse(rank), Reverse(maturity(version)), version.clone())
            });
        }
        groups.sort_by_cached_key(|(group, versions)| {
            let rank = versions.iter().map(|version| self.priority(group, version).group).max();
            // This server's own group of APIServices has none: as upstream, it comes before every other one.
            let rank = if group == "apiregistration.k8s.io" { Some(i64::MAX) } else { rank };
            (!group.is_empty(), Reverse(rank), group.clone())
        });
    }
}

/// The parts of an APIService's specification that requests need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    pub name: String,
    pub group: String,
    pub version: String,
    pub priority: (i64, i64),
    pub service: Option<ServiceReference>,
}

/// The Service of an extension API server, and how its certificate is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServiceReference {
    pub namespace: String,
    pub name: String,
    pub port: u16,
    /// In base64, as the object has it; the system's authorities if empty.
    pub ca_bundle: String,
    pub skip_verify: bool,
}

impl Spec {
    pub fn of(object: &Value) -> Self {
        let text =
            |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let number = |pointer: &str| object.pointer(pointer).and_then(Value::as_i64);
        let service =
            object.pointer("/spec/service").filter(|service| service.is_object()).map(|_| ServiceReference {
                namespace: text("/spec/service/namespace"),
                name: text("/spec/service/name"),
                port: number("/spec/service/port").and_then(|p| u16::try_from(p).ok()).unwrap_or(443),
                ca_bundle: text("/spec/caBundle"),
                skip_verify: object.pointer("/spec/insecureSkipTLSVerify").and_then(Value::as_bool)
                    == Some(true),
            });
        Self {
            name: meta::name(object).to_owned(),
            group: text("/spec/group"),
            version: text("/spec/version"),
            priority: (
                number("/spec/groupPriorityMinimum").unwrap_or_default(),
                number("/spec/versionPriority").unwrap_or_default(),
            ),
            service,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(group: &str, version: &str, ranks: (i64, i64)) -> ApiService {
        ApiService {
            group: group.into(),
            version: version.into(),
            priority: Priority { group: ranks.0, version: ranks.1 },
            remote: None,
            mounted: None,
        }
    }

    #[test]
    fn groups_and_versions_come_in_the_order_of_their_ranks() {
        let services = ApiServices::new([
            api("metrics.example", "v1", (20000, 5)),
            api("metrics.example", "v2alpha1", (100, 10)),
            api("late.example", "v1", (1, 1)),
        ]);
        let mut groups: Vec<(String, Vec<String>)> = [
            ("late.example", vec!["v1"]),
            ("custom.example", vec!["v1beta1", "nonsense", "v1", "v2alpha1", "v10"]),
            ("apps", vec!["v1"]),
            ("autoscaling", vec!["v1", "v2"]),
            ("", vec!["v1"]),
            ("metrics.example", vec!["v1", "v2alpha1"]),
            ("apiregistration.k8s.io", vec!["v1"]),
        ]
        .into_iter()
        .map(|(group, versions)| (group.to_owned(), versions.into_iter().map(str::to_owned).collect()))
        .collect();
        services.sort(&mut groups);
        let names: Vec<&str> = groups.iter().map(|(group, _)| group.as_str()).collect();
        assert_eq!(
            names,
            [
                "",
                "apiregistration.k8s.io",
                "metrics.example",
                "apps",
                "autoscaling",
                "custom.example",
                "late.example"
            ]
        );
        let versions = |group: &str| groups.iter().find(|(g, _)| g == group).expect("listed").1.clone();
        assert_eq!(versions("metrics.example"), ["v2alpha1", "v1"], "by rank");
        assert_eq!(versions("autoscaling"), ["v2", "v1"]);
        assert_eq!(versions("custom.example"), ["v10", "v1", "v1beta1", "v2alpha1", "nonsense"]);
    }
}

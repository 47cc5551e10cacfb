//! Names of kinds and resources.

use std::cmp::Reverse;
use std::fmt;

/// Group, version and kind, as an object's `apiVersion` and `kind` spell them. The core group is empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gvk {
    pub group: String,
    pub version: String,
    pub kind: String,
}

impl Gvk {
    pub fn new(group: impl Into<String>, version: impl Into<String>, kind: impl Into<String>) -> Self {
        Self { group: group.into(), version: version.into(), kind: kind.into() }
    }

    /// Reads `apps/v1` or `v1`. More than one slash is an error, as upstream's.
    pub fn from_api_version(api_version: &str, kind: &str) -> Option<Self> {
        match api_version.split_once('/') {
            None => Some(Self::new("", api_version, kind)),
            Some((_, version)) if version.contains('/') => None,
            Some((group, version)) => Some(Self::new(group, version, kind)),
        }
    }

    pub fn api_version(&self) -> String {
        api_version(&self.group, &self.version)
    }
}

impl fmt::Display for Gvk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}, Kind={}", self.group, self.version, self.kind)
    }
}

/// Group, version and plural resource name, as a request's path spells them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gvr {
    pub group: String,
    pub version: String,
    pub resource: String,
}

impl Gvr {
    pub fn new(group: impl Into<String>, version: impl Into<String>, resource: impl Into<String>) -> Self {
        Self { group: group.into(), version: version.into(), resource: resource.into() }
    }
}

impl fmt::Display for Gvr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}, Resource={}", self.group, self.version, self.resource)
    }
}

/// `apps/v1`, or `v1` for the core group.
pub fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// The rank of a version among others of its group: stable after beta after alpha, higher numbers later, other names first.
pub fn maturity(version: &str) -> (u8, u32, u32) {
    let Some(text) = version.strip_prefix('v') else { return (0, 0, 0) };
    let (stage, word) = match () {
        () if text.contains("alpha") => (1, "alpha"),
        () if text.contains("beta") => (2, "beta"),
        () => (3, "beta"),
    };
    let (major, minor) = text.split_once(word).unwrap_or((text, "0"));
    match (major.parse(), minor.parse()) {
        (Ok(major), Ok(minor)) => (stage, major, minor),
        _ => (0, 0, 0),
    }
}

/// The order of versions by preference, the most preferred last. Names that have no maturity are in order of the alphabet,
/// the first one preferred.
pub fn preference(version: &str) -> ((u8, u32, u32), Reverse<&str>) {
    (maturity(version), Reverse(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_in_order_of_preference() {
        let ordered = ["zoo", "alpha", "v1alpha1", "v2alpha1", "v1beta1", "v1beta2", "v1", "v2", "v10"];
        assert!(ordered.is_sorted_by_key(|version| preference(version)), "{ordered:?}");
    }
}

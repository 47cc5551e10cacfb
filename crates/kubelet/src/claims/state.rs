//! The claims that pods of this node use, and the devices that drivers have prepared for them.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A device that a driver has prepared, as upstream's checkpoint has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    #[serde(rename = "PoolName")]
    pub pool: String,
    #[serde(rename = "DeviceName")]
    pub device: String,
    #[serde(rename = "ShareID", default)]
    pub share_id: Option<String>,
    /// The requests that it is for; none is all of them.
    #[serde(rename = "RequestNames", default, deserialize_with = "null_is_empty")]
    pub requests: Vec<String>,
    #[serde(rename = "CDIDeviceIDs", default, deserialize_with = "null_is_empty")]
    pub cdi_devices: Vec<String>,
}

/// Go writes an empty list as null.
fn null_is_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Option::<Vec<String>>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A claim, by namespace and name.
pub(crate) type ClaimKey = (String, String);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClaimInfo {
    pub uid: String,
    /// UIDs of the pods that use it.
    pub pods: BTreeSet<String>,
    /// The devices of each driver that has a part in the claim.
    pub drivers: BTreeMap<String, Vec<Device>>,
    /// All drivers have prepared it since the kubelet started.
    pub is_prepared: bool,
}

impl ClaimInfo {
    /// The devices for a request; for all requests if it is empty.
    fn devices(&self, request: &str) -> impl Iterator<Item = &Device> {
        self.drivers.values().flatten().filter(move |device| {
            request.is_empty() || device.requests.is_empty() || device.requests.iter().any(|r| r == request)
        })
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ClaimState(pub BTreeMap<ClaimKey, ClaimInfo>);

/// A claim of this name is still in use by pods of an earlier claim.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "old ResourceClaim with same name {name} and different UID {uid} still exists (previous pod force-deleted?!)"
)]
pub(crate) struct OldClaim {
    name: String,
    uid: String,
}

impl ClaimState {
    /// The pod uses the claim from now on. True if drivers must prepare it.
    pub fn add(
        &mut self,
        key: &ClaimKey,
        uid: &str,
        drivers: &BTreeSet<String>,
        pod: &str,
    ) -> Result<bool, OldClaim> {
        let info = self.0.entry(key.clone()).or_insert_with(|| ClaimInfo {
            uid: uid.to_owned(),
            drivers: drivers.iter().map(|driver| (driver.clone(), Vec::new())).collect(),
            ..ClaimInfo::default()
        });
        if info.uid != uid {
            return Err(OldClaim { name: key.1.clone(), uid: info.uid.clone() });
        }
        info.pods.insert(pod.to_owned());
        Ok(!info.is_prepared)
    }

    /// The driver's answer takes the place of an earlier one.
    pub fn set_devices(&mut self, key: &ClaimKey, driver: &str, devices: Vec<Device>) {
        if let Some(info) = self.0.get_mut(key) {
            info.drivers.insert(driver.to_owned(), devices);
        }
    }

    pub fn set_prepared(&mut self, key: &ClaimKey) {
        if let Some(info) = self.0.get_mut(key) {
            info.is_prepared = true;
        }
    }

    /// The claims that nobody but this pod uses, with their UIDs and drivers.
    pub fn only_of(&self, pod: &str) -> Vec<(ClaimKey, String, BTreeSet<String>)> {
        let own = self.0.iter().filter(|(_, info)| info.pods.len() == 1 && info.pods.contains(pod));
        own.map(|(key, info)| (key.clone(), info.uid.clone(), info.drivers.keys().cloned().collect()))
            .collect()
    }

    /// The pod uses nothing any longer; claims that nobody uses are forgotten. True if something changed.
    pub fn release(&mut self, pod: &str) -> bool {
        let mut changed = false;
        self.0.retain(|_, info| {
            changed |= info.pods.remove(pod);
            !info.pods.is_empty()
        });
        changed
    }

    /// UIDs of the pods that use claims.
    pub fn pods(&self) -> BTreeSet<String> {
        self.0.values().flat_map(|info| &info.pods).cloned().collect()
    }

    /// CDI names of the devices for these requests of a claim, each once.
    pub fn cdi_devices(&self, key: &ClaimKey, requests: &[&str]) -> Option<Vec<String>> {
        let info = self.0.get(key)?;
        let mut names = Vec::new();
        for name in requests.iter().flat_map(|request| info.devices(request)).flat_map(|d| &d.cdi_devices) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        Some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ClaimKey {
        ("ns".to_owned(), name.to_owned())
    }

    #[test]
    fn a_claim_lives_as_long_as_its_pods() {
        let mut state = ClaimState::default();
        let drivers = BTreeSet::from(["d".to_owned()]);
        assert_eq!(state.add(&key("c"), "u", &drivers, "first"), Ok(true));
        state.set_prepared(&key("c"));
        assert_eq!(state.add(&key("c"), "u", &drivers, "second"), Ok(false), "prepared once");
        assert!(state.add(&key("c"), "new", &drivers, "third").is_err(), "another claim of this name");
        assert_eq!(state.only_of("first"), [], "the second pod uses it, too");
        assert!(state.release("first"));
        assert!(!state.release("first"));
        assert_eq!(state.only_of("second").len(), 1);
        assert_eq!(state.pods(), BTreeSet::from(["second".to_owned()]));
        assert!(state.release("second"));
        assert_eq!(state, ClaimState::default());
    }

    #[test]
    fn requests_choose_devices() {
        let mut state = ClaimState::default();
        state.add(&key("c"), "u", &BTreeSet::new(), "p").unwrap();
        let device = |requests: &[&str], cdi: &[&str]| Device {
            requests: requests.iter().map(|r| (*r).to_owned()).collect(),
            cdi_devices: cdi.iter().map(|c| (*c).to_owned()).collect(),
            ..Device::default()
        };
        state.set_devices(
            &key("c"),
            "d",
            vec![device(&["a"], &["v/k=1"]), device(&["b"], &["v/k=2"]), device(&[], &["v/k=0"])],
        );
        let names = |requests: &[&str]| state.cdi_devices(&key("c"), requests).unwrap();
        assert_eq!(names(&["a"]), ["v/k=1", "v/k=0"]);
        assert_eq!(names(&["a", "b"]), ["v/k=1", "v/k=0", "v/k=2"]);
        assert_eq!(names(&[""]), ["v/k=1", "v/k=2", "v/k=0"]);
        assert_eq!(state.cdi_devices(&key("x"), &[""]), None);
    }
}

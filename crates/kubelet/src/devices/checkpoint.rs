//! The file `kubelet_internal_checkpoint`: devices of pods, in upstream's format.

use super::state::{Given, PerNuma, PodDevices};
use crate::state_file::{self, go_list, go_map};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_devices::deviceplugin::ContainerAllocateResponse;
use ferrite_devices::{decode, encode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of the file, beside the sockets of plugins.
pub(crate) const FILE: &str = "kubelet_internal_checkpoint";

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error("it is no checkpoint: {0}")]
    Form(String),
    #[error("checkpoint is corrupted")]
    Checksum,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
    checksum: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container_name: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    /// By NUMA node.
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    /// The plugin's answer, as base64 of its protobuf form.
    #[serde(rename = "AllocResp")]
    alloc_resp: Option<String>,
}

/// The pods' devices, and the resources that plugins had registered.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Restored {
    pub pods: PodDevices,
    pub registered: Vec<String>,
}

pub(crate) fn write(pods: &PodDevices, registered: &BTreeMap<String, Vec<String>>) -> Vec<u8> {
    let mut entries = Vec::new();
    for (uid, containers) in pods {
        for (container, resources) in containers {
            for (resource, given) in resources {
                let ids = given.devices.iter().map(|(node, ids)| (node.to_string(), Some(ids.clone())));
                entries.push(Entry {
                    pod_uid: uid.clone(),
                    container_name: container.clone(),
                    resource_name: resource.clone(),
                    device_ids: Some(ids.collect()),
                    alloc_resp: Some(STANDARD.encode(encode(&given.response))),
                });
            }
        }
    }
    let registered = registered.iter().map(|(name, ids)| (name.clone(), Some(ids.clone()))).collect();
    let data = Data {
        pod_device_entries: (!entries.is_empty()).then_some(entries),
        registered_devices: Some(registered),
    };
    let checksum = state_file::checksum(&data.dump());
    ferrite_json::to_vec(&Checkpoint { data, checksum }).unwrap_or_default()
}

pub(crate) fn read(bytes: &[u8]) -> Result<Restored, CheckpointError> {
    let form = |e: String| CheckpointError::Form(e);
    let checkpoint: Checkpoint = ferrite_json::from_slice(bytes).map_err(|e| form(e.to_string()))?;
    if state_file::checksum(&checkpoint.data.dump()) != checkpoint.checksum {
        return Err(CheckpointError::Checksum);
    }
    let mut pods = PodDevices::new();
    for entry in checkpoint.data.pod_device_entries.into_iter().flatten() {
        let mut devices = PerNuma::new();
        for (node, ids) in entry.device_ids.into_iter().flatten() {
            let node = node.parse().map_err(|_| form(format!("{node:?} is no NUMA node")))?;
            devices.insert(node, ids.unwrap_or_default());
        }
        let answer = STANDARD.decode(entry.alloc_resp.unwrap_or_default());
        let answer = answer.map_err(|e| form(e.to_string()))?;
        let response: ContainerAllocateResponse = decode(&answer).map_err(|e| form(e.to_string()))?;
        let containers = pods.entry(entry.pod_uid).or_default();
        let resources = containers.entry(entry.container_name).or_default();
        resources.insert(entry.resource_name, Given { devices, response });
    }
    let registered = checkpoint.data.registered_devices.unwrap_or_default().into_keys().collect();
    Ok(Restored { pods, registered })
}

impl Data {
    /// The text that upstream's checksum is of.
    fn dump(&self) -> String {
        const NIL: &str = "<nil>";
        let list = |ids: &Option<Vec<String>>| ids.as_ref().map_or(NIL.to_owned(), go_list);
        let entry = |e: &Entry| {
            // Sorted as numbers.
            let by_node = |ids: &BTreeMap<String, Option<Vec<String>>>| -> String {
                let sorted: BTreeMap<i64, String> =
                    ids.iter().map(|(node, ids)| (node.parse().unwrap_or_default(), list(ids))).collect();
                go_map(sorted)
            };
            let ids = e.device_ids.as_ref().map_or(NIL.to_owned(), by_node);
            let answer = e.alloc_resp.as_ref().map(|text| STANDARD.decode(text).unwrap_or_default());
            let answer = answer.map_or(NIL.to_owned(), go_list);
            format!(
                "{{PodUID:(string){} ContainerName:(string){} ResourceName:(string){} \
                 DeviceIDs:(checkpoint.DevicesPerNUMA){ids} AllocResp:([]uint8){answer}}}",
                e.pod_uid, e.container_name, e.resource_name
            )
        };
        let entries = self.pod_device_entries.as_ref();
        let entries = entries.map_or(NIL.to_owned(), |all| go_list(all.iter().map(entry)));
        let registered = self.registered_devices.as_ref();
        let registered =
            registered.map_or(NIL.to_owned(), |all| go_map(all.iter().map(|(name, ids)| (name, list(ids)))));
        format!(
            "(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries} \
             RegisteredDevices:(map[string][]string){registered}}}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::Value;

    /// Checksums that upstream's code calculates for the same data.
    #[test]
    fn checksums_are_upstreams() {
        for (text, sum) in [
            (
                r#"{"PodDeviceEntries":[
                {"PodUID":"u1","ContainerName":"c","ResourceName":"r/a","DeviceIDs":{"-1":["d1","d2"],"0":["d3"]},"AllocResp":"CgNByA=="},
                {"PodUID":"u2","ContainerName":"c2","ResourceName":"r/b","DeviceIDs":{},"AllocResp":""}],
                "RegisteredDevices":{"r/b":[],"r/a":["d1","d2"]}}"#,
                3062254555,
            ),
            (r#"{"PodDeviceEntries":null,"RegisteredDevices":{}}"#, 3467439661),
            (r#"{"PodDeviceEntries":[],"RegisteredDevices":{"r/a":null}}"#, 178582127),
        ] {
            let data: Data = ferrite_json::from_str(text).unwrap();
            assert_eq!(state_file::checksum(&data.dump()), sum, "{}", data.dump());
        }
    }

    #[test]
    fn a_checkpoint_is_read_as_it_was_written() {
        let response =
            ContainerAllocateResponse { envs: [("A".into(), "1".into())].into(), ..Default::default() };
        let given = Given { devices: [(-1, vec!["a".into()]), (10, vec!["b".into()])].into(), response };
        let pods: PodDevices = [("uid".into(), [("c".into(), [("r/x".into(), given)].into())].into())].into();
        let registered = [("r/x".to_owned(), vec!["a".to_owned()]), ("r/y".to_owned(), vec![])].into();
        let bytes = write(&pods, &registered);
        let restored = read(&bytes).unwrap();
        assert_eq!(restored, Restored { pods, registered: vec!["r/x".into(), "r/y".into()] });
        let text: Value = ferrite_json::from_slice(&bytes).unwrap();
        let entry = &text["Data"]["PodDeviceEntries"][0];
        assert_eq!(entry["PodUID"], "uid");
        assert_eq!(entry["DeviceIDs"]["-1"][0], "a");
        assert_eq!(text["Data"]["RegisteredDevices"]["r/x"][0], "a");

        let none = read(&write(&PodDevices::new(), &BTreeMap::new())).unwrap();
        assert_eq!(none, Restored::default());
    }

    #[test]
    fn a_damaged_checkpoint_is_refused() {
        let bytes = write(&PodDevices::new(), &[("r/x".to_owned(), vec![])].into());
        let text = String::from_utf8(bytes).unwrap();
        for damaged in
            [text.replace("r/x", "r/y"), text[..text.len() / 2].to_owned(), String::new(), "{}".into()]
        {
            assert!(read(damaged.as_bytes()).is_err(), "{damaged}");
        }
    }
}

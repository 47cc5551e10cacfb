//! The file `dra_manager_state`: prepared claims, in upstream's format.

use super::state::{ClaimInfo, ClaimState, Device};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of the file, in the kubelet's directory.
pub(super) const FILE: &str = "dra_manager_state";

const KIND: &str = "DRACheckpoint";
const VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

#[derive(Debug, thiserror::Error)]
pub(super) enum CheckpointError {
    #[error("it is no checkpoint: {0}")]
    Form(#[from] ferrite_json::Error),
    #[error("checkpoint is corrupted")]
    Checksum,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    /// JSON of [`Data`].
    data: String,
    checksum: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Option<Vec<Entry>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    #[serde(rename = "ClaimUID")]
    uid: String,
    #[serde(rename = "ClaimName")]
    name: String,
    #[serde(rename = "Namespace")]
    namespace: String,
    /// A set, as Go writes it.
    #[serde(rename = "PodUIDs")]
    pods: BTreeMap<String, Empty>,
    #[serde(rename = "DriverState")]
    drivers: Option<BTreeMap<String, Driver>>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Empty {}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Driver {
    devices: Option<Vec<Device>>,
}

pub(super) fn write(state: &ClaimState) -> Result<Vec<u8>, ferrite_json::Error> {
    let claims = state.0.iter().map(|((namespace, name), info)| Entry {
        uid: info.uid.clone(),
        name: name.clone(),
        namespace: namespace.clone(),
        pods: info.pods.iter().map(|uid| (uid.clone(), Empty {})).collect(),
        drivers: Some(
            info.drivers
                .iter()
                .map(|(name, devices)| (name.clone(), Driver { devices: Some(devices.clone()) }))
                .collect(),
        ),
    });
    let data =
        Data { kind: KIND.to_owned(), api_version: VERSION.to_owned(), claims: Some(claims.collect()) };
    let data = ferrite_json::to_string(&data)?;
    let checksum = crc32fast::hash(data.as_bytes());
    ferrite_json::to_vec(&Checkpoint { data, checksum })
}

pub(super) fn read(bytes: &[u8]) -> Result<ClaimState, CheckpointError> {
    let checkpoint: Checkpoint = ferrite_json::from_slice(bytes)?;
    if crc32fast::hash(checkpoint.data.as_bytes()) != checkpoint.checksum {
        return Err(CheckpointError::Checksum);
    }
    let data: Data = ferrite_json::from_str(&checkpoint.data)?;
    let mut state = ClaimState::default();
    for entry in data.claims.into_iter().flatten() {
        let drivers = entry.drivers.unwrap_or_default().into_iter();
        let info = ClaimInfo {
            uid: entry.uid,
            pods: entry.pods.into_keys().collect(),
            drivers: drivers.map(|(name, driver)| (name, driver.devices.unwrap_or_default())).collect(),
            is_prepared: false,
        };
        state.0.insert((entry.namespace, entry.name), info);
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn what_was_written_is_read() {
        let mut state = ClaimState::default();
        let key = ("ns".to_owned(), "c".to_owned());
        state.add(&key, "u", &BTreeSet::from(["d.example".to_owned()]), "p").unwrap();
        let device = Device {
            pool: "p".to_owned(),
            device: "x".to_owned(),
            share_id: Some("s".to_owned()),
            requests: vec!["r".to_owned()],
            cdi_devices: vec!["v/k=x".to_owned()],
        };
        state.set_devices(&key, "d.example", vec![device]);
        let mut bytes = write(&state).unwrap();
        assert_eq!(read(&bytes).unwrap(), state);
        let at = bytes.iter().position(|byte| *byte == b'x').unwrap();
        bytes[at] = b'y';
        assert!(matches!(read(&bytes), Err(CheckpointError::Checksum)));
        assert!(matches!(read(b"{"), Err(CheckpointError::Form(_))));
    }

    #[test]
    fn a_file_of_upstreams_kubelet_is_read() {
        let data = r#"{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[{"ClaimUID":"u","ClaimName":"c","Namespace":"ns","PodUIDs":{"p":{}},"DriverState":{"d.example":{"Devices":[{"PoolName":"pool","DeviceName":"dev","ShareID":null,"RequestNames":null,"CDIDeviceIDs":["v/k=1"]}]}}}]}"#;
        let file = ferrite_json::json!({"Data": data, "Checksum": crc32fast::hash(data.as_bytes())});
        let state = read(file.to_string().as_bytes()).unwrap();
        let info = &state.0[&("ns".to_owned(), "c".to_owned())];
        assert_eq!(info.drivers["d.example"][0].cdi_devices, ["v/k=1"]);
        assert!(info.pods.contains("p"));
    }
}

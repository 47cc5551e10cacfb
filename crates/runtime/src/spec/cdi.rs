//! Devices by name: the parts of a device according to the files of the container device interface.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::SpecError;

/// One file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    cdi_version: String,
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    container_edits: Edits,
}

/// The changes that a device makes to a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    #[serde(default)]
    pub env: Vec<String>,
    #[serde(default)]
    pub device_nodes: Vec<Node>,
    #[serde(default)]
    pub mounts: Vec<Bind>,
    #[serde(default)]
    hooks: Vec<serde_json::Value>,
    #[serde(default)]
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub path: String,
    /// Where the node is on the host; empty: the same path.
    #[serde(default)]
    pub host_path: String,
    /// Some of `rwm`; empty: all.
    #[serde(default)]
    pub permissions: String,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bind {
    pub host_path: String,
    pub container_path: String,
    #[serde(default)]
    pub options: Vec<String>,
}

impl Edits {
    fn add(&mut self, other: &Self) {
        self.env.extend(other.env.iter().cloned());
        self.device_nodes.extend(other.device_nodes.iter().cloned());
        self.mounts.extend(other.mounts.iter().cloned());
        self.hooks.extend(other.hooks.iter().cloned());
        self.additional_gids.extend(&other.additional_gids);
    }
}

/// The devices of this machine.
#[derive(Debug, Default)]
pub struct Registry {
    /// By `vendor/class=name`, with the edits common to the file and whether that is needed.
    devices: BTreeMap<String, (Edits, usize)>,
    common: Vec<Edits>,
    problems: Vec<String>,
}

impl Registry {
    /// Takes a file in, JSON or YAML by the name's ending. Later files win, as directories of higher
    /// priority are read later. A file that makes no sense is kept as an explanation for devices missed.
    pub fn add(&mut self, name: &str, content: &str) {
        let parsed: Result<File, String> = if name.ends_with(".json") {
            serde_json::from_str(content).map_err(|error| error.to_string())
        } else {
            serde_saphyr::from_str(content).map_err(|error| error.to_string())
        };
        match parsed {
            Ok(file) if !file.cdi_version.is_empty() && file.kind.contains('/') => {
                self.common.push(file.container_edits);
                for device in file.devices {
                    let key = format!("{}={}", file.kind, device.name);
                    self.devices.insert(key, (device.container_edits, self.common.len() - 1));
                }
            }
            Ok(file) => self.problems.push(format!("{name}: kind {:?} is not vendor/class", file.kind)),
            Err(error) => self.problems.push(format!("{name}: {error}")),
        }
    }

    /// The combined edits of these devices; a file's common edits are made once.
    pub fn edits(&self, names: &[String]) -> Result<Edits, SpecError> {
        let (mut out, mut common) = (Edits::default(), Vec::new());
        for name in names {
            let fail = |message: String| Err(SpecError::Cdi { name: name.clone(), message });
            let Some((edits, file)) = self.devices.get(name) else {
                let problems = self.problems.join("; ");
                let hint = if problems.is_empty() { String::new() } else { format!(" ({problems})") };
                return fail(format!("no CDI file of this machine describes it{hint}"));
            };
            if !common.contains(file) {
                common.push(*file);
                out.add(&self.common[*file]);
            }
            out.add(edits);
            if !out.hooks.is_empty() {
                return fail("its CDI file asks for hooks, which are not supported".into());
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = r#"{"cdiVersion":"0.6.0","kind":"vendor.com/gpu",
        "containerEdits":{"env":["DRIVER=1"]},
        "devices":[
          {"name":"0","containerEdits":{"env":["GPU=0"],"deviceNodes":[{"path":"/dev/gpu0"}]}},
          {"name":"1","containerEdits":{"mounts":[{"hostPath":"/lib/gpu","containerPath":"/gpu","options":["ro"]}],
            "additionalGids":[44]}},
          {"name":"hooked","containerEdits":{"hooks":[{"hookName":"createContainer","path":"/x"}]}}]}"#;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn devices_and_common_edits() {
        let mut registry = Registry::default();
        registry.add("gpu.json", GPU);
        registry.add(
            "net.yaml",
            "cdiVersion: 0.5.0\nkind: v.org/nic\ndevices:\n- name: a\n  containerEdits:\n    env: [NIC=a]\n",
        );
        let edits = registry.edits(&names(&["vendor.com/gpu=0", "vendor.com/gpu=1", "v.org/nic=a"])).unwrap();
        assert_eq!(edits.env, ["DRIVER=1", "GPU=0", "NIC=a"]);
        assert_eq!(edits.device_nodes[0].path, "/dev/gpu0");
        assert_eq!(edits.mounts[0].container_path, "/gpu");
        assert_eq!(edits.additional_gids, [44]);
    }

    #[test]
    fn what_cannot_be_given_is_refused() {
        let mut registry = Registry::default();
        registry.add("gpu.json", GPU);
        registry.add("bad.json", "{");
        let missing = registry.edits(&names(&["vendor.com/gpu=9"])).unwrap_err().to_string();
        assert!(missing.contains("vendor.com/gpu=9") && missing.contains("bad.json"), "{missing}");
        assert!(
            registry.edits(&names(&["vendor.com/gpu=hooked"])).unwrap_err().to_string().contains("hooks")
        );
    }
}

//! Mounts that are read-only with everything mounted below them.

use crate::pod::model::PodContainer;
use ferrite_cri::v1::Mount;
use k8s_openapi::api::core::v1::VolumeMount;

/// Why a mount cannot be made so, worded as upstream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ReadOnlyError {
    #[error(
        "failed to resolve recursive read-only mode: volume {0:?} requested recursive read-only mode, but it is not read-only"
    )]
    Writable(String),
    #[error(
        "failed to resolve recursive read-only mode: volume {volume:?} requested recursive read-only mode, but it is not compatible with propagation {propagation:?}"
    )]
    Propagation { volume: String, propagation: String },
    #[error(
        "failed to resolve recursive read-only mode: volume {0:?} requested recursive read-only mode, but it is not supported by the runtime"
    )]
    Runtime(String),
    #[error("failed to resolve recursive read-only mode: unknown recursive read-only mode {0:?}")]
    Unknown(String),
}

fn mode(mount: &VolumeMount) -> Option<&str> {
    mount.recursive_read_only.as_deref().filter(|mode| *mode != "Disabled")
}

pub(crate) fn is_wanted(container: &PodContainer) -> bool {
    container.spec.volume_mounts.iter().flatten().any(|m| mode(m).is_some())
}

/// Sets the mode of each of the container's mounts; `mounts` begins with them, in the order of the spec.
pub(crate) fn resolve(
    container: &PodContainer,
    mut mounts: Vec<Mount>,
    supported: bool,
) -> Result<Vec<Mount>, ReadOnlyError> {
    for (wanted, mount) in container.spec.volume_mounts.iter().flatten().zip(&mut mounts) {
        let Some(mode) = mode(wanted) else { continue };
        if wanted.read_only != Some(true) {
            return Err(ReadOnlyError::Writable(wanted.name.clone()));
        }
        if let Some(propagation) = wanted.mount_propagation.as_deref().filter(|p| *p != "None") {
            let propagation = propagation.to_string();
            return Err(ReadOnlyError::Propagation { volume: wanted.name.clone(), propagation });
        }
        mount.recursive_read_only = match mode {
            "IfPossible" => supported,
            "Enabled" if supported => true,
            "Enabled" => return Err(ReadOnlyError::Runtime(wanted.name.clone())),
            other => return Err(ReadOnlyError::Unknown(other.to_string())),
        };
    }
    Ok(mounts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::model;
    use ferrite_json::{Value, json};

    #[test]
    fn modes() {
        let run = |mount: Value, supported: bool| {
            let pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {"containers": [
                {"name": "c", "volumeMounts": [mount]}]}}))
            .unwrap();
            let container = model::containers(&pod).remove(0);
            let mounts = resolve(&container, vec![Mount::default(), Mount::default()], supported);
            mounts.map(|m| m[0].recursive_read_only).map_err(|e| e.to_string())
        };
        let mount = |mode: &str, read_only: bool, propagation: &str| {
            json!({"name": "v", "mountPath": "/v", "readOnly": read_only, "recursiveReadOnly": mode,
                   "mountPropagation": propagation})
        };
        for (mount, supported, expected) in [
            (mount("Disabled", false, "Bidirectional"), true, Ok(false)),
            (mount("IfPossible", true, "None"), false, Ok(false)),
            (mount("IfPossible", true, "None"), true, Ok(true)),
            (mount("Enabled", true, "None"), true, Ok(true)),
            (mount("Enabled", true, "None"), false, Err("not supported by the runtime")),
            (mount("Enabled", false, "None"), true, Err("not read-only")),
            (mount("Enabled", true, "HostToContainer"), true, Err("not compatible with propagation")),
            (mount("Sometimes", true, "None"), true, Err("unknown recursive read-only mode")),
        ] {
            match (run(mount.clone(), supported), expected) {
                (Err(got), Err(part)) => assert!(got.contains(part), "{mount}: {got}"),
                (got, expected) => assert_eq!(got, expected.map_err(str::to_string), "{mount}"),
            }
        }
    }
}

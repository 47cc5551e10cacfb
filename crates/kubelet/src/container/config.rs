//! The request for one container.

use super::expand::expand;
use super::seccomp::{self, SeccompError};
use super::{resources, security};
use crate::pod::labels;
use crate::pod::model::{PodContainer, PodId};
use crate::topology::ContainerCpus;
use ferrite_cri::v1::{
    CdiDevice, ContainerConfig, ContainerMetadata, Device, ImageSpec, KeyValue, LinuxContainerConfig, Mount,
    UserNamespace,
};
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) struct ConfigInputs<'a> {
    pub pod: &'a Pod,
    pub container: &'a PodContainer,
    pub attempt: u32,
    pub env: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
    /// Raw devices, and those of plugins.
    pub devices: Vec<Device>,
    pub cdi_devices: Vec<CdiDevice>,
    /// The processors it runs on; without them, all.
    pub cpus: Option<ContainerCpus>,
    /// Of device plugins, for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// The image service's reference of the pulled image.
    pub image_ref: String,
    pub image_user: &'a security::ImageUser,
    /// The container an ephemeral one shares processes with.
    pub target_id: Option<String>,
    pub rules: &'a resources::NodeRules,
    /// The kernel ends all processes of the container when it has no memory left, not one.
    pub oom_group: bool,
    /// Where Localhost seccomp profiles are.
    pub seccomp_root: &'a Path,
    /// A container without a profile has the runtime's.
    pub seccomp_default: bool,
    /// Whose identities the pod's users are.
    pub users: &'a UserNamespace,
}

/// The log of one instance, beneath the pod's log directory.
pub(crate) fn log_path(container: &str, attempt: u32) -> String {
    format!("{container}/{attempt}.log")
}

pub(crate) fn container_config(inputs: ConfigInputs<'_>) -> Result<ContainerConfig, SeccompError> {
    let (pod, container) = (inputs.pod, inputs.container);
    let spec = &container.spec;
    let variables: BTreeMap<&str, &str> = inputs.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let expanded = |words: &Option<Vec<String>>| -> Vec<String> {
        words.iter().flatten().map(|w| expand(w, |name| variables.get(name).map(|v| v.to_string()))).collect()
    };
    let lifecycle = spec.lifecycle.as_ref();
    Ok(ContainerConfig {
        metadata: Some(ContainerMetadata { name: spec.name.clone(), attempt: inputs.attempt }),
        image: Some(ImageSpec {
            image: inputs.image_ref,
            user_specified_image: spec.image.clone().unwrap_or_default(),
            ..ImageSpec::default()
        }),
        command: expanded(&spec.command),
        args: expanded(&spec.args),
        working_dir: spec.working_dir.clone().unwrap_or_default(),
        // As upstream: every mount shows its files with the pod's identities.
        mounts: inputs
            .mounts
            .into_iter()
            .map(|mount| Mount {
                uid_mappings: inputs.users.uids.clone(),
                gid_mappings: inputs.users.gids.clone(),
                ..mount
            })
            .collect(),
        devices: inputs.devices,
        labels: labels::container_labels(&PodId::of(pod), container),
        cdi_devices: inputs.cdi_devices,
        annotations: {
            let mut annotations = inputs.annotations;
            annotations.extend(labels::container_annotations(pod, container, inputs.attempt));
            annotations
        },
        log_path: log_path(&spec.name, inputs.attempt),
        stdin: spec.stdin.unwrap_or(false),
        stdin_once: spec.stdin_once.unwrap_or(false),
        tty: spec.tty.unwrap_or(false),
        linux: Some(LinuxContainerConfig {
            resources: Some(resources::in_oom_group(
                resources::on_cpus(
                    resources::container_resources(pod, spec, inputs.rules),
                    inputs.cpus.as_ref(),
                ),
                inputs.oom_group,
            )),
            security_context: Some(security::container_context(
                pod,
                container,
                inputs.image_user,
                inputs.target_id,
                seccomp::Profiles { root: inputs.seccomp_root, runtime_default: inputs.seccomp_default },
                inputs.users,
            )?),
        }),
        stop_signal: security::stop_signal(lifecycle.and_then(|l| l.stop_signal.as_deref())),
        envs: inputs
            .env
            .into_iter()
            .map(|(key, value)| KeyValue { key, value: value.into_bytes() })
            .collect(),
        ..ContainerConfig::default()
    })
}

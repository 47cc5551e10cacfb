//! Security contexts: the pod's and the container's, merged, in the runtime's terms.

use super::apparmor;
use super::seccomp::{self, SeccompError};
use crate::pod::model::{self, PodContainer};
use ferrite_cri::v1::{
    self, Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, SeLinuxOption, SecurityProfile, SupplementalGroupsPolicy, UserNamespace,
    security_profile::ProfileType,
};
use ferrite_cri::{READONLY_PATHS, masked_paths};
use k8s_openapi::api::core::v1::{Pod, PodSecurityContext, SELinuxOptions, SecurityContext};

/// The user an image runs as when the pod does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ImageUser {
    pub uid: Option<i64>,
    pub name: String,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum NonRootError {
    #[error("container's runAsUser breaks non-root policy (pod: \"{pod}\", container: {container})")]
    RunsAsRoot { pod: model::PodId, container: String },
    #[error("container has runAsNonRoot and image will run as root (pod: \"{pod}\", container: {container})")]
    ImageRunsAsRoot { pod: model::PodId, container: String },
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root (pod: \"{pod}\", container: {container})"
    )]
    NotNumeric { pod: model::PodId, container: String, user: String },
}

/// Refuses a container that must not run as root and would.
pub(crate) fn check_non_root(
    pod: &Pod,
    container: &PodContainer,
    image: &ImageUser,
) -> Result<(), NonRootError> {
    let (of_pod, own) = contexts(pod, container);
    if own.run_as_non_root.or(of_pod.run_as_non_root) != Some(true) {
        return Ok(());
    }
    let (pod, container) = (model::PodId::of(pod), container.name().to_string());
    match own.run_as_user.or(of_pod.run_as_user) {
        Some(0) => Err(NonRootError::RunsAsRoot { pod, container }),
        Some(_) => Ok(()),
        None => match (image.uid, image.name.as_str()) {
            (Some(0), _) => Err(NonRootError::ImageRunsAsRoot { pod, container }),
            (Some(uid), _) if i32::try_from(uid).is_ok_and(|uid| uid > 0) => Ok(()),
            // No user can have that number: the user of the process is unknown.
            (Some(uid), _) => Err(NonRootError::NotNumeric { pod, container, user: uid.to_string() }),
            (None, "") => Err(NonRootError::ImageRunsAsRoot { pod, container }),
            (None, user) => Err(NonRootError::NotNumeric { pod, container, user: user.into() }),
        },
    }
}

fn contexts(pod: &Pod, container: &PodContainer) -> (PodSecurityContext, SecurityContext) {
    let of_pod = model::spec(pod).security_context.clone().unwrap_or_default();
    (of_pod, container.spec.security_context.clone().unwrap_or_default())
}

fn int(value: Option<i64>) -> Option<Int64Value> {
    value.map(|value| Int64Value { value })
}

fn supplemental(context: &PodSecurityContext) -> Vec<i64> {
    let mut groups: Vec<i64> = context.supplemental_groups.clone().unwrap_or_default();
    groups.extend(context.fs_group);
    groups
}

fn groups_policy(context: &PodSecurityContext) -> i32 {
    match context.supplemental_groups_policy.as_deref() {
        Some("Strict") => SupplementalGroupsPolicy::Strict,
        _ => SupplementalGroupsPolicy::Merge,
    }
    .into()
}

/// Which namespaces the pod's sandbox shares with the node.
pub(crate) fn namespaces(pod: &Pod, users: &UserNamespace) -> NamespaceOption {
    let spec = model::spec(pod);
    let node_or = |host: Option<bool>, own: NamespaceMode| -> i32 {
        if host == Some(true) { NamespaceMode::Node } else { own }.into()
    };
    let pid = if spec.share_process_namespace == Some(true) {
        NamespaceMode::Pod
    } else {
        NamespaceMode::Container
    };
    NamespaceOption {
        network: node_or(spec.host_network, NamespaceMode::Pod),
        ipc: node_or(spec.host_ipc, NamespaceMode::Pod),
        pid: node_or(spec.host_pid, pid),
        userns_options: Some(users.clone()),
        ..NamespaceOption::default()
    }
}

/// Ignored by runtimes of nodes without SELinux, as upstream.
fn selinux(options: Option<&SELinuxOptions>) -> Option<SeLinuxOption> {
    let options = options?;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    Some(SeLinuxOption {
        user: text(&options.user),
        role: text(&options.role),
        r#type: text(&options.type_),
        level: text(&options.level),
    })
}

pub(crate) fn sandbox_context(pod: &Pod, users: &UserNamespace) -> LinuxSandboxSecurityContext {
    let context = model::spec(pod).security_context.clone().unwrap_or_default();
    LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(pod, users)),
        selinux_options: selinux(context.se_linux_options.as_ref()),
        run_as_user: int(context.run_as_user),
        // A runtime refuses a sandbox with a group alone; the containers' own contexts have the group.
        run_as_group: int(context.run_as_group.filter(|_| context.run_as_user.is_some())),
        supplemental_groups: supplemental(&context),
        supplemental_groups_policy: groups_policy(&context),
        privileged: model::containers(pod)
            .iter()
            .any(|c| c.spec.security_context.as_ref().and_then(|s| s.privileged) == Some(true)),
        seccomp: Some(SecurityProfile {
            profile_type: ProfileType::RuntimeDefault.into(),
            localhost_ref: String::new(),
        }),
        ..LinuxSandboxSecurityContext::default()
    }
}

pub(crate) fn container_context(
    pod: &Pod,
    container: &PodContainer,
    image: &ImageUser,
    target_id: Option<String>,
    profiles: seccomp::Profiles<'_>,
    users: &UserNamespace,
) -> Result<LinuxContainerSecurityContext, SeccompError> {
    let (of_pod, own) = contexts(pod, container);
    let privileged = own.privileged.unwrap_or(false);
    let run_as_user = own.run_as_user.or(of_pod.run_as_user);
    let capabilities = own.capabilities.map(|c| Capability {
        add_capabilities: c.add.unwrap_or_default(),
        drop_capabilities: c.drop.unwrap_or_default(),
        add_ambient_capabilities: Vec::new(),
    });
    let unmasked = privileged || own.proc_mount.as_deref() == Some("Unmasked");
    let mut namespace_options = namespaces(pod, users);
    // As upstream: where processes are shared anyway there is nothing to join.
    if let Some(target) = target_id.filter(|_| namespace_options.pid() == NamespaceMode::Container) {
        namespace_options.pid = NamespaceMode::Target.into();
        namespace_options.target_id = target;
    }
    let profile = own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref());
    let profiles = seccomp::Profiles { runtime_default: profiles.runtime_default && !privileged, ..profiles };
    let profile = profile.filter(|_| !privileged);
    Ok(LinuxContainerSecurityContext {
        capabilities,
        privileged,
        namespace_options: Some(namespace_options),
        selinux_options: selinux(own.se_linux_options.as_ref().or(of_pod.se_linux_options.as_ref())),
        apparmor: apparmor::security_profile(pod, container),
        // The runtime resolves the image's user when the pod names none.
        run_as_username: if run_as_user.is_none() && image.uid.is_none() {
            image.name.clone()
        } else {
            String::new()
        },
        run_as_user: int(run_as_user.or(image.uid)),
        run_as_group: int(own.run_as_group.or(of_pod.run_as_group)),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: supplemental(&of_pod),
        supplemental_groups_policy: groups_policy(&of_pod),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: if unmasked { Vec::new() } else { masked_paths().to_vec() },
        readonly_paths: if unmasked { Vec::new() } else { READONLY_PATHS.map(String::from).to_vec() },
        seccomp: Some(seccomp::profile(profile, profiles)?),
        ..LinuxContainerSecurityContext::default()
    })
}

/// The CRI signal for the API's name of it.
pub(crate) fn stop_signal(name: Option<&str>) -> i32 {
    name.and_then(v1::Signal::from_str_name).unwrap_or(v1::Signal::RuntimeDefault).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};
    use std::path::Path;

    fn profiles() -> seccomp::Profiles<'static> {
        seccomp::Profiles { root: Path::new("/seccomp"), runtime_default: false }
    }

    fn make(pod_context: Value, own: Value) -> (Pod, PodContainer) {
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"securityContext": pod_context, "containers": [{"name": "c", "securityContext": own}]},
        }))
        .unwrap();
        let container = model::containers(&pod).remove(0);
        (pod, container)
    }

    #[test]
    fn the_container_speaks_before_the_pod() {
        let (pod, c) = make(
            json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4],
                   "seccompProfile": {"type": "RuntimeDefault"}}),
            json!({"runAsUser": 5, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}),
        );
        let (image, node) = (ImageUser::default(), crate::userns::of_node());
        let got = container_context(&pod, &c, &image, None, profiles(), &node).unwrap();
        assert_eq!(got.run_as_user, int(Some(5)));
        assert_eq!(got.run_as_group, int(Some(2)));
        assert_eq!(got.supplemental_groups, [4, 3]);
        assert!(got.no_new_privs && !got.privileged && !got.masked_paths.is_empty());
        assert_eq!(got.seccomp.unwrap().profile_type(), ProfileType::RuntimeDefault);
        assert_eq!(got.capabilities.unwrap().drop_capabilities, ["ALL"]);
    }

    #[test]
    fn privileged_means_no_masks_and_no_filter() {
        let (pod, c) =
            make(json!({"seccompProfile": {"type": "RuntimeDefault"}}), json!({"privileged": true}));
        let (image, node) = (ImageUser::default(), crate::userns::of_node());
        let got = container_context(&pod, &c, &image, None, profiles(), &node).unwrap();
        assert!(got.masked_paths.is_empty() && got.readonly_paths.is_empty());
        assert_eq!(got.seccomp.unwrap().profile_type(), ProfileType::Unconfined);
    }

    #[test]
    fn root_is_refused_where_it_must_not_be() {
        let image = |uid, name: &str| ImageUser { uid, name: name.into() };
        for (own, image, refused) in [
            (json!({}), image(Some(0), ""), false),
            (json!({"runAsNonRoot": true}), image(Some(0), ""), true),
            (json!({"runAsNonRoot": true}), image(Some(7), ""), false),
            (json!({"runAsNonRoot": true}), image(None, "nobody"), true),
            (json!({"runAsNonRoot": true, "runAsUser": 7}), image(Some(0), ""), false),
            (json!({"runAsNonRoot": true, "runAsUser": 0}), image(Some(7), ""), true),
        ] {
            let (pod, c) = make(json!({}), own.clone());
            assert_eq!(check_non_root(&pod, &c, &image).is_err(), refused, "{own}");
        }
    }
}

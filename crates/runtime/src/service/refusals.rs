//! Requests that the interface forbids: refused before anything is made.

use ferrite_cri::v1::{
    ContainerConfig, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, Mount, MountPropagation,
    NamespaceMode, NamespaceOption, PodSandboxConfig,
};

/// Why a request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum Refusal {
    #[error("run_as_group {0} is specified without a user")]
    GroupWithoutUser(i64),
    #[error("a user namespace of mode {0} is not supported: POD and NODE are")]
    UserNamespaceMode(&'static str),
    #[error("a {what} namespace of mode {mode} is not supported")]
    NamespaceMode { what: &'static str, mode: &'static str },
    #[error("mount {0}: recursive_read_only needs readonly")]
    RecursiveNotReadOnly(String),
    #[error("mount {0}: recursive_read_only needs private propagation")]
    RecursiveNotPrivate(String),
    #[error("mount {0}: a mount is of an image or of a host path, not of both")]
    TwoSources(String),
    #[error("one of stdin, stdout and stderr must be asked for")]
    NoStream,
    #[error("a terminal has no stderr: tty and stderr cannot both be true")]
    TerminalWithErrors,
}

impl From<Refusal> for ferrite_cri::Error {
    fn from(refusal: Refusal) -> Self {
        ferrite_cri::Error::invalid(refusal.to_string())
    }
}

/// Checks a sandbox's configuration.
pub(super) fn check_sandbox(config: &PodSandboxConfig) -> Result<(), Refusal> {
    let Some(security) = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref()) else {
        return Ok(());
    };
    let LinuxSandboxSecurityContext { run_as_user, run_as_group, namespace_options, .. } = security;
    if let (None, Some(group)) = (run_as_user, run_as_group) {
        return Err(Refusal::GroupWithoutUser(group.value));
    }
    namespace_options.as_ref().map_or(Ok(()), check_namespaces)
}

/// Checks a container's configuration.
pub(super) fn check_container(config: &ContainerConfig) -> Result<(), Refusal> {
    config.mounts.iter().try_for_each(check_mount)?;
    let Some(security) = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref()) else {
        return Ok(());
    };
    let LinuxContainerSecurityContext { run_as_user, run_as_username, run_as_group, .. } = security;
    if let (None, "", Some(group)) = (run_as_user, run_as_username.as_str(), run_as_group) {
        return Err(Refusal::GroupWithoutUser(group.value));
    }
    security.namespace_options.as_ref().map_or(Ok(()), check_namespaces)
}

/// Checks which streams an exec or an attach asks for.
pub(super) fn check_streams(stdin: bool, stdout: bool, stderr: bool, tty: bool) -> Result<(), Refusal> {
    match (stdin || stdout || stderr, tty && stderr) {
        (false, _) => Err(Refusal::NoStream),
        (_, true) => Err(Refusal::TerminalWithErrors),
        _ => Ok(()),
    }
}

fn check_namespaces(options: &NamespaceOption) -> Result<(), Refusal> {
    let single = |mode: NamespaceMode| matches!(mode, NamespaceMode::Container | NamespaceMode::Target);
    let user = options.userns_options.clone().unwrap_or_default().mode();
    if single(user) {
        return Err(Refusal::UserNamespaceMode(user.as_str_name()));
    }
    // The pod's containers share these two: a container cannot have its own.
    for (what, mode) in [("network", options.network()), ("IPC", options.ipc())] {
        if single(mode) {
            return Err(Refusal::NamespaceMode { what, mode: mode.as_str_name() });
        }
    }
    Ok(())
}

fn check_mount(mount: &Mount) -> Result<(), Refusal> {
    let path = || mount.container_path.clone();
    if mount.recursive_read_only && !mount.readonly {
        return Err(Refusal::RecursiveNotReadOnly(path()));
    }
    if mount.recursive_read_only && mount.propagation() != MountPropagation::PropagationPrivate {
        return Err(Refusal::RecursiveNotPrivate(path()));
    }
    if crate::spec::is_image(mount) && !mount.host_path.is_empty() {
        return Err(Refusal::TwoSources(path()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::{
        ImageSpec, Int64Value, LinuxContainerConfig, LinuxPodSandboxConfig, UserNamespace,
    };

    fn number(value: i64) -> Option<Int64Value> {
        Some(Int64Value { value })
    }

    #[test]
    fn a_group_needs_a_user() {
        for (user, name, group, container, sandbox) in [
            (None, "", None, true, true),
            (None, "", number(5), false, false),
            (number(0), "", number(5), true, true),
            (None, "web", number(5), true, false),
        ] {
            let security = LinuxContainerSecurityContext {
                run_as_user: user,
                run_as_username: name.into(),
                run_as_group: group,
                ..Default::default()
            };
            let linux = LinuxContainerConfig { security_context: Some(security), ..Default::default() };
            let config = ContainerConfig { linux: Some(linux), ..Default::default() };
            assert_eq!(check_container(&config).is_ok(), container, "{user:?} {name:?} {group:?}");
            let security =
                LinuxSandboxSecurityContext { run_as_user: user, run_as_group: group, ..Default::default() };
            let linux = LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
            let config = PodSandboxConfig { linux: Some(linux), ..Default::default() };
            assert_eq!(check_sandbox(&config).is_ok(), sandbox, "{user:?} {name:?} {group:?}");
        }
    }

    #[test]
    fn namespaces_of_a_pod() {
        for mode in [NamespaceMode::Pod, NamespaceMode::Node, NamespaceMode::Container, NamespaceMode::Target]
        {
            let shared = matches!(mode, NamespaceMode::Pod | NamespaceMode::Node);
            let user = UserNamespace { mode: mode.into(), ..Default::default() };
            for (options, good) in [
                (NamespaceOption { userns_options: Some(user), ..Default::default() }, shared),
                (NamespaceOption { network: mode.into(), ..Default::default() }, shared),
                (NamespaceOption { ipc: mode.into(), ..Default::default() }, shared),
                (NamespaceOption { pid: mode.into(), ..Default::default() }, true),
            ] {
                assert_eq!(check_namespaces(&options).is_ok(), good, "{options:?}");
            }
        }
    }

    #[test]
    fn mounts() {
        let mount = |readonly, recursive_read_only, propagation: MountPropagation| Mount {
            container_path: "/m".into(),
            host_path: "/h".into(),
            readonly,
            recursive_read_only,
            propagation: propagation.into(),
            ..Default::default()
        };
        let private = MountPropagation::PropagationPrivate;
        let slave = MountPropagation::PropagationHostToContainer;
        let shared = MountPropagation::PropagationBidirectional;
        let image = Some(ImageSpec { image: "i".into(), ..Default::default() });
        for (mount, expected) in [
            (mount(true, true, private), Ok(())),
            (mount(true, false, slave), Ok(())),
            (mount(false, true, private), Err(Refusal::RecursiveNotReadOnly("/m".into()))),
            (mount(true, true, slave), Err(Refusal::RecursiveNotPrivate("/m".into()))),
            (mount(true, true, shared), Err(Refusal::RecursiveNotPrivate("/m".into()))),
            (
                Mount { image: image.clone(), ..mount(true, false, private) },
                Err(Refusal::TwoSources("/m".into())),
            ),
            (Mount { image, host_path: String::new(), ..mount(true, false, private) }, Ok(())),
        ] {
            assert_eq!(check_mount(&mount), expected, "{mount:?}");
        }
    }

    #[test]
    fn streams() {
        for (stdin, stdout, stderr, tty, expected) in [
            (false, true, true, false, Ok(())),
            (true, true, false, true, Ok(())),
            (false, false, false, false, Err(Refusal::NoStream)),
            (true, true, true, true, Err(Refusal::TerminalWithErrors)),
        ] {
            assert_eq!(check_streams(stdin, stdout, stderr, tty), expected);
        }
    }
}

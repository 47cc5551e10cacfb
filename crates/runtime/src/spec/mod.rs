//! From CRI's words to the OCI description of a container. Pure: values in, values out.

mod capabilities;
mod cdi;
mod defaults;
mod idmap;
mod mounts;
mod seccomp;
mod signal;
mod sysctl;
mod user;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use ferrite_cri::v1::{ContainerConfig, LinuxContainerResources, LinuxContainerSecurityContext};
use oci_spec::runtime::{
    Capability, Linux, LinuxCapabilities, LinuxCpu, LinuxDevice, LinuxHugepageLimit, LinuxMemory,
    LinuxNamespace, LinuxNamespaceType, LinuxResources, Process, Root, Spec, User,
};

pub use capabilities::{all_capabilities, capabilities, capability_number};
pub use cdi::Registry as CdiRegistry;
pub use defaults::PATH;
#[cfg(test)]
pub use defaults::rule as device_rule;
pub use idmap::IdMap;
pub use idmap::map_file;
pub use mounts::{IMAGE_MOUNT, is_image};
pub use seccomp::{compile, default_profile, parse_profile};
pub use signal::{signal_from_cri, signal_from_name};
pub use sysctl::{Own as OwnNamespaces, check_sysctl};
pub use user::{Identity, IdentityRequest, Named, resolve as resolve_identity};

use crate::rootfs::ImageConfigView;

/// Why a container cannot be described.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpecError {
    #[error("no command specified: neither the container nor its image has one")]
    NoCommand,
    #[error("unknown capability {0:?}")]
    Capability(String),
    #[error("mount {0:?}: the path in the container must be absolute")]
    MountPath(String),
    #[error("unable to find user {0:?}: no matching entries in the image's passwd file")]
    User(String),
    #[error("unable to find group {0:?}: no matching entries in the image's group file")]
    Group(String),
    #[error("seccomp profile: {0}")]
    Seccomp(String),
    #[error("device {name:?}: {message}")]
    Cdi { name: String, message: String },
    #[error("control file {0:?} given by name: {1}")]
    Unified(String, &'static str),
    #[error("sysctl {0:?} is {1}")]
    Sysctl(String, &'static str),
    #[error("user namespace: {0}")]
    UserNamespace(String),
    #[error("working directory {0:?} must be absolute")]
    WorkingDir(String),
}

/// A device of the host, as the container sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct GivenDevice {
    pub node: LinuxDevice,
    /// Allowed access: some of `rwm`.
    pub access: String,
}

/// Everything the description of one container depends on.
pub struct Input<'a> {
    pub config: &'a ContainerConfig,
    pub image: &'a ImageConfigView,
    pub identity: &'a Identity,
    /// Name of the pod as its containers see it.
    pub hostname: &'a str,
    pub cgroup: String,
    pub rootfs: PathBuf,
    /// Files and directories of the sandbox.
    pub shm: PathBuf,
    pub resolv_conf: Option<PathBuf>,
    pub hostname_file: Option<PathBuf>,
    pub hosts_file: Option<PathBuf>,
    pub network_namespace: Option<PathBuf>,
    /// True if the container gets a PID namespace of its own.
    pub own_pid: bool,
    pub cgroup_v2: bool,
    /// Devices asked for, or all of the host's when privileged.
    pub devices: Vec<GivenDevice>,
    /// The pod's user namespace: where it is pinned, and whose identities it has.
    pub user_namespace: Option<(PathBuf, IdMap)>,
    /// The profile AppArmor is to confine the container with.
    pub apparmor: Option<String>,
}

/// Describes the container.
pub fn build(input: &Input<'_>) -> Result<Spec, SpecError> {
    let config = input.config;
    let linux_config = config.linux.clone().unwrap_or_default();
    let security = linux_config.security_context.unwrap_or_default();

    let mut root = Root::default();
    root.set_path(input.rootfs.clone()).set_readonly(Some(security.readonly_rootfs));

    let mut linux = Linux::default();
    let resources = linux_config.resources.unwrap_or_default();
    check_unified(&resources, input.cgroup_v2)?;
    linux
        .set_cgroups_path(Some(PathBuf::from(&input.cgroup)))
        .set_resources(Some(resources_of(&resources, &input.devices, security.privileged)))
        .set_namespaces(Some(namespaces(input)))
        .set_devices(Some(defaults::devices(&input.devices)))
        .set_masked_paths(Some(paths(&security, &security.masked_paths)))
        .set_readonly_paths(Some(paths(&security, &security.readonly_paths)))
        .set_seccomp(None);
    if let Some((_, map)) = &input.user_namespace {
        linux.set_uid_mappings(Some(map.uids.clone())).set_gid_mappings(Some(map.gids.clone()));
    }

    let mut spec = Spec::default();
    spec.set_root(Some(root))
        .set_hostname(Some(input.hostname.to_owned()))
        .set_process(Some(process(input, &security, resources.oom_score_adj)?))
        .set_mounts(Some(mounts::mounts(input, security.privileged)?))
        .set_linux(Some(linux));
    Ok(spec)
}

/// The kubelet sends the paths to hide; a privileged container has none.
fn paths(security: &LinuxContainerSecurityContext, given: &[String]) -> Vec<String> {
    if security.privileged { Vec::new() } else { given.to_vec() }
}

fn process(
    input: &Input<'_>,
    security: &LinuxContainerSecurityContext,
    oom_score_adj: i64,
) -> Result<Process, SpecError> {
    let config = input.config;
    let args = command(config, input.image)?;
    let cwd = [config.working_dir.as_str(), &input.image.working_dir, "/"]
        .into_iter()
        .find(|path| !path.is_empty())
        .unwrap_or("/");
    if !cwd.starts_with('/') {
        return Err(SpecError::WorkingDir(cwd.to_owned()));
    }
    let sets = capabilities(security)?;
    let to_set = |set: &std::collections::BTreeSet<u32>| -> HashSet<Capability> {
        set.iter().filter_map(|number| capabilities::capability(*number)).collect()
    };
    let mut caps = LinuxCapabilities::default();
    caps.set_bounding(Some(to_set(&sets.bounding)))
        .set_effective(Some(to_set(&sets.bounding)))
        .set_permitted(Some(to_set(&sets.bounding)))
        .set_inheritable(Some(to_set(&sets.ambient)))
        .set_ambient(Some(to_set(&sets.ambient)));
    let mut user = User::default();
    user.set_uid(input.identity.uid)
        .set_gid(input.identity.gid)
        .set_additional_gids(Some(input.identity.groups.clone()));
    let mut process = Process::default();
    process
        .set_terminal(Some(config.tty))
        .set_args(Some(args))
        .set_env(Some(environment(input)))
        .set_cwd(PathBuf::from(cwd))
        .set_user(user)
        .set_capabilities(Some(caps))
        .set_rlimits(None)
        .set_apparmor_profile(input.apparmor.clone())
        .set_no_new_privileges(Some(security.no_new_privs))
        .set_oom_score_adj(Some(i32::try_from(oom_score_adj.clamp(-1000, 1000)).unwrap_or(0)));
    Ok(process)
}

/// Command and arguments replace the image's entrypoint and command; a command alone drops both.
fn command(config: &ContainerConfig, image: &ImageConfigView) -> Result<Vec<String>, SpecError> {
    let (command, args) = match (config.command.is_empty(), config.args.is_empty()) {
        (true, true) => (&image.entrypoint, &image.cmd),
        (true, false) => (&image.entrypoint, &config.args),
        (false, _) => (&config.command, &config.args),
    };
    let all: Vec<String> = command.iter().chain(args).cloned().collect();
    if all.first().is_none_or(String::is_empty) { Err(SpecError::NoCommand) } else { Ok(all) }
}

/// The image's variables, overridden by the container's, with the few every program expects.
fn environment(input: &Input<'_>) -> Vec<String> {
    let mut order: Vec<String> = Vec::new();
    let mut values: BTreeMap<String, String> = BTreeMap::new();
    let mut set = |name: &str, value: String| {
        if values.insert(name.to_owned(), value).is_none() {
            order.push(name.to_owned());
        }
    };
    set("PATH", defaults::PATH.to_owned());
    set("HOSTNAME", input.hostname.to_owned());
    if input.config.tty {
        set("TERM", "xterm".to_owned());
    }
    set("HOME", input.identity.home.clone());
    for entry in &input.image.env {
        let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
        set(name, value.to_owned());
    }
    for entry in &input.config.envs {
        set(&entry.key, String::from_utf8_lossy(&entry.value).into_owned());
    }
    order.into_iter().map(|name| format!("{name}={}", values[&name])).collect()
}

fn namespaces(input: &Input<'_>) -> Vec<LinuxNamespace> {
    let make = |typ, path: Option<PathBuf>| {
        let mut namespace = LinuxNamespace::default();
        namespace.set_typ(typ).set_path(path);
        namespace
    };
    let mut list = vec![make(LinuxNamespaceType::Mount, None)];
    if input.own_pid {
        list.push(make(LinuxNamespaceType::Pid, None));
    }
    if let Some(path) = &input.network_namespace {
        list.push(make(LinuxNamespaceType::Network, Some(path.clone())));
    }
    if let Some((path, _)) = &input.user_namespace {
        list.push(make(LinuxNamespaceType::User, Some(path.clone())));
    }
    if input.cgroup_v2 {
        list.push(make(LinuxNamespaceType::Cgroup, None));
    }
    list
}

/// Files by name are a matter of the unified hierarchy, and must be files of the container's group.
fn check_unified(resources: &LinuxContainerResources, v2: bool) -> Result<(), SpecError> {
    for file in resources.unified.keys() {
        if !v2 {
            return Err(SpecError::Unified(file.clone(), "this machine uses cgroup version 1"));
        }
        if file.contains('/') || !file.contains('.') || file.starts_with("cgroup.") {
            return Err(SpecError::Unified(file.clone(), "not the name of a controller's file"));
        }
    }
    Ok(())
}

/// Limits in OCI's words.
pub fn resources_of(
    resources: &LinuxContainerResources,
    devices: &[GivenDevice],
    privileged: bool,
) -> LinuxResources {
    let positive = |value: i64| (value > 0).then_some(value);
    let text = |value: &String| (!value.is_empty()).then(|| value.clone());
    let mut cpu = LinuxCpu::default();
    cpu.set_shares(positive(resources.cpu_shares).map(|v| v as u64))
        .set_quota((resources.cpu_quota != 0).then_some(resources.cpu_quota))
        .set_period(positive(resources.cpu_period).map(|v| v as u64))
        .set_cpus(text(&resources.cpuset_cpus))
        .set_mems(text(&resources.cpuset_mems));
    let mut memory = LinuxMemory::default();
    let limit = positive(resources.memory_limit_in_bytes);
    // Without a word about swap the limit covers both, as the other runtimes have it: no swap.
    let swap = positive(resources.memory_swap_limit_in_bytes).or(limit);
    memory.set_limit(limit).set_swap(swap);
    let huge = resources.hugepage_limits.iter().map(|limit| {
        let mut huge = LinuxHugepageLimit::default();
        huge.set_page_size(limit.page_size.clone()).set_limit(i64::try_from(limit.limit).unwrap_or(i64::MAX));
        huge
    });
    let mut out = LinuxResources::default();
    if !resources.hugepage_limits.is_empty() {
        out.set_hugepage_limits(Some(huge.collect()));
    }
    if !resources.unified.is_empty() {
        out.set_unified(Some(resources.unified.clone().into_iter().collect()));
    }
    out.set_cpu(Some(cpu))
        .set_memory(Some(memory))
        .set_devices(Some(defaults::device_rules(devices, privileged)));
    out
}

#[cfg(test)]
mod tests;

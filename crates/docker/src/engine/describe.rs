//! A container as a CRI request, and the settings that CRI lacks. Pure.

use std::path::{Path, PathBuf};

use ferrite_cri::{READONLY_PATHS, masked_paths, v1};
use oci_spec::runtime::{LinuxPids, Mount, PosixRlimitBuilder, PosixRlimitType, Spec};

use super::{EngineError, Result};
use crate::record::HostConfig;

/// Which namespaces the container shares, in CRI's words.
pub(super) fn namespaces(host: &HostConfig) -> v1::NamespaceOption {
    use v1::NamespaceMode::{Container, Node, Pod};
    let network = if host.network == "host" { Node } else { Pod };
    let pid = match host.pid.as_str() {
        "host" => Node,
        // `Extras` names the container to the runtime.
        other if other.starts_with("container:") => Pod,
        // A first process that reaps, and the program below it.
        _ if host.init => Pod,
        _ => Container,
    };
    let ipc = if host.ipc == "host" { Node } else { Pod };
    v1::NamespaceOption { network: network.into(), pid: pid.into(), ipc: ipc.into(), ..Default::default() }
}

pub(super) fn resources(host: &HostConfig) -> v1::LinuxContainerResources {
    const PERIOD: i64 = 100_000;
    let swap = match host.memory_swap {
        0 => host.memory.saturating_mul(2),
        swap => swap,
    };
    v1::LinuxContainerResources {
        cpu_period: if host.nano_cpus > 0 { PERIOD } else { 0 },
        cpu_quota: host.nano_cpus.saturating_mul(PERIOD) / 1_000_000_000,
        cpu_shares: host.cpu_shares,
        memory_limit_in_bytes: host.memory,
        memory_swap_limit_in_bytes: if host.memory > 0 { swap } else { 0 },
        oom_score_adj: host.oom_score_adj,
        cpuset_cpus: host.cpuset_cpus.clone(),
        cpuset_mems: host.cpuset_mems.clone(),
        ..Default::default()
    }
}

/// `groups`: the numbers of `group_add`.
pub(super) fn security(host: &HostConfig, groups: Vec<i64>) -> Result<v1::LinuxContainerSecurityContext> {
    use v1::security_profile::ProfileType;
    let profile = |kind: ProfileType, path: &str| v1::SecurityProfile {
        profile_type: kind.into(),
        localhost_ref: path.to_owned(),
    };
    let mut security = v1::LinuxContainerSecurityContext {
        capabilities: Some(v1::Capability {
            add_capabilities: host.cap_add.clone(),
            drop_capabilities: host.cap_drop.clone(),
            ..Default::default()
        }),
        privileged: host.privileged,
        namespace_options: Some(namespaces(host)),
        readonly_rootfs: host.read_only,
        seccomp: Some(profile(ProfileType::RuntimeDefault, "")),
        masked_paths: masked_paths().to_vec(),
        readonly_paths: READONLY_PATHS.iter().map(|path| (*path).to_owned()).collect(),
        supplemental_groups: groups,
        ..Default::default()
    };
    for option in &host.security_opt {
        let (key, value) = option.split_once([':', '=']).unwrap_or((option, "true"));
        match (key, value) {
            ("no-new-privileges", value) => security.no_new_privs = value != "false",
            ("seccomp", "unconfined") => security.seccomp = Some(profile(ProfileType::Unconfined, "")),
            ("seccomp", path) => security.seccomp = Some(profile(ProfileType::Localhost, path)),
            ("apparmor", "unconfined") => security.apparmor = Some(profile(ProfileType::Unconfined, "")),
            ("apparmor", name) => security.apparmor = Some(profile(ProfileType::Localhost, name)),
            // There is no SELinux to configure.
            ("label", _) => {}
            ("systempaths", "unconfined") => {
                security.masked_paths.clear();
                security.readonly_paths.clear();
            }
            _ => return Err(EngineError::Invalid(format!("invalid --security-opt 2: {option:?}"))),
        }
    }
    Ok(security)
}

/// The numbers of groups given by number or by their name in `/etc/group`.
pub(super) fn groups(wanted: &[String], file: &str) -> Result<Vec<i64>> {
    let find = |name: &String| {
        let named = file.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1)?.trim().parse::<u32>().ok())?
        });
        let number = named.or_else(|| name.parse().ok());
        number.map(i64::from).ok_or_else(|| EngineError::Invalid(format!("Unable to find group {name}")))
    };
    wanted.iter().map(find).collect()
}

fn rlimit(name: &str) -> Option<PosixRlimitType> {
    use PosixRlimitType::*;
    Some(match name {
        "cpu" => RlimitCpu,
        "fsize" => RlimitFsize,
        "data" => RlimitData,
        "stack" => RlimitStack,
        "core" => RlimitCore,
        "rss" => RlimitRss,
        "nproc" => RlimitNproc,
        "nofile" => RlimitNofile,
        "memlock" => RlimitMemlock,
        "as" => RlimitAs,
        "locks" => RlimitLocks,
        "sigpending" => RlimitSigpending,
        "msgqueue" => RlimitMsgqueue,
        "nice" => RlimitNice,
        "rtprio" => RlimitRtprio,
        "rttime" => RlimitRttime,
        _ => return None,
    })
}

/// Applies the settings that CRI cannot express.
pub(super) fn adjust(spec: &mut Spec, host: &HostConfig) {
    if let Some(process) = spec.process_mut() {
        let amount = |value: i64| u64::try_from(value).unwrap_or(u64::MAX);
        let limits = host.ulimits.iter().filter_map(|limit| {
            let built = PosixRlimitBuilder::default()
                .typ(rlimit(&limit.name)?)
                .soft(amount(limit.soft))
                .hard(amount(limit.hard))
                .build();
            built.ok()
        });
        process.set_rlimits(Some(limits.collect()));
    }
    if host.pids_limit > 0
        && let Some(resources) = spec.linux_mut().as_mut().and_then(|linux| linux.resources_mut().as_mut())
    {
        let mut pids = LinuxPids::default();
        pids.set_limit(host.pids_limit);
        resources.set_pids(Some(pids));
    }
    let mounts = spec.mounts().clone().unwrap_or_default();
    let mut mounts: Vec<Mount> = mounts
        .into_iter()
        .filter(|mount| !host.tmpfs.contains_key(&mount.destination().display().to_string()))
        .filter(|mount| host.ipc != "none" || mount.destination() != Path::new("/dev/shm"))
        .collect();
    for (path, options) in &host.tmpfs {
        let mut all = vec!["nosuid".to_owned(), "nodev".to_owned()];
        let given: Vec<&str> = options.split(',').filter(|option| !option.is_empty()).collect();
        if !given.contains(&"exec") {
            all.push("noexec".to_owned());
        }
        let plain = |option: &&&str| !matches!(**option, "exec" | "suid" | "dev" | "rw");
        all.extend(given.iter().filter(plain).map(|option| (*option).to_owned()));
        let mut mount = Mount::default();
        mount
            .set_destination(PathBuf::from(path))
            .set_typ(Some("tmpfs".into()))
            .set_source(Some("tmpfs".into()))
            .set_options(Some(all));
        mounts.push(mount);
    }
    // Stable: mounts that were in order stay so, and a mount below another comes after it.
    mounts.sort_by_key(|mount| mount.destination().components().count());
    spec.set_mounts(Some(mounts));
}

/// The host's resolver for a container: servers on the host's loopback are out of reach from another network.
pub(super) fn resolver(text: &str, host_network: bool) -> (Vec<String>, Vec<String>, Vec<String>) {
    let (mut servers, mut searches, mut options) = (Vec::new(), Vec::new(), Vec::new());
    for line in text.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("nameserver") => servers.extend(words.next()),
            Some("search") => searches = words.collect(),
            Some("options") => options.extend(words),
            _ => {}
        }
    }
    if !host_network {
        let reachable =
            |server: &String| !server.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
        servers.retain(reachable);
        if servers.is_empty() {
            servers = vec!["8.8.8.8".into(), "8.8.4.4".into()];
        }
    }
    (servers, searches, options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers() {
        let text = "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.1\nsearch a b\noptions ndots:2\n";
        assert_eq!(resolver(text, false).0, ["10.0.0.1"]);
        assert_eq!(resolver(text, true).0, ["127.0.0.53", "10.0.0.1"]);
        assert_eq!(resolver("nameserver 127.0.0.1", false).0, ["8.8.8.8", "8.8.4.4"]);
        assert_eq!(resolver(text, false).1, ["a", "b"]);
    }

    #[test]
    fn limits() {
        let host = HostConfig { memory: 64 << 20, nano_cpus: 500_000_000, ..Default::default() };
        let resources = resources(&host);
        assert_eq!((resources.cpu_quota, resources.cpu_period), (50_000, 100_000));
        assert_eq!(resources.memory_swap_limit_in_bytes, 128 << 20);
        let host = HostConfig { security_opt: vec!["no-new-privileges".into()], ..Default::default() };
        assert!(security(&host, Vec::new()).unwrap().no_new_privs);
        let host = HostConfig { security_opt: vec!["nonsense".into()], ..Default::default() };
        assert!(security(&host, Vec::new()).is_err());
    }

    #[test]
    fn group_names() {
        let file = "root:x:0:\nvideo:x:44:a,b\n7:x:70:\nbad:x:-1:\n";
        let list = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        assert_eq!(groups(&list(&["video", "1000", "7"]), file).unwrap(), [44, 1000, 70], "names go first");
        for unknown in ["audio", "bad", "-1", ""] {
            assert!(groups(&list(&[unknown]), file).is_err(), "{unknown:?}");
        }
    }
}

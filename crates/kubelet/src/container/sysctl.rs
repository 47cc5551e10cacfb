//! Kernel settings of a pod: those that are known to change nothing but the pod.

use crate::pod::model;
use k8s_openapi::api::core::v1::Pod;

/// A version of the kernel: major, minor.
pub(crate) type KernelVersion = (u32, u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Namespace {
    Ipc,
    Net,
}

/// Upstream's safe settings, with the kernel that first has them in a namespace.
const SAFE: &[(&str, Namespace, KernelVersion)] = &[
    ("kernel.shm_rmid_forced", Namespace::Ipc, (0, 0)),
    ("net.ipv4.ip_local_port_range", Namespace::Net, (0, 0)),
    ("net.ipv4.tcp_syncookies", Namespace::Net, (0, 0)),
    ("net.ipv4.ping_group_range", Namespace::Net, (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", Namespace::Net, (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", Namespace::Net, (3, 16)),
    ("net.ipv4.tcp_keepalive_time", Namespace::Net, (4, 5)),
    ("net.ipv4.tcp_fin_timeout", Namespace::Net, (4, 6)),
    ("net.ipv4.tcp_keepalive_intvl", Namespace::Net, (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", Namespace::Net, (4, 5)),
    ("net.ipv4.tcp_rmem", Namespace::Net, (4, 15)),
    ("net.ipv4.tcp_wmem", Namespace::Net, (4, 15)),
];

/// Why a setting is refused, worded as upstream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum SysctlError {
    #[error("forbidden sysctl: {0:?} not allowlisted")]
    NotAllowed(String),
    #[error("forbidden sysctl: {0:?} not allowed with host {1} enabled")]
    HostNamespace(String, &'static str),
}

/// A name with dots between its parts. Where the first separator is a slash, dots belong to the parts.
pub(crate) fn normalized(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(at) if name.as_bytes()[at] == b'/' => name
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                other => other,
            })
            .collect(),
        _ => name.to_string(),
    }
}

/// Settings of namespaces by the beginnings of their names, as upstream knows them: an administrator may allow these, too.
const NAMESPACED: &[(&str, Namespace)] = &[
    ("kernel.sem", Namespace::Ipc),
    ("kernel.shm", Namespace::Ipc),
    ("kernel.msg", Namespace::Ipc),
    ("fs.mqueue.", Namespace::Ipc),
    ("net.", Namespace::Net),
];

/// Settings beyond the safe ones that pods may have on this node (`allowedUnsafeSysctls`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnsafeSysctls {
    names: Vec<String>,
    /// The beginnings of names.
    prefixes: Vec<String>,
}

/// A setting cannot be allowed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UnsafeSysctlError {
    #[error("{0:?} is no name of a kernel setting, nor a pattern that ends in *")]
    Form(String),
    #[error("the sysctls {0:?} are not known to be namespaced")]
    NotNamespaced(String),
}

impl UnsafeSysctls {
    /// Names, and patterns that end in `*`.
    pub fn parse<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self, UnsafeSysctlError> {
        let mut allowed = Self::default();
        for pattern in patterns {
            let name = normalized(pattern);
            let (start, is_prefix) = name.strip_suffix('*').map_or((name.as_str(), false), |s| (s, true));
            let fine = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
            if start.is_empty() || !start.contains('.') || !start.chars().all(fine) {
                return Err(UnsafeSysctlError::Form(pattern.to_owned()));
            }
            if namespace_of(start).is_none() {
                return Err(UnsafeSysctlError::NotNamespaced(pattern.to_owned()));
            }
            let list = if is_prefix { &mut allowed.prefixes } else { &mut allowed.names };
            list.push(start.to_owned());
        }
        Ok(allowed)
    }

    /// As they were given.
    pub(crate) fn patterns(&self) -> Vec<String> {
        self.names.iter().cloned().chain(self.prefixes.iter().map(|start| format!("{start}*"))).collect()
    }

    fn allows(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
            || self.prefixes.iter().any(|start| name.starts_with(start))
    }
}

fn namespace_of(name: &str) -> Option<Namespace> {
    NAMESPACED.iter().find(|(start, _)| name.starts_with(start)).map(|(_, namespace)| *namespace)
}

/// Refuses a pod with a setting that is not safe, or not the pod's own.
pub(crate) fn check(pod: &Pod, kernel: KernelVersion, allowed: &UnsafeSysctls) -> Result<(), SysctlError> {
    let spec = model::spec(pod);
    let wanted = spec.security_context.as_ref().and_then(|c| c.sysctls.as_ref());
    for sysctl in wanted.into_iter().flatten() {
        let name = normalized(&sysctl.name);
        let known = SAFE.iter().find(|(safe, _, since)| *safe == name && *since <= kernel);
        let namespace = match known {
            Some((_, namespace, _)) => Some(*namespace),
            None => namespace_of(&name).filter(|_| allowed.allows(&name)),
        };
        let Some(namespace) = namespace else { return Err(SysctlError::NotAllowed(name)) };
        match namespace {
            Namespace::Ipc if spec.host_ipc == Some(true) => {
                return Err(SysctlError::HostNamespace(name, "IPC"));
            }
            Namespace::Net if spec.host_network == Some(true) => {
                return Err(SysctlError::HostNamespace(name, "Net"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The version in a release such as `6.12.3-generic`.
pub(crate) fn kernel_version(release: &str) -> KernelVersion {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn settings() {
        for (name, host, kernel, expected) in [
            ("net.ipv4.tcp_syncookies", false, (6, 1), None),
            ("net/ipv4/tcp_syncookies", false, (6, 1), None),
            ("net.ipv4.tcp_syncookies", true, (6, 1), Some("not allowed with host Net enabled")),
            ("kernel.shm_rmid_forced", true, (6, 1), Some("not allowed with host IPC enabled")),
            ("net.ipv4.tcp_rmem", false, (4, 14), Some("\"net.ipv4.tcp_rmem\" not allowlisted")),
            ("net.ipv4.tcp_rmem", false, (5, 0), None),
            ("net.core.somaxconn", false, (6, 1), Some("not allowlisted")),
            ("kernel.msgmax", false, (6, 1), Some("not allowlisted")),
            ("kernel.core_pattern", false, (6, 1), Some("not allowlisted")),
            ("net/ipv4/tcp.syncookies", false, (6, 1), Some("\"net.ipv4.tcp/syncookies\" not allowlisted")),
        ] {
            let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {
                "containers": [], "hostNetwork": host, "hostIPC": host,
                "securityContext": {"sysctls": [{"name": name, "value": "1"}]}}}))
            .unwrap();
            let got = check(&pod, kernel, &UnsafeSysctls::default()).err().map(|e| e.to_string());
            match expected {
                None => assert_eq!(got, None, "{name}"),
                Some(part) => assert!(got.as_deref().is_some_and(|g| g.contains(part)), "{name}: {got:?}"),
            }
        }
    }

    #[test]
    fn an_administrator_allows_more() {
        let allowed =
            UnsafeSysctls::parse(["net.core.somaxconn", "kernel.msg*", "net/ipv4/route.*"]).unwrap();
        assert_eq!(allowed.patterns(), ["net.core.somaxconn", "kernel.msg*", "net.ipv4.route/*"]);
        for (name, host, fine) in [
            ("net.core.somaxconn", false, true),
            ("net.core.somaxconn", true, false),
            ("net.core.somaxconnx", false, false),
            ("kernel.msgmax", false, true),
            ("kernel.msgmax", true, false),
            ("kernel.sem", false, false),
        ] {
            let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {
                "containers": [], "hostNetwork": host, "hostIPC": host,
                "securityContext": {"sysctls": [{"name": name, "value": "1"}]}}}))
            .unwrap();
            assert_eq!(check(&pod, (6, 1), &allowed).is_ok(), fine, "{name} {host}");
        }
        for (pattern, part) in [
            ("kernel.core_pattern", "not known to be namespaced"),
            ("vm.*", "not known to be namespaced"),
            ("*", "no name"),
            ("", "no name"),
            ("net.*.x*", "no name"),
        ] {
            let said = UnsafeSysctls::parse([pattern]).unwrap_err().to_string();
            assert!(said.contains(part), "{pattern}: {said}");
        }
    }

    #[test]
    fn releases() {
        for (text, expected) in
            [("6.12.3-generic", (6, 12)), ("5.4", (5, 4)), ("7", (7, 0)), ("", (0, 0)), ("x", (0, 0))]
        {
            assert_eq!(kernel_version(text), expected, "{text}");
        }
    }
}

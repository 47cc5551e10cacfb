//! Which kernel settings a pod may have: those of namespaces that are its own.

use super::SpecError;

/// Settings of the IPC namespace besides `fs.mqueue.*`.
const IPC: &[&str] = &[
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shm_rmid_forced",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
];

/// Namespaces a pod does not share with anybody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    pub network: bool,
    pub ipc: bool,
    pub uts: bool,
}

/// Refuses a setting that would change more than the pod.
pub fn check_sysctl(name: &str, own: Own) -> Result<(), SpecError> {
    let fail = |why: &'static str| Err(SpecError::Sysctl(name.to_owned(), why));
    // Slashes part a name whose parts have dots in them; then its dots are no separators.
    let dotted = if name.contains('/') { name.replace('.', "_").replace('/', ".") } else { name.to_owned() };
    if name.split('/').any(|part| matches!(part, "." | "..")) || dotted.split('.').any(str::is_empty) {
        return fail("not a name");
    }
    if IPC.contains(&dotted.as_str()) || dotted.starts_with("fs.mqueue.") {
        return if own.ipc { Ok(()) } else { fail("not allowed in the hosts ipc namespace") };
    }
    if dotted.starts_with("net.") {
        return if own.network { Ok(()) } else { fail("not allowed in host network namespace") };
    }
    if dotted == "kernel.domainname" {
        return if own.uts { Ok(()) } else { fail("not allowed in the hosts UTS namespace") };
    }
    fail("not in a separate kernel namespace")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings() {
        let all = Own { network: true, ipc: true, uts: true };
        let none = Own { network: false, ipc: false, uts: false };
        for (name, with_own, with_hosts) in [
            ("net.core.somaxconn", true, false),
            ("net/ipv4/conf/eth0.1/forwarding", true, false),
            ("kernel.shmmax", true, false),
            ("fs.mqueue.msg_max", true, false),
            ("kernel.domainname", true, false),
            ("kernel.hostname", false, false),
            ("kernel.panic", false, false),
            ("vm.swappiness", false, false),
            ("fs.file-max", false, false),
            ("net", false, false),
            ("net..x", false, false),
            ("net/../kernel/panic", false, false),
            ("", false, false),
        ] {
            assert_eq!(check_sysctl(name, all).is_ok(), with_own, "{name:?} with its own namespaces");
            assert_eq!(check_sysctl(name, none).is_ok(), with_hosts, "{name:?} with the host's");
        }
    }
}

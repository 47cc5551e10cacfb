//! Files of a sandbox that its containers see below `/etc`, unless the caller mounts others there.

use std::io;
use std::path::Path;

use ferrite_cri::v1::DnsConfig;

pub(super) const RESOLV_CONF: &str = "resolv.conf";
pub(super) const HOSTNAME: &str = "hostname";
pub(super) const HOSTS: &str = "hosts";

/// Bytes on disk of a sandbox's files, which its containers can write.
pub(super) fn space(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = [RESOLV_CONF, HOSTNAME, HOSTS].map(|name| directory.join(name).symlink_metadata());
    files.iter().flatten().map(|file| file.blocks().saturating_mul(512)).sum()
}

/// Largest file of the node that is copied.
const MAX_NODE_FILE: u64 = 1 << 20;

/// The content of the pod's resolv.conf; `None` means the node's.
fn resolv_conf(dns: &DnsConfig) -> Option<String> {
    if dns.servers.is_empty() && dns.searches.is_empty() && dns.options.is_empty() {
        return None;
    }
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text.push_str(&format!("search {}\n", dns.searches.join(" ")));
    }
    for server in &dns.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !dns.options.is_empty() {
        text.push_str(&format!("options {}\n", dns.options.join(" ")));
    }
    Some(text)
}

/// The hosts file of a pod with a network of its own.
fn hosts(ips: &[String], hostname: &str) -> String {
    let mut text = String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for ip in ips {
        text.push_str(&format!("{ip}\t{hostname}\n"));
    }
    text
}

/// A file of the node. On many nodes it is a link, which is followed: an administrator made it.
fn of_node(path: &str) -> Option<Vec<u8>> {
    let real = std::fs::canonicalize(path).ok()?;
    ferrite_hostfs::read_head(&real, MAX_NODE_FILE).ok()
}

/// Writes the files that are known before the pod has a network. As other runtimes: without a word about DNS the
/// pod has the node's.
pub(super) fn write(directory: &Path, dns: Option<&DnsConfig>, hostname: &str) -> io::Result<()> {
    let resolver = dns.and_then(resolv_conf).map(String::into_bytes).or_else(|| of_node("/etc/resolv.conf"));
    if let Some(content) = resolver {
        std::fs::write(directory.join(RESOLV_CONF), content)?;
    }
    std::fs::write(directory.join(HOSTNAME), format!("{hostname}\n"))
}

/// Writes the hosts file: the node's for a pod on the node's network.
pub(super) fn write_hosts(directory: &Path, on_node: bool, ips: &[String], hostname: &str) -> io::Result<()> {
    let content = if on_node { of_node("/etc/hosts") } else { None };
    let content = content.unwrap_or_else(|| hosts(ips, hostname).into_bytes());
    std::fs::write(directory.join(HOSTS), content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolver_files() {
        let dns = |servers: &[&str], searches: &[&str], options: &[&str]| {
            let owned = |v: &[&str]| v.iter().map(|s| (*s).to_owned()).collect();
            DnsConfig { servers: owned(servers), searches: owned(searches), options: owned(options) }
        };
        assert_eq!(resolv_conf(&dns(&[], &[], &[])), None);
        assert_eq!(
            resolv_conf(&dns(&["10.0.0.10", "::1"], &["a.svc", "svc"], &["ndots:5"])).as_deref(),
            Some("search a.svc svc\nnameserver 10.0.0.10\nnameserver ::1\noptions ndots:5\n")
        );
    }

    #[test]
    fn a_pod_knows_itself_by_name() {
        let text = hosts(&["10.0.0.2".into(), "fd00::2".into()], "web-0");
        assert!(text.starts_with("127.0.0.1\tlocalhost\n"), "{text}");
        assert!(text.ends_with("10.0.0.2\tweb-0\nfd00::2\tweb-0\n"), "{text}");
    }

    #[test]
    fn the_nodes_files_stand_in() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), None, "web-0").unwrap();
        write_hosts(dir.path(), true, &[], "web-0").unwrap();
        let read = |name: &str| std::fs::read(dir.path().join(name)).ok();
        assert_eq!(read(HOSTNAME).unwrap(), b"web-0\n");
        assert_eq!(read(RESOLV_CONF), of_node("/etc/resolv.conf"));
        assert_eq!(read(HOSTS).unwrap(), of_node("/etc/hosts").unwrap());
    }
}

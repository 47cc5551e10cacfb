//! Which resolvers know the names that are not the cluster's.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::rr::Name;

const DNS_PORT: u16 = 53;
/// A resolver that failed is tried after the others for this long; longer for every failure in a row.
const REST: Duration = Duration::from_secs(1);
const LONGEST_REST: u32 = 16;
/// As glibc's limit, so that pods and node ask the same resolvers.
const MAX_SERVERS: usize = 3;

/// Another resolver.
#[derive(Debug)]
pub struct Upstream {
    pub address: SocketAddr,
    born: Instant,
    failures: AtomicU32,
    rests_until: AtomicU64,
    /// It sends our questions back to us.
    looping: AtomicBool,
}

impl Upstream {
    fn new(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            address,
            born: Instant::now(),
            failures: AtomicU32::new(0),
            rests_until: AtomicU64::new(0),
            looping: AtomicBool::new(false),
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub fn succeeded(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.rests_until.store(0, Ordering::Relaxed);
    }

    pub fn failed(&self) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).min(LONGEST_REST - 1) + 1;
        let rest = u64::try_from((REST * failures).as_millis()).unwrap_or(u64::MAX);
        self.rests_until.store(self.now().saturating_add(rest), Ordering::Relaxed);
    }

    fn rests(&self) -> bool {
        self.rests_until.load(Ordering::Relaxed) > self.now()
    }

    pub fn is_looping(&self) -> bool {
        self.looping.load(Ordering::Relaxed)
    }

    /// Marks the resolver as looping. Returns true if it was not marked before.
    pub fn set_looping(&self) -> bool {
        !self.looping.swap(true, Ordering::Relaxed)
    }
}

/// Resolvers of one domain and everything below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StubDomain {
    pub domain: Name,
    pub servers: Vec<SocketAddr>,
}

/// The state of the file when it was read. A file that is replaced has another inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    changed: (i64, i64),
    size: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        Some(Self { inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()), size: meta.size() })
    }
}

#[derive(Debug, Default)]
struct Loaded {
    stamp: Option<Stamp>,
    servers: Vec<Arc<Upstream>>,
}

/// The resolvers of the node, as its `resolv.conf` names them at this moment, and those of stub domains.
#[derive(Debug)]
pub struct Resolvers {
    file: PathBuf,
    loaded: Mutex<Loaded>,
    stubs: Vec<(Name, Vec<Arc<Upstream>>)>,
    /// Addresses of this server, which must not be asked by itself.
    own: Vec<IpAddr>,
}

impl Resolvers {
    pub fn new(file: PathBuf, mut stubs: Vec<StubDomain>, own: Vec<IpAddr>) -> Self {
        // The longest domain decides.
        stubs.sort_by_key(|stub| std::cmp::Reverse(stub.domain.num_labels()));
        let stubs = stubs
            .into_iter()
            .map(|stub| (stub.domain, stub.servers.into_iter().map(Upstream::new).collect()))
            .collect();
        Self { file, loaded: Mutex::default(), stubs, own }
    }

    /// The resolvers for a name in the order in which to try them: at random as CoreDNS, those that failed lately last.
    pub fn for_name(&self, name: &Name) -> Vec<Arc<Upstream>> {
        let mut servers = match self.stubs.iter().find(|(domain, _)| domain.zone_of(name)) {
            Some((_, servers)) => servers.clone(),
            None => self.of_the_node(),
        };
        servers.retain(|server| !server.is_looping());
        if servers.len() > 1 {
            let turn = rand::random_range(0..servers.len());
            servers.rotate_left(turn);
            servers.sort_by_key(|server| server.rests());
        }
        servers
    }

    fn of_the_node(&self) -> Vec<Arc<Upstream>> {
        let stamp = Stamp::of(&self.file);
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        // Without the file there is nobody to ask; the servers of a file that is being replaced are kept.
        if stamp.is_some() && stamp != loaded.stamp {
            let text = std::fs::read_to_string(&self.file).unwrap_or_default();
            let (servers, refused) = servers_of(&text, &self.own);
            for address in refused {
                tracing::error!(
                    %address, file = %self.file.display(),
                    "the node's resolver is this DNS server: names outside the cluster would be asked in a circle; name another resolver in the file"
                );
            }
            loaded.servers = servers.into_iter().map(Upstream::new).collect();
            loaded.stamp = stamp;
            tracing::debug!(servers = ?loaded.servers, "resolvers read");
        }
        loaded.servers.clone()
    }
}

/// The name servers of a `resolv.conf`, and those that are ourselves.
fn servers_of(text: &str, own: &[IpAddr]) -> (Vec<SocketAddr>, Vec<IpAddr>) {
    let mut servers: Vec<SocketAddr> = Vec::new();
    let mut refused = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some("nameserver"), Some(address)) = (words.next(), words.next()) else { continue };
        // The scope of a link-local address names an interface, which a socket address has as a number.
        let (address, scope) = address.split_once('%').unwrap_or((address, ""));
        let Ok(ip) = address.parse::<IpAddr>() else { continue };
        if own.contains(&ip) {
            refused.push(ip);
            continue;
        }
        let server = match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, DNS_PORT),
            IpAddr::V6(ip) => std::net::SocketAddrV6::new(ip, DNS_PORT, 0, interface(scope)).into(),
        };
        if servers.len() < MAX_SERVERS && !servers.contains(&server) {
            servers.push(server);
        }
    }
    (servers, refused)
}

/// The number of an interface, zero for one that does not exist.
fn interface(name: &str) -> u32 {
    if name.is_empty() || name.contains('/') || name.starts_with('.') {
        return 0;
    }
    let number = std::fs::read_to_string(Path::new("/sys/class/net").join(name).join("ifindex"));
    number.ok().and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files() {
        let own: Vec<IpAddr> = vec!["10.96.0.10".parse().unwrap()];
        for (text, want, refused) in [
            ("", vec![], 0),
            ("# x\nnameserver 192.0.2.1\nnameserver ::1 \n", vec!["192.0.2.1:53", "[::1]:53"], 0),
            ("nameserver 10.96.0.10\nnameserver 127.0.0.53", vec!["127.0.0.53:53"], 1),
            ("nameserver nonsense\nnameserver\nsearch a b\nnameserverx 1.1.1.1", vec![], 0),
            ("nameserver 1.1.1.1\nnameserver 1.1.1.1\n", vec!["1.1.1.1:53"], 0),
            (
                "nameserver 1.1.1.1\nnameserver 1.1.1.2\nnameserver 1.1.1.3\nnameserver 1.1.1.4",
                vec!["1.1.1.1:53", "1.1.1.2:53", "1.1.1.3:53"],
                0,
            ),
        ] {
            let (servers, loops) = servers_of(text, &own);
            let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
            assert_eq!(
                (servers, loops.len()),
                (want.iter().map(ToString::to_string).collect(), refused),
                "{text}"
            );
        }
    }

    #[test]
    fn the_file_is_read_again_when_it_changes_and_the_longest_stub_domain_decides() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        let stub = |domain: &str, server: &str| StubDomain {
            domain: Name::from_ascii(domain).unwrap(),
            servers: vec![server.parse().unwrap()],
        };
        let stubs = vec![stub("example.org.", "192.0.2.7:53"), stub("deep.example.org.", "192.0.2.8:5353")];
        let resolvers = Resolvers::new(file.clone(), stubs, Vec::new());
        let servers = |name: &str| -> Vec<String> {
            let name = Name::from_ascii(name).unwrap();
            resolvers.for_name(&name).iter().map(|u| u.address.to_string()).collect()
        };
        assert!(servers("a.").is_empty(), "there is no file");
        std::fs::write(&file, "nameserver 192.0.2.1").unwrap();
        assert_eq!(servers("a."), ["192.0.2.1:53"]);
        let other = dir.path().join("new");
        std::fs::write(&other, "nameserver 192.0.2.2").unwrap();
        std::fs::rename(other, &file).unwrap();
        assert_eq!(servers("a."), ["192.0.2.2:53"]);
        assert_eq!(servers("x.Example.org."), ["192.0.2.7:53"]);
        assert_eq!(servers("x.deep.example.org."), ["192.0.2.8:5353"]);
    }

    #[test]
    fn a_resolver_that_failed_is_tried_last_and_one_that_loops_never() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        std::fs::write(&file, "nameserver 192.0.2.1\nnameserver 192.0.2.2").unwrap();
        let resolvers = Resolvers::new(file, Vec::new(), Vec::new());
        let all = resolvers.for_name(&Name::root());
        all[0].failed();
        for _ in 0..20 {
            assert_eq!(resolvers.for_name(&Name::root())[0].address, all[1].address);
        }
        all[0].succeeded();
        assert!(all[1].set_looping());
        assert!(!all[1].set_looping());
        let left = resolvers.for_name(&Name::root());
        assert_eq!((left.len(), left[0].address), (1, all[0].address));
    }
}

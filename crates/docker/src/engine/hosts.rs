//! The members of each network, and the names by which they find each other.
//!
//! A network's directory has a file for every container that is on it now. A process that changes the
//! membership updates the members' `/etc/hosts` files from these, under the network lock.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::networks::Network;
use super::{Engine, EngineError, Result};
use crate::record::{self, Container, Lock};

/// A container's place on a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    pub container: String,
    /// The interface in the container.
    pub link: String,
    /// None while it is being made.
    pub address: Option<Ipv4Addr>,
}

const ENDPOINTS: &str = "endpoints";
pub(super) const HOSTS: &str = "hosts";
/// Largest hosts file that is kept up; a container may have written anything into its own.
const MAX_HOSTS: u64 = 1 << 20;

const BEGIN: &str = "# Names on this container's networks, kept up by the engine";
const END: &str = "# End of names on networks";

/// An address and the names it has.
type Named = (Ipv4Addr, Vec<String>);

impl Engine {
    fn endpoint_file(&self, network: &Network, container: &str) -> PathBuf {
        self.network_directory(network).join(ENDPOINTS).join(container)
    }

    /// The containers on a network now.
    pub fn endpoints(&self, network: &Network) -> Vec<Endpoint> {
        if network.driver != "bridge" {
            return Vec::new();
        }
        let entries = fs::read_dir(self.network_directory(network).join(ENDPOINTS));
        let read = |path: PathBuf| serde_json::from_slice::<Endpoint>(&fs::read(path).ok()?).ok();
        let mut all: Vec<Endpoint> =
            entries.into_iter().flatten().flatten().filter_map(|entry| read(entry.path())).collect();
        all.sort_by(|a, b| a.container.cmp(&b.container));
        all
    }

    /// The networks a container is on now.
    pub fn endpoints_of(&self, container: &str) -> Result<Vec<(Network, Endpoint)>> {
        let mut all = Vec::new();
        for network in self.networks()? {
            let found = self.endpoints(&network).into_iter().find(|endpoint| endpoint.container == container);
            all.extend(found.map(|endpoint| (network, endpoint)));
        }
        Ok(all)
    }

    pub(super) fn write_endpoint(&self, _turn: &Lock, network: &Network, endpoint: &Endpoint) -> Result<()> {
        let path = self.endpoint_file(network, &endpoint.container);
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
            record::write(&path, &serde_json::to_vec(endpoint)?)
        };
        write().map_err(EngineError::io("record who is on the network"))
    }

    pub(super) fn remove_endpoint(&self, _turn: &Lock, network: &Network, container: &str) -> Result<()> {
        match fs::remove_file(self.endpoint_file(network, container)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(EngineError::io("record who left the network")(error))
            }
            _ => Ok(()),
        }
    }

    /// Where a container's hosts file is; one that shares another's network shares its file.
    pub(super) fn hosts_path(&self, container: &Container) -> PathBuf {
        let owner = container.host.network.strip_prefix("container:").unwrap_or(&container.id);
        self.directory(owner).join(HOSTS)
    }

    /// Brings the hosts files of everybody on these networks up to date.
    pub(super) fn refresh_hosts(&self, turn: &Lock, networks: &[Network]) -> Result<()> {
        let members: BTreeMap<String, Network> = networks
            .iter()
            .filter(|network| !network.is_predefined())
            .flat_map(|network| self.endpoints(network).into_iter().map(|e| (e.container, network.clone())))
            .collect();
        for id in members.keys() {
            // A member that cannot be written to must not keep the others from learning.
            if let Ok(container) = Container::read(&self.directory(id))
                && let Err(error) = self.refresh_hosts_of(turn, &container)
            {
                tracing::warn!(container = container.name, %error, "its /etc/hosts is not up to date");
            }
        }
        Ok(())
    }

    /// Brings one container's hosts file up to date.
    pub(super) fn refresh_hosts_of(&self, _turn: &Lock, container: &Container) -> Result<()> {
        let (mut own, mut peers): (Vec<Named>, Vec<Named>) = (Vec::new(), Vec::new());
        for (network, endpoint) in self.endpoints_of(&container.id)? {
            let named = !network.is_predefined();
            if let Some(address) = endpoint.address {
                let mut names = vec![container.config.hostname.clone()];
                if named {
                    names.extend(names_on(container, &network));
                }
                own.push((address, distinct(names)));
            }
            let others = self.endpoints(&network).into_iter().filter(|other| other.container != container.id);
            for other in others.filter(|_| named) {
                let record = Container::read(&self.directory(&other.container));
                if let (Ok(record), Some(address)) = (record, other.address) {
                    peers.push((address, distinct(names_on(&record, &network))));
                }
            }
        }
        own.append(&mut peers);
        let path = self.directory(&container.id).join(HOSTS);
        rewrite(&path, &own).map_err(EngineError::io("write /etc/hosts"))
    }
}

/// The names by which other members of a network find a container.
fn names_on(container: &Container, network: &Network) -> Vec<String> {
    let joined = container.networks.iter().find(|joined| joined.network == network.id);
    let aliases = joined.map(|joined| joined.aliases.clone()).unwrap_or_default();
    let mut names = vec![container.name.clone(), container.id.chars().take(12).collect()];
    names.extend(aliases);
    names
}

fn distinct(names: Vec<String>) -> Vec<String> {
    let mut seen = Vec::new();
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// A hosts file with our names in place of the earlier ones. Lines that the container wrote stay.
fn with_names(text: &str, names: &[Named]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut ours = false;
    for line in text.lines() {
        match line {
            BEGIN => ours = true,
            END => ours = false,
            _ if ours => {}
            _ => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    if names.is_empty() {
        return out;
    }
    out.push_str(BEGIN);
    out.push('\n');
    for (address, names) in names {
        out.push_str(&format!("{address}\t{}\n", names.join(" ")));
    }
    out.push_str(END);
    out.push('\n');
    out
}

/// In place, because the file is mounted into the container: written over, then cut.
fn rewrite(path: &Path, names: &[Named]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mut text = String::new();
    (&file).take(MAX_HOSTS).read_to_string(&mut text)?;
    let new = with_names(&text, names);
    if new != text {
        file.write_all_at(new.as_bytes(), 0)?;
        file.set_len(new.len() as u64)?;
    }
    Ok(())
}

/// The beginning of a container's hosts file.
pub(super) fn base_hosts(container: &Container, gateway: Option<Ipv4Addr>) -> String {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n\
         ff00::0\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n",
    );
    for entry in &container.host.extra_hosts {
        if let Some((name, address)) = entry.split_once([':', '=']) {
            let host = gateway.map_or_else(|| "127.0.0.1".into(), |gateway| gateway.to_string());
            let address = if address == "host-gateway" { host } else { address.to_owned() };
            text.push_str(&format!("{address}\t{name}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning() {
        let mut container = Container::default();
        container.host.extra_hosts = vec!["db:10.0.0.1".into(), "up:host-gateway".into()];
        let text = base_hosts(&container, Some(Ipv4Addr::new(172, 17, 0, 1)));
        for line in ["10.0.0.1\tdb\n", "172.17.0.1\tup\n", "127.0.0.1\tlocalhost\n"] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn names_are_replaced_and_the_rest_stays() {
        let named = |address: [u8; 4], names: &[&str]| -> Named {
            (address.into(), names.iter().map(|n| (*n).to_owned()).collect())
        };
        let first = with_names("127.0.0.1\tlocalhost\n", &[named([10, 0, 0, 2], &["a", "b"])]);
        assert_eq!(first, format!("127.0.0.1\tlocalhost\n{BEGIN}\n10.0.0.2\ta b\n{END}\n"));
        let edited = format!("{first}1.2.3.4\tmine\n");
        let second = with_names(&edited, &[named([10, 0, 0, 3], &["c"])]);
        assert_eq!(second, format!("127.0.0.1\tlocalhost\n1.2.3.4\tmine\n{BEGIN}\n10.0.0.3\tc\n{END}\n"));
        assert_eq!(with_names(&second, &[]), "127.0.0.1\tlocalhost\n1.2.3.4\tmine\n");
        assert_eq!(with_names(&format!("a\n{BEGIN}\nlost"), &[]), "a\n", "an end that is missing");
    }

    #[test]
    fn a_hosts_file_shrinks_in_place() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        fs::write(&path, "x\n").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        rewrite(&path, &[([10, 0, 0, 1].into(), vec!["a-long-name".into()])]).unwrap();
        rewrite(&path, &[]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "x\n");
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode, "the mounted file is the same");
    }
}

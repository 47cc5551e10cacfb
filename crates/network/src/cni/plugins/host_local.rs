//! `host-local`: addresses from ranges, remembered in files of this node, in the reference plugin's format.
//!
//! A file for each address in use, named by it, holds the container and the interface. A lock keeps calls apart.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use ferrite_nft::Cidr;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};

use super::refused::{Refused, key};
use super::{Call, Failure, IpConfig, Plugin, code, ip_json};

pub(super) struct HostLocal;

const DEFAULT_DIR: &str = "/var/lib/cni/networks";

/// Addresses that may be given, the first and the last included.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    subnet: Cidr,
    first: u128,
    last: u128,
    gateway: IpAddr,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn address(number: u128, like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(number).unwrap_or(u32::MAX)).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(number).into(),
    }
}

impl Range {
    fn parse(object: &Value) -> Result<Self, Failure> {
        let text = |key: &str| object.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
        let subnet: Cidr = text("subnet")
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| Failure::config("a range has no subnet such as 10.1.0.0/16"))?;
        let (network, end) = (number(subnet.network()), number(subnet.last()));
        if end - network < 3 {
            return Err(Failure::config(format!("network {subnet} is too small to allocate from")));
        }
        let inside = |key: &str| -> Result<Option<IpAddr>, Failure> {
            let Some(text) = text(key) else { return Ok(None) };
            let bad = || Failure::config(format!("{key} {text} is not in {subnet}"));
            let parsed: IpAddr = text.parse().map_err(|_| bad())?;
            if subnet.contains(parsed) { Ok(Some(parsed)) } else { Err(bad()) }
        };
        // The last address of IPv4 is for broadcasts.
        let usable = if subnet.network().is_ipv4() { end - 1 } else { end };
        let gateway = match text("gateway") {
            Some(text) => text.parse().map_err(|_| Failure::config(format!("{text} is no gateway")))?,
            None => address(network + 1, subnet.network()),
        };
        let first = inside("rangeStart")?.map_or(network + 1, number);
        let last = inside("rangeEnd")?.map_or(usable, number);
        if first > last {
            return Err(Failure::config(format!("rangeStart is after rangeEnd in {subnet}")));
        }
        Ok(Self { subnet, first, last, gateway })
    }

    fn contains(&self, number: u128) -> bool {
        (self.first..=self.last).contains(&number)
    }
}

/// The sets of ranges: a container gets one address of each.
fn range_sets(call: &Call) -> Result<Vec<Vec<Range>>, Failure> {
    let none = Value::Null;
    let ipam = call.config.get("ipam").unwrap_or(&none);
    let mut sets = Vec::new();
    if ipam.get("subnet").is_some() {
        sets.push(vec![Range::parse(ipam)?]);
    }
    let lists = [ipam.get("ranges"), call.capability("ipRanges")];
    for list in lists.into_iter().flatten().filter_map(Value::as_array).flatten() {
        let ranges =
            list.as_array().into_iter().flatten().map(Range::parse).collect::<Result<Vec<_>, _>>()?;
        if !ranges.is_empty() {
            sets.push(ranges);
        }
    }
    match sets.is_empty() {
        true => Err(Failure::config("no IP ranges specified")),
        false => Ok(sets),
    }
}

/// The files of one network, for one call at a time.
struct Store {
    dir: PathBuf,
    _lock: Flock<File>,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure + use<> {
    let path = path.display().to_string();
    move |error| Failure::new(code::OTHER, format!("{path}: {error}"))
}

impl Store {
    fn open(call: &Call) -> Result<Self, Failure> {
        let ipam = call.config.get("ipam");
        let base = ipam.and_then(|ipam| ipam.get("dataDir")).and_then(Value::as_str).unwrap_or(DEFAULT_DIR);
        let dir = Path::new(base).join(call.network()?);
        fs::create_dir_all(&dir).map_err(failed(&dir))?;
        let path = dir.join("lock");
        let file =
            File::options().create(true).truncate(false).write(true).open(&path).map_err(failed(&path))?;
        let lock =
            Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| failed(&path)(errno.into()))?;
        Ok(Self { dir, _lock: lock })
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        // As the reference plugin: a colon is replaced, for file systems that do not take it.
        self.dir.join(address.to_string().replace(':', "-"))
    }

    fn reserve(&self, address: IpAddr, owner: &str) -> Result<bool, Failure> {
        let path = self.path(address);
        match File::options().create_new(true).write(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(failed(&path)(error)),
            Ok(_) => fs::write(&path, owner).map_err(failed(&path))?,
        }
        Ok(true)
    }

    /// The addresses in use, with their owners.
    fn reservations(&self) -> Result<Vec<(PathBuf, IpAddr, String)>, Failure> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed(&self.dir))? {
            let path = entry.map_err(failed(&self.dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().replace('-', ":");
            if let Ok(address) = name.parse() {
                let owner = fs::read_to_string(&path).map_err(failed(&path))?;
                found.push((path, address, owner.trim().to_owned()));
            }
        }
        Ok(found)
    }

    fn last(&self, set: usize) -> Option<IpAddr> {
        fs::read_to_string(self.dir.join(format!("last_reserved_ip.{set}"))).ok()?.trim().parse().ok()
    }

    /// A free address of the set, after the one that was given last.
    fn take(&self, set: usize, ranges: &[Range], owner: &str) -> Result<IpConfig, Failure> {
        let last = self.last(set).map(number);
        let begin = ranges
            .iter()
            .position(|range| last.is_some_and(|last| range.contains(last)))
            .map(|index| (index, last.unwrap_or(0).saturating_add(1)));
        let (index, from) = begin.unwrap_or((0, 0));
        let rotated = ranges.iter().cycle().skip(index).take(ranges.len());
        let after = ranges.get(index).into_iter().flat_map(|range| {
            let start = from.max(range.first);
            (start..=range.last).map(move |number| (range, number))
        });
        let others =
            rotated.clone().skip(1).flat_map(|range| (range.first..=range.last).map(move |n| (range, n)));
        let before = ranges.get(index).into_iter().flat_map(|range| {
            (range.first..=range.last)
                .take_while(move |number| *number < from)
                .map(move |number| (range, number))
        });
        for (range, number) in after.chain(others).chain(before) {
            let address = address(number, range.subnet.network());
            let network = number == self::number(range.subnet.network());
            if address == range.gateway || network || !self.reserve(address, owner)? {
                continue;
            }
            let path = self.dir.join(format!("last_reserved_ip.{set}"));
            fs::write(&path, address.to_string()).map_err(failed(&path))?;
            return Ok(IpConfig { address, prefix: range.subnet.prefix(), gateway: Some(range.gateway) });
        }
        let all: Vec<String> = ranges.iter().map(|range| range.subnet.to_string()).collect();
        let text = format!("no IP addresses available in range set: {}", all.join(","));
        Err(Failure::new(code::TRY_AGAIN, text))
    }

    fn release(&self, gone: impl Fn(&str) -> bool) -> Result<(), Failure> {
        for (path, _, owner) in self.reservations()? {
            if gone(&owner) {
                fs::remove_file(&path).map_err(failed(&path))?;
            }
        }
        Ok(())
    }
}

fn owner(call: &Call) -> String {
    format!("{}\r\n{}", call.environment.container, call.interface())
}

#[async_trait]
impl Plugin for HostLocal {
    fn refused(&self) -> &'static [Refused] {
        const KEYS: &[Refused] = &[key("ipam.resolvConf"), key("runtimeConfig.ips"), key("args.cni.ips")];
        KEYS
    }

    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        if call.environment.args.split(';').any(|argument| argument.starts_with("IP=")) {
            return Err(Failure::config("IP in CNI_ARGS is not supported: leave it out"));
        }
        let (sets, store, owner) = (range_sets(call)?, Store::open(call)?, owner(call));
        if store.reservations()?.iter().any(|(_, _, known)| *known == owner) {
            let text = format!("{} has been allocated an address already", call.environment.container);
            return Err(Failure::new(code::OTHER, text));
        }
        let mut ips = Vec::new();
        for (index, ranges) in sets.iter().enumerate() {
            match store.take(index, ranges, &owner) {
                Ok(ip) => ips.push(ip),
                Err(error) => {
                    store.release(|known| known == owner)?;
                    return Err(error);
                }
            }
        }
        let ipam = call.config.get("ipam");
        let routes = ipam.and_then(|ipam| ipam.get("routes")).cloned().unwrap_or_else(|| json!([]));
        let ips: Vec<Value> = ips.iter().map(|ip| ip_json(ip, None, &call.version)).collect();
        Ok(json!({"ips": ips, "routes": routes, "dns": {}}))
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        let owner = owner(call);
        Store::open(call)?.release(|known| known == owner)
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        let owner = owner(call);
        match Store::open(call)?.reservations()?.iter().any(|(_, _, known)| *known == owner) {
            true => Ok(()),
            false => Err(Failure::new(code::OTHER, format!("{owner:?} has no address"))),
        }
    }

    async fn gc(&self, call: &Call, valid: &[(String, String)]) -> Result<(), Failure> {
        let valid: Vec<String> = valid.iter().map(|(id, link)| format!("{id}\r\n{link}")).collect();
        Store::open(call)?.release(|known| !valid.iter().any(|valid| valid == known))
    }
}

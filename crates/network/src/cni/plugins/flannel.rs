//! `flannel`: reads the subnet that a daemon leased for this node, and has `bridge` and `host-local` do the rest.

use std::fs;
use std::io;
use std::path::PathBuf;

use async_trait::async_trait;
use serde_json::{Map, Value, json};

use super::{Call, Failure, Plugin, code};

pub(super) struct Flannel;

const SUBNET_FILE: &str = "/run/flannel/subnet.env";
const DATA_DIR: &str = "/var/lib/cni/flannel";

/// The lease of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lease {
    /// The ranges of the whole cluster.
    networks: Vec<String>,
    /// The node's range of each family that the daemon serves, at least one.
    subnets: Vec<String>,
    mtu: Option<u64>,
    masquerade: bool,
}

impl Lease {
    /// Lines such as `FLANNEL_SUBNET=10.244.1.1/24`.
    fn parse(text: &str) -> Option<Self> {
        let get = |key: &str| text.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='));
        let present = |key: &str| get(key).filter(|value| !value.is_empty());
        let mut subnets = Vec::new();
        for subnet in ["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"].into_iter().filter_map(present) {
            subnets.push(subnet.parse::<ferrite_nft::Cidr>().ok()?.to_string());
        }
        if subnets.is_empty() {
            return None;
        }
        let networks = ["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"].into_iter().filter_map(present);
        Some(Self {
            networks: networks
                .flat_map(|ranges| ranges.split(','))
                .map(|range| range.trim().to_owned())
                .collect(),
            subnets,
            mtu: get("FLANNEL_MTU").and_then(|text| text.parse().ok()),
            masquerade: get("FLANNEL_IPMASQ") == Some("true"),
        })
    }
}

/// The configuration of the plugin that does the work.
fn delegate(call: &Call, lease: &Lease) -> Result<Map<String, Value>, Failure> {
    let mut config = match call.config.get("delegate") {
        None => Map::new(),
        Some(Value::Object(object)) => object.clone(),
        Some(_) => return Err(Failure::config("'delegate' dictionary must be an object")),
    };
    if config.contains_key("name") || config.contains_key("ipam") {
        return Err(Failure::config(
            "'delegate' dictionary must not have 'name' or 'ipam', which are set here",
        ));
    }
    config.insert("name".into(), call.network()?.into());
    config.insert("cniVersion".into(), call.version.clone().into());
    config.entry("type").or_insert_with(|| "bridge".into());
    // Masquerading is done once, by the daemon or here.
    config.entry("ipMasq").or_insert_with(|| (!lease.masquerade).into());
    if let Some(mtu) = lease.mtu {
        config.entry("mtu").or_insert_with(|| mtu.into());
    }
    if config.get("type") == Some(&"bridge".into()) {
        config.entry("isGateway").or_insert_with(|| true.into());
    }
    let mut ipam = match call.config.get("ipam") {
        Some(Value::Object(object)) => object.clone(),
        _ => Map::new(),
    };
    ipam.entry("type").or_insert_with(|| "host-local".into());
    let ranges: Vec<Value> = lease.subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
    ipam.insert("ranges".into(), ranges.into());
    if let Some(routes) = ipam.entry("routes").or_insert_with(|| json!([])).as_array_mut() {
        routes.extend(lease.networks.iter().map(|network| json!({"dst": network})));
    }
    config.insert("ipam".into(), ipam.into());
    Ok(config)
}

fn kind(config: &Map<String, Value>) -> String {
    config.get("type").and_then(Value::as_str).unwrap_or("bridge").to_owned()
}

/// The file with the configuration that a container came by.
fn remembered(call: &Call) -> PathBuf {
    let dir = call.text("dataDir").unwrap_or(DATA_DIR);
    PathBuf::from(dir).join(format!("{}-{}", call.environment.container, call.interface()))
}

fn recall(call: &Call) -> Result<Option<Map<String, Value>>, Failure> {
    let path = remembered(call);
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(Failure::of(path.display().to_string()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::of(path.display().to_string())(error)),
    }
}

#[async_trait]
impl Plugin for Flannel {
    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let file = call.text("subnetFile").unwrap_or(SUBNET_FILE);
        let text = fs::read_to_string(file).map_err(|error| {
            Failure::new(code::TRY_AGAIN, format!("this node has no subnet: {file}: {error}"))
        })?;
        let lease = Lease::parse(&text).ok_or_else(|| {
            Failure::new(
                code::TRY_AGAIN,
                format!("{file} has no FLANNEL_SUBNET such as 10.244.1.1/24 and no FLANNEL_IPV6_SUBNET"),
            )
        })?;
        let config = delegate(call, &lease)?;
        let path = remembered(call);
        let fail = || Failure::of(path.display().to_string());
        fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(fail())?;
        fs::write(&path, Value::Object(config.clone()).to_string()).map_err(fail())?;
        let result = call.delegate(&kind(&config), "ADD", &config).await?;
        result.ok_or_else(|| Failure::new(code::OTHER, "the delegate has no result"))
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        let Some(config) = recall(call)? else { return Ok(()) };
        call.delegate(&kind(&config), "DEL", &config).await?;
        let path = remembered(call);
        fs::remove_file(&path).map_err(Failure::of(path.display().to_string()))
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        let missing = || Failure::new(code::UNKNOWN_CONTAINER, "the container was not added by this plugin");
        let mut config = recall(call)?.ok_or_else(missing)?;
        config.insert("prevResult".into(), call.previous().cloned().unwrap_or_default());
        call.delegate(&kind(&config), "CHECK", &config).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases() {
        let v4 = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        let v6 = "FLANNEL_IPV6_NETWORK=fd00:244::/56\nFLANNEL_IPV6_SUBNET=fd00:244:0:1::1/64\n";
        let lease = Lease {
            networks: vec!["10.244.0.0/16".into()],
            subnets: vec!["10.244.1.0/24".into()],
            mtu: Some(1450),
            masquerade: true,
        };
        assert_eq!(Lease::parse(v4).as_ref(), Some(&lease));
        let both = Lease {
            networks: vec!["10.244.0.0/16".into(), "fd00:244::/56".into()],
            subnets: vec!["10.244.1.0/24".into(), "fd00:244:0:1::/64".into()],
            ..lease
        };
        assert_eq!(Lease::parse(&format!("{v4}{v6}")), Some(both));
        let six = Lease::parse(&format!("FLANNEL_SUBNET=\n{v6}")).unwrap();
        assert_eq!((six.subnets, six.masquerade), (vec!["fd00:244:0:1::/64".to_owned()], false));
        let several =
            Lease::parse("FLANNEL_NETWORK=10.0.0.0/16,10.1.0.0/16\nFLANNEL_SUBNET=10.0.1.1/24\n").unwrap();
        assert_eq!(several.networks, ["10.0.0.0/16", "10.1.0.0/16"]);
        for bad in [
            "",
            "FLANNEL_SUBNET=",
            "FLANNEL_SUBNET=x/24",
            "FLANNEL_SUBNETS=10.0.0.0/8",
            "FLANNEL_IPV6_SUBNET=fd00::/129",
        ] {
            assert_eq!(Lease::parse(bad), None, "{bad}");
        }
    }
}

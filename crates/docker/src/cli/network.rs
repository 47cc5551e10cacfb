//! `network …`.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::list::{has_label, split_filters};
use super::options::split_label;
use super::system::show_found;
use super::{Failure, Outcome, each, say, table};
use crate::engine::{Engine, EngineError, Network, NetworkRequest};
use crate::record::Joined;
use crate::units;

#[derive(Debug, Subcommand)]
pub enum NetworkCommand {
    /// Create a network
    Create(Create),
    /// List networks
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Display detailed information on one or more networks
    Inspect {
        /// Format the output using the given Go template
        #[arg(short, long)]
        format: Option<String>,
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove one or more networks
    #[command(visible_alias = "remove")]
    Rm {
        /// Absent networks are no failure
        #[arg(short, long)]
        force: bool,
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Connect a container to a network
    Connect(Connect),
    /// Disconnect a container from a network
    Disconnect {
        /// Force the container to disconnect from a network
        #[arg(short, long)]
        force: bool,
        network: String,
        container: String,
    },
    /// Remove all unused networks
    Prune {
        /// Do not prompt for confirmation
        #[arg(short, long)]
        force: bool,
        /// Provide filter values: label=<key>[=<value>]
        #[arg(long)]
        filter: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub struct Create {
    /// Driver to manage the network
    #[arg(short, long, default_value = "bridge")]
    driver: String,
    /// Subnet in CIDR format that represents a network segment
    #[arg(long)]
    subnet: Option<String>,
    /// IPv4 gateway for the subnet: its first address
    #[arg(long)]
    gateway: Option<std::net::Ipv4Addr>,
    /// Restrict external access to the network
    #[arg(long)]
    internal: bool,
    /// Set metadata on a network
    #[arg(long)]
    label: Vec<String>,
    /// Set driver specific options
    #[arg(short, long)]
    opt: Vec<String>,
    name: String,
}

#[derive(Debug, Args)]
pub struct Ls {
    /// Only display network IDs
    #[arg(short, long)]
    quiet: bool,
    /// Do not truncate the output
    #[arg(long)]
    no_trunc: bool,
    /// Provide filter values: driver, id, label, name, scope or type (custom or builtin)
    #[arg(short, long)]
    filter: Vec<String>,
    /// Format output using a Go template
    #[arg(long)]
    format: Option<String>,
}

#[derive(Debug, Args)]
pub struct Connect {
    /// Add network-scoped alias for the container
    #[arg(long)]
    alias: Vec<String>,
    /// IPv4 address
    #[arg(long)]
    ip: Option<std::net::Ipv4Addr>,
    network: String,
    container: String,
}

fn pairs(entries: &[String]) -> BTreeMap<String, String> {
    entries.iter().map(|entry| split_label(entry)).collect()
}

fn matches(network: &Network, key: &str, value: &str) -> bool {
    match key {
        "driver" => network.driver == value,
        "id" => network.id.starts_with(value),
        "name" => network.name.contains(value),
        "label" => has_label(&network.labels, value),
        "scope" => value == "local",
        "type" => (value == "builtin") == network.is_predefined(),
        _ => false,
    }
}

/// Filters of one key are alternatives; those of different keys must all hold.
fn wanted(network: &Network, filters: &[(String, String)]) -> bool {
    filters.iter().all(|(key, _)| {
        filters.iter().filter(|(other, _)| other == key).any(|(key, value)| matches(network, key, value))
    })
}

impl Ls {
    fn run(self, engine: &Engine) -> Outcome {
        let filters = split_filters(&self.filter, &["driver", "id", "label", "name", "scope", "type"])?;
        let networks = engine.networks()?.into_iter().filter(|network| wanted(network, &filters));
        let id = |network: &Network| match self.no_trunc {
            true => network.id.clone(),
            false => network.id.chars().take(12).collect(),
        };
        if self.quiet && self.format.is_none() {
            for network in networks {
                say(&id(&network))?;
            }
            return Ok(0);
        }
        let row = |network: Network| {
            let labels: Vec<String> =
                network.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            json!({
                "ID": id(&network), "Name": network.name, "Driver": network.driver, "Scope": "local",
                "IPv4": "true", "IPv6": "false", "Internal": network.internal.to_string(),
                "Labels": labels.join(","), "CreatedAt": units::created_at(network.created),
            })
        };
        let rows: Vec<Value> = networks.map(row).collect();
        let columns = &[("NETWORK ID", "ID"), ("NAME", "Name"), ("DRIVER", "Driver"), ("SCOPE", "Scope")];
        let headings = &[("ID", "NETWORK ID"), ("Name", "NAME"), ("Driver", "DRIVER"), ("Scope", "SCOPE")];
        table::show(&rows, self.format.as_deref(), columns, headings)?;
        Ok(0)
    }
}

impl NetworkCommand {
    pub async fn run(self, engine: &Engine) -> Outcome {
        match self {
            Self::Create(create) => {
                let request = NetworkRequest {
                    name: create.name,
                    driver: create.driver,
                    subnet: create.subnet,
                    gateway: create.gateway,
                    internal: create.internal,
                    labels: pairs(&create.label),
                    options: pairs(&create.opt),
                };
                say(&engine.create_network(request).await?.id)?;
                Ok(0)
            }
            Self::Ls(ls) => ls.run(engine),
            Self::Inspect { format, names } => {
                let (mut found, mut missing) = (Vec::new(), Vec::new());
                for name in names {
                    match engine.inspect_network(&name) {
                        Ok(value) => found.push(value),
                        Err(error) => missing.push(format!("Error response from daemon: {error}")),
                    }
                }
                show_found(&found, &missing, format.as_deref())
            }
            Self::Rm { force, names } => {
                each(&names, async |name| match engine.remove_network(name).await {
                    Err(EngineError::NoSuchNetwork(_)) if force => Ok(String::new()),
                    removed => removed.map(|_| name.clone()),
                })
                .await
            }
            Self::Connect(connect) => {
                let joined = Joined { aliases: connect.alias, ip: connect.ip, ..Default::default() };
                engine.connect(&connect.network, &connect.container, joined).await?;
                Ok(0)
            }
            Self::Disconnect { network, container, .. } => {
                engine.disconnect(&network, &container).await?;
                Ok(0)
            }
            Self::Prune { force, filter } => {
                let filters = split_filters(&filter, &["label"])?;
                if !force && !confirmed()? {
                    return Ok(0);
                }
                let removed = engine.prune_networks(|network| wanted(network, &filters)).await?;
                if !removed.is_empty() {
                    say(&format!("Deleted Networks:\n{}\n", removed.join("\n")))?;
                }
                Ok(0)
            }
        }
    }
}

fn confirmed() -> Result<bool, Failure> {
    say("WARNING! This will remove all custom networks not used by at least one container.")?;
    say("Are you sure you want to continue? [y/N] ")?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        let own = Network {
            name: "own".into(),
            driver: "bridge".into(),
            labels: pairs(&["a=b".into()]),
            ..Default::default()
        };
        let filter = |entries: &[&str]| -> Vec<(String, String)> {
            pairs(&entries.iter().map(|e| (*e).to_owned()).collect::<Vec<_>>()).into_iter().collect()
        };
        for (filters, want) in [
            (&["name=ow"][..], true),
            (&["type=builtin"], false),
            (&["type=custom", "driver=bridge"], true),
            (&["label=a"], true),
            (&["label=a=c"], false),
        ] {
            assert_eq!(wanted(&own, &filter(filters)), want, "{filters:?}");
        }
    }
}

//! `ferrite node`: nodes on this machine, and failures to try.

use super::{MachineError, Machines, Role};
use crate::apiserver::BoxError;
use crate::cli::DataDir;
use crate::joining::client_of;
use crate::joining::token::JoinToken;
use crate::paths::Paths;
use clap::{Args, Subcommand};
use ferrite_client::{Api, is_not_found};
use ferrite_network::Segment;
use k8s_openapi::api::core::v1::Node;
use kube::api::DeleteParams;
use std::process::ExitCode;
use std::time::Duration;

/// Nodes on this machine, beside the one of the cluster's own process, and the machines of `up --control-planes`.
#[derive(Debug, Args)]
pub struct NodeCommand {
    #[command(flatten)]
    data: DataDir,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List nodes and their states.
    #[command(visible_alias = "ls")]
    List,
    /// Make another node.
    Add { name: String },
    /// Switch a node off: its agent and its containers, or its server and its etcd member, end as when the power fails.
    Stop { name: String },
    /// Switch a node on, continue its programs, or connect it again.
    Start { name: String },
    /// Stop the agent of a node where it is, or the server and the etcd member; containers go on.
    Pause { name: String },
    /// Cut a node off from all others; everything on it goes on.
    Partition { name: String },
    /// Switch a node off and remove it, with its Node object.
    #[command(visible_alias = "rm")]
    Delete { name: String },
}

const TOKEN_LIFETIME: Duration = Duration::from_secs(3600);

impl NodeCommand {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        if let Command::List = self.command {
            list(&paths);
            return Ok(ExitCode::SUCCESS);
        }
        if !nix::unistd::geteuid().is_root() {
            return Err("changing nodes needs root: try `sudo ferrite node`".into());
        }
        if !paths.nodes().exists() {
            return Err(MachineError::NoSegment.into());
        }
        let machines = Machines::open(&paths).await?;
        match self.command {
            Command::List => {}
            Command::Add { name } => {
                machines.options()?;
                let (client, ca) = (client_of(&paths).await?, authority(&paths)?);
                let segment =
                    Segment::find(&paths.segment(), &paths.bridge()).await?.ok_or(MachineError::NoSegment)?;
                machines.check_new(&name)?;
                // That of the cluster's own process, or of another machine: two agents would fight for one object.
                if Api::<Node>::all(client.clone()).get_opt(&name).await?.is_some() {
                    return Err(MachineError::Foreign(name).into());
                }
                let machine = machines.add(&name, Role::Node, segment.ranges())?;
                let token =
                    JoinToken::create(&client, &ca, Some(TOKEN_LIFETIME), "node of this machine").await?;
                machines.start(machine, &segment, Some(&token)).await?;
                println!("node {name} added: `kubectl get nodes --watch` shows when it is Ready");
            }
            Command::Stop { name } => {
                machines.stop(machines.find(&name)?).await?;
                println!("node {name} is off");
            }
            Command::Start { name } => {
                let mut machine = machines.find(&name)?;
                machine.cut = false;
                let segment =
                    Segment::find(&paths.segment(), &paths.bridge()).await?.ok_or(MachineError::NoSegment)?;
                machines.start(machine, &segment, None).await?;
                println!("node {name} is on");
            }
            Command::Pause { name } => {
                if !machines.pause(&machines.find(&name)?)? {
                    return Err(format!("nothing runs on node {name}").into());
                }
                println!("node {name} is paused: `ferrite node start {name}` continues it");
            }
            Command::Partition { name } => {
                machines.cut_off(machines.find(&name)?).await?;
                println!("node {name} is cut off: `ferrite node start {name}` connects it again");
            }
            Command::Delete { name } => {
                let machine = machines.find(&name)?;
                if machine.role == Role::ControlPlane {
                    return Err(MachineError::ControlPlane(name).into());
                }
                machines.remove(machine).await?;
                if let Ok(client) = client_of(&paths).await {
                    match Api::<Node>::all(client).delete(&name, &DeleteParams::default()).await {
                        Err(error) if !is_not_found(&error) => {
                            tracing::warn!(%error, "the Node object is still there");
                        }
                        _ => {}
                    }
                }
                println!("node {name} is gone");
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn authority(paths: &Paths) -> Result<String, BoxError> {
    std::fs::read_to_string(paths.pki().join("ca.crt"))
        .map_err(|e| format!("cannot read the cluster's authority: {e}").into())
}

fn list(paths: &Paths) {
    println!("{:<32} {:<14} {:<16} STATE", "NAME", "ROLE", "ADDRESS");
    for machine in Machines::list(paths) {
        let state = Machines::condition(paths, &machine);
        println!("{:<32} {:<14} {:<16} {state}", machine.name, machine.role, machine.addresses.to_string());
    }
}

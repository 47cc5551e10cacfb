//! Containers as JSON, with the fields people write scripts against.

use serde_json::{Map, Value, json};

use super::networks::hardware_address;
use super::{Engine, Network, Result, View};
use crate::record::{Container, Joined, MountKind, Status};
use crate::units::rfc3339;

impl Engine {
    /// A container's networks by name, with its address on each while it runs.
    fn inspect_endpoints(&self, container: &Container, runs: bool) -> Result<Value> {
        let mut networks = Map::new();
        let now = if runs { self.endpoints_of(&container.id)? } else { Vec::new() };
        let mut add = |network: &Network, joined: Option<&Joined>| {
            let endpoint = now.iter().find(|(known, _)| known.id == network.id).map(|(_, endpoint)| endpoint);
            let address = endpoint.and_then(|endpoint| endpoint.address);
            let place = self.gateway_on(network).filter(|_| address.is_some());
            let aliases = joined.map(|joined| &joined.aliases).filter(|aliases| !aliases.is_empty());
            let names = [container.name.clone(), container.id[..12.min(container.id.len())].to_owned()];
            let names = (!network.is_predefined()).then(|| {
                let own = names.iter().cloned();
                own.chain(aliases.into_iter().flatten().cloned()).collect::<Vec<_>>()
            });
            let wanted = joined.and_then(|joined| joined.ip).map(|ip| json!({"IPv4Address": ip.to_string()}));
            networks.insert(
                network.name.clone(),
                json!({
                    "IPAMConfig": wanted, "Links": null, "Aliases": aliases, "DNSNames": names,
                    "NetworkID": network.id, "EndpointID": "",
                    "Gateway": place.map(|(gateway, _)| gateway.to_string()).unwrap_or_default(),
                    "IPAddress": address.map(|address| address.to_string()).unwrap_or_default(),
                    "IPPrefixLen": place.map_or(0, |(_, range)| range.prefix()), "IPv6Gateway": "",
                    "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0,
                    "MacAddress": address.map(hardware_address).unwrap_or_default(), "DriverOpts": null,
                }),
            );
        };
        for joined in &container.networks {
            if let Ok(network) = self.find_network(&joined.network) {
                add(&network, Some(joined));
            }
        }
        if matches!(container.host.network.as_str(), "host" | "none") {
            add(&self.find_network(&container.host.network)?, None);
        }
        Ok(Value::Object(networks))
    }

    /// `inspect` of a container.
    pub fn inspect(&self, name: &str) -> Result<Value> {
        let View { container, state } = self.find(name)?;
        let (config, host) = (&container.config, &container.host);
        let command = config.command();
        let directory = self.directory(&container.id);
        let file = |name: &str| directory.join(name).display().to_string();
        let task = state.task.as_ref();
        let mut ports = Map::new();
        for (port, protocol) in &config.exposed {
            ports.insert(format!("{port}/{protocol}"), Value::Null);
        }
        for port in &state.ports {
            let entry = ports.entry(format!("{}/{}", port.container, port.protocol)).or_insert(json!([]));
            if entry.is_null() {
                *entry = json!([]);
            }
            if let Value::Array(list) = entry {
                list.push(
                    json!({"HostIp": port.host_ip.to_string(), "HostPort": port.host_port.to_string()}),
                );
            }
        }
        if !state.status.runs() {
            ports.clear();
        }
        let mut bindings = Map::new();
        for port in &host.ports {
            let entry = bindings.entry(format!("{}/{}", port.container, port.protocol)).or_insert(json!([]));
            if let Value::Array(list) = entry {
                list.push(json!({
                    "HostIp": port.host_ip.map(|ip| ip.to_string()).unwrap_or_default(),
                    "HostPort": port.host_port.map(|port| port.to_string()).unwrap_or_default(),
                }));
            }
        }
        let networks = self.inspect_endpoints(&container, state.status.runs())?;
        // The older top-level fields describe only the network that the container was made for.
        let first = &networks[host.network.as_str()];
        let exposed: Map<String, Value> =
            config.exposed.iter().map(|(port, protocol)| (format!("{port}/{protocol}"), json!({}))).collect();
        let volumes: Map<String, Value> =
            config.volumes.iter().map(|path| (path.clone(), json!({}))).collect();
        let mounts: Vec<Value> = container
            .mounts
            .iter()
            .map(|mount| {
                let mut entry = json!({
                    "Type": match mount.kind { MountKind::Bind => "bind", MountKind::Volume => "volume" },
                    "Source": mount.source, "Destination": mount.destination,
                    "Mode": if mount.read_only { "ro" } else { "" }, "RW": !mount.read_only,
                    "Propagation": mount.propagation,
                });
                if mount.kind == MountKind::Volume {
                    entry["Name"] = mount.name.as_str().into();
                    entry["Driver"] = "local".into();
                }
                entry
            })
            .collect();
        let list = |values: &[String]| if values.is_empty() { Value::Null } else { json!(values) };
        let ulimits: Vec<Value> = host
            .ulimits
            .iter()
            .map(|limit| json!({"Name": limit.name, "Soft": limit.soft, "Hard": limit.hard}))
            .collect();
        let devices: Vec<Value> = host
            .devices
            .iter()
            .map(|d| {
                json!({"PathOnHost": d.host, "PathInContainer": d.container, "CgroupPermissions": d.permissions})
            })
            .collect();
        let state_json = json!({
            "Status": state.status.name(),
            "Running": state.status.runs() || state.status == Status::Restarting,
            "Paused": state.status == Status::Paused,
            "Restarting": state.status == Status::Restarting,
            "OOMKilled": state.oom_killed,
            "Dead": state.status == Status::Dead,
            "Pid": task.filter(|_| state.status.runs()).map_or(0, |task| task.pid),
            "ExitCode": state.exit_code,
            "Error": state.error,
            "StartedAt": rfc3339(state.started_at),
            "FinishedAt": rfc3339(state.finished_at),
        });
        let host_config = json!({
            "Binds": list(&host.binds),
            "NetworkMode": host.network,
            "PortBindings": bindings,
            "RestartPolicy": {"Name": host.restart.name(), "MaximumRetryCount": host.restart.retries()},
            "AutoRemove": host.auto_remove,
            "CapAdd": list(&host.cap_add),
            "CapDrop": list(&host.cap_drop),
            "Dns": host.dns,
            "DnsOptions": host.dns_options,
            "DnsSearch": host.dns_search,
            "ExtraHosts": list(&host.extra_hosts),
            "GroupAdd": list(&host.group_add),
            "IpcMode": if host.ipc.is_empty() { "private" } else { &host.ipc },
            "PidMode": host.pid,
            "UTSMode": host.uts,
            "Privileged": host.privileged,
            "PublishAllPorts": host.publish_all,
            "ReadonlyRootfs": host.read_only,
            "SecurityOpt": list(&host.security_opt),
            "Sysctls": host.sysctls,
            "Tmpfs": host.tmpfs,
            "ShmSize": if host.shm_size == 0 { 64 << 20 } else { host.shm_size },
            "Init": host.init,
            "Memory": host.memory,
            "MemorySwap": if host.memory_swap == 0 { host.memory * 2 } else { host.memory_swap },
            "NanoCpus": host.nano_cpus,
            "CpuShares": host.cpu_shares,
            "CpusetCpus": host.cpuset_cpus,
            "CpusetMems": host.cpuset_mems,
            "PidsLimit": host.pids_limit,
            "OomScoreAdj": host.oom_score_adj,
            "Ulimits": ulimits,
            "Devices": devices,
            "Runtime": "ferrite",
            "LogConfig": {"Type": "cri", "Config": {}},
        });
        let graph_driver = json!({
            "Name": "overlay2",
            "Data": {
                "LowerDir": container.lowers.iter().map(|l| l.display().to_string()).collect::<Vec<_>>().join(":"),
                "UpperDir": directory.join(super::start::LAYER).join("upper"),
                "WorkDir": directory.join(super::start::LAYER).join("work"),
            },
        });
        let config_json = json!({
            "Hostname": config.hostname,
            "User": config.user,
            "Tty": config.tty,
            "OpenStdin": config.open_stdin,
            "StdinOnce": config.stdin_once,
            "Env": config.env,
            "Cmd": list(&config.cmd),
            "Entrypoint": list(&config.entrypoint),
            "Image": config.image,
            "Volumes": volumes,
            "WorkingDir": config.working_dir,
            "Labels": config.labels,
            "ExposedPorts": exposed,
            "StopSignal": if config.stop_signal.is_empty() { "SIGTERM" } else { &config.stop_signal },
            "StopTimeout": config.stop_timeout,
        });
        let network_settings = json!({
            "Bridge": "",
            "SandboxKey": task.map(|task| task.network_namespace()),
            "Ports": ports,
            "Gateway": if host.network == "bridge" { first["Gateway"].clone() } else { "".into() },
            "IPAddress": if host.network == "bridge" { first["IPAddress"].clone() } else { "".into() },
            "IPPrefixLen": if host.network == "bridge" { first["IPPrefixLen"].clone() } else { 0.into() },
            "MacAddress": if host.network == "bridge" { first["MacAddress"].clone() } else { "".into() },
            "Networks": networks,
        });
        Ok(json!({
            "Id": container.id,
            "Created": rfc3339(container.created),
            "Path": command.first(),
            "Args": command.get(1..).unwrap_or_default(),
            "State": state_json,
            "Image": container.image_id,
            "ResolvConfPath": task.map_or_else(String::new, |_| file("resolv.conf")),
            "HostnamePath": file("hostname"),
            "HostsPath": file("hosts"),
            "LogPath": file(super::logs::LOG),
            "Name": format!("/{}", container.name),
            "RestartCount": state.restart_count,
            "Driver": "overlay2",
            "Platform": "linux",
            "MountLabel": "",
            "ProcessLabel": "",
            "AppArmorProfile": "",
            "ExecIDs": null,
            "HostConfig": host_config,
            "GraphDriver": graph_driver,
            "Mounts": mounts,
            "Config": config_json,
            "NetworkSettings": network_settings,
        }))
    }
}

//! Containers as JSON, with the fields people write scripts against.

use serde_json::{Map, Value, json};

use super::{Engine, Result, View};
use crate::record::{MountKind, Status};
use crate::units::rfc3339;

impl Engine {
    /// `inspect` of a container.
    pub fn inspect(&self, name: &str) -> Result<Value> {
        let View { container, state } = self.find(name)?;
        let (config, host) = (&container.config, &container.host);
        let command = config.command();
        let directory = self.directory(&container.id);
        let file = |name: &str| directory.join(name).display().to_string();
        let task = state.task.as_ref();
        let ip = task.and_then(|task| task.ips.first().cloned()).unwrap_or_default();
        let connected = !ip.is_empty();
        let (gateway, prefix) = match self.gateway().filter(|_| connected) {
            Some((gateway, range)) => (gateway.to_string(), range.prefix()),
            None => (String::new(), 0),
        };
        let mac = ip.parse::<std::net::Ipv4Addr>().map_or_else(
            |_| String::new(),
            |ip| {
                let [a, b, c, d] = ip.octets();
                format!("0a:58:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
            },
        );
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
        let endpoint = json!({
            "IPAMConfig": null, "Links": null, "Aliases": null, "NetworkID": "", "EndpointID": "",
            "Gateway": gateway, "IPAddress": ip, "IPPrefixLen": prefix, "IPv6Gateway": "",
            "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "MacAddress": mac, "DriverOpts": null,
        });
        let networks = if host.network.starts_with("container:") {
            json!({})
        } else {
            json!({host.network.as_str(): endpoint})
        };
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
            "Gateway": gateway,
            "IPAddress": ip,
            "IPPrefixLen": prefix,
            "MacAddress": mac,
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

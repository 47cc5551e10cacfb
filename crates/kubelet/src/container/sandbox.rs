//! The sandbox a pod's containers live in.

use super::hosts::{self, HostnameError};
use super::resources::CpuQuota;
use super::{dns, resources, security, sysctl};
use crate::pod::labels;
use crate::pod::model::{self, PodId};
use ferrite_cri::v1::{
    DnsConfig, LinuxPodSandboxConfig, PodSandboxConfig, PodSandboxMetadata, PortMapping, Protocol,
    UserNamespace,
};
use k8s_openapi::api::core::v1::Pod;
use std::path::Path;

/// The node's inputs of a sandbox.
pub(crate) struct SandboxInputs<'a> {
    pub cluster_dns: &'a dns::ClusterDns,
    pub node_dns: &'a DnsConfig,
    pub node_hostname: &'a str,
    pub log_root: &'a Path,
    pub cgroup_parent: &'a str,
    pub quota: CpuQuota,
    pub users: &'a UserNamespace,
}

pub(crate) fn sandbox_config(
    pod: &Pod,
    attempt: u32,
    inputs: &SandboxInputs<'_>,
) -> Result<PodSandboxConfig, HostnameError> {
    let id = PodId::of(pod);
    // The runtime leaves the node's name alone when pods share its network.
    let hostname = if model::is_host_network(pod) {
        String::new()
    } else {
        hosts::kernel_hostname(pod, &inputs.cluster_dns.domain, inputs.node_hostname)?
    };
    let total = resources::pod_resources(pod);
    let context = model::spec(pod).security_context.as_ref();
    let sysctls = context.and_then(|c| c.sysctls.as_ref()).into_iter().flatten();
    Ok(PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: id.name.clone(),
            uid: id.uid.clone(),
            namespace: id.namespace.clone(),
            attempt,
        }),
        hostname,
        log_directory: inputs.log_root.join(id.log_directory()).to_string_lossy().into_owned(),
        dns_config: Some(dns::pod_dns(pod, inputs.cluster_dns, inputs.node_dns)),
        port_mappings: port_mappings(pod),
        labels: labels::sandbox_labels(pod),
        annotations: labels::sandbox_annotations(pod),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: inputs.cgroup_parent.to_string(),
            security_context: Some(security::sandbox_context(pod, inputs.users)),
            sysctls: sysctls.map(|s| (sysctl::normalized(&s.name), s.value.clone())).collect(),
            overhead: resources::overhead(pod, inputs.quota),
            resources: Some(resources::of_sandbox(pod, &total, inputs.quota)),
        }),
        ..PodSandboxConfig::default()
    })
}

fn port_mappings(pod: &Pod) -> Vec<PortMapping> {
    if model::is_host_network(pod) {
        return Vec::new();
    }
    let containers = model::containers(pod);
    let ports = containers.iter().flat_map(|c| c.spec.ports.iter().flatten());
    ports
        .map(|p| PortMapping {
            protocol: match p.protocol.as_deref() {
                Some("UDP") => Protocol::Udp,
                Some("SCTP") => Protocol::Sctp,
                _ => Protocol::Tcp,
            }
            .into(),
            container_port: p.container_port,
            host_port: p.host_port.unwrap_or(0),
            host_ip: p.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

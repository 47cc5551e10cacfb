//! The built-in kinds: one file each, one row each in [`built_in`].

pub(crate) mod access;
mod binding;
mod cell;
mod check;
mod configmap;
mod core;
mod deployment;
mod endpoints;
mod endpointslice;
mod event;
mod go;
mod lease;
mod namespace;
mod node;
pub mod pod;
mod replicaset;
mod row;
mod secret;
mod service;
mod serviceaccount;
mod volume_source;
mod workload;

use crate::resource::Resource;
use row::*;

/// Every resource compiled into the server, in discovery's order.
pub fn built_in() -> Vec<Resource> {
    vec![
        Row::core("Binding", "bindings", "binding").verbs(CREATE).build(binding::Bindings),
        Row::core("ComponentStatus", "componentstatuses", "componentstatus")
            .cluster()
            .verbs(GET_LIST)
            .short(&["cs"])
            .build(core::componentstatus::ComponentStatuses),
        Row::core("ConfigMap", "configmaps", "configmap").short(&["cm"]).build(configmap::ConfigMaps),
        Row::core("Endpoints", "endpoints", "endpoints").short(&["ep"]).build(endpoints::Endpoints),
        Row::core("Event", "events", "event").short(&["ev"]).build(event::Events),
        Row::core("LimitRange", "limitranges", "limitrange")
            .short(&["limits"])
            .build(core::limitrange::LimitRanges),
        Row::core("Namespace", "namespaces", "namespace")
            .cluster()
            .verbs(NAMESPACE_VERBS)
            .short(&["ns"])
            .subresources(&[sub("finalize", UPDATE), sub("status", GET_PATCH_UPDATE)])
            .build(namespace::Namespaces),
        Row::core("Node", "nodes", "node")
            .cluster()
            .short(&["no"])
            .subresources(&[
                body("proxy", PROXY, "", "v1", "NodeProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(node::Nodes),
        Row::core("PersistentVolumeClaim", "persistentvolumeclaims", "persistentvolumeclaim")
            .short(&["pvc"])
            .status()
            .build(core::persistentvolumeclaim::PersistentVolumeClaims),
        Row::core("PersistentVolume", "persistentvolumes", "persistentvolume")
            .cluster()
            .short(&["pv"])
            .status()
            .build(core::persistentvolume::PersistentVolumes),
        Row::core("Pod", "pods", "pod")
            .short(&["po"])
            .all()
            .subresources(&[
                body("attach", CREATE_GET, "", "v1", "PodAttachOptions"),
                body("binding", CREATE, "", "v1", "Binding"),
                sub("ephemeralcontainers", GET_PATCH_UPDATE),
                body("eviction", CREATE, "policy", "v1", "Eviction"),
                body("exec", CREATE_GET, "", "v1", "PodExecOptions"),
                sub("log", GET),
                body("portforward", CREATE_GET, "", "v1", "PodPortForwardOptions"),
                body("proxy", PROXY, "", "v1", "PodProxyOptions"),
                sub("resize", GET_PATCH_UPDATE),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(pod::Pods),
        Row::core("PodTemplate", "podtemplates", "podtemplate").build(core::podtemplate::PodTemplates),
        Row::core("ReplicationController", "replicationcontrollers", "replicationcontroller")
            .short(&["rc"])
            .all()
            .scale()
            .build(core::replicationcontroller::ReplicationControllers),
        Row::core("ResourceQuota", "resourcequotas", "resourcequota")
            .short(&["quota"])
            .status()
            .build(core::resourcequota::ResourceQuotas),
        Row::core("Secret", "secrets", "secret").build(secret::Secrets),
        Row::core("ServiceAccount", "serviceaccounts", "serviceaccount")
            .short(&["sa"])
            .subresources(&[body("token", CREATE, "authentication.k8s.io", "v1", "TokenRequest")])
            .build(serviceaccount::ServiceAccounts),
        Row::core("Service", "services", "service")
            .short(&["svc"])
            .all()
            .subresources(&[
                body("proxy", PROXY, "", "v1", "ServiceProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(service::Services),
        Row::new("apps", "v1", "Deployment", "deployments", "deployment")
            .short(&["deploy"])
            .all()
            .subresources(&[
                body("scale", GET_PATCH_UPDATE, "autoscaling", "v1", "Scale"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(deployment::Deployments),
        Row::new("apps", "v1", "ReplicaSet", "replicasets", "replicaset")
            .short(&["rs"])
            .all()
            .subresources(&[
                body("scale", GET_PATCH_UPDATE, "autoscaling", "v1", "Scale"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(replicaset::ReplicaSets),
        Row::new("coordination.k8s.io", "v1", "Lease", "leases", "lease").build(lease::Leases),
        Row::new("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", "endpointslice")
            .build(endpointslice::EndpointSlices),
    ]
}

#[cfg(test)]
mod tests;

//! The built-in kinds: one file each in the directory of its group, one row each in [`built_in`]. `common` has what several
//! kinds share.

mod admissionregistration;
mod apiextensions;
mod apiregistration;
mod apiserverinternal;
mod apps;
mod authorization;
mod autoscaling;
mod batch;
mod certificates;
pub(crate) mod common;
mod coordination;
pub mod core;
mod discovery;
mod events;
mod flowcontrol;
mod networking;
mod node;
mod policy;
mod rbac;
mod resource;
mod scheduling;
mod storage;
mod storagemigration;

pub use certificates::certificatesigningrequest::USAGES as CERTIFICATE_USAGES;
pub use common::volume_source::ACCESS_MODES;
pub use core::service::validate_cluster_ips;

use crate::resource::{Connect, Reservation, Resource, Storage};
use common::review::Reviews;
use common::row::*;
use ferrite_json::Value;

/// Every resource compiled into the server, in discovery's order. Those that are not
/// [on by default](Resource::on_by_default) are beta or alpha versions.
pub fn built_in() -> Vec<Resource> {
    [
        core_rows(),
        admission_rows(),
        extension_rows(),
        workload_rows(),
        review_rows(),
        cluster_rows(),
        networking_rows(),
        rbac_rows(),
        device_rows(),
        storage_rows(),
        preview_rows(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The body of the `scale` subresources.
pub fn scale() -> Resource {
    Row::new("autoscaling", "v1", "Scale", "scales", "scale").build(autoscaling::scale::Scales)
}

/// As [`scale`], of custom kinds.
pub fn custom_scale() -> Resource {
    Row::new("autoscaling", "v1", "Scale", "scales", "scale").build(autoscaling::scale::CustomScales)
}

fn core_rows() -> Vec<Resource> {
    vec![
        Row::core("Binding", "bindings", "binding")
            .verbs(CREATE)
            .connect(Connect::Binding)
            .build(core::binding::Bindings),
        Row::core("ComponentStatus", "componentstatuses", "componentstatus")
            .cluster()
            .verbs(GET_LIST)
            .short(&["cs"])
            .deprecated("v1 ComponentStatus is deprecated in v1.19+")
            .connect(Connect::ComponentStatus)
            .build(core::componentstatus::ComponentStatuses),
        Row::core("ConfigMap", "configmaps", "configmap").short(&["cm"]).build(core::configmap::ConfigMaps),
        Row::core("Endpoints", "endpoints", "endpoints")
            .short(&["ep"])
            .storage_prefix("services/endpoints")
            .deprecated(core::endpoints::DEPRECATION)
            .build(core::endpoints::Endpoints),
        Row::core("Event", "events", "event").short(&["ev"]).ttl().build(core::event::Events),
        Row::core("LimitRange", "limitranges", "limitrange")
            .short(&["limits"])
            .build(core::limitrange::LimitRanges),
        Row::core("Namespace", "namespaces", "namespace")
            .cluster()
            .verbs(NAMESPACE_VERBS)
            .short(&["ns"])
            .subresources(&[sub("finalize", UPDATE), sub("status", GET_PATCH_UPDATE)])
            .build(core::namespace::Namespaces),
        Row::core("Node", "nodes", "node")
            .cluster()
            .storage_prefix("minions")
            .short(&["no"])
            .subresources(&[
                body("proxy", PROXY, "", "v1", "NodeProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(core::node::Nodes),
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
            .build(core::pod::Pods),
        Row::core("PodTemplate", "podtemplates", "podtemplate").build(core::podtemplate::PodTemplates),
        Row::core("ReplicationController", "replicationcontrollers", "replicationcontroller")
            .storage_prefix("controllers")
            .short(&["rc"])
            .all()
            .scale()
            .build(core::replicationcontroller::ReplicationControllers),
        Row::core("ResourceQuota", "resourcequotas", "resourcequota")
            .short(&["quota"])
            .status()
            .build(core::resourcequota::ResourceQuotas),
        Row::core("Secret", "secrets", "secret").build(core::secret::Secrets),
        Row::core("ServiceAccount", "serviceaccounts", "serviceaccount")
            .short(&["sa"])
            .subresources(&[body("token", CREATE, "authentication.k8s.io", "v1", "TokenRequest")])
            .build(core::serviceaccount::ServiceAccounts),
        Row::core("Service", "services", "service")
            .storage_prefix("services/specs")
            .begin_create(Reservation::AddressesAndPorts)
            .short(&["svc"])
            .all()
            .subresources(&[
                body("proxy", PROXY, "", "v1", "ServiceProxyOptions"),
                sub("status", GET_PATCH_UPDATE),
            ])
            .build(core::service::Services),
    ]
}

const EXTENSIONS: &[&str] = &["api-extensions"];

fn admission_rows() -> Vec<Resource> {
    let row = |version, kind, plural, singular| {
        Row::new("admissionregistration.k8s.io", version, kind, plural, singular)
            .cluster()
            .category(EXTENSIONS)
    };
    let policies = |version| {
        row(version, "MutatingAdmissionPolicy", "mutatingadmissionpolicies", "mutatingadmissionpolicy")
    };
    let bindings = |version| {
        row(
            version,
            "MutatingAdmissionPolicyBinding",
            "mutatingadmissionpolicybindings",
            "mutatingadmissionpolicybinding",
        )
    };
    let policy = || admissionregistration::policy::Policies { mutating: true };
    let binding = || admissionregistration::binding::PolicyBindings { mutating: true };
    vec![
        policies("v1").build(policy()),
        bindings("v1").build(binding()),
        row(
            "v1",
            "MutatingWebhookConfiguration",
            "mutatingwebhookconfigurations",
            "mutatingwebhookconfiguration",
        )
        .build(admissionregistration::webhook::WebhookConfigurations { mutating: true }),
        row("v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", "validatingadmissionpolicy")
            .status()
            .build(admissionregistration::policy::Policies { mutating: false }),
        row(
            "v1",
            "ValidatingAdmissionPolicyBinding",
            "validatingadmissionpolicybindings",
            "validatingadmissionpolicybinding",
        )
        .build(admissionregistration::binding::PolicyBindings { mutating: false }),
        row(
            "v1",
            "ValidatingWebhookConfiguration",
            "validatingwebhookconfigurations",
            "validatingwebhookconfiguration",
        )
        .build(admissionregistration::webhook::WebhookConfigurations { mutating: false }),
        policies("v1alpha1").off().stored(MUTATING_POLICIES[0]).build(policy()),
        bindings("v1alpha1").off().stored(MUTATING_BINDINGS[0]).build(binding()),
        policies("v1beta1").off().stored(MUTATING_POLICIES[1]).build(policy()),
        bindings("v1beta1").off().stored(MUTATING_BINDINGS[1]).build(binding()),
    ]
}

fn extension_rows() -> Vec<Resource> {
    vec![
        Row::new(
            "apiextensions.k8s.io",
            "v1",
            "CustomResourceDefinition",
            "customresourcedefinitions",
            "customresourcedefinition",
        )
        .cluster()
        .short(&["crd", "crds"])
        .storage_prefix("apiextensions.k8s.io/customresourcedefinitions")
        .category(EXTENSIONS)
        .status()
        .build(apiextensions::customresourcedefinition::CustomResourceDefinitions),
        Row::new("apiregistration.k8s.io", "v1", "APIService", "apiservices", "apiservice")
            .cluster()
            .storage_prefix("apiregistration.k8s.io/apiservices")
            .category(EXTENSIONS)
            .status()
            .build(apiregistration::apiservice::ApiServices),
    ]
}

fn workload_rows() -> Vec<Resource> {
    let autoscalers = |version| {
        Row::new(
            "autoscaling",
            version,
            "HorizontalPodAutoscaler",
            "horizontalpodautoscalers",
            "horizontalpodautoscaler",
        )
        .short(&["hpa"])
        .all()
        .status()
    };
    vec![
        Row::new("apps", "v1", "ControllerRevision", "controllerrevisions", "controllerrevision")
            .build(apps::controllerrevision::ControllerRevisions),
        Row::new("apps", "v1", "DaemonSet", "daemonsets", "daemonset")
            .short(&["ds"])
            .all()
            .status()
            .build(apps::daemonset::DaemonSets),
        Row::new("apps", "v1", "Deployment", "deployments", "deployment")
            .short(&["deploy"])
            .all()
            .scale()
            .build(apps::deployment::Deployments),
        Row::new("apps", "v1", "ReplicaSet", "replicasets", "replicaset")
            .short(&["rs"])
            .all()
            .scale()
            .build(apps::replicaset::ReplicaSets),
        Row::new("apps", "v1", "StatefulSet", "statefulsets", "statefulset")
            .short(&["sts"])
            .all()
            .scale()
            .build(apps::statefulset::StatefulSets),
        autoscalers("v1").stored(autoscaling::v1::STORAGE).build(autoscaling::v1::strategy()),
        autoscalers("v2").build(autoscaling::v2::HorizontalPodAutoscalers),
        Row::new("batch", "v1", "CronJob", "cronjobs", "cronjob")
            .short(&["cj"])
            .all()
            .status()
            .build(batch::cronjob::CronJobs),
        Row::new("batch", "v1", "Job", "jobs", "job").all().status().build(batch::job::Jobs),
        Row::new("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", "poddisruptionbudget")
            .short(&["pdb"])
            .status()
            .build(policy::poddisruptionbudget::PodDisruptionBudgets),
        Row::new("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", "priorityclass")
            .cluster()
            .short(&["pc"])
            .build(scheduling::priorityclass::PriorityClasses),
    ]
}

fn review_rows() -> Vec<Resource> {
    let who = |kind, plural, singular| {
        let row = Row::new("authentication.k8s.io", "v1", kind, plural, singular);
        row.cluster().verbs(CREATE).connect(Connect::Review)
    };
    let may = |kind, plural, singular| {
        let row = Row::new("authorization.k8s.io", "v1", kind, plural, singular);
        row.verbs(CREATE).connect(Connect::Review)
    };
    vec![
        who("SelfSubjectReview", "selfsubjectreviews", "selfsubjectreview").build(Reviews),
        who("TokenReview", "tokenreviews", "tokenreview").build(Reviews),
        may("LocalSubjectAccessReview", "localsubjectaccessreviews", "localsubjectaccessreview")
            .build(authorization::review::AccessReviews { own: false, local: true }),
        may("SelfSubjectAccessReview", "selfsubjectaccessreviews", "selfsubjectaccessreview")
            .cluster()
            .build(authorization::review::AccessReviews { own: true, local: false }),
        may("SelfSubjectRulesReview", "selfsubjectrulesreviews", "selfsubjectrulesreview")
            .cluster()
            .build(Reviews),
        may("SubjectAccessReview", "subjectaccessreviews", "subjectaccessreview")
            .cluster()
            .build(authorization::review::AccessReviews { own: false, local: false }),
    ]
}

fn cluster_rows() -> Vec<Resource> {
    let flow = |kind, plural, singular| {
        Row::new("flowcontrol.apiserver.k8s.io", "v1", kind, plural, singular).cluster().status()
    };
    vec![
        Row::new(
            "certificates.k8s.io",
            "v1",
            "CertificateSigningRequest",
            "certificatesigningrequests",
            "certificatesigningrequest",
        )
        .cluster()
        .short(&["csr"])
        .subresources(&[sub("approval", GET_PATCH_UPDATE), sub("status", GET_PATCH_UPDATE)])
        .build(certificates::certificatesigningrequest::CertificateSigningRequests),
        Row::new("coordination.k8s.io", "v1", "Lease", "leases", "lease").build(coordination::lease::Leases),
        Row::new("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", "endpointslice")
            .build(discovery::endpointslice::EndpointSlices),
        Row::new("events.k8s.io", "v1", "Event", "events", "event")
            .short(&["ev"])
            .ttl()
            .stored(events::event::STORAGE)
            .build(events::event::EventsV1),
        flow("FlowSchema", "flowschemas", "flowschema").build(flowcontrol::flowschema::FlowSchemas),
        flow("PriorityLevelConfiguration", "prioritylevelconfigurations", "prioritylevelconfiguration")
            .build(flowcontrol::prioritylevel::PriorityLevels),
        Row::new("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", "runtimeclass")
            .cluster()
            .build(node::runtimeclass::RuntimeClasses),
    ]
}

fn networking_rows() -> Vec<Resource> {
    let row =
        |version, kind, plural, singular| Row::new("networking.k8s.io", version, kind, plural, singular);
    let addresses = |version| row(version, "IPAddress", "ipaddresses", "ipaddress").cluster().short(&["ip"]);
    let ranges = |version| row(version, "ServiceCIDR", "servicecidrs", "servicecidr").cluster().status();
    vec![
        row("v1", "IngressClass", "ingressclasses", "ingressclass")
            .cluster()
            .build(networking::ingressclass::IngressClasses),
        row("v1", "Ingress", "ingresses", "ingress")
            .short(&["ing"])
            .storage_prefix("ingress")
            .status()
            .build(networking::ingress::Ingresses),
        addresses("v1").build(networking::ipaddress::IpAddresses),
        row("v1", "NetworkPolicy", "networkpolicies", "networkpolicy")
            .short(&["netpol"])
            .build(networking::networkpolicy::NetworkPolicies),
        ranges("v1").build(networking::servicecidr::ServiceCidrs),
        addresses("v1beta1").off().stored(IP_ADDRESSES).build(networking::ipaddress::IpAddresses),
        ranges("v1beta1").off().stored(SERVICE_CIDRS).build(networking::servicecidr::ServiceCidrs),
    ]
}

fn rbac_rows() -> Vec<Resource> {
    let row = |kind, plural, singular| Row::new("rbac.authorization.k8s.io", "v1", kind, plural, singular);
    vec![
        row("ClusterRoleBinding", "clusterrolebindings", "clusterrolebinding")
            .cluster()
            .build(rbac::bindings::Bindings { namespaced: false }),
        row("ClusterRole", "clusterroles", "clusterrole")
            .cluster()
            .build(rbac::roles::Roles { namespaced: false }),
        row("RoleBinding", "rolebindings", "rolebinding")
            .build(rbac::bindings::Bindings { namespaced: true }),
        row("Role", "roles", "role").build(rbac::roles::Roles { namespaced: true }),
    ]
}

fn device_rows() -> Vec<Resource> {
    let row = |version, kind, plural, singular| Row::new("resource.k8s.io", version, kind, plural, singular);
    let classes = |version| row(version, "DeviceClass", "deviceclasses", "deviceclass").cluster();
    let claims = |version| row(version, "ResourceClaim", "resourceclaims", "resourceclaim").status();
    let templates =
        |version| row(version, "ResourceClaimTemplate", "resourceclaimtemplates", "resourceclaimtemplate");
    let slices = |version| row(version, "ResourceSlice", "resourceslices", "resourceslice").cluster();
    let taints =
        |version| row(version, "DeviceTaintRule", "devicetaintrules", "devicetaintrule").cluster().status();
    vec![
        classes("v1").build(resource::deviceclass::DeviceClasses),
        claims("v1").build(resource::resourceclaim::ResourceClaims),
        templates("v1").build(resource::resourceclaim::ResourceClaimTemplates),
        slices("v1").build(resource::resourceslice::ResourceSlices),
        taints("v1alpha3")
            .off()
            .stored(DEVICE_TAINT_RULES)
            .build(resource::devicetaintrule::DeviceTaintRules),
        row(
            "v1alpha3",
            "ResourcePoolStatusRequest",
            "resourcepoolstatusrequests",
            "resourcepoolstatusrequest",
        )
        .cluster()
        .status()
        .off()
        .build(resource::resourcepoolstatusrequest::ResourcePoolStatusRequests),
        classes("v1beta1").off().stored(resource::beta::CLASSES).build(resource::beta::classes()),
        claims("v1beta1").off().stored(resource::beta::CLAIMS).build(resource::beta::claims()),
        templates("v1beta1").off().stored(resource::beta::TEMPLATES).build(resource::beta::templates()),
        slices("v1beta1").off().stored(resource::beta::SLICES).build(resource::beta::slices()),
        classes("v1beta2").off().stored(DEVICES[0]).build(resource::deviceclass::DeviceClasses),
        taints("v1beta2").off().build(resource::devicetaintrule::DeviceTaintRules),
        claims("v1beta2").off().stored(DEVICES[1]).build(resource::resourceclaim::ResourceClaims),
        templates("v1beta2").off().stored(DEVICES[2]).build(resource::resourceclaim::ResourceClaimTemplates),
        slices("v1beta2").off().stored(DEVICES[3]).build(resource::resourceslice::ResourceSlices),
    ]
}

fn storage_rows() -> Vec<Resource> {
    let row = |kind, plural, singular| Row::new("storage.k8s.io", "v1", kind, plural, singular);
    let attributes = |version| {
        Row::new(
            "storage.k8s.io",
            version,
            "VolumeAttributesClass",
            "volumeattributesclasses",
            "volumeattributesclass",
        )
        .cluster()
        .short(&["vac"])
    };
    vec![
        row("CSIDriver", "csidrivers", "csidriver").cluster().build(storage::csidriver::CsiDrivers),
        row("CSINode", "csinodes", "csinode").cluster().build(storage::csinode::CsiNodes),
        row("CSIStorageCapacity", "csistoragecapacities", "csistoragecapacity")
            .build(storage::csistoragecapacity::CsiStorageCapacities),
        row("StorageClass", "storageclasses", "storageclass")
            .cluster()
            .short(&["sc"])
            .build(storage::storageclass::StorageClasses),
        row("VolumeAttachment", "volumeattachments", "volumeattachment")
            .cluster()
            .status()
            .build(storage::volumeattachment::VolumeAttachments),
        attributes("v1").build(storage::volumeattributesclass::VolumeAttributesClasses),
        attributes("v1beta1")
            .off()
            .stored(VOLUME_ATTRIBUTES)
            .build(storage::volumeattributesclass::VolumeAttributesClasses),
    ]
}

/// Kinds that have no stable version yet.
fn preview_rows() -> Vec<Resource> {
    let bundles = |version| {
        Row::new(
            "certificates.k8s.io",
            version,
            "ClusterTrustBundle",
            "clustertrustbundles",
            "clustertrustbundle",
        )
        .cluster()
        .off()
        .gate("ClusterTrustBundle")
    };
    let candidates = |version| {
        Row::new("coordination.k8s.io", version, "LeaseCandidate", "leasecandidates", "leasecandidate").off()
    };
    vec![
        bundles("v1alpha1")
            .stored(CLUSTER_TRUST_BUNDLES)
            .build(certificates::clustertrustbundle::ClusterTrustBundles),
        bundles("v1beta1").build(certificates::clustertrustbundle::ClusterTrustBundles),
        Row::new(
            "certificates.k8s.io",
            "v1beta1",
            "PodCertificateRequest",
            "podcertificaterequests",
            "podcertificaterequest",
        )
        .status()
        .off()
        .gate("PodCertificateRequest")
        .build(certificates::podcertificaterequest::PodCertificateRequests),
        candidates("v1alpha2").stored(LEASE_CANDIDATES).build(coordination::leasecandidate::LeaseCandidates),
        candidates("v1beta1").build(coordination::leasecandidate::LeaseCandidates),
        Row::new(
            "internal.apiserver.k8s.io",
            "v1alpha1",
            "StorageVersion",
            "storageversions",
            "storageversion",
        )
        .cluster()
        .status()
        .off()
        .build(apiserverinternal::storageversion::StorageVersions),
        Row::new("scheduling.k8s.io", "v1alpha2", "PodGroup", "podgroups", "podgroup")
            .status()
            .off()
            .build(scheduling::podgroup::PodGroups),
        Row::new("scheduling.k8s.io", "v1alpha2", "Workload", "workloads", "workload")
            .off()
            .build(scheduling::workload::Workloads),
        Row::new(
            "storagemigration.k8s.io",
            "v1beta1",
            "StorageVersionMigration",
            "storageversionmigrations",
            "storageversionmigration",
        )
        .cluster()
        .status()
        .off()
        .build(storagemigration::storageversionmigration::StorageVersionMigrations),
    ]
}

/// A version that differs from the stored one in nothing but its name.
macro_rules! same_shape {
    ($group:literal, $from:literal => $to:literal, $kind:literal, $plural:literal) => {
        Storage {
            group: $group,
            version: $to,
            kind: $kind,
            plural: $plural,
            to_storage: |object| set_version(object, concat!($group, "/", $to)),
            from_storage: |object| set_version(object, concat!($group, "/", $from)),
        }
    };
}

fn set_version(object: &mut Value, version: &str) {
    if object.is_object() {
        object["apiVersion"] = version.into();
    }
}

const MUTATING_POLICIES: [Storage; 2] = [
    same_shape!("admissionregistration.k8s.io", "v1alpha1" => "v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies"),
    same_shape!("admissionregistration.k8s.io", "v1beta1" => "v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies"),
];
const MUTATING_BINDINGS: [Storage; 2] = [
    same_shape!("admissionregistration.k8s.io", "v1alpha1" => "v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings"),
    same_shape!("admissionregistration.k8s.io", "v1beta1" => "v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings"),
];
const IP_ADDRESSES: Storage = same_shape!("networking.k8s.io", "v1beta1" => "v1", "IPAddress", "ipaddresses");
const SERVICE_CIDRS: Storage =
    same_shape!("networking.k8s.io", "v1beta1" => "v1", "ServiceCIDR", "servicecidrs");
const DEVICES: [Storage; 4] = [
    same_shape!("resource.k8s.io", "v1beta2" => "v1", "DeviceClass", "deviceclasses"),
    same_shape!("resource.k8s.io", "v1beta2" => "v1", "ResourceClaim", "resourceclaims"),
    same_shape!("resource.k8s.io", "v1beta2" => "v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
    same_shape!("resource.k8s.io", "v1beta2" => "v1", "ResourceSlice", "resourceslices"),
];
const DEVICE_TAINT_RULES: Storage =
    same_shape!("resource.k8s.io", "v1alpha3" => "v1beta2", "DeviceTaintRule", "devicetaintrules");
const VOLUME_ATTRIBUTES: Storage =
    same_shape!("storage.k8s.io", "v1beta1" => "v1", "VolumeAttributesClass", "volumeattributesclasses");
const CLUSTER_TRUST_BUNDLES: Storage =
    same_shape!("certificates.k8s.io", "v1alpha1" => "v1beta1", "ClusterTrustBundle", "clustertrustbundles");
const LEASE_CANDIDATES: Storage =
    same_shape!("coordination.k8s.io", "v1alpha2" => "v1beta1", "LeaseCandidate", "leasecandidates");

#[cfg(test)]
mod tests;

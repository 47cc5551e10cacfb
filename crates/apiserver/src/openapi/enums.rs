//! Strings with a few possible values, as upstream's document lists them.

use super::descriptions::unversioned;
use ferrite_api::kinds::{ACCESS_MODES, CERTIFICATE_USAGES};

/// Type, named without its version, field and the values it may have, sorted. Of a list, its items.
type Row = (&'static str, &'static str, &'static [&'static str]);

pub(super) fn of(type_: &str, field: &str) -> Option<&'static [&'static str]> {
    let type_ = unversioned(type_);
    ENUMS.iter().find(|(t, f, _)| *t == type_ && *f == field).map(|(_, _, values)| *values)
}

const PULL: &[&str] = &["Always", "IfNotPresent", "Never"];
const TERMINATION: &[&str] = &["FallbackToLogsOnError", "File"];
const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
const TAINT_EFFECTS: &[&str] = &["NoExecute", "NoSchedule", "PreferNoSchedule"];
const PROFILES: &[&str] = &["Localhost", "RuntimeDefault", "Unconfined"];
const HONOUR: &[&str] = &["Honor", "Ignore"];
const VOLUME_MODES: &[&str] = &["Block", "Filesystem"];
const QUOTA_SCOPES: &[&str] = &[
    "BestEffort",
    "CrossNamespacePodAffinity",
    "NotBestEffort",
    "NotTerminating",
    "PriorityClass",
    "Terminating",
    "VolumeAttributesClass",
];
const FAILURE_POLICIES: &[&str] = &["Fail", "Ignore"];
const MATCH_POLICIES: &[&str] = &["Equivalent", "Exact"];
const SIDE_EFFECTS: &[&str] = &["None", "NoneOnDryRun", "Some", "Unknown"];
const OPERATIONS: &[&str] = &["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
const SCOPES: &[&str] = &["*", "Cluster", "Namespaced"];
const REINVOCATION: &[&str] = &["IfNeeded", "Never"];

const SIGNALS: &[&str] = &[
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCLD",
    "SIGCONT",
    "SIGFPE",
    "SIGHUP",
    "SIGILL",
    "SIGINT",
    "SIGIO",
    "SIGIOT",
    "SIGKILL",
    "SIGPIPE",
    "SIGPOLL",
    "SIGPROF",
    "SIGPWR",
    "SIGQUIT",
    "SIGRTMAX",
    "SIGRTMAX-1",
    "SIGRTMAX-10",
    "SIGRTMAX-11",
    "SIGRTMAX-12",
    "SIGRTMAX-13",
    "SIGRTMAX-14",
    "SIGRTMAX-2",
    "SIGRTMAX-3",
    "SIGRTMAX-4",
    "SIGRTMAX-5",
    "SIGRTMAX-6",
    "SIGRTMAX-7",
    "SIGRTMAX-8",
    "SIGRTMAX-9",
    "SIGRTMIN",
    "SIGRTMIN+1",
    "SIGRTMIN+10",
    "SIGRTMIN+11",
    "SIGRTMIN+12",
    "SIGRTMIN+13",
    "SIGRTMIN+14",
    "SIGRTMIN+15",
    "SIGRTMIN+2",
    "SIGRTMIN+3",
    "SIGRTMIN+4",
    "SIGRTMIN+5",
    "SIGRTMIN+6",
    "SIGRTMIN+7",
    "SIGRTMIN+8",
    "SIGRTMIN+9",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTERM",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGUSR1",
    "SIGUSR2",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];
const DEVICE_EFFECTS: &[&str] = &["NoExecute", "NoSchedule", "None"];
const ALLOCATION_MODES: &[&str] = &["All", "ExactCount"];

const ENUMS: &[Row] = &[
    ("core.ContainerStatus", "stopSignal", SIGNALS),
    ("core.Lifecycle", "stopSignal", SIGNALS),
    ("core.ImageVolumeSource", "pullPolicy", PULL),
    (
        "core.PersistentVolumeClaimStatus",
        "allocatedResourceStatuses",
        &[
            "ControllerResizeInProgress",
            "ControllerResizeInfeasible",
            "NodeResizeInProgress",
            "NodeResizeInfeasible",
            "NodeResizePending",
        ],
    ),
    ("resource.DeviceAllocationConfiguration", "source", &["FromClaim", "FromClass"]),
    ("resource.DeviceSubRequest", "allocationMode", ALLOCATION_MODES),
    ("resource.ExactDeviceRequest", "allocationMode", ALLOCATION_MODES),
    ("resource.DeviceTaint", "effect", DEVICE_EFFECTS),
    ("resource.DeviceToleration", "effect", DEVICE_EFFECTS),
    ("resource.DeviceToleration", "operator", &["Equal", "Exists"]),
    (
        "apiextensions.ValidationRule",
        "reason",
        &["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"],
    ),
    ("core.PodSpec", "dnsPolicy", &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]),
    ("core.PodSpec", "preemptionPolicy", &["Never", "PreemptLowerPriority"]),
    ("core.PodSpec", "restartPolicy", &["Always", "Never", "OnFailure"]),
    ("core.PodStatus", "phase", &["Failed", "Pending", "Running", "Succeeded", "Unknown"]),
    ("core.PodStatus", "qosClass", &["BestEffort", "Burstable", "Guaranteed"]),
    ("core.Container", "imagePullPolicy", PULL),
    ("core.EphemeralContainer", "imagePullPolicy", PULL),
    ("core.Container", "terminationMessagePolicy", TERMINATION),
    ("core.EphemeralContainer", "terminationMessagePolicy", TERMINATION),
    ("core.ContainerPort", "protocol", PROTOCOLS),
    ("core.ServicePort", "protocol", PROTOCOLS),
    ("core.EndpointPort", "protocol", PROTOCOLS),
    ("core.PortStatus", "protocol", PROTOCOLS),
    ("core.Taint", "effect", TAINT_EFFECTS),
    ("core.Toleration", "effect", TAINT_EFFECTS),
    ("core.Toleration", "operator", &["Equal", "Exists", "Gt", "Lt"]),
    ("core.NodeSelectorRequirement", "operator", &["DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn"]),
    ("core.ServiceSpec", "type", &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]),
    ("core.ServiceSpec", "sessionAffinity", &["ClientIP", "None"]),
    ("core.ServiceSpec", "externalTrafficPolicy", &["Cluster", "Local"]),
    ("core.ServiceSpec", "internalTrafficPolicy", &["Cluster", "Local"]),
    ("core.ServiceSpec", "ipFamilies", &["", "IPv4", "IPv6"]),
    ("core.ServiceSpec", "ipFamilyPolicy", &["PreferDualStack", "RequireDualStack", "SingleStack"]),
    ("core.VolumeMount", "mountPropagation", &["Bidirectional", "HostToContainer", "None"]),
    ("core.PersistentVolumeSpec", "accessModes", ACCESS_MODES),
    ("core.PersistentVolumeClaimSpec", "accessModes", ACCESS_MODES),
    ("core.PersistentVolumeClaimStatus", "accessModes", ACCESS_MODES),
    ("core.ModifyVolumeStatus", "status", &["InProgress", "Infeasible", "Pending"]),
    ("core.PersistentVolumeSpec", "volumeMode", VOLUME_MODES),
    ("core.PersistentVolumeClaimSpec", "volumeMode", VOLUME_MODES),
    ("core.PersistentVolumeSpec", "persistentVolumeReclaimPolicy", &["Delete", "Recycle", "Retain"]),
    ("core.PersistentVolumeStatus", "phase", &["Available", "Bound", "Failed", "Pending", "Released"]),
    ("core.PersistentVolumeClaimStatus", "phase", &["Bound", "Lost", "Pending"]),
    ("core.NodeStatus", "phase", &["Pending", "Running", "Terminated"]),
    ("core.NamespaceStatus", "phase", &["Active", "Terminating"]),
    ("core.HTTPGetAction", "scheme", &["HTTP", "HTTPS"]),
    ("core.SeccompProfile", "type", PROFILES),
    ("core.AppArmorProfile", "type", PROFILES),
    ("core.SecurityContext", "procMount", &["Default", "Unmasked"]),
    ("core.PodSecurityContext", "fsGroupChangePolicy", &["Always", "OnRootMismatch"]),
    ("core.PodSecurityContext", "supplementalGroupsPolicy", &["Merge", "Strict"]),
    (
        "core.HostPathVolumeSource",
        "type",
        &[
            "",
            "BlockDevice",
            "CharDevice",
            "Directory",
            "DirectoryOrCreate",
            "File",
            "FileOrCreate",
            "Socket",
        ],
    ),
    ("core.TopologySpreadConstraint", "whenUnsatisfiable", &["DoNotSchedule", "ScheduleAnyway"]),
    ("core.TopologySpreadConstraint", "nodeAffinityPolicy", HONOUR),
    ("core.TopologySpreadConstraint", "nodeTaintsPolicy", HONOUR),
    ("core.AzureDiskVolumeSource", "cachingMode", &["None", "ReadOnly", "ReadWrite"]),
    ("core.AzureDiskVolumeSource", "kind", &["Dedicated", "Managed", "Shared"]),
    ("core.ScopedResourceSelectorRequirement", "operator", &["DoesNotExist", "Exists", "In", "NotIn"]),
    ("core.ScopedResourceSelectorRequirement", "scopeName", QUOTA_SCOPES),
    ("core.ResourceQuotaSpec", "scopes", QUOTA_SCOPES),
    ("apps.DeploymentStrategy", "type", &["Recreate", "RollingUpdate"]),
    ("apps.DaemonSetUpdateStrategy", "type", &["OnDelete", "RollingUpdate"]),
    ("apps.StatefulSetUpdateStrategy", "type", &["OnDelete", "RollingUpdate"]),
    ("apps.StatefulSetSpec", "podManagementPolicy", &["OrderedReady", "Parallel"]),
    ("batch.CronJobSpec", "concurrencyPolicy", &["Allow", "Forbid", "Replace"]),
    ("batch.JobSpec", "completionMode", &["Indexed", "NonIndexed"]),
    ("batch.JobSpec", "podReplacementPolicy", &["Failed", "TerminatingOrFailed"]),
    ("batch.PodFailurePolicyRule", "action", &["Count", "FailIndex", "FailJob", "Ignore"]),
    ("batch.PodFailurePolicyOnExitCodesRequirement", "operator", &["In", "NotIn"]),
    ("networking.HTTPIngressPath", "pathType", &["Exact", "ImplementationSpecific", "Prefix"]),
    ("networking.NetworkPolicySpec", "policyTypes", &["Egress", "Ingress"]),
    ("networking.NetworkPolicyPort", "protocol", PROTOCOLS),
    ("networking.IngressPortStatus", "protocol", PROTOCOLS),
    ("discovery.EndpointSlice", "addressType", &["FQDN", "IPv4", "IPv6"]),
    ("discovery.EndpointPort", "protocol", PROTOCOLS),
    ("policy.PodDisruptionBudgetSpec", "unhealthyPodEvictionPolicy", &["AlwaysAllow", "IfHealthyBudget"]),
    ("storage.StorageClass", "reclaimPolicy", &["Delete", "Recycle", "Retain"]),
    ("storage.StorageClass", "volumeBindingMode", &["Immediate", "WaitForFirstConsumer"]),
    ("scheduling.PriorityClass", "preemptionPolicy", &["Never", "PreemptLowerPriority"]),
    ("admissionregistration.MutatingWebhook", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.MutatingWebhook", "matchPolicy", MATCH_POLICIES),
    ("admissionregistration.MutatingWebhook", "reinvocationPolicy", REINVOCATION),
    ("admissionregistration.MutatingWebhook", "sideEffects", SIDE_EFFECTS),
    ("admissionregistration.ValidatingWebhook", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.ValidatingWebhook", "matchPolicy", MATCH_POLICIES),
    ("admissionregistration.ValidatingWebhook", "sideEffects", SIDE_EFFECTS),
    ("admissionregistration.ValidatingAdmissionPolicySpec", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.MutatingAdmissionPolicySpec", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.MutatingAdmissionPolicySpec", "reinvocationPolicy", REINVOCATION),
    ("admissionregistration.Mutation", "patchType", &["ApplyConfiguration", "JSONPatch"]),
    ("certificates.CertificateSigningRequestSpec", "usages", CERTIFICATE_USAGES),
    ("admissionregistration.MatchResources", "matchPolicy", MATCH_POLICIES),
    (
        "admissionregistration.ValidatingAdmissionPolicyBindingSpec",
        "validationActions",
        &["Audit", "Deny", "Warn"],
    ),
    ("admissionregistration.RuleWithOperations", "operations", OPERATIONS),
    ("admissionregistration.RuleWithOperations", "scope", SCOPES),
    ("admissionregistration.NamedRuleWithOperations", "operations", OPERATIONS),
    ("admissionregistration.NamedRuleWithOperations", "scope", SCOPES),
];

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::schema;

    #[test]
    fn every_row_names_a_field_there_is() {
        for (type_, field, values) in ENUMS {
            let mut versions = schema::types().filter(|t| unversioned(t.name) == *type_);
            assert!(versions.any(|t| t.field(field).is_some()), "{type_} has no {field}");
            assert!(values.is_sorted(), "{type_}.{field}");
        }
    }
}

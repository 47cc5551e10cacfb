//! Strings of which only a few are possible, as upstream's document tells them.

/// Type, field and the values it may have, sorted. Of a list, its items.
type Row = (&'static str, &'static str, &'static [&'static str]);

pub(super) fn of(type_: &str, field: &str) -> Option<&'static [&'static str]> {
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

const ENUMS: &[Row] = &[
    ("core.v1.PodSpec", "dnsPolicy", &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]),
    ("core.v1.PodSpec", "preemptionPolicy", &["Never", "PreemptLowerPriority"]),
    ("core.v1.PodSpec", "restartPolicy", &["Always", "Never", "OnFailure"]),
    ("core.v1.PodStatus", "phase", &["Failed", "Pending", "Running", "Succeeded", "Unknown"]),
    ("core.v1.PodStatus", "qosClass", &["BestEffort", "Burstable", "Guaranteed"]),
    ("core.v1.Container", "imagePullPolicy", PULL),
    ("core.v1.EphemeralContainer", "imagePullPolicy", PULL),
    ("core.v1.Container", "terminationMessagePolicy", TERMINATION),
    ("core.v1.EphemeralContainer", "terminationMessagePolicy", TERMINATION),
    ("core.v1.ContainerPort", "protocol", PROTOCOLS),
    ("core.v1.ServicePort", "protocol", PROTOCOLS),
    ("core.v1.EndpointPort", "protocol", PROTOCOLS),
    ("core.v1.PortStatus", "protocol", PROTOCOLS),
    ("core.v1.Taint", "effect", TAINT_EFFECTS),
    ("core.v1.Toleration", "effect", TAINT_EFFECTS),
    ("core.v1.Toleration", "operator", &["Equal", "Exists", "Gt", "Lt"]),
    ("core.v1.NodeSelectorRequirement", "operator", &["DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn"]),
    ("core.v1.ServiceSpec", "type", &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]),
    ("core.v1.ServiceSpec", "sessionAffinity", &["ClientIP", "None"]),
    ("core.v1.ServiceSpec", "externalTrafficPolicy", &["Cluster", "Local"]),
    ("core.v1.ServiceSpec", "internalTrafficPolicy", &["Cluster", "Local"]),
    ("core.v1.ServiceSpec", "ipFamilies", &["", "IPv4", "IPv6"]),
    ("core.v1.ServiceSpec", "ipFamilyPolicy", &["PreferDualStack", "RequireDualStack", "SingleStack"]),
    ("core.v1.PersistentVolumeSpec", "volumeMode", VOLUME_MODES),
    ("core.v1.PersistentVolumeClaimSpec", "volumeMode", VOLUME_MODES),
    ("core.v1.PersistentVolumeSpec", "persistentVolumeReclaimPolicy", &["Delete", "Recycle", "Retain"]),
    ("core.v1.PersistentVolumeStatus", "phase", &["Available", "Bound", "Failed", "Pending", "Released"]),
    ("core.v1.PersistentVolumeClaimStatus", "phase", &["Bound", "Lost", "Pending"]),
    ("core.v1.NodeStatus", "phase", &["Pending", "Running", "Terminated"]),
    ("core.v1.NamespaceStatus", "phase", &["Active", "Terminating"]),
    ("core.v1.HTTPGetAction", "scheme", &["HTTP", "HTTPS"]),
    ("core.v1.SeccompProfile", "type", PROFILES),
    ("core.v1.AppArmorProfile", "type", PROFILES),
    ("core.v1.SecurityContext", "procMount", &["Default", "Unmasked"]),
    ("core.v1.PodSecurityContext", "fsGroupChangePolicy", &["Always", "OnRootMismatch"]),
    ("core.v1.PodSecurityContext", "supplementalGroupsPolicy", &["Merge", "Strict"]),
    (
        "core.v1.HostPathVolumeSource",
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
    ("core.v1.TopologySpreadConstraint", "whenUnsatisfiable", &["DoNotSchedule", "ScheduleAnyway"]),
    ("core.v1.TopologySpreadConstraint", "nodeAffinityPolicy", HONOUR),
    ("core.v1.TopologySpreadConstraint", "nodeTaintsPolicy", HONOUR),
    ("core.v1.AzureDiskVolumeSource", "cachingMode", &["None", "ReadOnly", "ReadWrite"]),
    ("core.v1.AzureDiskVolumeSource", "kind", &["Dedicated", "Managed", "Shared"]),
    ("core.v1.ScopedResourceSelectorRequirement", "operator", &["DoesNotExist", "Exists", "In", "NotIn"]),
    ("core.v1.ScopedResourceSelectorRequirement", "scopeName", QUOTA_SCOPES),
    ("core.v1.ResourceQuotaSpec", "scopes", QUOTA_SCOPES),
    ("apps.v1.DeploymentStrategy", "type", &["Recreate", "RollingUpdate"]),
    ("apps.v1.DaemonSetUpdateStrategy", "type", &["OnDelete", "RollingUpdate"]),
    ("apps.v1.StatefulSetUpdateStrategy", "type", &["OnDelete", "RollingUpdate"]),
    ("apps.v1.StatefulSetSpec", "podManagementPolicy", &["OrderedReady", "Parallel"]),
    ("batch.v1.CronJobSpec", "concurrencyPolicy", &["Allow", "Forbid", "Replace"]),
    ("batch.v1.JobSpec", "completionMode", &["Indexed", "NonIndexed"]),
    ("batch.v1.JobSpec", "podReplacementPolicy", &["Failed", "TerminatingOrFailed"]),
    ("batch.v1.PodFailurePolicyRule", "action", &["Count", "FailIndex", "FailJob", "Ignore"]),
    ("batch.v1.PodFailurePolicyOnExitCodesRequirement", "operator", &["In", "NotIn"]),
    ("networking.v1.HTTPIngressPath", "pathType", &["Exact", "ImplementationSpecific", "Prefix"]),
    ("networking.v1.NetworkPolicySpec", "policyTypes", &["Egress", "Ingress"]),
    ("networking.v1.NetworkPolicyPort", "protocol", PROTOCOLS),
    ("networking.v1.IngressPortStatus", "protocol", PROTOCOLS),
    ("discovery.v1.EndpointSlice", "addressType", &["FQDN", "IPv4", "IPv6"]),
    ("discovery.v1.EndpointPort", "protocol", PROTOCOLS),
    ("policy.v1.PodDisruptionBudgetSpec", "unhealthyPodEvictionPolicy", &["AlwaysAllow", "IfHealthyBudget"]),
    ("storage.v1.StorageClass", "reclaimPolicy", &["Delete", "Recycle", "Retain"]),
    ("storage.v1.StorageClass", "volumeBindingMode", &["Immediate", "WaitForFirstConsumer"]),
    ("scheduling.v1.PriorityClass", "preemptionPolicy", &["Never", "PreemptLowerPriority"]),
    ("admissionregistration.v1.MutatingWebhook", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.v1.MutatingWebhook", "matchPolicy", MATCH_POLICIES),
    ("admissionregistration.v1.MutatingWebhook", "reinvocationPolicy", &["IfNeeded", "Never"]),
    ("admissionregistration.v1.MutatingWebhook", "sideEffects", SIDE_EFFECTS),
    ("admissionregistration.v1.ValidatingWebhook", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.v1.ValidatingWebhook", "matchPolicy", MATCH_POLICIES),
    ("admissionregistration.v1.ValidatingWebhook", "sideEffects", SIDE_EFFECTS),
    ("admissionregistration.v1.ValidatingAdmissionPolicySpec", "failurePolicy", FAILURE_POLICIES),
    ("admissionregistration.v1.MatchResources", "matchPolicy", MATCH_POLICIES),
    (
        "admissionregistration.v1.ValidatingAdmissionPolicyBindingSpec",
        "validationActions",
        &["Audit", "Deny", "Warn"],
    ),
    ("admissionregistration.v1.RuleWithOperations", "operations", OPERATIONS),
    ("admissionregistration.v1.RuleWithOperations", "scope", SCOPES),
    ("admissionregistration.v1.NamedRuleWithOperations", "operations", OPERATIONS),
    ("admissionregistration.v1.NamedRuleWithOperations", "scope", SCOPES),
];

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::schema;

    #[test]
    fn every_row_names_a_field_there_is() {
        for (type_, field, values) in ENUMS {
            let found = schema::named(type_).unwrap_or_else(|| panic!("no type {type_}"));
            assert!(found.fields.iter().any(|f| f.name == *field), "{type_} has no {field}");
            assert!(values.is_sorted(), "{type_}.{field}");
        }
    }
}

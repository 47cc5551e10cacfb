//! A verdict for every field of a pod's spec: nothing a pod asks for is dropped in silence.
//!
//! A field that the schema has and this table has not fails the test. Decide its treatment before adding
//! it.

use Verdict::{Acted, Differs, Elsewhere, Refused};
use ferrite_api::schema::{self, Kind, TypeRef};
use std::collections::BTreeSet;

#[derive(Debug, Clone, Copy)]
enum Verdict {
    /// The module that acts on it. The fields of a struct have rows of their own.
    Acted(&'static str),
    /// The module that refuses it, and the reason a user sees. The module's tests try it.
    Refused(&'static str, &'static str),
    /// The component whose matter it is.
    Elsewhere(&'static str),
    /// docs/differences.md speaks of it, by this name.
    Differs(&'static str),
}

const NO_PLUGIN: Verdict = Refused("volumes/mod", "FailedMount");
const API: Verdict = Elsewhere("apiserver");
const SCHEDULER: Verdict = Elsewhere("scheduler");

type Row = (&'static str, Verdict);

const TABLE: &[(&str, &[Row])] = &[
    (
        "PodSpec",
        &[
            ("activeDeadlineSeconds", Acted("pod/worker")),
            ("affinity", SCHEDULER),
            ("automountServiceAccountToken", API),
            ("containers", Acted("pod/decide")),
            ("dnsConfig", Acted("container/dns")),
            ("dnsPolicy", Acted("container/dns")),
            ("enableServiceLinks", Acted("pod/start")),
            ("ephemeralContainers", Acted("pod/decide")),
            ("hostAliases", Acted("container/hosts")),
            ("hostIPC", Acted("container/security")),
            ("hostNetwork", Acted("container/security")),
            ("hostPID", Acted("container/security")),
            ("hostUsers", Acted("userns")),
            ("hostname", Acted("container/hosts")),
            ("hostnameOverride", Acted("container/hosts")),
            ("imagePullSecrets", Acted("pod/start")),
            ("initContainers", Acted("pod/decide")),
            ("nodeName", Acted("kubelet")),
            ("nodeSelector", Acted("pod/admission")),
            ("os", Refused("pod/admission", "PodOSNotSupported")),
            ("overhead", Acted("container/resources")),
            ("preemptionPolicy", SCHEDULER),
            ("priority", Acted("container/resources")),
            ("priorityClassName", API),
            ("readinessGates", Acted("pod/status")),
            ("resourceClaims", Acted("claims/mod")),
            ("resources", Acted("container/resources")),
            ("restartPolicy", Acted("pod/model")),
            ("runtimeClassName", Acted("runtime_class")),
            ("schedulerName", SCHEDULER),
            ("schedulingGates", SCHEDULER),
            ("schedulingGroup", SCHEDULER),
            ("securityContext", Acted("container/security")),
            ("serviceAccount", API),
            ("serviceAccountName", Acted("volumes/token")),
            ("setHostnameAsFQDN", Acted("container/hosts")),
            ("shareProcessNamespace", Acted("container/security")),
            ("subdomain", Acted("container/hosts")),
            ("terminationGracePeriodSeconds", Acted("pod/labels")),
            ("tolerations", Elsewhere("scheduler, controllers")),
            ("topologySpreadConstraints", SCHEDULER),
            ("volumes", Acted("volumes/mod")),
        ],
    ),
    (
        "Container",
        &[
            ("args", Acted("container/config")),
            ("command", Acted("container/config")),
            ("env", Acted("container/env")),
            ("envFrom", Acted("container/env")),
            ("image", Acted("images/mod")),
            ("imagePullPolicy", Acted("images/mod")),
            ("lifecycle", Acted("hooks")),
            ("livenessProbe", Acted("probe/mod")),
            ("name", Acted("container/config")),
            ("ports", Acted("container/sandbox")),
            ("readinessProbe", Acted("probe/mod")),
            ("resizePolicy", Acted("pod/resize")),
            ("resources", Acted("container/resources")),
            ("restartPolicy", Acted("pod/model")),
            ("restartPolicyRules", Acted("pod/model")),
            ("securityContext", Acted("container/security")),
            ("startupProbe", Acted("probe/mod")),
            ("stdin", Acted("container/config")),
            ("stdinOnce", Acted("container/config")),
            ("terminationMessagePath", Acted("pod/start")),
            ("terminationMessagePolicy", Acted("pod/observe")),
            ("tty", Acted("container/config")),
            ("volumeDevices", Acted("volumes/mod")),
            ("volumeMounts", Acted("volumes/mod")),
            ("workingDir", Acted("container/config")),
        ],
    ),
    (
        // The API refuses fields that an ephemeral container cannot have.
        "EphemeralContainer",
        &[
            ("args", Acted("container/config")),
            ("command", Acted("container/config")),
            ("env", Acted("container/env")),
            ("envFrom", Acted("container/env")),
            ("image", Acted("images/mod")),
            ("imagePullPolicy", Acted("images/mod")),
            ("lifecycle", API),
            ("livenessProbe", API),
            ("name", Acted("container/config")),
            ("ports", API),
            ("readinessProbe", API),
            ("resizePolicy", API),
            ("resources", API),
            ("restartPolicy", API),
            ("restartPolicyRules", API),
            ("securityContext", Acted("container/security")),
            ("startupProbe", API),
            ("stdin", Acted("container/config")),
            ("stdinOnce", Acted("container/config")),
            ("targetContainerName", Acted("pod/start")),
            ("terminationMessagePath", Acted("pod/start")),
            ("terminationMessagePolicy", Acted("pod/observe")),
            ("tty", Acted("container/config")),
            ("volumeDevices", Acted("volumes/mod")),
            ("volumeMounts", Acted("volumes/mod")),
            ("workingDir", Acted("container/config")),
        ],
    ),
    (
        "PodSecurityContext",
        &[
            ("appArmorProfile", Acted("container/apparmor")),
            ("fsGroup", Acted("volumes/mod")),
            ("fsGroupChangePolicy", Acted("volumes/local")),
            ("runAsGroup", Acted("container/security")),
            ("runAsNonRoot", Acted("container/security")),
            ("runAsUser", Acted("container/security")),
            ("seLinuxChangePolicy", Differs("seLinuxChangePolicy")),
            ("seLinuxOptions", Differs("seLinuxOptions")),
            ("seccompProfile", Acted("container/security")),
            ("supplementalGroups", Acted("container/security")),
            ("supplementalGroupsPolicy", Refused("pod/admission", "SupplementalGroupsPolicyNotSupported")),
            ("sysctls", Acted("container/sysctl")),
            ("windowsOptions", Differs("windowsOptions")),
        ],
    ),
    (
        "SecurityContext",
        &[
            ("allowPrivilegeEscalation", Acted("container/security")),
            ("appArmorProfile", Acted("container/apparmor")),
            ("capabilities", Acted("container/security")),
            ("privileged", Acted("container/security")),
            ("procMount", Acted("container/security")),
            ("readOnlyRootFilesystem", Acted("container/security")),
            ("runAsGroup", Acted("container/security")),
            ("runAsNonRoot", Acted("container/security")),
            ("runAsUser", Acted("container/security")),
            ("seLinuxOptions", Differs("seLinuxOptions")),
            ("seccompProfile", Acted("container/security")),
            ("windowsOptions", Differs("windowsOptions")),
        ],
    ),
    (
        "AppArmorProfile",
        &[("localhostProfile", Acted("container/apparmor")), ("type", Acted("container/apparmor"))],
    ),
    (
        "SeccompProfile",
        &[("localhostProfile", Acted("container/security")), ("type", Acted("container/security"))],
    ),
    ("Capabilities", &[("add", Acted("container/security")), ("drop", Acted("container/security"))]),
    (
        "Sysctl",
        &[("name", Refused("pod/admission", "SysctlForbidden")), ("value", Acted("container/sandbox"))],
    ),
    ("LocalObjectReference", &[("name", Acted("pod/start"))]),
    ("HostAlias", &[("hostnames", Acted("container/hosts")), ("ip", Acted("container/hosts"))]),
    (
        "PodDNSConfig",
        &[
            ("nameservers", Acted("container/dns")),
            ("options", Acted("container/dns")),
            ("searches", Acted("container/dns")),
        ],
    ),
    ("PodDNSConfigOption", &[("name", Acted("container/dns")), ("value", Acted("container/dns"))]),
    (
        "PodResourceClaim",
        &[
            ("name", Acted("claims/mod")),
            ("resourceClaimName", Acted("claims/mod")),
            ("resourceClaimTemplateName", API),
        ],
    ),
    ("ResourceClaim", &[("name", Acted("claims/mod")), ("request", Acted("claims/mod"))]),
    ("PodReadinessGate", &[("conditionType", Acted("pod/status"))]),
    (
        "ResourceRequirements",
        &[
            ("claims", Acted("claims/mod")),
            ("limits", Acted("container/resources")),
            ("requests", Acted("container/resources")),
        ],
    ),
    (
        "ContainerPort",
        &[
            ("containerPort", Acted("container/sandbox")),
            ("hostIP", Acted("container/sandbox")),
            ("hostPort", Acted("container/sandbox")),
            ("name", Acted("probe/check")),
            ("protocol", Acted("container/sandbox")),
        ],
    ),
    (
        "EnvFromSource",
        &[
            ("configMapRef", Acted("container/env")),
            ("prefix", Acted("container/env")),
            ("secretRef", Acted("container/env")),
        ],
    ),
    ("ConfigMapEnvSource", &[("name", Acted("container/env")), ("optional", Acted("container/env"))]),
    ("SecretEnvSource", &[("name", Acted("container/env")), ("optional", Acted("container/env"))]),
    (
        "EnvVar",
        &[
            ("name", Acted("container/env")),
            ("value", Acted("container/env")),
            ("valueFrom", Acted("container/env")),
        ],
    ),
    (
        "EnvVarSource",
        &[
            ("configMapKeyRef", Acted("container/env")),
            ("fieldRef", Acted("container/fields")),
            ("fileKeyRef", Acted("container/env_file")),
            ("resourceFieldRef", Acted("container/fields")),
            ("secretKeyRef", Acted("container/env")),
        ],
    ),
    (
        "ConfigMapKeySelector",
        &[
            ("key", Acted("container/env")),
            ("name", Acted("container/env")),
            ("optional", Acted("container/env")),
        ],
    ),
    (
        "SecretKeySelector",
        &[
            ("key", Acted("container/env")),
            ("name", Acted("container/env")),
            ("optional", Acted("container/env")),
        ],
    ),
    ("ObjectFieldSelector", &[("apiVersion", API), ("fieldPath", Acted("container/fields"))]),
    (
        "ResourceFieldSelector",
        &[
            ("containerName", Acted("container/fields")),
            ("divisor", Acted("container/fields")),
            ("resource", Acted("container/fields")),
        ],
    ),
    (
        "ContainerRestartRule",
        &[("action", Refused("pod/admission", "PodFeatureUnsupported")), ("exitCodes", Acted("pod/model"))],
    ),
    ("ContainerRestartRuleOnExitCodes", &[("operator", Acted("pod/model")), ("values", Acted("pod/model"))]),
    (
        "VolumeMount",
        &[
            ("mountPath", Acted("volumes/mod")),
            ("mountPropagation", Acted("volumes/mod")),
            ("name", Acted("volumes/mod")),
            ("readOnly", Acted("volumes/mod")),
            ("recursiveReadOnly", Acted("container/read_only")),
            ("subPath", Acted("volumes/mod")),
            ("subPathExpr", Acted("volumes/mod")),
        ],
    ),
    (
        "Probe",
        &[
            ("exec", Acted("probe/check")),
            ("failureThreshold", Acted("probe/machine")),
            ("grpc", Acted("probe/grpc")),
            ("httpGet", Acted("probe/http")),
            ("initialDelaySeconds", Acted("probe/worker")),
            ("periodSeconds", Acted("probe/worker")),
            ("successThreshold", Acted("probe/machine")),
            ("tcpSocket", Acted("probe/check")),
            ("terminationGracePeriodSeconds", Acted("pod/worker")),
            ("timeoutSeconds", Acted("probe/check")),
        ],
    ),
    (
        "Lifecycle",
        &[
            ("postStart", Acted("pod/start")),
            ("preStop", Acted("pod/kill")),
            ("stopSignal", Acted("container/security")),
        ],
    ),
    (
        "LifecycleHandler",
        &[
            ("exec", Acted("hooks")),
            ("httpGet", Acted("hooks")),
            ("sleep", Acted("hooks")),
            ("tcpSocket", Refused("hooks", "FailedPostStartHook")),
        ],
    ),
    ("ExecAction", &[("command", Acted("probe/check"))]),
    (
        "HTTPGetAction",
        &[
            ("host", Acted("probe/check")),
            ("httpHeaders", Acted("probe/check")),
            ("path", Acted("probe/check")),
            ("port", Acted("probe/check")),
            ("scheme", Acted("probe/check")),
        ],
    ),
    ("HTTPHeader", &[("name", Acted("probe/http")), ("value", Acted("probe/http"))]),
    ("TCPSocketAction", &[("host", Acted("probe/check")), ("port", Acted("probe/check"))]),
    ("GRPCAction", &[("port", Acted("probe/grpc")), ("service", Acted("probe/grpc"))]),
    ("SleepAction", &[("seconds", Acted("hooks"))]),
    (
        "Volume",
        &[
            ("awsElasticBlockStore", NO_PLUGIN),
            ("azureDisk", NO_PLUGIN),
            ("azureFile", NO_PLUGIN),
            ("cephfs", NO_PLUGIN),
            ("cinder", NO_PLUGIN),
            ("configMap", Acted("volumes/config_map")),
            ("csi", Acted("volumes/csi/mod")),
            ("downwardAPI", Acted("volumes/downward_api")),
            ("emptyDir", Acted("volumes/empty_dir")),
            ("ephemeral", Acted("volumes/claim")),
            ("fc", NO_PLUGIN),
            ("flexVolume", NO_PLUGIN),
            ("flocker", NO_PLUGIN),
            ("gcePersistentDisk", NO_PLUGIN),
            ("gitRepo", NO_PLUGIN),
            ("glusterfs", NO_PLUGIN),
            ("hostPath", Acted("volumes/host_path")),
            ("image", Acted("volumes/image")),
            ("iscsi", NO_PLUGIN),
            ("name", Acted("volumes/mod")),
            ("nfs", Acted("volumes/nfs")),
            ("persistentVolumeClaim", Acted("volumes/claim")),
            ("photonPersistentDisk", NO_PLUGIN),
            ("portworxVolume", NO_PLUGIN),
            ("projected", Acted("volumes/projected")),
            ("quobyte", NO_PLUGIN),
            ("rbd", NO_PLUGIN),
            ("scaleIO", NO_PLUGIN),
            ("secret", Acted("volumes/secret")),
            ("storageos", NO_PLUGIN),
            ("vsphereVolume", NO_PLUGIN),
        ],
    ),
    (
        "PersistentVolumeClaimVolumeSource",
        &[("claimName", Acted("volumes/claim")), ("readOnly", Acted("volumes/claim"))],
    ),
    (
        "CSIVolumeSource",
        &[
            ("driver", Acted("volumes/csi/wanted")),
            ("fsType", Acted("volumes/csi/wanted")),
            ("nodePublishSecretRef", Acted("volumes/csi/secrets")),
            ("readOnly", Acted("volumes/csi/wanted")),
            ("volumeAttributes", Acted("volumes/csi/wanted")),
        ],
    ),
    (
        "FileKeySelector",
        &[
            ("key", Acted("container/env_file")),
            ("optional", Acted("container/env")),
            ("path", Acted("container/env")),
            ("volumeName", Acted("container/env")),
        ],
    ),
    (
        "ContainerResizePolicy",
        &[("resourceName", Acted("pod/resize")), ("restartPolicy", Acted("pod/resize"))],
    ),
    ("ImageVolumeSource", &[("pullPolicy", Acted("volumes/image")), ("reference", Acted("volumes/image"))]),
    ("EphemeralVolumeSource", &[("volumeClaimTemplate", Elsewhere("controllers"))]),
    (
        "NFSVolumeSource",
        &[
            ("path", Acted("volumes/nfs")),
            ("readOnly", Acted("volumes/nfs")),
            ("server", Acted("volumes/nfs")),
        ],
    ),
    ("VolumeDevice", &[("devicePath", Acted("volumes/mod")), ("name", Acted("volumes/mod"))]),
    ("HostPathVolumeSource", &[("path", Acted("volumes/host_path")), ("type", Acted("volumes/host_path"))]),
    (
        "EmptyDirVolumeSource",
        &[("medium", Acted("volumes/empty_dir")), ("sizeLimit", Acted("eviction/rank"))],
    ),
    (
        "SecretVolumeSource",
        &[
            ("defaultMode", Acted("volumes/payload")),
            ("items", Acted("volumes/payload")),
            ("optional", Acted("volumes/mod")),
            ("secretName", Acted("volumes/mod")),
        ],
    ),
    (
        "ConfigMapVolumeSource",
        &[
            ("defaultMode", Acted("volumes/payload")),
            ("items", Acted("volumes/payload")),
            ("name", Acted("volumes/mod")),
            ("optional", Acted("volumes/mod")),
        ],
    ),
    (
        "DownwardAPIVolumeSource",
        &[("defaultMode", Acted("volumes/payload")), ("items", Acted("volumes/payload"))],
    ),
    (
        "KeyToPath",
        &[
            ("key", Acted("volumes/payload")),
            ("mode", Acted("volumes/payload")),
            ("path", Acted("volumes/payload")),
        ],
    ),
    (
        "DownwardAPIVolumeFile",
        &[
            ("fieldRef", Acted("container/fields")),
            ("mode", Acted("volumes/payload")),
            ("path", Acted("volumes/payload")),
            ("resourceFieldRef", Acted("container/fields")),
        ],
    ),
    (
        "ProjectedVolumeSource",
        &[("defaultMode", Acted("volumes/payload")), ("sources", Acted("volumes/mod"))],
    ),
    (
        "VolumeProjection",
        &[
            ("clusterTrustBundle", Acted("volumes/trust_bundles")),
            ("configMap", Acted("volumes/mod")),
            ("downwardAPI", Acted("volumes/mod")),
            ("podCertificate", Acted("volumes/pod_certificate/mod")),
            ("secret", Acted("volumes/mod")),
            ("serviceAccountToken", Acted("volumes/token")),
        ],
    ),
    (
        "ClusterTrustBundleProjection",
        &[
            ("labelSelector", Acted("volumes/trust_bundles")),
            ("name", Acted("volumes/trust_bundles")),
            ("optional", Acted("volumes/trust_bundles")),
            ("path", Acted("volumes/projected")),
            ("signerName", Acted("volumes/trust_bundles")),
        ],
    ),
    (
        "LabelSelector",
        &[
            ("matchExpressions", Acted("volumes/trust_bundles")),
            ("matchLabels", Acted("volumes/trust_bundles")),
        ],
    ),
    (
        "LabelSelectorRequirement",
        &[
            ("key", Acted("volumes/trust_bundles")),
            ("operator", Acted("volumes/trust_bundles")),
            ("values", Acted("volumes/trust_bundles")),
        ],
    ),
    (
        "PodCertificateProjection",
        &[
            ("certificateChainPath", Acted("volumes/projected")),
            ("credentialBundlePath", Acted("volumes/projected")),
            ("keyPath", Acted("volumes/projected")),
            ("keyType", Acted("volumes/pod_certificate/mod")),
            ("maxExpirationSeconds", Acted("volumes/pod_certificate/mod")),
            ("signerName", Acted("volumes/pod_certificate/mod")),
            ("userAnnotations", Acted("volumes/pod_certificate/mod")),
        ],
    ),
    (
        "SecretProjection",
        &[
            ("items", Acted("volumes/payload")),
            ("name", Acted("volumes/mod")),
            ("optional", Acted("volumes/mod")),
        ],
    ),
    (
        "ConfigMapProjection",
        &[
            ("items", Acted("volumes/payload")),
            ("name", Acted("volumes/mod")),
            ("optional", Acted("volumes/mod")),
        ],
    ),
    ("DownwardAPIProjection", &[("items", Acted("volumes/payload"))]),
    (
        "ServiceAccountTokenProjection",
        &[
            ("audience", Acted("volumes/token")),
            ("expirationSeconds", Acted("volumes/token")),
            ("path", Acted("volumes/mod")),
        ],
    ),
];

fn short(of: TypeRef) -> &'static str {
    of.name.rsplit('.').next().unwrap_or(of.name)
}

/// The struct a field holds, alone or in a list or a map.
fn held(kind: Kind) -> Option<TypeRef> {
    match kind {
        Kind::Struct(of) => Some(of),
        Kind::List(of) | Kind::Map(of) => held(*of),
        _ => None,
    }
}

#[test]
fn every_field_has_a_verdict() {
    let mut problems = Vec::new();
    let (mut queue, mut seen) = (vec![schema::named("core.v1.PodSpec").unwrap()], BTreeSet::new());
    while let Some(of) = queue.pop() {
        if !seen.insert(short(of)) {
            continue;
        }
        let rows = TABLE.iter().find(|(name, _)| *name == short(of)).map_or(&[][..], |(_, rows)| rows);
        for field in of.fields {
            match rows.iter().find(|(name, _)| *name == field.name) {
                None => problems.push(format!("{}.{} has no verdict", short(of), field.name)),
                Some((_, Acted(_))) => queue.extend(held(field.kind)),
                Some(_) => {}
            }
        }
        for (name, _) in rows.iter().filter(|(name, _)| of.field(name).is_none()) {
            problems.push(format!("{}.{name} is not in the schema", short(of)));
        }
    }
    for (name, _) in TABLE.iter().filter(|(name, _)| !seen.contains(name)) {
        problems.push(format!("{name} is not part of a pod that is acted on"));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn verdicts_name_what_exists() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let differences = std::fs::read_to_string(root.join("../../docs/differences.md")).unwrap();
    for (of, field, verdict) in
        TABLE.iter().flat_map(|(of, rows)| rows.iter().map(move |(field, verdict)| (of, field, verdict)))
    {
        match verdict {
            Acted(module) => {
                assert!(root.join(format!("src/{module}.rs")).exists(), "{of}.{field}: {module}");
            }
            Refused(module, reason) => {
                assert!(root.join(format!("src/{module}.rs")).exists(), "{of}.{field}: {module}");
                assert!(!reason.is_empty());
            }
            Elsewhere(component) => {
                let known = component.split(", ").all(|c| root.join("..").join(c).exists());
                assert!(known, "{of}.{field}: {component}");
            }
            Differs(name) => {
                assert!(differences.contains(&format!("`{name}`")), "{of}.{field}: docs/differences.md");
            }
        }
    }
}

//! Selects the controllers that run, with the rules and names of upstream's `--controllers`.

use crate::{CONTROLLERS, Context, running};

/// Controllers that upstream's API server runs itself: they write statuses of objects that only the server
/// reads.
pub const OF_THE_SERVER: &[&str] = &["priority-and-fairness-config-consumer"];

/// Controllers that `*` does not select: upstream starts them only where they are named.
pub const ON_REQUEST: &[&str] =
    &["bootstrap-signer-controller", "selinux-warning-controller", "token-cleaner-controller"];

/// Those of them that keep the tokens with which nodes join.
pub const FOR_JOINING: &[&str] = &["bootstrap-signer-controller", "token-cleaner-controller"];

/// Controllers that run only with a feature gate, which is off by default.
const WITH_GATE: &[(&str, &str)] = &[
    ("kube-apiserver-serving-clustertrustbundle-publisher-controller", "ClusterTrustBundle"),
    ("podcertificaterequest-cleaner-controller", "PodCertificateRequest"),
    ("storage-version-migrator-controller", "StorageVersionMigrator"),
];

/// Controllers of upstream whose feature is off by default in v1.36, with its gate. Upstream accepts their names and
/// starts them only with the gate, which cannot be set here.
const GATED: &[(&str, &str)] = &[
    ("podgroup-protection-controller", "GenericWorkload"),
    ("resourcepoolstatusrequest-controller", "DRAResourcePoolStatus"),
    ("storageversion-garbage-collector-controller", "StorageVersionAPI"),
];

/// Controllers of a cloud's controller manager. Upstream's manager knows their names and starts none of them.
const OF_CLOUDS: &[&str] =
    &["cloud-node-lifecycle-controller", "node-route-controller", "service-lb-controller"];

/// Names that controllers had before v1.28, which `--controllers` still understands.
const ALIASES: &[(&str, &str)] = &[
    ("attachdetach", "persistentvolume-attach-detach-controller"),
    ("bootstrapsigner", "bootstrap-signer-controller"),
    ("cloud-node-lifecycle", "cloud-node-lifecycle-controller"),
    ("clusterrole-aggregation", "clusterrole-aggregation-controller"),
    ("cronjob", "cronjob-controller"),
    ("csrapproving", "certificatesigningrequest-approving-controller"),
    ("csrcleaner", "certificatesigningrequest-cleaner-controller"),
    ("csrsigning", "certificatesigningrequest-signing-controller"),
    ("daemonset", "daemonset-controller"),
    ("deployment", "deployment-controller"),
    ("disruption", "disruption-controller"),
    ("endpoint", "endpoints-controller"),
    ("endpointslice", "endpointslice-controller"),
    ("endpointslicemirroring", "endpointslice-mirroring-controller"),
    ("ephemeral-volume", "ephemeral-volume-controller"),
    ("garbagecollector", "garbage-collector-controller"),
    ("horizontalpodautoscaling", "horizontal-pod-autoscaler-controller"),
    ("job", "job-controller"),
    ("legacy-service-account-token-cleaner", "legacy-serviceaccount-token-cleaner-controller"),
    ("namespace", "namespace-controller"),
    ("nodeipam", "node-ipam-controller"),
    ("nodelifecycle", "node-lifecycle-controller"),
    ("persistentvolume-binder", "persistentvolume-binder-controller"),
    ("persistentvolume-expander", "persistentvolume-expander-controller"),
    ("podgc", "pod-garbage-collector-controller"),
    ("pv-protection", "persistentvolume-protection-controller"),
    ("pvc-protection", "persistentvolumeclaim-protection-controller"),
    ("replicaset", "replicaset-controller"),
    ("replicationcontroller", "replicationcontroller-controller"),
    ("resource-claim-controller", "resourceclaim-controller"),
    ("resourcequota", "resourcequota-controller"),
    ("root-ca-cert-publisher", "root-ca-certificate-publisher-controller"),
    ("route", "node-route-controller"),
    ("service", "service-lb-controller"),
    ("serviceaccount", "serviceaccount-controller"),
    ("serviceaccount-token", "serviceaccount-token-controller"),
    ("statefulset", "statefulset-controller"),
    ("storage-version-gc", "storageversion-garbage-collector-controller"),
    ("svm", "storage-version-migrator-controller"),
    ("tokencleaner", "token-cleaner-controller"),
    ("ttl", "ttl-controller"),
    ("ttl-after-finished", "ttl-after-finished-controller"),
];

/// Starts the controllers `names` selects, with the rules of `--controllers`: `*` is all, `name` one, `-name` all
/// but that one; the first match for a controller decides. Returns the names that match no controller.
pub fn start_all(context: &Context, names: &[&str]) -> Vec<String> {
    let is_off = |gate: &str| !context.config.feature_gates.enabled(gate);
    let off: Vec<_> = WITH_GATE.iter().filter(|(_, gate)| is_off(gate)).collect();
    for (name, gate) in GATED.iter().chain(off.iter().copied()).filter(|(name, _)| is_named(name, names)) {
        tracing::warn!(
            controller = name,
            gate,
            "not started: its feature gate is off, as in v1.36 by default"
        );
    }
    for name in OF_CLOUDS.iter().filter(|name| is_named(name, names)) {
        tracing::warn!(controller = name, "not started: it belongs to a cloud's own controller manager");
    }
    let mut started = Vec::new();
    for entry in CONTROLLERS {
        if is_enabled(entry.name, names) && off.iter().all(|(name, _)| *name != entry.name) {
            tracing::info!(controller = entry.name, "starting");
            (entry.start)(&context.acting_as(entry.identity));
            if !OF_THE_SERVER.contains(&entry.name) {
                started.push(entry.name);
            }
        }
    }
    running::show(started, &context.scope);
    unknown(names)
}

/// Those of the names that match no controller.
pub fn unknown(names: &[&str]) -> Vec<String> {
    let all = names.iter().map(|name| split(name).1);
    all.filter(|name| *name != "*" && !is_known(name)).map(str::to_owned).collect()
}

/// True if `names` selects a controller that is not the API server's own.
pub fn selects_any(names: &[&str]) -> bool {
    let mut others = CONTROLLERS.iter().filter(|entry| !OF_THE_SERVER.contains(&entry.name));
    others.any(|entry| is_enabled(entry.name, names))
}

/// A name in today's form, and whether it turns its controller on.
fn split(name: &str) -> (bool, &str) {
    let (on, name) = name.strip_prefix('-').map_or((true, name), |name| (false, name));
    let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
    (on, alias.map_or(name, |(_, name)| *name))
}

fn is_known(name: &str) -> bool {
    CONTROLLERS.iter().any(|entry| entry.name == name)
        || GATED.iter().any(|(gated, _)| *gated == name)
        || OF_CLOUDS.contains(&name)
}

/// The first entry for a controller decides.
fn choice(controller: &str, names: &[&str]) -> Option<bool> {
    names.iter().map(|name| split(name)).find(|(_, name)| *name == controller).map(|(on, _)| on)
}

fn is_named(controller: &str, names: &[&str]) -> bool {
    choice(controller, names) == Some(true)
}

fn is_enabled(controller: &str, names: &[&str]) -> bool {
    choice(controller, names).unwrap_or_else(|| names.contains(&"*") && !ON_REQUEST.contains(&controller))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selection_follows_upstreams_flag() {
        for (names, enabled) in [
            (&["*"][..], true),
            (&[], false),
            (&["a"], true),
            (&["-a", "*"], false),
            (&["*", "-a"], false),
            (&["b"], false),
            (&["a", "-a"], true),
        ] {
            assert_eq!(is_enabled("a", names), enabled, "{names:?}");
        }
        assert!(!is_enabled(ON_REQUEST[0], &["*"]));
        assert!(is_enabled(ON_REQUEST[0], &["*", ON_REQUEST[0]]));
        assert!(!is_enabled("deployment-controller", &["*", "-deployment"]), "an older name");
        assert!(is_enabled("ttl-controller", &["ttl"]));
    }

    #[test]
    fn nothing_may_be_selected() {
        for (names, any) in [
            (&[][..], false),
            (&["-*"], false),
            (&["-job-controller"], false),
            (OF_THE_SERVER, false),
            (&["*"], true),
            (&["namespace-controller"], true),
        ] {
            assert_eq!(selects_any(names), any, "{names:?}");
        }
    }

    #[test]
    fn every_name_of_upstream_is_known() {
        for (alias, name) in ALIASES {
            assert!(is_known(name), "{alias} stands for {name}");
        }
        for name in ["podgroup-protection-controller", "service-lb-controller", "deployment-controller"] {
            assert!(is_known(name), "{name}");
        }
        assert!(!is_known("deploymnet-controller"));
        for (name, _) in GATED {
            assert!(CONTROLLERS.iter().all(|entry| entry.name != *name), "{name} runs");
        }
        for (name, _) in WITH_GATE {
            assert!(CONTROLLERS.iter().any(|entry| entry.name == *name), "{name} does not run");
        }
    }
}

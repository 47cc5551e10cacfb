//! Pod security: limits the pods of a namespace by the level that its labels name.

mod checks;
mod metrics;
mod policy;

use super::{Attributes, Operation, Plugin, config};
use crate::registry::View;
use checks::Violation;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use policy::{Level, Policy, Rule};
use std::collections::{BTreeMap, BTreeSet};

pub(super) const NAME: &str = "PodSecurity";

/// The policy of namespaces without labels, and the exemptions.
#[derive(Default)]
struct PodSecurity {
    defaults: Policy,
    exempt: Exemptions,
}

#[derive(Default)]
struct Exemptions {
    users: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    runtime_classes: BTreeSet<String>,
}

pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let Some(configuration) = configuration else { return Ok(Box::new(PodSecurity::default())) };
    config::check_kind(configuration, "pod-security.admission.config.k8s.io", "PodSecurityConfiguration")?;
    let exempt = |key: &str| {
        let list = configuration["exemptions"][key].as_array();
        list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    Ok(Box::new(PodSecurity {
        defaults: Policy::read(&configuration["defaults"])?,
        exempt: Exemptions {
            users: exempt("usernames"),
            namespaces: exempt("namespaces"),
            runtime_classes: exempt("runtimeClasses"),
        },
    }))
}

/// Most pods checked when a namespace's level changes, as upstream.
const MAX_PODS: usize = 3000;

/// Subresources that cannot change a pod's privileges.
const HARMLESS: [&str; 8] =
    ["exec", "attach", "binding", "eviction", "log", "portforward", "proxy", "status"];

/// Workloads, and where their pods' template is.
const TEMPLATES: [(&str, &str, &str); 8] = [
    ("", "podtemplates", "/template"),
    ("", "replicationcontrollers", "/spec/template"),
    ("apps", "replicasets", "/spec/template"),
    ("apps", "deployments", "/spec/template"),
    ("apps", "statefulsets", "/spec/template"),
    ("apps", "daemonsets", "/spec/template"),
    ("batch", "jobs", "/spec/template"),
    ("batch", "cronjobs", "/spec/jobTemplate/spec/template"),
];

impl Plugin for PodSecurity {
    fn name(&self) -> &'static str {
        NAME
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object else { return Ok(()) };
        let (group, plural) = (&*attributes.resource.group, &*attributes.resource.plural);
        match (group, plural) {
            ("", "namespaces") if attributes.subresource.is_none() => {
                self.namespace(view, attributes, object)
            }
            ("", "pods") if !attributes.subresource.is_some_and(|s| HARMLESS.contains(&s)) => {
                self.pod(view, attributes, object)
            }
            _ if attributes.subresource.is_none() => {
                let template = TEMPLATES.iter().find(|row| (row.0, row.1) == (group, plural));
                if let Some(template) = template.and_then(|row| object.pointer(row.2))
                    && !self.exempts(attributes, template)
                {
                    let policy = self.policy_of(view, attributes.namespace);
                    audit(attributes, &policy, template);
                    warn(attributes, &policy, template);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Exemptions {
    /// Why a pod is none of the plugin's business. None if it is.
    fn reason(&self, attributes: &Attributes<'_>, pod: &Value) -> Option<&'static str> {
        let class = pod["spec"]["runtimeClassName"].as_str();
        match () {
            () if self.namespaces.contains(attributes.namespace) => Some("namespace"),
            () if self.users.contains(&attributes.user.name) => Some("user"),
            () if class.is_some_and(|class| self.runtime_classes.contains(class)) => Some("runtimeClass"),
            () => None,
        }
    }
}

impl PodSecurity {
    fn policy_of(&self, view: &View, namespace: &str) -> Policy {
        let namespace = view.get("", "namespaces", "", namespace).unwrap_or_default();
        Policy::of(&namespace, &self.defaults).0
    }

    fn exempts(&self, attributes: &Attributes<'_>, pod: &Value) -> bool {
        let exempt = self.exempt.reason(attributes, pod);
        if let Some(reason) = exempt {
            metrics::exempted(attributes);
            attributes.annotate("pod-security.kubernetes.io/exempt", reason);
        }
        exempt.is_some()
    }

    fn pod(&self, view: &View, attributes: &Attributes<'_>, pod: &Value) -> Result<(), Status> {
        if self.exempts(attributes, pod) {
            return Ok(());
        }
        check_pod(attributes, pod, || self.policy_of(view, attributes.namespace))
    }

    /// Labels must name levels and versions. A stricter level warns of existing pods that violate it.
    fn namespace(&self, view: &View, attributes: &Attributes<'_>, namespace: &Value) -> Result<(), Status> {
        let (new, errors) = Policy::of(namespace, &self.defaults);
        let before = attributes.old.map(|old| Policy::of(old, &self.defaults));
        if !errors.is_empty() && before.as_ref().is_none_or(|(_, old)| *old != errors) {
            return Err(Status::invalid("", "Namespace", attributes.name, &errors));
        }
        let Some((old, _)) = before else { return Ok(()) };
        let relaxed = new.enforce.version == old.enforce.version && new.enforce.level <= old.enforce.level;
        let exempt = self.exempt.namespaces.contains(attributes.name);
        if new.enforce.level == Level::Privileged || relaxed || exempt {
            return Ok(());
        }
        let pods = view.objects("", "pods", attributes.name).take(MAX_PODS);
        for warning in existing(attributes.name, new.enforce, pods) {
            attributes.warn(warning);
        }
        Ok(())
    }
}

fn check_pod(
    attributes: &Attributes<'_>,
    pod: &Value,
    policy: impl FnOnce() -> Policy,
) -> Result<(), Status> {
    if attributes.operation == Operation::Update
        && attributes.old.is_some_and(|old| !is_significant(pod, old))
    {
        return Ok(());
    }
    let policy = policy();
    let violations = checks::run(policy.enforce, pod);
    metrics::evaluated(attributes, "enforce", policy.enforce, violations.is_empty());
    attributes.annotate("pod-security.kubernetes.io/enforce-policy", policy.enforce.to_string());
    audit(attributes, &policy, pod);
    if !violations.is_empty() {
        return Err(attributes.forbid(format!(
            "violates PodSecurity \"{}\": {}",
            policy.enforce,
            details(&violations)
        )));
    }
    warn(attributes, &policy, pod);
    Ok(())
}

/// Annotates the audit of the request with violations of the namespace's audit level.
fn audit(attributes: &Attributes<'_>, policy: &Policy, pod: &Value) {
    let violations = checks::run(policy.audit, pod);
    if !violations.is_empty() {
        metrics::evaluated(attributes, "audit", policy.audit, false);
        attributes.annotate(
            "pod-security.kubernetes.io/audit-violations",
            format!("would violate PodSecurity \"{}\": {}", policy.audit, details(&violations)),
        );
    }
}

fn warn(attributes: &Attributes<'_>, policy: &Policy, pod: &Value) {
    let violations = checks::run(policy.warn, pod);
    if !violations.is_empty() {
        // As upstream: of warnings only those that are given are counted.
        metrics::evaluated(attributes, "warn", policy.warn, false);
        attributes.warn(format!("would violate PodSecurity \"{}\": {}", policy.warn, details(&violations)));
    }
}

fn details(violations: &[Violation]) -> String {
    let texts: Vec<String> = violations.iter().map(|v| format!("{} ({})", v.reason, v.detail)).collect();
    texts.join(", ")
}

/// Returns true if an update adds containers or changes their images or settings: nothing else that matters
/// is mutable.
fn is_significant(new: &Value, old: &Value) -> bool {
    const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";
    ["containers", "initContainers", "ephemeralContainers"].iter().any(|kind| {
        let of = |pod: &Value| pod["spec"][*kind].as_array().cloned().unwrap_or_default();
        let (new_ones, old_ones) = (of(new), of(old));
        new_ones.len() != old_ones.len()
            || new_ones.iter().zip(&old_ones).any(|(n, o)| {
                let key = format!("{APPARMOR}{}", n["name"].as_str().unwrap_or_default());
                let annotation = |pod: &Value| pod["metadata"]["annotations"].get(&key).cloned();
                n["image"] != o["image"] || annotation(new) != annotation(old)
            })
    })
}

/// The warnings about existing pods that a level would refuse: one line per kind of violation.
fn existing(namespace: &str, rule: Rule, pods: impl Iterator<Item = Value>) -> Vec<String> {
    let mut found: BTreeMap<String, (String, usize)> = BTreeMap::new();
    for pod in pods {
        let violations = checks::run(rule, &pod);
        if !violations.is_empty() {
            let reasons: Vec<&str> = violations.iter().map(|v| &*v.reason).collect();
            found.entry(reasons.join(", ")).or_insert_with(|| (meta::name(&pod).to_owned(), 0)).1 += 1;
        }
    }
    let mut lines: Vec<String> = found
        .into_iter()
        .map(|(reasons, (pod, count))| match count {
            1 => format!("{pod}: {reasons}"),
            2 => format!("{pod} (and 1 other pod): {reasons}"),
            count => format!("{pod} (and {} other pods): {reasons}", count - 1),
        })
        .collect();
    lines.sort();
    if !lines.is_empty() {
        let first = format!(
            "existing pods in namespace {namespace:?} violate the new PodSecurity enforce level \"{rule}\""
        );
        lines.insert(0, first);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn only_changes_that_matter_are_checked_again() {
        let pod = |image: &str, labels: &str| json!({"metadata": {"labels": {"a": labels}}, "spec": {"containers": [{"name": "c", "image": image}]}});
        assert!(!is_significant(&pod("i", "x"), &pod("i", "y")));
        assert!(is_significant(&pod("j", "x"), &pod("i", "x")));
        let mut debugged = pod("i", "x");
        debugged["spec"]["ephemeralContainers"] = json!([{"name": "d"}]);
        assert!(is_significant(&debugged, &pod("i", "x")));
    }

    #[test]
    fn existing_pods_are_told_of_by_kind() {
        let rule = Rule { level: Level::Baseline, version: None };
        let pod = |name: &str| json!({"metadata": {"name": name}, "spec": {"hostNetwork": true}});
        let pods = [pod("a"), pod("b"), pod("c"), json!({"metadata": {"name": "fine"}, "spec": {}})];
        assert_eq!(
            existing("ns", rule, pods.into_iter()),
            [
                r#"existing pods in namespace "ns" violate the new PodSecurity enforce level "baseline:latest""#,
                "a (and 2 other pods): host namespaces",
            ]
        );
    }
}

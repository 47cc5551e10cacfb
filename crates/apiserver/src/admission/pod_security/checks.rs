//! The checks of each level, as of each version: one row each in [`CHECKS`], in the order of upstream's
//! messages.

use super::policy::{Level, Rule};
use ferrite_json::Value;
use std::collections::BTreeSet;

/// A forbidden property of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Violation {
    pub reason: String,
    pub detail: String,
}

/// The inputs of a check.
struct Pod<'a> {
    metadata: &'a Value,
    spec: &'a Value,
    /// The minor version as of which the level is meant.
    version: u32,
}

struct Check {
    id: &'static str,
    level: Level,
    /// The first version that has it.
    since: u32,
    run: fn(&Pod<'_>) -> Option<Violation>,
    /// The baseline check whose place it takes.
    replaces: Option<&'static str>,
}

const fn baseline(id: &'static str, run: fn(&Pod<'_>) -> Option<Violation>) -> Check {
    Check { id, level: Level::Baseline, since: 0, run, replaces: None }
}

const fn restricted(
    id: &'static str,
    since: u32,
    run: fn(&Pod<'_>) -> Option<Violation>,
    replaces: Option<&'static str>,
) -> Check {
    Check { id, level: Level::Restricted, since, run, replaces }
}

const CHECKS: &[Check] = &[
    baseline("appArmorProfile", app_armor),
    baseline("capabilities_baseline", baseline_capabilities),
    baseline("hostNamespaces", host_namespaces),
    baseline("hostPathVolumes", host_paths),
    baseline("hostPorts", host_ports),
    Check { since: 34, ..baseline("hostProbesAndHostLifecycle", probe_hosts) },
    baseline("privileged", privileged),
    baseline(
        "procMount",
        |pod| if pod.version >= 35 && pod.has_own_users() { None } else { proc_mount(pod) },
    ),
    baseline("seLinuxOptions", se_linux),
    baseline("seccompProfile_baseline", baseline_seccomp),
    baseline("sysctls", sysctls),
    baseline("windowsHostProcess", host_process),
    restricted("allowPrivilegeEscalation", 8, privilege_escalation, None),
    restricted("capabilities_restricted", 22, restricted_capabilities, Some("capabilities_baseline")),
    restricted("procMount_restricted", 35, proc_mount, Some("procMount")),
    restricted("restrictedVolumes", 0, volumes, Some("hostPathVolumes")),
    restricted("runAsNonRoot", 0, non_root, None),
    restricted("runAsUser", 23, run_as_user, None),
    restricted("seccompProfile_restricted", 19, restricted_seccomp, Some("seccompProfile_baseline")),
];

/// The newest version for which a level differs from the one before.
const LATEST: u32 = 35;

/// The properties of a pod, or of a pod template, that a level forbids.
pub(super) fn run(rule: Rule, pod: &Value) -> Vec<Violation> {
    let version = rule.version.unwrap_or(LATEST).min(LATEST);
    let pod = Pod { metadata: &pod["metadata"], spec: &pod["spec"], version };
    let active = |check: &&Check| check.level <= rule.level && check.since <= version;
    let replaced: Vec<&str> =
        CHECKS.iter().filter(active).filter(|c| c.level == rule.level).filter_map(|c| c.replaces).collect();
    CHECKS
        .iter()
        .filter(active)
        .filter(|check| !replaced.contains(&check.id))
        .filter_map(|check| (check.run)(&pod))
        .collect()
}

impl Pod<'_> {
    fn containers(&self) -> impl Iterator<Item = &Value> {
        ["initContainers", "containers", "ephemeralContainers"]
            .into_iter()
            .flat_map(|kind| self.spec[kind].as_array().into_iter().flatten())
    }

    /// The names of containers of which something is true.
    fn containers_where(&self, is: impl Fn(&Value) -> bool) -> Vec<&str> {
        self.containers().filter(|c| is(c)).map(name).collect()
    }

    /// Root in such a pod is nobody on the node.
    fn has_own_users(&self) -> bool {
        self.spec["hostUsers"] == false
    }

    /// Some of the fields mean nothing there.
    fn is_windows(&self) -> bool {
        self.version >= 25 && self.spec["os"]["name"] == "windows"
    }

    /// The pod and containers that set a field of a security context to a forbidden value, and those
    /// values.
    fn setters(&self, field: &str, allowed: impl Fn(&str) -> bool) -> (Vec<String>, BTreeSet<String>) {
        let mut values = BTreeSet::new();
        let mut bad = |context: &Value| {
            let value = context.pointer(field).and_then(Value::as_str);
            let bad = value.filter(|v| !allowed(v)).map(str::to_owned);
            let is_bad = bad.is_some();
            values.extend(bad);
            is_bad
        };
        let mut setters = Vec::new();
        if bad(&self.spec["securityContext"]) {
            setters.push("pod".to_owned());
        }
        let containers: Vec<&str> =
            self.containers().filter(|c| bad(&c["securityContext"])).map(name).collect();
        if !containers.is_empty() {
            setters.push(these(&containers));
        }
        (setters, values)
    }
}

fn name(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}

fn violation(reason: &str, detail: String) -> Violation {
    Violation { reason: reason.into(), detail }
}

fn plural<'a>(one: &'a str, many: &'a str, count: usize) -> &'a str {
    if count == 1 { one } else { many }
}

fn quoted(items: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let items: Vec<String> = items.into_iter().map(|i| format!("\"{}\"", i.as_ref())).collect();
    items.join(", ")
}

/// `container "a"`, `containers "a", "b"`
fn these(containers: &[&str]) -> String {
    format!("{} {}", plural("container", "containers", containers.len()), quoted(containers))
}

fn app_armor(pod: &Pod<'_>) -> Option<Violation> {
    const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
    let allowed = |kind: &str| matches!(kind, "RuntimeDefault" | "Localhost");
    let (mut setters, values) = pod.setters("/appArmorProfile/type", allowed);
    let annotations = pod.metadata["annotations"].as_object().into_iter().flatten();
    let mut wrong: Vec<String> = annotations
        .filter(|(key, _)| key.starts_with(ANNOTATION))
        .filter_map(|(key, value)| Some((key, value.as_str()?)))
        .filter(|(_, v)| !v.is_empty() && *v != "runtime/default" && !v.starts_with("localhost/"))
        .map(|(key, value)| format!("{key}={value:?}"))
        .collect();
    if !wrong.is_empty() {
        setters.push(plural("annotation", "annotations", wrong.len()).into());
        wrong.sort();
    }
    let values: Vec<String> = values.into_iter().chain(wrong).collect();
    (!setters.is_empty()).then(|| {
        let reason = plural("forbidden AppArmor profile", "forbidden AppArmor profiles", values.len());
        let setters = setters.join(" and ");
        violation(reason, format!("{setters} must not set AppArmor profile type to {}", quoted(values)))
    })
}

const CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Containers that add capabilities that are not allowed, and which.
fn added(pod: &Pod<'_>, allowed: &[&str]) -> Option<String> {
    let mut found = BTreeSet::new();
    let adds = |container: &&Value| {
        let add = &container["securityContext"]["capabilities"]["add"];
        let wrong: Vec<&str> = strings(add).filter(|c| !allowed.contains(c)).collect();
        found.extend(wrong.iter().map(|&c| c.to_owned()));
        !wrong.is_empty()
    };
    let containers: Vec<&str> = pod.containers().filter(adds).map(name).collect();
    (!containers.is_empty()).then(|| {
        format!(
            "{} must not include {} in securityContext.capabilities.add",
            these(&containers),
            quoted(found)
        )
    })
}

fn baseline_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    added(pod, &CAPABILITIES).map(|detail| violation("non-default capabilities", detail))
}

fn host_namespaces(pod: &Pod<'_>) -> Option<Violation> {
    let used: Vec<String> = ["hostNetwork", "hostPID", "hostIPC"]
        .iter()
        .filter(|key| pod.spec[**key] == true)
        .map(|key| format!("{key}=true"))
        .collect();
    (!used.is_empty()).then(|| violation("host namespaces", used.join(", ")))
}

fn host_paths(pod: &Pod<'_>) -> Option<Violation> {
    let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
    let names: Vec<&str> = volumes.filter(|v| !v["hostPath"].is_null()).map(name).collect();
    (!names.is_empty()).then(|| {
        let detail = format!("{} {}", plural("volume", "volumes", names.len()), quoted(&names));
        violation("hostPath volumes", detail)
    })
}

fn host_ports(pod: &Pod<'_>) -> Option<Violation> {
    let ports_of = |container: &Value| -> Vec<i64> {
        let ports = container["ports"].as_array().into_iter().flatten();
        ports.filter_map(|p| p["hostPort"].as_i64()).filter(|p| *p != 0).collect()
    };
    let containers = pod.containers_where(|c| !ports_of(c).is_empty());
    let ports: BTreeSet<String> = pod.containers().flat_map(ports_of).map(|p| p.to_string()).collect();
    (!containers.is_empty()).then(|| {
        let detail = format!(
            "{} {} {} {}",
            these(&containers),
            plural("uses", "use", containers.len()),
            plural("hostPort", "hostPorts", ports.len()),
            ports.into_iter().collect::<Vec<_>>().join(", ")
        );
        violation("hostPort", detail)
    })
}

fn probe_hosts(pod: &Pod<'_>) -> Option<Violation> {
    const HANDLERS: [&str; 5] =
        ["/livenessProbe", "/readinessProbe", "/startupProbe", "/lifecycle/postStart", "/lifecycle/preStop"];
    let hosts_of = |container: &Value| -> Vec<String> {
        let handlers = HANDLERS.iter().filter_map(|pointer| container.pointer(pointer));
        let hosts = handlers.flat_map(|h| [h["httpGet"]["host"].as_str(), h["tcpSocket"]["host"].as_str()]);
        hosts.flatten().filter(|host| !host.is_empty()).map(str::to_owned).collect()
    };
    let mut containers = pod.containers_where(|c| !hosts_of(c).is_empty());
    containers.sort_unstable();
    containers.dedup();
    let hosts: BTreeSet<String> = pod.containers().flat_map(hosts_of).collect();
    (!containers.is_empty()).then(|| {
        let detail = format!(
            "{} {} {} {}",
            these(&containers),
            plural("uses", "use", containers.len()),
            plural("probe or lifecycle host", "probe or lifecycle hosts", hosts.len()),
            quoted(hosts)
        );
        violation("probe or lifecycle host", detail)
    })
}

fn privileged(pod: &Pod<'_>) -> Option<Violation> {
    let containers = pod.containers_where(|c| c["securityContext"]["privileged"] == true);
    (!containers.is_empty()).then(|| {
        violation(
            "privileged",
            format!("{} must not set securityContext.privileged=true", these(&containers)),
        )
    })
}

fn proc_mount(pod: &Pod<'_>) -> Option<Violation> {
    let unusual = |c: &Value| {
        let kind = c["securityContext"]["procMount"].as_str();
        kind.filter(|kind| *kind != "Default").map(str::to_owned)
    };
    let containers = pod.containers_where(|c| unusual(c).is_some());
    let kinds: BTreeSet<String> = pod.containers().filter_map(unusual).collect();
    (!containers.is_empty()).then(|| {
        violation(
            "procMount",
            format!("{} must not set securityContext.procMount to {}", these(&containers), quoted(kinds)),
        )
    })
}

fn se_linux(pod: &Pod<'_>) -> Option<Violation> {
    let allowed = |kind: &str| {
        matches!(kind, "" | "container_t" | "container_init_t" | "container_kvm_t")
            || (kind == "container_engine_t" && pod.version >= 31)
    };
    let (mut types, mut user, mut role) = (BTreeSet::new(), false, false);
    let mut bad = |context: &Value| {
        let text = |key: &str| context["seLinuxOptions"][key].as_str().unwrap_or_default();
        let wrong = !allowed(text("type"));
        if wrong {
            types.insert(text("type").to_owned());
        }
        user |= !text("user").is_empty();
        role |= !text("role").is_empty();
        wrong || !text("user").is_empty() || !text("role").is_empty()
    };
    let mut setters = Vec::new();
    if bad(&pod.spec["securityContext"]) {
        setters.push("pod".to_owned());
    }
    let containers: Vec<&str> = pod.containers().filter(|c| bad(&c["securityContext"])).map(name).collect();
    if !containers.is_empty() {
        setters.push(these(&containers));
    }
    let mut data = Vec::new();
    if !types.is_empty() {
        data.push(format!("{} {}", plural("type", "types", types.len()), quoted(types)));
    }
    if user {
        data.push("user may not be set".into());
    }
    if role {
        data.push("role may not be set".into());
    }
    (!setters.is_empty()).then(|| {
        let setters = setters.join(" and ");
        let data = data.join("; ");
        violation("seLinuxOptions", format!("{setters} set forbidden securityContext.seLinuxOptions: {data}"))
    })
}

fn is_confined(kind: &str) -> bool {
    matches!(kind, "RuntimeDefault" | "Localhost")
}

fn unconfined(pod: &Pod<'_>) -> Option<Violation> {
    let (setters, values) = pod.setters("/seccompProfile/type", is_confined);
    (!setters.is_empty()).then(|| {
        let detail = format!(
            "{} must not set securityContext.seccompProfile.type to {}",
            setters.join(" and "),
            quoted(values)
        );
        violation("seccompProfile", detail)
    })
}

/// Before 1.19 there were only annotations, which mean nothing today.
fn baseline_seccomp(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version < 19 { None } else { unconfined(pod) }
}

const SYSCTLS: [(&str, u32); 12] = [
    ("kernel.shm_rmid_forced", 0),
    ("net.ipv4.ip_local_port_range", 0),
    ("net.ipv4.tcp_syncookies", 0),
    ("net.ipv4.ping_group_range", 0),
    ("net.ipv4.ip_unprivileged_port_start", 0),
    ("net.ipv4.ip_local_reserved_ports", 27),
    ("net.ipv4.tcp_keepalive_time", 29),
    ("net.ipv4.tcp_fin_timeout", 29),
    ("net.ipv4.tcp_keepalive_intvl", 29),
    ("net.ipv4.tcp_keepalive_probes", 29),
    ("net.ipv4.tcp_rmem", 32),
    ("net.ipv4.tcp_wmem", 32),
];

fn sysctls(pod: &Pod<'_>) -> Option<Violation> {
    let safe = |sysctl: &str| SYSCTLS.iter().any(|(name, since)| *name == sysctl && *since <= pod.version);
    let set = pod.spec["securityContext"]["sysctls"].as_array().into_iter().flatten();
    let unsafe_ones: Vec<&str> = set.map(name).filter(|sysctl| !safe(sysctl)).collect();
    (!unsafe_ones.is_empty()).then(|| violation("forbidden sysctls", unsafe_ones.join(", ")))
}

fn host_process(pod: &Pod<'_>) -> Option<Violation> {
    let asks = |context: &Value| context["windowsOptions"]["hostProcess"] == true;
    let mut setters = Vec::new();
    if asks(&pod.spec["securityContext"]) {
        setters.push("pod".to_owned());
    }
    let containers = pod.containers_where(|c| asks(&c["securityContext"]));
    if !containers.is_empty() {
        setters.push(these(&containers));
    }
    (!setters.is_empty()).then(|| {
        let setters = setters.join(" and ");
        let detail = format!("{setters} must not set securityContext.windowsOptions.hostProcess=true");
        violation("hostProcess", detail)
    })
}

fn privilege_escalation(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() {
        return None;
    }
    let containers = pod.containers_where(|c| c["securityContext"]["allowPrivilegeEscalation"] != false);
    (!containers.is_empty()).then(|| {
        let detail =
            format!("{} must set securityContext.allowPrivilegeEscalation=false", these(&containers));
        violation("allowPrivilegeEscalation != false", detail)
    })
}

fn restricted_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() {
        return None;
    }
    let drops = |c: &Value| strings(&c["securityContext"]["capabilities"]["drop"]).any(|c| c == "ALL");
    let keeping = pod.containers_where(|c| !drops(c));
    let mut details = Vec::new();
    if !keeping.is_empty() {
        details.push(format!(r#"{} must set securityContext.capabilities.drop=["ALL"]"#, these(&keeping)));
    }
    details.extend(added(pod, &["NET_BIND_SERVICE"]));
    (!details.is_empty()).then(|| violation("unrestricted capabilities", details.join("; ")))
}

const VOLUMES: [&str; 9] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

fn volumes(pod: &Pod<'_>) -> Option<Violation> {
    fn kind(volume: &Value) -> &str {
        let keys = volume.as_object().into_iter().flatten();
        keys.map(|(key, _)| key.as_str()).find(|key| *key != "name").unwrap_or("emptyDir")
    }
    let all = pod.spec["volumes"].as_array().into_iter().flatten();
    let bad: Vec<(&str, &str)> =
        all.map(|v| (name(v), kind(v))).filter(|(_, kind)| !VOLUMES.contains(kind)).collect();
    let kinds: BTreeSet<&str> = bad.iter().map(|(_, kind)| *kind).collect();
    (!bad.is_empty()).then(|| {
        let detail = format!(
            "{} {} {} {} {}",
            plural("volume", "volumes", bad.len()),
            quoted(bad.iter().map(|(name, _)| name)),
            plural("uses", "use", bad.len()),
            plural("restricted volume type", "restricted volume types", kinds.len()),
            quoted(&kinds)
        );
        violation("restricted volume types", detail)
    })
}

fn non_root(pod: &Pod<'_>) -> Option<Violation> {
    const REASON: &str = "runAsNonRoot != true";
    if pod.version >= 35 && pod.has_own_users() {
        return None;
    }
    let of = |context: &Value| context["runAsNonRoot"].as_bool();
    let whole = of(&pod.spec["securityContext"]);
    let mut setters = Vec::new();
    if whole == Some(false) {
        setters.push("pod".to_owned());
    }
    let explicit = pod.containers_where(|c| of(&c["securityContext"]) == Some(false));
    if !explicit.is_empty() {
        setters.push(these(&explicit));
    }
    if !setters.is_empty() {
        let setters = setters.join(" and ");
        return Some(violation(REASON, format!("{setters} must not set securityContext.runAsNonRoot=false")));
    }
    let silent = pod.containers_where(|c| of(&c["securityContext"]).is_none() && whole != Some(true));
    (!silent.is_empty()).then(|| {
        violation(REASON, format!("pod or {} must set securityContext.runAsNonRoot=true", these(&silent)))
    })
}

fn run_as_user(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version >= 35 && pod.has_own_users() {
        return None;
    }
    let is_root = |context: &Value| context["runAsUser"] == 0;
    let mut setters = Vec::new();
    if is_root(&pod.spec["securityContext"]) {
        setters.push("pod".to_owned());
    }
    let containers = pod.containers_where(|c| is_root(&c["securityContext"]));
    if !containers.is_empty() {
        setters.push(these(&containers));
    }
    (!setters.is_empty())
        .then(|| violation("runAsUser=0", format!("{} must not set runAsUser=0", setters.join(" and "))))
}

fn restricted_seccomp(pod: &Pod<'_>) -> Option<Violation> {
    if pod.is_windows() {
        return None;
    }
    if let Some(violation) = unconfined(pod) {
        return Some(violation);
    }
    let set = |context: &Value| context["seccompProfile"]["type"].is_string();
    if set(&pod.spec["securityContext"]) {
        return None;
    }
    let silent = pod.containers_where(|c| !set(&c["securityContext"]));
    (!silent.is_empty()).then(|| {
        let detail = format!(
            r#"pod or {} must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost""#,
            these(&silent)
        );
        violation("seccompProfile", detail)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn told(level: Level, version: Option<u32>, spec: Value) -> Vec<String> {
        let pod = json!({"metadata": {}, "spec": spec});
        let violations = run(Rule { level, version }, &pod);
        violations.into_iter().map(|v| format!("{} ({})", v.reason, v.detail)).collect()
    }

    fn container(context: Value) -> Value {
        json!({"containers": [{"name": "c", "securityContext": context}]})
    }

    #[test]
    fn baseline_refuses_what_reaches_the_node() {
        let rows = [
            (
                json!({"hostNetwork": true, "hostIPC": true}),
                "host namespaces (hostNetwork=true, hostIPC=true)",
            ),
            (
                container(json!({"privileged": true})),
                r#"privileged (container "c" must not set securityContext.privileged=true)"#,
            ),
            (
                container(json!({"capabilities": {"add": ["CHOWN", "SYS_ADMIN"]}})),
                r#"non-default capabilities (container "c" must not include "SYS_ADMIN" in securityContext.capabilities.add)"#,
            ),
            (
                json!({"volumes": [{"name": "a", "hostPath": {}}, {"name": "b", "hostPath": {}}]}),
                r#"hostPath volumes (volumes "a", "b")"#,
            ),
            (
                json!({"containers": [{"name": "c", "ports": [{"hostPort": 80}, {"hostPort": 443}]}]}),
                r#"hostPort (container "c" uses hostPorts 443, 80)"#,
            ),
            (
                json!({"containers": [{"name": "c", "livenessProbe": {"httpGet": {"host": "x"}}}]}),
                r#"probe or lifecycle host (container "c" uses probe or lifecycle host "x")"#,
            ),
            (
                container(json!({"procMount": "Unmasked"})),
                r#"procMount (container "c" must not set securityContext.procMount to "Unmasked")"#,
            ),
            (
                json!({"securityContext": {"seLinuxOptions": {"type": "x", "user": "u"}}}),
                r#"seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type "x"; user may not be set)"#,
            ),
            (
                json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
                r#"seccompProfile (pod must not set securityContext.seccompProfile.type to "Unconfined")"#,
            ),
            (
                json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax"}, {"name": "net.ipv4.tcp_rmem"}]}}),
                "forbidden sysctls (kernel.msgmax)",
            ),
            (
                container(json!({"windowsOptions": {"hostProcess": true}})),
                r#"hostProcess (container "c" must not set securityContext.windowsOptions.hostProcess=true)"#,
            ),
            (
                container(json!({"appArmorProfile": {"type": "Unconfined"}})),
                r#"forbidden AppArmor profile (container "c" must not set AppArmor profile type to "Unconfined")"#,
            ),
        ];
        for (spec, expected) in rows {
            assert_eq!(told(Level::Baseline, None, spec.clone()), [expected], "{spec}");
            assert!(told(Level::Privileged, None, spec).is_empty());
        }
    }

    #[test]
    fn restricted_wants_everything_said() {
        assert_eq!(
            told(Level::Restricted, None, container(json!({}))),
            [
                r#"allowPrivilegeEscalation != false (container "c" must set securityContext.allowPrivilegeEscalation=false)"#,
                r#"unrestricted capabilities (container "c" must set securityContext.capabilities.drop=["ALL"])"#,
                r#"runAsNonRoot != true (pod or container "c" must set securityContext.runAsNonRoot=true)"#,
                r#"seccompProfile (pod or container "c" must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")"#,
            ]
        );
        let mut good = container(json!({
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        }));
        good["securityContext"] = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
        assert!(told(Level::Restricted, None, good.clone()).is_empty());
        good["volumes"] = json!([{"name": "v", "hostPath": {"path": "/"}}, {"name": "ok", "image": {}}]);
        assert_eq!(
            told(Level::Restricted, None, good),
            [r#"restricted volume types (volume "v" uses restricted volume type "hostPath")"#]
        );
    }

    #[test]
    fn versions_are_kept_apart() {
        let rmem = json!({"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_rmem"}]}});
        assert_eq!(told(Level::Baseline, Some(31), rmem.clone()).len(), 1);
        assert!(told(Level::Baseline, Some(32), rmem.clone()).is_empty());
        assert!(told(Level::Baseline, Some(99), rmem).is_empty());
        let mut own_users = container(json!({"procMount": "Unmasked"}));
        own_users["hostUsers"] = false.into();
        assert!(told(Level::Baseline, None, own_users.clone()).is_empty());
        assert_eq!(told(Level::Baseline, Some(34), own_users.clone()).len(), 1);
        let restricted = told(Level::Restricted, None, own_users);
        assert!(restricted.iter().any(|t| t.starts_with("procMount")), "{restricted:?}");
        assert!(!restricted.iter().any(|t| t.starts_with("runAsNonRoot")), "{restricted:?}");
    }
}

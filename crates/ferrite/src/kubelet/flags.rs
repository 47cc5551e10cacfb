//! The kubelet's command line, with upstream's flags: those of one process, and one for many a field of its configuration.

use super::settings::{Form, Setting, Settings};
use super::table::SETTINGS;
use ferrite_component::nearest;
use ferrite_kubelet::ExternalCloudProvider;
use ferrite_network::{Addresses, IpFamily};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

/// A command line that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    #[error("unknown flag: --{name}{hint}")]
    Unknown { name: String, hint: String },
    #[error("unknown command {0:?}: the kubelet takes flags only")]
    Argument(String),
    #[error("--{0} needs a value")]
    NoValue(String),
    #[error("--{name}: {value:?} is not {wanted}")]
    Value { name: &'static str, value: String, wanted: &'static str },
    #[error("--{name} cannot be {value:?}: Ferrite's kubelet does not have it; leave it out")]
    Unsupported { name: &'static str, value: String },
    #[error("--cloud-provider: {0:?} is no cloud provider; name external, or none")]
    CloudProvider(String),
    #[error(
        "--node-labels: unknown 'kubernetes.io' or 'k8s.io' labels specified: {0}; a kubelet may set only some of them"
    )]
    Label(String),
}

/// Flags of the process, with a value each, and their descriptions.
const PROCESS: &[(&str, &str)] = &[
    ("config", "KubeletConfiguration file; flags are laid over it"),
    ("config-dir", "directory of drop-ins for it: files that end in .conf, in the order of their names"),
    ("kubeconfig", "kubeconfig file; without it the kubelet runs static pods alone, without an API server"),
    ("bootstrap-kubeconfig", "kubeconfig file with which the first client certificate is asked for"),
    ("hostname-override", "name of the node; the host name without it"),
    (
        "node-ip",
        "addresses of the node, one or one of each family; that of the default route's interface without it",
    ),
    ("cloud-provider", "external: a cloud provider that runs elsewhere knows the node; none without it"),
    ("lock-file", "file that one kubelet at a time has locked; others wait for it"),
    ("cert-dir", "directory of the kubelet's certificates; /var/lib/kubelet/pki without it"),
    ("root-dir", "directory of pods and volumes; /var/lib/kubelet without it"),
    ("node-labels", "labels of the node: a=b,c=d"),
    ("image-credential-provider-config", "file or directory with the configuration of credential providers"),
    ("image-credential-provider-bin-dir", "directory of the credential providers' programs"),
    ("v", "how much to log"),
];

/// Flags of upstream's process that are taken with their default only.
const DEFAULT_ONLY: &[(&str, &str)] = &[
    ("runtime-cgroups", ""),
    ("exit-on-lock-contention", "false"),
    ("minimum-container-ttl-duration", "0s"),
    ("maximum-dead-containers-per-container", "1"),
    ("maximum-dead-containers", "-1"),
    ("experimental-mounter-path", ""),
    ("experimental-allocatable-ignore-eviction", "false"),
    ("log-json-info-buffer-size", "0"),
    ("log-json-split-stream", "false"),
    ("log-text-info-buffer-size", "0"),
    ("log-text-split-stream", "false"),
];

/// The choice of the node's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeIp {
    /// That of the default route, of IPv4 if there is one.
    Any,
    /// That of the default route, of this family if there is one.
    Preferred(IpFamily),
    Given(Addresses),
}

/// A command line that was read.
#[derive(Debug, Default)]
pub struct Flags {
    process: BTreeMap<&'static str, String>,
    /// Fields of the configuration, in the order of the command line.
    pub settings: Vec<(&'static Setting, String)>,
    pub help: bool,
    pub version: bool,
}

impl Flags {
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, FlagError> {
        let mut flags = Self::default();
        let mut arguments = arguments.into_iter().map(|a| a.to_string_lossy().into_owned());
        while let Some(argument) = arguments.next() {
            let Some(rest) = argument.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
                return Err(FlagError::Argument(argument));
            };
            let rest = rest.strip_prefix('-').unwrap_or(rest);
            let (name, mut value) = match rest.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (rest, None),
            };
            // As pflag's names for upstream: `--tls_cert_file` is `--tls-cert-file`.
            let name = &*name.replace('_', "-");
            if matches!(name, "help" | "h") {
                flags.help = true;
                continue;
            }
            if name == "version" {
                flags.version = true;
                continue;
            }
            let setting = SETTINGS.iter().find(|s| !s.flag.is_empty() && s.flag == name);
            let process = PROCESS.iter().chain(DEFAULT_ONLY).find(|(known, _)| *known == name);
            if setting.is_none() && process.is_none() {
                let known = SETTINGS.iter().map(|s| s.flag).chain(PROCESS.iter().map(|(name, _)| *name));
                let hint = nearest(name, known.filter(|name| !name.is_empty()));
                let hint = hint.map(|known| format!(" (did you mean --{known}?)")).unwrap_or_default();
                return Err(FlagError::Unknown { name: name.to_owned(), hint });
            }
            const SWITCHES: &[&str] = &[
                "exit-on-lock-contention",
                "experimental-allocatable-ignore-eviction",
                "log-json-split-stream",
                "log-text-split-stream",
            ];
            let is_switch = setting.is_some_and(|s| s.form == Form::Bool) || SWITCHES.contains(&name);
            if value.is_none() {
                value = if is_switch { Some("true".to_owned()) } else { arguments.next() };
            }
            let value = value.ok_or_else(|| FlagError::NoValue(name.to_owned()))?;
            match (setting, process) {
                (Some(setting), _) => flags.settings.push((setting, value)),
                (None, Some((name, default))) if DEFAULT_ONLY.iter().any(|(known, _)| known == name) => {
                    if value != *default {
                        return Err(FlagError::Unsupported { name, value });
                    }
                }
                (None, Some((name, _))) => drop(flags.process.insert(name, value)),
                (None, None) => {}
            }
        }
        Ok(flags)
    }

    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(PathBuf::from)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.process.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    pub fn verbosity(&self) -> u8 {
        self.text("v").and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    pub fn node_ip(&self) -> Result<NodeIp, FlagError> {
        let Some(text) = self.text("node-ip") else { return Ok(NodeIp::Any) };
        let bad = || FlagError::Value {
            name: "node-ip",
            value: text.to_owned(),
            wanted: "one address of the node, or one of each family, or 0.0.0.0 or :: alone",
        };
        let addresses: Addresses = text.parse().map_err(|_| bad())?;
        let several = addresses.iter().count() > 1;
        match addresses.iter().any(|address| address.is_unspecified()) {
            true if several => Err(bad()),
            true => Ok(NodeIp::Preferred(IpFamily::of(*addresses.primary()))),
            false => Ok(NodeIp::Given(addresses)),
        }
    }

    /// The cloud provider that runs elsewhere, with the addresses that an administrator gave the node.
    pub fn cloud_provider(&self) -> Result<Option<ExternalCloudProvider>, FlagError> {
        match self.text("cloud-provider") {
            None => Ok(None),
            Some("external") => {
                let provided = match self.node_ip()? {
                    NodeIp::Given(addresses) => addresses.iter().copied().collect(),
                    NodeIp::Any | NodeIp::Preferred(_) => Vec::new(),
                };
                let without_address = matches!(self.node_ip()?, NodeIp::Any);
                Ok(Some(ExternalCloudProvider { provided, without_address }))
            }
            Some(other) => Err(FlagError::CloudProvider(other.to_owned())),
        }
    }

    /// Every flag with its value, for `/flagz`. Headers of requests may be secret.
    pub fn shown(&self, settings: &Settings) -> BTreeMap<String, String> {
        let of_process = PROCESS.iter().map(|(name, _)| {
            let value = self.process.get(name).cloned().unwrap_or_default();
            ((*name).to_owned(), value)
        });
        let of_fields = SETTINGS.iter().filter(|s| !s.flag.is_empty() && s.flag != "manifest-url-header");
        let of_fields = of_fields.map(|setting| {
            let value = settings.value(setting.field);
            (setting.flag.to_owned(), value.as_str().map_or_else(|| value.to_string(), str::to_owned))
        });
        of_process.chain(of_fields).collect()
    }

    pub fn node_labels(&self) -> Result<BTreeMap<String, String>, FlagError> {
        let mut labels = BTreeMap::new();
        for part in self.text("node-labels").unwrap_or_default().split(',').filter(|p| !p.trim().is_empty()) {
            let (key, value) = part.trim().split_once('=').ok_or_else(|| FlagError::Value {
                name: "node-labels",
                value: part.to_owned(),
                wanted: "like key=value",
            })?;
            if !may_label_itself(key) {
                return Err(FlagError::Label(key.to_owned()));
            }
            labels.insert(key.to_owned(), value.to_owned());
        }
        Ok(labels)
    }
}

/// As upstream: of the project's own labels a node gives itself the well-known ones and those meant for it.
fn may_label_itself(key: &str) -> bool {
    const KNOWN: &[&str] = &[
        "kubernetes.io/hostname",
        "kubernetes.io/arch",
        "kubernetes.io/os",
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/instance-type",
        "node.kubernetes.io/instance-type",
        "failure-domain.beta.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.kubernetes.io/region",
        "failure-domain.kubernetes.io/zone",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
    ];
    let Some((prefix, _)) = key.split_once('/') else { return true };
    let within = |domain: &str| prefix == domain || prefix.ends_with(&format!(".{domain}"));
    let theirs = within("kubernetes.io") || within("k8s.io");
    !theirs || KNOWN.contains(&key) || within("kubelet.kubernetes.io") || within("node.kubernetes.io")
}

/// The text of `--help`.
pub fn help() -> String {
    let mut text = String::from(
        "Run the kubelet alone, against any API server and any container runtime with a CRI socket.\n\n\
         Usage: ferrite kubelet [--config FILE] [--config-dir DIR] [--kubeconfig FILE] [FLAGS]\n\nFlags:\n",
    );
    for (name, about) in PROCESS {
        text.push_str(&format!("  --{name:<46} {about}\n"));
    }
    text.push_str("\nFlags for fields of the configuration, with the default:\n");
    for setting in SETTINGS.iter().filter(|s| !s.flag.is_empty()) {
        text.push_str(&format!("  --{:<46} {} ({})\n", setting.flag, setting.field, setting.default));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn parse(line: &str) -> Result<Flags, FlagError> {
        Flags::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn upstreams_forms_are_understood() {
        let flags = parse("--config /c --kubeconfig=/k --max-pods 5 --anonymous-auth --rotate-certificates=false -v=4 --cloud-provider=").unwrap();
        assert_eq!(flags.path("config"), Some("/c".into()));
        assert_eq!((flags.text("kubeconfig"), flags.verbosity()), (Some("/k"), 4));
        let settings: Vec<_> = flags.settings.iter().map(|(s, v)| format!("{}={v}", s.field)).collect();
        assert_eq!(
            settings.join(" "),
            "maxPods=5 authentication.anonymous.enabled=true rotateCertificates=false"
        );
        assert!(parse("--help").unwrap().help);
    }

    #[test]
    fn mistakes_are_named() {
        for (line, said) in [
            ("--max-pdos 5", "unknown flag: --max-pdos (did you mean --max-pods?)"),
            ("--zzzzzzzzz", "unknown flag: --zzzzzzzzz"),
            ("run", "unknown command \"run\": the kubelet takes flags only"),
            ("--config", "--config needs a value"),
            (
                "--runtime-cgroups=/x",
                "--runtime-cgroups cannot be \"/x\": Ferrite's kubelet does not have it; leave it out",
            ),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), said, "{line}");
        }
    }

    /// The flags of upstream's kubelet in v1.36, but for `help`, `version` and the abbreviation `v`.
    const FLAGS: &str = "address allowed-unsafe-sysctls anonymous-auth authentication-token-webhook \
        authentication-token-webhook-cache-ttl authorization-mode authorization-webhook-cache-authorized-ttl \
        authorization-webhook-cache-unauthorized-ttl bootstrap-kubeconfig cert-dir cgroup-driver cgroup-root \
        cgroups-per-qos client-ca-file cloud-provider cluster-dns cluster-domain config config-dir \
        container-log-max-files container-log-max-size container-runtime-endpoint contention-profiling \
        cpu-cfs-quota cpu-cfs-quota-period cpu-manager-policy cpu-manager-policy-options \
        cpu-manager-reconcile-period enable-controller-attach-detach enable-debugging-handlers enable-server \
        enforce-node-allocatable event-burst event-qps eviction-hard eviction-max-pod-grace-period \
        eviction-minimum-reclaim eviction-pressure-transition-period eviction-soft \
        eviction-soft-grace-period exit-on-lock-contention experimental-allocatable-ignore-eviction \
        experimental-mounter-path fail-cgroupv1 fail-swap-on feature-gates file-check-frequency hairpin-mode \
        healthz-bind-address healthz-port hostname-override http-check-frequency \
        image-credential-provider-bin-dir image-credential-provider-config image-gc-high-threshold \
        image-gc-low-threshold image-service-endpoint kernel-memcg-notification kube-api-burst \
        kube-api-content-type kube-api-qps kube-reserved kube-reserved-cgroup kubeconfig kubelet-cgroups \
        local-storage-capacity-isolation lock-file log-flush-frequency log-json-info-buffer-size \
        log-json-split-stream log-text-info-buffer-size log-text-split-stream logging-format \
        make-iptables-util-chains manifest-url manifest-url-header max-open-files max-pods \
        maximum-dead-containers maximum-dead-containers-per-container memory-manager-policy \
        minimum-container-ttl-duration minimum-image-ttl-duration node-ip node-labels node-status-max-images \
        node-status-update-frequency oom-score-adj pod-cidr pod-manifest-path pod-max-pids pods-per-core \
        port protect-kernel-defaults provider-id qos-reserved read-only-port register-node \
        register-with-taints registry-burst registry-qps reserved-cpus reserved-memory resolv-conf root-dir \
        rotate-certificates rotate-server-certificates runonce runtime-cgroups runtime-request-timeout \
        seccomp-default serialize-image-pulls streaming-connection-idle-timeout sync-frequency \
        system-cgroups system-reserved system-reserved-cgroup tls-cert-file tls-cipher-suites \
        tls-min-version tls-private-key-file topology-manager-policy topology-manager-policy-options \
        topology-manager-scope vmodule volume-plugin-dir volume-stats-agg-period";

    #[test]
    fn every_flag_of_upstream_is_known() {
        let known: BTreeSet<&str> = SETTINGS
            .iter()
            .map(|s| s.flag)
            .chain(PROCESS.iter().map(|(name, _)| *name))
            .chain(DEFAULT_ONLY.iter().map(|(name, _)| *name))
            .filter(|name| !name.is_empty() && *name != "v")
            .collect();
        assert_eq!(known, FLAGS.split_whitespace().collect());
    }

    #[test]
    fn addresses_of_the_node() {
        let given = |text: &str| NodeIp::Given(text.parse().unwrap());
        for (text, expected) in [
            ("", Some(NodeIp::Any)),
            ("192.0.2.1", Some(given("192.0.2.1"))),
            ("192.0.2.1,2001:db8::1", Some(given("192.0.2.1,2001:db8::1"))),
            ("::", Some(NodeIp::Preferred(IpFamily::V6))),
            ("0.0.0.0", Some(NodeIp::Preferred(IpFamily::V4))),
            ("192.0.2.1,::", None),
            ("192.0.2.1,192.0.2.2", None),
            ("here", None),
        ] {
            assert_eq!(parse(&format!("--node-ip={text}")).unwrap().node_ip().ok(), expected, "{text}");
        }
        let provider = |line: &str| parse(line).unwrap().cloud_provider();
        assert_eq!(provider("--cloud-provider="), Ok(None));
        let external = provider("--cloud-provider=external --node-ip=192.0.2.1").unwrap().unwrap();
        assert_eq!((external.provided.len(), external.without_address), (1, false));
        assert!(provider("--cloud-provider=external").unwrap().unwrap().without_address);
        assert!(!provider("--cloud-provider=external --node-ip=::").unwrap().unwrap().without_address);
        assert!(provider("--cloud-provider=aws").unwrap_err().to_string().contains("no cloud provider"));
    }

    #[test]
    fn a_node_may_give_itself_some_labels() {
        for (label, fine) in [
            ("role=web", true),
            ("example.org/role=web", true),
            ("node.kubernetes.io/pool=a", true),
            ("x.node.kubernetes.io/pool=a", true),
            ("topology.kubernetes.io/zone=a", true),
            ("node-role.kubernetes.io/control-plane=", false),
            ("kubernetes.io/x=y", false),
            ("a.k8s.io/x=y", false),
            ("novalue", false),
        ] {
            let flags = parse(&format!("--node-labels={label}")).unwrap();
            assert_eq!(flags.node_labels().is_ok(), fine, "{label}");
        }
    }
}

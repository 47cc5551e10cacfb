//! The kubelet's command line, with upstream's flags: those of one process, and one for many a field of its configuration.

use super::settings::{Form, Setting};
use super::table::SETTINGS;
use ferrite_component::nearest;
use ferrite_network::Addresses;
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
    ("cert-dir", "directory of the kubelet's certificates; /var/lib/kubelet/pki without it"),
    ("root-dir", "directory of pods and volumes; /var/lib/kubelet without it"),
    ("node-labels", "labels of the node: a=b,c=d"),
    ("image-credential-provider-config", "file or directory with the configuration of credential providers"),
    ("image-credential-provider-bin-dir", "directory of the credential providers' programs"),
    ("v", "how much to log"),
];

/// Flags of upstream's process that are taken with their default only.
const DEFAULT_ONLY: &[(&str, &str)] = &[
    ("cloud-provider", ""),
    ("lock-file", ""),
    ("exit-on-lock-contention", "false"),
    ("minimum-container-ttl-duration", "0s"),
    ("maximum-dead-containers-per-container", "1"),
    ("maximum-dead-containers", "-1"),
    ("experimental-mounter-path", ""),
    ("experimental-allocatable-ignore-eviction", "false"),
    ("vmodule", ""),
    ("log-flush-frequency", "5s"),
    ("logging-format", "text"),
];

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
            let is_switch =
                setting.is_some_and(|s| s.form == Form::Bool) || name == "exit-on-lock-contention";
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

    pub fn node_ips(&self) -> Result<Option<Addresses>, FlagError> {
        let bad = |value: &str| FlagError::Value {
            name: "node-ip",
            value: value.to_owned(),
            wanted: "one address of the node, or one of each family",
        };
        self.text("node-ip").map(|text| text.parse().map_err(|_| bad(text))).transpose()
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
                "--cloud-provider=external",
                "--cloud-provider cannot be \"external\": Ferrite's kubelet does not have it; leave it out",
            ),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), said, "{line}");
        }
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

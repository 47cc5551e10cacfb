//! Components by the name the program is called with.

use ferrite_runtime::image::TOOLS;
use std::ffi::OsString;
use std::path::Path;

/// Names that are subcommands as well: a symlink of that name runs the component.
const COMPONENTS: &[&str] = &[
    "kube-controller-manager",
    "kube-scheduler",
    "kube-apiserver",
    "kube-proxy",
    "kubelet",
    "tools",
    "docker",
];

fn called(arguments: &[OsString]) -> &str {
    arguments.first().and_then(|a| Path::new(a).file_name()).and_then(|n| n.to_str()).unwrap_or_default()
}

pub fn is(arguments: &[OsString], name: &str) -> bool {
    called(arguments) == name
}

/// The CNI plugin that the program is called as.
pub fn cni_plugin(arguments: &[OsString]) -> Option<&str> {
    Some(called(arguments)).filter(|name| ferrite_network::cni::plugins::is_plugin(name))
}

/// `kube-apiserver --x` becomes `ferrite kube-apiserver --x`, and `sleep 60` becomes `ferrite tools sleep 60`.
pub fn expand(arguments: &mut Vec<OsString>) {
    let name = called(arguments).to_owned();
    if COMPONENTS.contains(&name.as_str()) {
        arguments.insert(0, "ferrite".into());
        arguments[1] = name.into();
    } else if TOOLS.contains(&name.as_str()) {
        arguments.splice(..1, ["ferrite".into(), "tools".into(), name.into()]);
    }
}

/// Components whose flags are upstream's, and are read by clap.
const PFLAG: &[&str] = &["kube-controller-manager", "kube-scheduler", "kube-apiserver", "kube-proxy"];

/// The flag that may be given several times, each time for other gates.
const GATES: &str = "--feature-gates";

/// Gives the flags of a component the form that clap reads, as pflag does for upstream's: `--tls_cert_file` is
/// `--tls-cert-file`, and the gates of several `--feature-gates` count together. Returns true if the version is asked for.
pub fn as_pflag(arguments: &mut Vec<OsString>) -> bool {
    let is_component = |name: &OsString| name.to_str().is_some_and(|name| PFLAG.contains(&name));
    let Some(at) = arguments.iter().position(is_component) else { return false };
    // Our own option may come first. The name of a component that is something else there is no component.
    let mut before = arguments[1..at].iter();
    while let Some(argument) = before.next() {
        match argument.to_str() {
            Some("-v" | "--v") => drop(before.next()),
            Some(option) if option.starts_with('-') => {}
            _ => return false,
        }
    }
    let mut gates: Vec<String> = Vec::new();
    let mut given = arguments.split_off(at + 1).into_iter();
    let mut asks_version = false;
    while let Some(argument) = given.next() {
        let Some(text) = argument.to_str().filter(|text| text.starts_with("--")) else {
            arguments.push(argument);
            continue;
        };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name.replace('_', "-"), Some(value)),
            None => (text.replace('_', "-"), None),
        };
        match (&*name, value) {
            ("--", None) => {
                arguments.push(argument);
                arguments.extend(given);
                break;
            }
            (GATES, Some(value)) => gates.push(value.to_owned()),
            (GATES, None) => match given.next() {
                Some(value) => gates.push(value.to_string_lossy().into_owned()),
                None => arguments.push(GATES.into()),
            },
            ("--version", None | Some("true")) => asks_version = true,
            (_, Some(value)) => arguments.push(format!("{name}={value}").into()),
            (_, None) => arguments.push(name.into()),
        }
    }
    if !gates.is_empty() {
        arguments.insert(at + 1, format!("{GATES}={}", gates.join(",")).into());
    }
    asks_version
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_equal_flags_counts() {
        use clap::Parser;
        for (name, flag) in [
            ("kube-apiserver", "--feature-gates="),
            ("kube-controller-manager", "--feature-gates="),
            ("kube-scheduler", "--feature-gates="),
            ("kube-proxy", "--hostname-override=a"),
        ] {
            assert!(crate::cli::Cli::try_parse_from(["ferrite", name, flag, flag]).is_ok(), "{name}");
        }
    }

    #[test]
    fn flags_are_read_as_pflag_reads_them() {
        for (given, read, asks_version) in [
            (
                "ferrite kube-scheduler --tls_cert_file=a_b",
                "ferrite kube-scheduler --tls-cert-file=a_b",
                false,
            ),
            (
                "ferrite -v 2 kube-apiserver --secure_port 7 x_y",
                "ferrite -v 2 kube-apiserver --secure-port 7 x_y",
                false,
            ),
            (
                "ferrite kube-proxy --feature-gates=A=true --a --feature_gates B=false,C=true",
                "ferrite kube-proxy --feature-gates=A=true,B=false,C=true --a",
                false,
            ),
            ("ferrite kube-proxy --feature-gates", "ferrite kube-proxy --feature-gates", false),
            ("ferrite kube-proxy --version", "ferrite kube-proxy", true),
            ("ferrite kube-proxy -- --a_b", "ferrite kube-proxy -- --a_b", false),
            ("ferrite tools get kube-proxy --a_b", "ferrite tools get kube-proxy --a_b", false),
            ("ferrite up --data_dir=x", "ferrite up --data_dir=x", false),
        ] {
            let mut arguments: Vec<OsString> = given.split(' ').map(OsString::from).collect();
            assert_eq!(as_pflag(&mut arguments), asks_version, "{given}");
            assert_eq!(arguments, read.split(' ').collect::<Vec<_>>(), "{given}");
        }
    }

    #[test]
    fn a_symlink_runs_the_component() {
        let mut arguments: Vec<OsString> = vec!["/usr/bin/kube-apiserver".into(), "--help".into()];
        expand(&mut arguments);
        assert_eq!(arguments, ["ferrite", "kube-apiserver", "--help"]);
        let mut tool: Vec<OsString> = vec!["/bin/sleep".into(), "60".into()];
        expand(&mut tool);
        assert_eq!(tool, ["ferrite", "tools", "sleep", "60"]);
        let mut plain: Vec<OsString> = vec!["./ferrite".into(), "up".into()];
        expand(&mut plain);
        assert_eq!(plain, ["./ferrite", "up"]);
        assert_eq!(cni_plugin(&plain), None);
        assert_eq!(cni_plugin(&["/opt/cni/bin/host-local".into()]), Some("host-local"));
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

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

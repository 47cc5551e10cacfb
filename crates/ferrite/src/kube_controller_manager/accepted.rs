//! Flags of upstream's controller manager that have nothing to act on here, so that a command line of upstream's works as it
//! is. A value that would change something is refused.

use clap::builder::ArgAction;
use clap::{Arg, ArgMatches, Command};

/// The values that a flag may have.
enum Values {
    /// Any: there is nothing that it could change.
    Any,
    /// A switch that changes nothing either way.
    Switch,
    /// These, the first of which is upstream's default; others ask for something that there is not.
    Only(&'static [&'static str]),
}

use Values::{Any, Only, Switch};

/// A flag, its values, and the reason why it has no effect.
struct Accepted {
    name: &'static str,
    values: Values,
    why: &'static str,
}

const fn row(name: &'static str, values: Values, why: &'static str) -> Accepted {
    Accepted { name, values, why }
}

const EVENTS: &str = "changes arrive as events, nothing is synced by time";
const CLOUD: &str = "there is no cloud provider in this manager";
const RECYCLER: &str = "nobody recycles volumes";
const TOKENS: &str = "callers show bearer tokens, and nothing else is trusted";
const SERVING: &str = "the port has one certificate and the TLS settings of the program";
const METRICS: &str = "all metrics are always shown";
const LOGS: &str = "there is one form of log; -v says how much";

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("allow-metric-labels", Only(&["", "[]"]), METRICS),
    row("allow-metric-labels-manifest", Only(&[""]), METRICS),
    row("attach-detach-reconcile-sync-period", Any, EVENTS),
    row("authentication-skip-lookup", Switch, TOKENS),
    row("authentication-tolerate-lookup-failure", Switch, TOKENS),
    row("cert-dir", Any, "a certificate that is made at the start is kept in memory"),
    row("cidr-allocator-type", Only(&["RangeAllocator"]), CLOUD),
    row("client-ca-file", Any, TOKENS),
    row("cloud-config", Only(&[""]), CLOUD),
    row("cloud-provider", Only(&["", "external"]), CLOUD),
    row("cluster-name", Any, CLOUD),
    row("concurrent-service-syncs", Any, CLOUD),
    row("configure-cloud-routes", Switch, CLOUD),
    row("contention-profiling", Only(&["false"]), "the program is not profiled through its port"),
    row("controller-shutdown-timeout", Any, "controllers end at once: nothing is lost by that"),
    row("controller-start-interval", Any, "controllers start together"),
    row("disable-attach-detach-reconcile-sync", Switch, EVENTS),
    row("disable-http2-serving", Only(&["false"]), SERVING),
    row("disabled-metrics", Only(&[""]), METRICS),
    row("emulated-version", Only(&["", "1.36", "kube=1.36"]), "this program is v1.36"),
    row("enable-hostpath-provisioner", Only(&["false"]), "the provisioner of local volumes is part of `ferrite up`"),
    row("enable-leader-migration", Only(&["false"]), "there is one lease for all controllers"),
    row("endpoint-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("external-cloud-volume-plugin", Only(&[""]), CLOUD),
    row("flex-volume-plugin-dir", Any, "controllers call no FlexVolume plugins"),
    row("http2-max-streams-per-connection", Any, SERVING),
    row("kube-api-burst", Any, "the API server limits requests"),
    row("kube-api-content-type", Any, "requests are JSON"),
    row("kube-api-qps", Any, "the API server limits requests"),
    row("leader-migration-config", Only(&[""]), "there is one lease for all controllers"),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("min-compatibility-version", Only(&["", "1.36", "kube=1.36", "1.35", "kube=1.35"]), "this program is v1.36"),
    row("min-resync-period", Any, EVENTS),
    row("mirroring-endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("namespace-sync-period", Any, EVENTS),
    row("node-monitor-period", Any, EVENTS),
    row("permit-address-sharing", Only(&["false"]), SERVING),
    row("permit-port-sharing", Only(&["false"]), SERVING),
    row("profiling", Switch, "the program is not profiled through its port"),
    row("pv-recycler-increment-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-hostpath", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-hostpath", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-nfs", Any, RECYCLER),
    row("pv-recycler-timeout-increment-hostpath", Any, RECYCLER),
    row("pvclaimbinder-sync-period", Any, EVENTS),
    row("requestheader-allowed-names", Any, TOKENS),
    row("requestheader-client-ca-file", Any, TOKENS),
    row("requestheader-extra-headers-prefix", Any, TOKENS),
    row("requestheader-group-headers", Any, TOKENS),
    row("requestheader-uid-headers", Any, TOKENS),
    row("requestheader-username-headers", Any, TOKENS),
    row("route-reconciliation-period", Any, CLOUD),
    row("show-hidden-metrics-for-version", Only(&[""]), METRICS),
    row("tls-cipher-suites", Only(&[""]), SERVING),
    row("tls-curve-preferences", Only(&[""]), SERVING),
    row("tls-min-version", Only(&["", "VersionTLS12"]), SERVING),
    row("tls-sni-cert-key", Only(&["", "[]"]), SERVING),
    row("vmodule", Only(&[""]), LOGS),
];

/// Marks that a command line may have these flags. Reading it refuses values that ask for something.
#[derive(Debug, Clone, Copy, Default)]
pub struct AcceptedFlags;

impl clap::Args for AcceptedFlags {
    fn augment_args(mut command: Command) -> Command {
        for flag in ACCEPTED {
            let help = match flag.values {
                Only(values) => format!("No effect ({}); {} only", flag.why, quoted(values)),
                Any | Switch => format!("No effect: {}", flag.why),
            };
            let mut arg = Arg::new(flag.name)
                .long(flag.name)
                .help(help)
                .help_heading("Accepted as upstream's")
                .hide_short_help(true)
                .allow_hyphen_values(true)
                .action(ArgAction::Set);
            if is_switch(&flag.values) {
                arg = arg.num_args(0..=1).require_equals(true).default_missing_value("true");
            }
            command = command.arg(arg);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for AcceptedFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        for flag in ACCEPTED {
            let Some(value) = matches.get_one::<String>(flag.name) else { continue };
            if let Some(problem) = problem(flag, value) {
                return Err(clap::Error::raw(clap::error::ErrorKind::ValueValidation, problem + "\n"));
            }
        }
        Ok(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        Self::from_arg_matches(matches).map(drop)
    }
}

fn quoted(values: &[&str]) -> String {
    values.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(", ")
}

fn is_switch(values: &Values) -> bool {
    match values {
        Switch => true,
        Only(values) => values.first() == Some(&"false"),
        Any => false,
    }
}

/// Why a flag cannot have this value.
fn problem(flag: &Accepted, value: &str) -> Option<String> {
    match flag.values {
        Only(values) if !values.contains(&value) => {
            let (name, why, values) = (flag.name, flag.why, quoted(values));
            Some(format!("--{name} cannot be {value:?}: {why}; give {values}, or leave it out"))
        }
        Switch if !matches!(value, "true" | "false") => {
            Some(format!("--{}: {value:?} is neither true nor false", flag.name))
        }
        Any | Switch | Only(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn read(arguments: &[&str]) -> Result<(), String> {
        let command = AcceptedFlags::augment_args(Command::new("x").no_binary_name(true));
        let matches = command.try_get_matches_from(arguments).map_err(|error| error.to_string())?;
        AcceptedFlags::from_arg_matches(&matches).map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn values_that_ask_for_something_are_refused() {
        for arguments in [
            &["--kube-api-qps=50", "--kube-api-burst", "100"][..],
            &["--profiling"],
            &["--profiling=false"],
            &["--contention-profiling=false"],
            &["--cloud-provider=external"],
            &["--cloud-provider="],
            &["--client-ca-file=/etc/kubernetes/pki/ca.crt"],
            &["--tls-min-version=VersionTLS12"],
        ] {
            assert_eq!(read(arguments), Ok(()), "{arguments:?}");
        }
        for (arguments, part) in [
            (&["--cloud-provider=aws"][..], "--cloud-provider cannot be \"aws\": there is no cloud provider"),
            (&["--contention-profiling"], "--contention-profiling cannot be \"true\""),
            (&["--profiling=maybe"], "neither true nor false"),
            (&["--tls-min-version=VersionTLS13"], "VersionTLS12"),
        ] {
            let refused = read(arguments).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
    }

    #[test]
    fn rows_are_in_order() {
        assert!(ACCEPTED.is_sorted_by_key(|flag| flag.name));
    }
}

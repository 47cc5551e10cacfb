//! Flags of upstream's components that have nothing to act on here, so that a command line of upstream's works as it is. A
//! value that would change something is refused.

use clap::builder::ArgAction;
use clap::{Arg, ArgMatches, Command};
use std::marker::PhantomData;

/// The values that a flag may have.
pub enum Values {
    /// Any: there is nothing that it could change.
    Any,
    /// A switch that changes nothing either way.
    Switch,
    /// These, the first of which is upstream's default; others ask for something that there is not.
    Only(&'static [&'static str]),
}

use Values::{Any, Only, Switch};

/// A flag, its values, and the reason why it has no effect.
pub struct Accepted {
    name: &'static str,
    values: Values,
    why: &'static str,
}

pub const fn row(name: &'static str, values: Values, why: &'static str) -> Accepted {
    Accepted { name, values, why }
}

/// The flags of one component: groups, each in the order of its names.
pub trait AcceptedTable: Clone + Default + std::fmt::Debug {
    const GROUPS: &'static [&'static [Accepted]];

    fn flags() -> impl Iterator<Item = &'static Accepted> {
        Self::GROUPS.iter().copied().flatten()
    }
}

const METRICS: &str = "all metrics are always shown";
const LOGS: &str = "there is one form of log; -v says how much";
pub const VERSION: &str = "this program is v1.36";
const TOKENS: &str = "callers show bearer tokens, and nothing else is trusted";
const SERVING: &str = "the port has one certificate and the TLS settings of the program";

/// Flags of every component.
#[rustfmt::skip]
pub const COMMON: &[Accepted] = &[
    row("allow-metric-labels", Only(&["", "[]"]), METRICS),
    row("allow-metric-labels-manifest", Only(&[""]), METRICS),
    row("disabled-metrics", Only(&[""]), METRICS),
    row("emulated-version", Only(&["", "1.36", "kube=1.36"]), VERSION),
    row("log-flush-frequency", Any, LOGS),
    row("log-json-info-buffer-size", Only(&["0"]), LOGS),
    row("log-json-split-stream", Only(&["false"]), LOGS),
    row("log-text-info-buffer-size", Only(&["0"]), LOGS),
    row("log-text-split-stream", Only(&["false"]), LOGS),
    row("logging-format", Only(&["text"]), LOGS),
    row("min-compatibility-version", Only(&["", "1.36", "kube=1.36", "1.35", "kube=1.35"]), VERSION),
    row("show-hidden-metrics-for-version", Only(&[""]), METRICS),
    row("tls-curve-preferences", Only(&["", "[]"]), "the TLS library chooses among its curves"),
    row("vmodule", Only(&[""]), LOGS),
];

/// Flags of components that are clients of the API server and have a port of their own.
#[rustfmt::skip]
pub const CLIENT: &[Accepted] = &[
    row("authentication-skip-lookup", Switch, TOKENS),
    row("authentication-tolerate-lookup-failure", Switch, TOKENS),
    row("cert-dir", Any, "a certificate that is made at the start is kept in memory"),
    row("client-ca-file", Any, TOKENS),
    row("disable-http2-serving", Only(&["false"]), SERVING),
    row("http2-max-streams-per-connection", Any, SERVING),
    row("kube-api-burst", Any, "the API server limits requests"),
    row("kube-api-content-type", Any, "requests are JSON"),
    row("kube-api-qps", Any, "the API server limits requests"),
    row("permit-address-sharing", Only(&["false"]), SERVING),
    row("permit-port-sharing", Only(&["false"]), SERVING),
    row("profiling", Switch, "the program is not profiled through its port"),
    row("requestheader-allowed-names", Any, TOKENS),
    row("requestheader-client-ca-file", Any, TOKENS),
    row("requestheader-extra-headers-prefix", Any, TOKENS),
    row("requestheader-group-headers", Any, TOKENS),
    row("requestheader-uid-headers", Any, TOKENS),
    row("requestheader-username-headers", Any, TOKENS),
    row("tls-cipher-suites", Only(&[""]), SERVING),
    row("tls-min-version", Only(&["", "VersionTLS12"]), SERVING),
    row("tls-sni-cert-key", Only(&["", "[]"]), SERVING),
];

/// Marks that a command line may have these flags. Reading it refuses values that ask for something.
#[derive(Debug, Clone, Default)]
pub struct AcceptedFlags<T>(PhantomData<T>);

impl<T: AcceptedTable> clap::Args for AcceptedFlags<T> {
    fn augment_args(mut command: Command) -> Command {
        for flag in T::flags() {
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

impl<T: AcceptedTable> clap::FromArgMatches for AcceptedFlags<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        for flag in T::flags() {
            let Some(value) = matches.get_one::<String>(flag.name) else { continue };
            if let Some(problem) = problem(flag, value) {
                return Err(clap::Error::raw(clap::error::ErrorKind::ValueValidation, problem + "\n"));
            }
        }
        Ok(Self(PhantomData))
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

/// A flag cannot have this value.
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

    #[derive(Debug, Clone, Default)]
    struct Flags;

    impl AcceptedTable for Flags {
        const GROUPS: &'static [&'static [Accepted]] = &[&[
            row("client-ca-file", Any, "nobody is trusted"),
            row("cloud-provider", Only(&["", "external"]), "there is no cloud provider"),
            row("contention-profiling", Only(&["false"]), "nothing is profiled"),
            row("kube-api-burst", Any, "the API server limits requests"),
            row("kube-api-qps", Any, "the API server limits requests"),
            row("profiling", Switch, "nothing is profiled"),
            row("tls-min-version", Only(&["", "VersionTLS12"]), "there is one version"),
        ]];
    }

    fn read(arguments: &[&str]) -> Result<(), String> {
        let command = AcceptedFlags::<Flags>::augment_args(Command::new("x").no_binary_name(true));
        let matches = command.try_get_matches_from(arguments).map_err(|error| error.to_string())?;
        AcceptedFlags::<Flags>::from_arg_matches(&matches).map(drop).map_err(|error| error.to_string())
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

    /// The flags of upstream's v1.36, also the deprecated ones that its help does not show.
    const UPSTREAM: [(&str, &str); 4] = [
        ("kube-apiserver", include_str!("upstream_flags/kube-apiserver.txt")),
        ("kube-controller-manager", include_str!("upstream_flags/kube-controller-manager.txt")),
        ("kube-proxy", include_str!("upstream_flags/kube-proxy.txt")),
        ("kube-scheduler", include_str!("upstream_flags/kube-scheduler.txt")),
    ];

    #[test]
    fn every_flag_of_upstream_is_known() {
        use clap::CommandFactory;
        let mut all = crate::cli::Cli::command();
        all.build();
        for (component, flags) in UPSTREAM {
            let command = all.find_subcommand(component).expect(component);
            let known: std::collections::BTreeSet<&str> = command
                .get_arguments()
                .flat_map(|argument| {
                    argument.get_long().into_iter().chain(argument.get_all_aliases().into_iter().flatten())
                })
                .collect();
            let missing: Vec<&str> = flags.lines().filter(|flag| !known.contains(flag)).collect();
            assert!(missing.is_empty(), "{component} does not know {missing:?}");
        }
    }

    #[test]
    fn rows_are_in_order() {
        fn check<T: AcceptedTable>() {
            assert!(T::GROUPS.iter().all(|group| group.is_sorted_by_key(|flag| flag.name)));
        }
        check::<crate::apiserver_flags::ApiServerFlags>();
        check::<crate::kube_scheduler_flags::SchedulerFlags>();
        check::<crate::kube_controller_manager::accepted::ControllerManagerFlags>();
        check::<crate::kube_proxy::accepted::KubeProxyFlags>();
    }
}

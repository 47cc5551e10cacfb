//! The flags that say how many keys a controller works on at once, with upstream's names and defaults.

use std::collections::BTreeMap;

use clap::builder::ArgAction;
use clap::{Arg, ArgMatches, Command};

/// A flag, the controller it is for, and upstream's default.
type Row = (&'static str, &'static str, usize);

const FLAGS: &[Row] = &[
    ("concurrent-cron-job-syncs", "cronjob-controller", 5),
    ("concurrent-daemonset-syncs", "daemonset-controller", 2),
    ("concurrent-deployment-syncs", "deployment-controller", 5),
    ("concurrent-device-taint-eviction-syncs", "device-taint-eviction-controller", 10),
    ("concurrent-endpoint-syncs", "endpoints-controller", 5),
    ("concurrent-ephemeralvolume-syncs", "ephemeral-volume-controller", 5),
    ("concurrent-gc-syncs", "garbage-collector-controller", 20),
    ("concurrent-job-syncs", "job-controller", 5),
    ("concurrent-namespace-syncs", "namespace-controller", 10),
    ("concurrent-rc-syncs", "replicationcontroller-controller", 5),
    ("concurrent-replicaset-syncs", "replicaset-controller", 5),
    ("concurrent-resource-quota-syncs", "resourcequota-controller", 5),
    ("concurrent-resourceclaim-syncs", "resourceclaim-controller", 10),
    ("concurrent-service-endpoint-syncs", "endpointslice-controller", 5),
    ("concurrent-serviceaccount-token-syncs", "serviceaccount-token-controller", 5),
    ("concurrent-statefulset-syncs", "statefulset-controller", 5),
    ("concurrent-ttl-after-finished-syncs", "ttl-after-finished-controller", 5),
    ("concurrent-validating-admission-policy-status-syncs", "validatingadmissionpolicy-status-controller", 5),
    ("mirroring-concurrent-service-endpoint-syncs", "endpointslice-mirroring-controller", 5),
];

/// More would be a mistake: each worker may have a request under way.
const MOST: u64 = 10_000;

/// Workers by the name of their controller.
#[derive(Debug, Clone, Default)]
pub struct Concurrency(pub BTreeMap<&'static str, usize>);

impl clap::Args for Concurrency {
    fn augment_args(mut command: Command) -> Command {
        for (flag, controller, default) in FLAGS {
            let arg = Arg::new(*flag)
                .long(*flag)
                .value_name("N")
                .help(format!("Keys that {controller} works on at once [default: {default}]"))
                .help_heading("Concurrency")
                .hide_short_help(true)
                .value_parser(clap::value_parser!(u64).range(1..=MOST))
                .action(ArgAction::Set);
            command = command.arg(arg);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Concurrency {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let workers = FLAGS.iter().map(|(flag, controller, default)| {
            let given = matches.get_one::<u64>(flag).and_then(|given| usize::try_from(*given).ok());
            (*controller, given.unwrap_or(*default))
        });
        Ok(Self(workers.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    #[test]
    fn every_flag_is_for_a_controller_and_changes_its_workers() {
        for (flag, controller, _) in FLAGS {
            let known = ferrite_controllers::CONTROLLERS.iter().any(|entry| entry.name == *controller);
            assert!(known, "--{flag} is for {controller}, which there is not");
        }
        let command = || Concurrency::augment_args(Command::new("x").no_binary_name(true));
        let matches = command().try_get_matches_from(["--concurrent-gc-syncs=3"]).unwrap();
        let Concurrency(workers) = Concurrency::from_arg_matches(&matches).unwrap();
        assert_eq!((workers["garbage-collector-controller"], workers["daemonset-controller"]), (3, 2));
        assert!(command().try_get_matches_from(["--concurrent-gc-syncs=0"]).is_err());
    }
}

//! Thresholds: when a run of equal outcomes becomes a verdict.

use super::ProbeKind;
use k8s_openapi::api::core::v1::Probe;
use std::time::Duration;

/// One check's outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Success,
    /// Healthy, with a warning.
    Warning(String),
    Failure(String),
    /// The check itself could not be made; counts as nothing.
    Error(String),
}

/// Timing and thresholds of one probe, with upstream's defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thresholds {
    pub initial_delay: Duration,
    pub period: Duration,
    pub timeout: Duration,
    pub success: u32,
    pub failure: u32,
}

impl Thresholds {
    pub(crate) fn of(probe: &Probe) -> Self {
        let seconds = |v: Option<i32>, default: u64| {
            Duration::from_secs(v.and_then(|v| u64::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default))
        };
        let count = |v: Option<i32>, default| {
            v.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default)
        };
        Self {
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, 10),
            timeout: seconds(probe.timeout_seconds, 1),
            success: count(probe.success_threshold, 1),
            failure: count(probe.failure_threshold, 3),
        }
    }
}

/// The effect of one more result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing changes; probe again after the period.
    Continue,
    /// The verdict (true: success); probe again after the period.
    Verdict(bool),
    /// The verdict ends the probing of this container instance: it passed its start, or will be killed.
    Last(bool),
}

/// Counts equal outcomes in a row.
#[derive(Debug)]
pub(crate) struct Machine {
    kind: ProbeKind,
    thresholds: Thresholds,
    last: Option<bool>,
    run: u32,
}

impl Machine {
    pub(crate) fn new(kind: ProbeKind, thresholds: Thresholds) -> Self {
        Self { kind, thresholds, last: None, run: 0 }
    }

    pub(crate) fn observe(&mut self, outcome: &Outcome) -> Step {
        let success = match outcome {
            Outcome::Success | Outcome::Warning(_) => true,
            Outcome::Failure(_) => false,
            Outcome::Error(_) => return Step::Continue,
        };
        if self.last == Some(success) {
            self.run = self.run.saturating_add(1);
        } else {
            self.last = Some(success);
            self.run = 1;
        }
        let threshold = if success { self.thresholds.success } else { self.thresholds.failure };
        if self.run < threshold {
            return Step::Continue;
        }
        match (self.kind, success) {
            (ProbeKind::Startup, _) | (ProbeKind::Liveness, false) => Step::Last(success),
            _ => Step::Verdict(success),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn verdicts_follow_runs_of_equal_outcomes() {
        use ProbeKind::*;
        // 's' success, 'f' failure, 'e' error; expected: '.' continue, 'S'/'F' verdict, upper-case '!' last.
        for (kind, success, failure, outcomes, expected) in [
            (Readiness, 1, 3, "sfffsf", "S..FS."),
            (Readiness, 2, 1, "sssfs", ".SSF."),
            (Liveness, 1, 3, "sffsfff", "S..S..!"),
            (Liveness, 1, 1, "f", "!"),
            (Liveness, 1, 2, "fef", "..!"),
            (Startup, 1, 3, "ffs", "..!"),
            (Startup, 1, 2, "ff", ".!"),
        ] {
            let probe: Probe =
                ferrite_json::from_value(json!({"successThreshold": success, "failureThreshold": failure}))
                    .unwrap();
            let mut machine = Machine::new(kind, Thresholds::of(&probe));
            let seen: String = outcomes
                .chars()
                .map(|c| {
                    let outcome = match c {
                        's' => Outcome::Success,
                        'f' => Outcome::Failure(String::new()),
                        _ => Outcome::Error(String::new()),
                    };
                    match machine.observe(&outcome) {
                        Step::Continue => '.',
                        Step::Verdict(true) => 'S',
                        Step::Verdict(false) => 'F',
                        Step::Last(_) => '!',
                    }
                })
                .collect();
            assert_eq!(seen, expected, "{kind:?} {outcomes}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let t = Thresholds::of(&Probe::default());
        assert_eq!((t.period.as_secs(), t.timeout.as_secs(), t.success, t.failure), (10, 1, 1, 3));
    }
}

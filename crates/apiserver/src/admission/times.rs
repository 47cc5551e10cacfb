//! Durations of each plugin and each expression of admission, under upstream's names.

use crate::metrics::BoundedSeries;
use ferrite_component::metrics::{Family, Histogram, registry};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

const OPERATIONS: [&str; 4] = ["CREATE", "UPDATE", "DELETE", "CONNECT"];
const STEPS: [&str; 2] = ["admit", "validate"];
const CONDITION_SECONDS: &[f64] = &[0.001, 0.005, 0.01, 0.025, 0.1, 0.2, 0.25];
const PLUGIN_SECONDS: &[f64] = &[0.005, 0.025, 0.1, 0.5, 1.0, 2.5];
/// The usual buckets of upstream's library.
const EXPRESSION_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

static PLUGINS: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    registry().histogram(
        "apiserver_admission_controller_admission_duration_seconds",
        "How long a plugin of admission took.",
        &["name", "operation", "rejected", "type"],
        PLUGIN_SECONDS,
    )
});

struct ConditionTimes {
    family: Arc<Family<Histogram>>,
    series: BoundedSeries,
}

static CONDITIONS: LazyLock<ConditionTimes> = LazyLock::new(|| {
    ConditionTimes {
    family: registry().histogram(
        "apiserver_admission_match_condition_evaluation_seconds",
        "Admission match condition evaluation time in seconds, identified by name and broken out for each kind containing \
         matchConditions (webhook or policy), operation and type (validate or admit).",
        &["kind", "name", "operation", "type"],
        CONDITION_SECONDS,
    ),
    series: BoundedSeries::default(),
}
});

/// Records how long the match conditions of a webhook or a policy took.
pub(super) fn conditions_took(kind: &str, name: &str, operation: &str, step: &str, elapsed: Duration) {
    let labels = [kind, name, operation, step];
    if CONDITIONS.series.admits(&labels) {
        CONDITIONS.family.with(&labels).observe(elapsed);
    }
}

/// Times plugins that work one after the other. The clock is read once for each of them: many have nothing to do, and
/// take less time than the reading.
#[derive(Debug)]
pub(super) struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the start or the last lap.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now.duration_since(std::mem::replace(&mut self.0, now))
    }
}

/// The times of one plugin: by step, operation, and whether the plugin refused. Made when they are first needed.
#[derive(Debug, Default)]
pub(super) struct PluginTimes([[[OnceLock<Arc<Histogram>>; 2]; 4]; 2]);

impl PluginTimes {
    /// Does the work of a plugin, and records how long it took since the last lap of the watch. `operation` is one of
    /// admission's four; others are not counted.
    pub fn measure<T, E>(
        &self,
        watch: &mut Stopwatch,
        name: &str,
        validating: bool,
        operation: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let result = work();
        let took = watch.lap();
        if let Some(index) = OPERATIONS.iter().position(|known| *known == operation) {
            let (step, rejected) = (usize::from(validating), result.is_err());
            let series = &self.0[step][index][usize::from(rejected)];
            let labels =
                || PLUGINS.with(&[name, operation, if rejected { "true" } else { "false" }, STEPS[step]]);
            series.get_or_init(labels).observe(took);
        }
        result
    }
}

fn of_expressions(name: &'static str, help: &'static str) -> Arc<Histogram> {
    registry().histogram(name, help, &[], EXPRESSION_SECONDS).with(&[])
}

static COMPILATIONS: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    of_expressions("apiserver_cel_compilation_duration_seconds", "How long an expression took to compile.")
});
static EVALUATIONS: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    of_expressions("apiserver_cel_evaluation_duration_seconds", "How long an expression took to evaluate.")
});

/// Compiles an expression, and records how long it took.
pub(super) fn compilation<T>(work: impl FnOnce() -> T) -> T {
    timed(&COMPILATIONS, work).0
}

/// Evaluates an expression, records how long it took, and returns that time, too.
pub(super) fn evaluation<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    timed(&EVALUATIONS, work)
}

fn timed<T>(times: &Histogram, work: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let result = work();
    let elapsed = started.elapsed();
    times.observe(elapsed);
    (result, elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_measured_by_what_it_did() {
        let times = PluginTimes::default();
        let _: Result<(), ()> = times.measure(&mut Stopwatch::start(), "Tested", true, "CREATE", || Ok(()));
        let _: Result<(), ()> = times.measure(&mut Stopwatch::start(), "Tested", false, "DELETE", || Err(()));
        let _: Result<(), ()> = times.measure(&mut Stopwatch::start(), "Tested", false, "OTHER", || Ok(()));
        let text = registry().text();
        let counts: Vec<&str> = text.lines().filter(|line| line.contains("_count{name=\"Tested\"")).collect();
        let name = "apiserver_admission_controller_admission_duration_seconds_count";
        assert_eq!(
            counts,
            [
                format!(r#"{name}{{name="Tested",operation="CREATE",rejected="false",type="validate"}} 1"#),
                format!(r#"{name}{{name="Tested",operation="DELETE",rejected="true",type="admit"}} 1"#),
            ]
        );
    }
}

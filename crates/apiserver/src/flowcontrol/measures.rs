//! The metrics of flow control, with upstream's names.

use super::demand::Smoothed;
use super::queues::{Queues, Reason};
use super::shares::Bounds;
use ferrite_component::metrics::{Counter, Family, Gauge, Histogram, registry};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const SECONDS: &[f64] = &[0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0];
const BY_FLOW: &[&str] = &["flow_schema", "priority_level"];
const BY_LEVEL: &[&str] = &["priority_level"];

/// A family of gauges, registered under a name when it is first used.
macro_rules! gauges {
    ($($name:ident = $labels:expr, $full:literal, $help:literal;)*) => {
        $(static $name: LazyLock<Arc<Family<Gauge>>> =
            LazyLock::new(|| registry().gauge($full, $help, $labels));)*
    };
}

gauges! {
    EXECUTING = BY_FLOW, "apiserver_flowcontrol_current_executing_requests", "Requests that are served.";
    EXECUTING_SEATS = BY_FLOW, "apiserver_flowcontrol_current_executing_seats", "Seats of the requests that are served.";
    IN_QUEUE = BY_FLOW, "apiserver_flowcontrol_current_inqueue_requests", "Requests that wait in a queue.";
    IN_QUEUE_SEATS = BY_FLOW, "apiserver_flowcontrol_current_inqueue_seats", "Seats of the requests that wait.";
    NOMINAL = BY_LEVEL, "apiserver_flowcontrol_nominal_limit_seats", "Seats of a level by its share.";
    LOWER = BY_LEVEL, "apiserver_flowcontrol_lower_limit_seats", "Seats that a level keeps when it lends all it may.";
    UPPER = BY_LEVEL, "apiserver_flowcontrol_upper_limit_seats", "Seats of a level with all it may borrow.";
    CURRENT = BY_LEVEL, "apiserver_flowcontrol_current_limit_seats", "Seats of a level now.";
    MOST = BY_LEVEL, "apiserver_flowcontrol_demand_seats_high_watermark", "The most seats asked for in the last period.";
    AVERAGE = BY_LEVEL, "apiserver_flowcontrol_demand_seats_average", "Seats asked for on average in the last period.";
    DEVIATION = BY_LEVEL, "apiserver_flowcontrol_demand_seats_stdev", "Standard deviation of the seats asked for.";
    SMOOTHED = BY_LEVEL, "apiserver_flowcontrol_demand_seats_smoothed", "Seats asked for, smoothed over minutes.";
    TARGET = BY_LEVEL, "apiserver_flowcontrol_target_seats", "Seats that a level would like to have.";
    PROGRESS = BY_LEVEL, "apiserver_flowcontrol_current_r", "Seat-seconds given to each active queue so far.";
}

static DISPATCHED: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Requests that were served.";
    registry().counter("apiserver_flowcontrol_dispatched_requests_total", help, BY_FLOW)
});

static REJECTED: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let (name, help) = ("apiserver_flowcontrol_rejected_requests_total", "Requests that were refused.");
    registry().counter(name, help, &["flow_schema", "priority_level", "reason"])
});

static WAITED: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    let (name, help) =
        ("apiserver_flowcontrol_request_wait_duration_seconds", "How long requests waited in a queue.");
    registry().histogram(name, help, &["execute", "flow_schema", "priority_level"], SECONDS)
});

static EXECUTED: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    let (name, help) = ("apiserver_flowcontrol_request_execution_seconds", "How long requests were served.");
    registry().histogram(name, help, &["flow_schema", "priority_level", "type"], SECONDS)
});

/// The values of one flow schema at its level.
pub(crate) struct FlowMeasures {
    names: (String, String),
    executing: Arc<Gauge>,
    executing_seats: Arc<Gauge>,
    in_queue: Arc<Gauge>,
    in_queue_seats: Arc<Gauge>,
    dispatched: Arc<Counter>,
    waited: Arc<Histogram>,
    executed: Arc<Histogram>,
}

impl FlowMeasures {
    pub fn new(level: &str, schema: &str) -> Self {
        let labels = [schema, level];
        Self {
            names: (schema.to_owned(), level.to_owned()),
            executing: EXECUTING.with(&labels),
            executing_seats: EXECUTING_SEATS.with(&labels),
            in_queue: IN_QUEUE.with(&labels),
            in_queue_seats: IN_QUEUE_SEATS.with(&labels),
            dispatched: DISPATCHED.with(&labels),
            waited: WAITED.with(&["true", schema, level]),
            executed: EXECUTED.with(&[schema, level, "regular"]),
        }
    }

    /// A request begins (1) or ceases (-1) to wait.
    pub fn queued(&self, seats: u32, change: i64) {
        self.in_queue.add(change);
        self.in_queue_seats.add(i64::from(seats) * change);
    }

    /// A request begins (1) or ceases (-1) to be served.
    pub fn serving(&self, seats: u32, change: i64) {
        self.executing.add(change);
        self.executing_seats.add(i64::from(seats) * change);
        if change > 0 {
            self.dispatched.increment();
        }
    }

    pub fn served(&self, elapsed: Duration) {
        self.executed.observe(elapsed);
    }

    pub fn waited(&self, elapsed: Duration, served: bool) {
        match served {
            true => self.waited.observe(elapsed),
            false => WAITED.with(&["false", &self.names.0, &self.names.1]).observe(elapsed),
        }
    }

    pub fn refused(&self, reason: Reason) {
        REJECTED.with(&[&self.names.0, &self.names.1, reason.as_str()]).increment();
    }
}

/// The values of one level.
pub(super) struct LevelMeasures {
    level: String,
    progress: Arc<Gauge>,
}

impl LevelMeasures {
    pub fn new(level: &str) -> Self {
        Self { level: level.to_owned(), progress: PROGRESS.with(&[level]) }
    }

    fn set(&self, family: &Family<Gauge>, value: i64) {
        family.with(&[&self.level]).set(value);
    }

    pub fn configured(&self, bounds: &Bounds, limit: u32) {
        self.set(&NOMINAL, i64::from(bounds.nominal));
        self.set(&LOWER, i64::from(bounds.lower));
        self.set(&UPPER, i64::from(bounds.upper));
        self.limited(limit);
    }

    pub fn limited(&self, limit: u32) {
        self.set(&CURRENT, i64::from(limit));
    }

    pub fn adjusted(&self, demand: &Smoothed, target: f64) {
        self.set(&MOST, i64::from(demand.most));
        self.set(&AVERAGE, demand.average.round() as i64);
        self.set(&DEVIATION, demand.deviation.round() as i64);
        self.set(&SMOOTHED, demand.smoothed.round() as i64);
        self.set(&TARGET, target.round() as i64);
    }

    pub fn note<T>(&self, queues: &Queues<T>) {
        self.progress.set(queues.progress() as i64);
    }
}

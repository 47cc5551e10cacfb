//! Stabilisation and limits: the part of a recommendation to apply now.
//!
//! Pure: the history of an autoscaler and the time are arguments. The time is that since some fixed moment, so that a
//! change of the system's clock moves nothing.

use std::time::Duration;

use k8s_openapi::api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerBehavior};

/// Earlier recommendations and changes of one autoscaler. Entries that no window reaches any more are dropped, and an
/// autoscaler gains at most one of each kind in a sync period.
#[derive(Debug, Default)]
pub(super) struct History {
    recommendations: Vec<Recommendation>,
    ups: Vec<ScaleEvent>,
    downs: Vec<ScaleEvent>,
}

#[derive(Debug, Clone, Copy)]
struct Recommendation {
    at: Duration,
    replicas: i32,
}

#[derive(Debug, Clone, Copy)]
struct ScaleEvent {
    at: Duration,
    /// Never negative.
    change: i64,
}

/// The numbers that a recommendation is compared with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) min: i32,
    pub(super) max: i32,
    pub(super) current: i32,
}

/// Reason and message of a condition.
pub(super) type Why = (&'static str, &'static str);

/// The part of a recommendation that happens now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Normalized {
    pub(super) replicas: i32,
    /// Of the condition AbleToScale, which is true.
    pub(super) able: Why,
    pub(super) limited: bool,
    /// Of the condition ScalingLimited.
    pub(super) limit: Why,
}

const READY: Why = ("ReadyForNewScale", "recommended size matches current size");
const DOWN_STABILIZED: Why = (
    "ScaleDownStabilized",
    "recent recommendations were higher than current one, applying the highest recent recommendation",
);
const UP_STABILIZED: Why = (
    "ScaleUpStabilized",
    "recent recommendations were lower than current one, applying the lowest recent recommendation",
);
const UP_LIMIT: Why =
    ("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate");
const DOWN_LIMIT: Why =
    ("ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate");
const TOO_MANY: Why = ("TooManyReplicas", "the desired replica count is more than the maximum replica count");
const TOO_FEW: Why = ("TooFewReplicas", "the desired replica count is less than the minimum replica count");
const WITHIN: Why = ("DesiredWithinRange", "the desired count is within the acceptable range");

/// The rules of one direction, complete.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    window: Duration,
    select: Select,
    policies: Vec<Policy>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Select {
    Max,
    Min,
    Disabled,
}

#[derive(Debug, Clone, Copy)]
struct Policy {
    in_percent: bool,
    value: i64,
    period: Duration,
}

/// The rules of both directions, of an autoscaler that has any.
#[derive(Debug, Clone)]
pub(super) struct Behavior {
    up: Rules,
    down: Rules,
}

fn seconds(number: i32) -> Duration {
    Duration::from_secs(u64::try_from(number).unwrap_or(0))
}

impl Behavior {
    /// Fields that are absent have upstream's defaults; `window` is that of scaling down.
    pub(super) fn of(behavior: &HorizontalPodAutoscalerBehavior, window: Duration) -> Self {
        let percent = Policy { in_percent: true, value: 100, period: Duration::from_secs(15) };
        let pods = Policy { in_percent: false, value: 4, ..percent };
        Self {
            up: Rules::of(behavior.scale_up.as_ref(), Duration::ZERO, &[pods, percent]),
            down: Rules::of(behavior.scale_down.as_ref(), window, &[percent]),
        }
    }
}

impl Rules {
    fn of(rules: Option<&HPAScalingRules>, window: Duration, policies: &[Policy]) -> Self {
        let select = match rules.and_then(|rules| rules.select_policy.as_deref()) {
            Some("Disabled") => Select::Disabled,
            Some("Min") => Select::Min,
            _ => Select::Max,
        };
        let own = rules.and_then(|rules| rules.policies.as_ref()).filter(|policies| !policies.is_empty());
        let policy = |policy: &HPAScalingPolicy| Policy {
            in_percent: policy.type_ == "Percent",
            value: i64::from(policy.value),
            period: seconds(policy.period_seconds),
        };
        Self {
            window: rules.and_then(|rules| rules.stabilization_window_seconds).map_or(window, seconds),
            select,
            policies: own.map_or_else(|| policies.to_vec(), |own| own.iter().map(policy).collect()),
        }
    }

    fn longest_period(&self) -> Duration {
        self.policies.iter().map(|policy| policy.period).max().unwrap_or_default()
    }
}

/// The age of an entry. One from the future, which a monotonic clock does not make, is new.
fn age(now: Duration, at: Duration) -> Duration {
    now.saturating_sub(at)
}

impl History {
    /// Begins the history of an autoscaler: a restart must not scale down a target that was just scaled up.
    pub(super) fn begin(&mut self, current: i32, now: Duration) {
        if self.recommendations.is_empty() {
            self.recommendations.push(Recommendation { at: now, replicas: current });
        }
    }

    fn recommend(&mut self, replicas: i32, now: Duration, window: Duration) {
        self.recommendations.retain(|old| age(now, old.at) <= window);
        self.recommendations.push(Recommendation { at: now, replicas });
    }

    /// Applies the rules of an autoscaler without a behavior.
    pub(super) fn normalize(
        &mut self,
        bounds: Bounds,
        desired: i32,
        window: Duration,
        now: Duration,
    ) -> Normalized {
        let recent = self.recommendations.iter().filter(|old| age(now, old.at) <= window);
        let stabilized = recent.map(|old| old.replicas).fold(desired, i32::max);
        self.recommend(desired, now, window);
        let able = if stabilized == desired { READY } else { DOWN_STABILIZED };
        // As upstream: usage that was measured wrongly does not multiply a target at once.
        let rate = bounds.current.saturating_mul(2).max(4);
        let (most, limit) = if bounds.max > rate { (rate, UP_LIMIT) } else { (bounds.max, TOO_MANY) };
        let (replicas, limit) = match stabilized {
            low if low < bounds.min => (bounds.min, TOO_FEW),
            high if high > most => (most, limit),
            within => (within, WITHIN),
        };
        Normalized { replicas, able, limited: replicas != stabilized, limit }
    }

    /// Applies the rules of a behavior.
    pub(super) fn normalize_with(
        &mut self,
        behavior: &Behavior,
        bounds: Bounds,
        desired: i32,
        now: Duration,
    ) -> Normalized {
        let recent = |window: Duration| {
            self.recommendations
                .iter()
                .filter(move |old| age(now, old.at) < window)
                .map(|recommendation| recommendation.replicas)
        };
        let lowest = recent(behavior.up.window).fold(desired, i32::min);
        let highest = recent(behavior.down.window).fold(desired, i32::max);
        let stabilized = bounds.current.max(lowest).min(highest);
        self.recommend(desired, now, behavior.up.window.max(behavior.down.window));
        let able = match () {
            () if stabilized == desired => READY,
            () if desired >= bounds.current => UP_STABILIZED,
            () => DOWN_STABILIZED,
        };
        let (replicas, limit) = self.at_rate(behavior, bounds, stabilized, now);
        Normalized { replicas, able, limited: replicas != stabilized, limit }
    }

    fn at_rate(&self, behavior: &Behavior, bounds: Bounds, desired: i32, now: Duration) -> (i32, Why) {
        let Bounds { min, max, current } = bounds;
        if desired > current {
            let rate = self.rate_up(&behavior.up, current, now).max(current);
            let (most, why) = if max > rate { (rate, UP_LIMIT) } else { (max, TOO_MANY) };
            if desired > most {
                return (most, why);
            }
        } else if desired < current {
            let rate = self.rate_down(&behavior.down, current, now).min(current);
            let (least, why) = if min < rate { (rate, DOWN_LIMIT) } else { (min, TOO_FEW) };
            if desired < least {
                return (least, why);
            }
        }
        (desired, WITHIN)
    }

    /// The number of replicas when the period began, which the changes since are counted against.
    fn at_start(&self, current: i32, period: Duration, now: Duration) -> i64 {
        let changed = |events: &[ScaleEvent]| -> i64 {
            events.iter().filter(|event| age(now, event.at) < period).map(|event| event.change).sum()
        };
        i64::from(current) - changed(&self.ups) + changed(&self.downs)
    }

    fn rate_up(&self, rules: &Rules, current: i32, now: Duration) -> i32 {
        let proposals = rules.policies.iter().map(|policy| {
            let start = self.at_start(current, policy.period, now);
            match policy.in_percent {
                false => start + policy.value,
                // Rounded up, or a small target would never grow. As upstream in floating point, where 100 and 10 % are 111.
                true => (start as f64 * (1.0 + policy.value as f64 / 100.0)).ceil() as i64,
            }
        });
        choose(rules.select, proposals, current)
    }

    fn rate_down(&self, rules: &Rules, current: i32, now: Duration) -> i32 {
        let proposals = rules.policies.iter().map(|policy| {
            let start = self.at_start(current, policy.period, now);
            match policy.in_percent {
                false => start - policy.value,
                true => (start as f64 * (1.0 - policy.value as f64 / 100.0)) as i64,
            }
        });
        // The larger change is the lower number here.
        let select = match rules.select {
            Select::Max => Select::Min,
            Select::Min => Select::Max,
            Select::Disabled => Select::Disabled,
        };
        choose(select, proposals, current)
    }

    /// Remembers a change, which later ones are limited by. Only behaviors have such limits.
    pub(super) fn scaled(&mut self, behavior: Option<&Behavior>, from: i32, to: i32, now: Duration) {
        let Some(behavior) = behavior else { return };
        let change = (i64::from(to) - i64::from(from)).abs();
        let events = if to > from { &mut self.ups } else { &mut self.downs };
        // Changes of both directions count against the policies of both.
        let longest = behavior.up.longest_period().max(behavior.down.longest_period());
        events.retain(|event| age(now, event.at) <= longest);
        events.push(ScaleEvent { at: now, change });
    }
}

fn choose(select: Select, proposals: impl Iterator<Item = i64>, current: i32) -> i32 {
    let chosen = match select {
        Select::Disabled => return current,
        Select::Max => proposals.max(),
        Select::Min => proposals.min(),
    };
    let chosen = chosen.unwrap_or_else(|| i64::from(current));
    i32::try_from(chosen).unwrap_or(if chosen < 0 { i32::MIN } else { i32::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_calculated_as_upstream_does() {
        let rules = |percent: i64| Rules {
            window: Duration::ZERO,
            select: Select::Max,
            policies: vec![Policy { in_percent: true, value: percent, period: Duration::from_secs(15) }],
        };
        let history = History::default();
        for (current, percent, up, down) in [
            (100, 10, 111, 90),
            (10, 10, 11, 9),
            (1, 10, 2, 0),
            (10, 100, 20, 0),
            (7, 50, 11, 3),
            (0, 100, 0, 0),
        ] {
            let rules = rules(percent);
            let rates = (
                history.rate_up(&rules, current, Duration::ZERO),
                history.rate_down(&rules, current, Duration::ZERO),
            );
            assert_eq!(rates, (up, down), "{current} {percent} %");
        }
    }
}

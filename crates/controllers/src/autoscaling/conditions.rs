//! Conditions of an autoscaler, with upstream's reasons and messages.

use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscalerCondition as Condition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(super) const ABLE_TO_SCALE: &str = "AbleToScale";
pub(super) const SCALING_ACTIVE: &str = "ScalingActive";
pub(super) const SCALING_LIMITED: &str = "ScalingLimited";
/// A condition of scaling to zero, which is off: one that an earlier manager left is removed.
pub(super) const SCALED_TO_ZERO: &str = "ScaledToZero";

/// Sets a condition; its time changes with its status only.
pub(super) fn set(
    conditions: &mut Vec<Condition>,
    kind: &str,
    status: bool,
    (reason, message): (&str, &str),
    now: Timestamp,
) {
    let status = if status { "True" } else { "False" };
    let index = conditions.iter().position(|condition| condition.type_ == kind).unwrap_or_else(|| {
        conditions.push(Condition { type_: kind.to_owned(), ..Condition::default() });
        conditions.len() - 1
    });
    let condition = &mut conditions[index];
    if condition.status != status {
        // The API keeps whole seconds.
        let whole = Timestamp::from_second(now.as_second()).unwrap_or(now);
        condition.last_transition_time = Some(Time(whole));
        condition.status = status.to_owned();
    }
    condition.reason = Some(reason.to_owned());
    condition.message = Some(message.to_owned());
}

pub(super) fn remove(conditions: &mut Vec<Condition>, kind: &str) {
    conditions.retain(|condition| condition.type_ != kind);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_changes_with_the_status() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        let mut all = Vec::new();
        set(&mut all, ABLE_TO_SCALE, true, ("A", "a"), at(10));
        set(&mut all, SCALING_ACTIVE, true, ("X", "x"), at(10));
        set(&mut all, ABLE_TO_SCALE, true, ("B", "b"), at(20));
        let first = &all[0];
        assert_eq!((first.reason.as_deref(), first.message.as_deref()), (Some("B"), Some("b")));
        assert_eq!(first.last_transition_time, Some(Time(at(10))));
        set(&mut all, ABLE_TO_SCALE, false, ("C", "c"), at(30));
        assert_eq!((&*all[0].status, &all[0].last_transition_time), ("False", &Some(Time(at(30)))));
        remove(&mut all, ABLE_TO_SCALE);
        assert_eq!(all.len(), 1);
    }
}

//! The conditions of a definition.

use ferrite_api::custom::Approval;
use ferrite_json::{Value, json};
use jiff::Timestamp;

/// The status of a condition.
pub(super) fn condition<'a>(definition: &'a Value, type_: &str) -> Option<&'a str> {
    let conditions = definition.pointer("/status/conditions")?.as_array()?;
    conditions.iter().find(|condition| condition["type"] == *type_)?["status"].as_str()
}

/// Sets a condition. The time of its last transition stays while its status does.
pub(super) fn set(status: &mut Value, type_: &str, value: &str, reason: &str, message: &str, now: Timestamp) {
    let at = crate::registry::metadata::time(now);
    let new = |at: Value| json!({"type": type_, "status": value, "lastTransitionTime": at, "reason": reason, "message": message});
    let Some(conditions) = status["conditions"].as_array_mut() else {
        status["conditions"] = json!([new(at.into())]);
        return;
    };
    match conditions.iter_mut().find(|condition| condition["type"] == *type_) {
        Some(old) => {
            let moved = old["status"] != *value;
            let at = if moved { at.into() } else { old["lastTransitionTime"].clone() };
            let observed = old.get("observedGeneration").cloned();
            *old = new(at);
            if let Some(observed) = observed {
                old["observedGeneration"] = observed;
            }
        }
        None => conditions.push(new(at.into())),
    }
}

/// Says whether a definition in a group of the Kubernetes project is approved. Others have no such condition.
pub(super) fn set_approval(status: &mut Value, definition: &Value, now: Timestamp) {
    if let Some(approval) = Approval::of(definition) {
        let (value, reason) = approval.condition();
        let message = approval.message(definition);
        set(status, "KubernetesAPIApprovalPolicyConformant", value, reason, &message, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_transition_stays_while_the_status_does() {
        let (first, later) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(60).expect("a time"));
        let mut status = json!({});
        set(&mut status, "Terminating", "True", "A", "a", first);
        set(&mut status, "Terminating", "True", "B", "b", later);
        let condition = &status["conditions"][0];
        assert_eq!((&condition["reason"], &condition["message"]), (&json!("B"), &json!("b")));
        assert_eq!(condition["lastTransitionTime"], "1970-01-01T00:00:00Z");
        set(&mut status, "Terminating", "False", "C", "c", later);
        assert_eq!(status["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
    }

    #[test]
    fn approvals_are_conditions_of_protected_groups_only() {
        let of = |group: &str| {
            let mut status = json!({});
            set_approval(&mut status, &json!({"spec": {"group": group}}), Timestamp::UNIX_EPOCH);
            status["conditions"][0]["reason"].clone()
        };
        assert_eq!(of("example.com"), Value::Null);
        assert_eq!(of("storage.k8s.io"), "MissingAnnotation");
    }
}

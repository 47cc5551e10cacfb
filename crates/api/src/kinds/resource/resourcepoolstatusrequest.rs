//! ResourcePoolStatusRequests: questions about the devices of a driver's pools.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, int, list, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, conditions};
use crate::kinds::common::declared::{self, at_least, at_most};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, number, shown};
use crate::meta_validation::{long_name, long_name_caseless};
use crate::resource::{Column, StatusUse, Strategy};
use crate::table::{NONE, since};
use ferrite_json::Value;
use jiff::Timestamp;

const LIMIT: i64 = 100;
const LIMIT_MAX: i64 = 1000;
const POOLS_MAX: usize = 1000;
const CONDITIONS_MAX: usize = 10;
const ERROR_MAX: usize = 256;
/// The fields of a condition, as Go declares them.
const CONDITION: [&str; 6] =
    ["type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"];

pub(in crate::kinds) struct ResourcePoolStatusRequests;

impl Strategy for ResourcePoolStatusRequests {
    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn default(&self, object: &mut Value) {
        default_field(ensure_object(object, "spec"), "limit", LIMIT);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_driver(spec, &path);
        if let Some(pool) = spec["poolName"].as_str() {
            errors.extend(declared::pool_name(pool, &path.child("poolName")));
        }
        errors.extend(at_least(spec, "limit", 1, &path));
        errors.extend(at_most(spec, "limit", LIMIT_MAX, &path));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let changed = new["spec"] != old["spec"];
        changed.then(|| declared::immutable(&Path::new("spec"))).into_iter().collect()
    }

    /// A request is answered once.
    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("status");
        let (status, before) = (&new["status"], &old["status"]);
        if status == before {
            return Vec::new();
        }
        let mut errors = match before.is_null() {
            true => conditions(list(status, "conditions"), &path.child("conditions")),
            false => {
                let error = FieldError::invalid(&path, status.clone(), IMMUTABLE);
                vec![match status.is_null() {
                    true => error,
                    false => error.rendered_as(go::compact("ResourcePoolStatusRequestStatus", status)),
                }]
            }
        };
        if !status.is_null() {
            errors.extend(validate_answer(status, before, &path));
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Driver"),
                shown("Total"),
                shown("Available"),
                shown("Allocated"),
                shown("Unavailable"),
                shown("Errors"),
                number("Pools"),
                shown("Status"),
                shown("Completed"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = &object["status"];
        let pools = list(status, "pools");
        let count = int(status, "poolCount");
        // The first condition that ends the request.
        let ended = list(status, "conditions")
            .iter()
            .find(|c| matches!(text(c, "type"), "Complete" | "Failed") && text(c, "status") == "True");
        let (word, completed) = match ended.map(|condition| (text(condition, "type"), condition)) {
            Some(("Complete", condition)) => {
                let shown = pools.len();
                let partly = usize::try_from(count).is_ok_and(|count| count > shown);
                let word =
                    if partly { format!("Complete ({shown}/{count} pools)") } else { "Complete".into() };
                (word, since(text(condition, "lastTransitionTime"), now))
            }
            Some(_) => ("Failed".into(), NONE.into()),
            None => ("Pending".into(), NONE.into()),
        };
        let known = !status.is_null() && word != "Failed";
        let total = |count: &dyn Fn(&Value) -> i64| match known {
            true => pools.iter().map(count).sum::<i64>().to_string().into(),
            false => "-".into(),
        };
        let devices = |key: &'static str| total(&move |pool: &Value| int(pool, key));
        vec![
            cell::name(object),
            text(&object["spec"], "driver").into(),
            devices("totalDevices"),
            devices("availableDevices"),
            devices("allocatedDevices"),
            devices("unavailableDevices"),
            total(&|pool| i64::from(present(pool, "validationError"))),
            count.into(),
            word.into(),
            completed.into(),
        ]
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_driver(object: &Value, path: &Path) -> FieldErrors {
    let (driver, path) = (text(object, "driver"), path.child("driver"));
    match driver {
        "" => vec![FieldError::required(&path, "")],
        driver => complaints(&path, driver, long_name_caseless(driver)),
    }
}

fn validate_answer(status: &Value, before: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if status["poolCount"] != before["poolCount"] || before.is_null() {
        match present(status, "poolCount") {
            false => errors.push(FieldError::required(&path.child("poolCount"), "")),
            true => errors.extend(at_least(status, "poolCount", 0, path)),
        }
    }
    let (pools, pools_path) = (list(status, "pools"), path.child("pools"));
    if pools != list(before, "pools") {
        if pools.len() > POOLS_MAX {
            errors.push(FieldError::too_many(&pools_path, pools.len(), POOLS_MAX));
        } else {
            let each = pools.iter().enumerate();
            errors.extend(each.flat_map(|(index, pool)| validate_pool(pool, &pools_path.index(index))));
        }
    }
    let (given, path) = (list(status, "conditions"), path.child("conditions"));
    if given == list(before, "conditions") {
        return errors;
    }
    if given.len() > CONDITIONS_MAX {
        errors.push(FieldError::too_many(&path, given.len(), CONDITIONS_MAX));
    } else {
        errors.extend(declared::unique(given, "type", &CONDITION, &path));
    }
    errors
}

fn validate_pool(pool: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_driver(pool, path);
    match text(pool, "poolName") {
        "" => errors.push(FieldError::required(&path.child("poolName"), "")),
        name => errors.extend(declared::pool_name(name, &path.child("poolName"))),
    }
    errors.extend(declared::required_at_least(pool, "generation", 0, path));
    errors.extend(at_least(pool, "resourceSliceCount", 1, path));
    for key in ["totalDevices", "allocatedDevices", "availableDevices", "unavailableDevices"] {
        errors.extend(at_least(pool, key, 0, path));
    }
    if let Some(node) = pool["nodeName"].as_str() {
        errors.extend(complaints(&path.child("nodeName"), node, long_name(node)));
    }
    if text(pool, "validationError").len() > ERROR_MAX {
        errors.push(FieldError::too_long(&path.child("validationError"), ERROR_MAX));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_request_names_a_driver() {
        let strategy = ResourcePoolStatusRequests;
        let errors = |spec: Value| texts(strategy.validate(&json!({"spec": spec})));
        assert_eq!(errors(json!({"driver": "D.example", "poolName": "a/b", "limit": 1})), [""; 0]);
        assert_eq!(errors(json!({})), ["spec.driver: Required value"]);
        assert_eq!(
            errors(json!({"driver": "d", "limit": 0})),
            ["spec.limit: Invalid value: 0: must be greater than or equal to 1"]
        );
        assert_eq!(
            errors(json!({"driver": "d", "limit": 1001})),
            ["spec.limit: Invalid value: 1001: must be less than or equal to 1000"]
        );
        let mut request = json!({});
        strategy.default(&mut request);
        assert_eq!(request, json!({"spec": {"limit": 100}}));
        let (old, new) = (json!({"spec": {"driver": "d"}}), json!({"spec": {"driver": "e"}}));
        assert_eq!(
            texts(strategy.validate_update(&new, &old)),
            ["spec: Invalid value: null: field is immutable"]
        );
    }

    #[test]
    fn a_request_is_answered_once() {
        let strategy = ResourcePoolStatusRequests;
        let check = |new: Value, old: Value| {
            texts(strategy.validate_status_update(&json!({"status": new}), &json!({"status": old})))
        };
        let pool = json!({"driver": "d", "poolName": "p", "generation": 1});
        assert_eq!(check(json!({"poolCount": 1, "pools": [pool]}), json!(null)), [""; 0]);
        assert_eq!(check(json!({}), json!(null)), ["status.poolCount: Required value"]);
        assert_eq!(
            check(json!({"poolCount": 0, "pools": [{"totalDevices": -1}]}), json!(null)),
            [
                "status.pools[0].driver: Required value",
                "status.pools[0].poolName: Required value",
                "status.pools[0].generation: Required value",
                "status.pools[0].totalDevices: Invalid value: -1: must be greater than or equal to 0",
            ]
        );
        let condition = json!({"type": "T", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        assert_eq!(
            check(json!({"poolCount": 1, "conditions": [condition, condition]}), json!(null)),
            [
                "status.conditions[1].type: Duplicate value: \"T\"",
                "status.conditions[1]: Duplicate value: {\"type\":\"T\",\"status\":\"True\",\"lastTransitionTime\":\"2026-01-01T00:00:00Z\",\"reason\":\"R\",\"message\":\"\"}",
            ]
        );
        let errors = check(json!({"poolCount": 2}), json!({"poolCount": 1}));
        assert_eq!(
            errors,
            [r#"status: Invalid value: {"PoolCount":2,"Pools":null,"Conditions":null}: field is immutable"#]
        );
    }

    #[test]
    fn a_table_sums_the_pools_up() {
        let now = Timestamp::UNIX_EPOCH;
        let cells = |status: Value| {
            let object = json!({"metadata": {"name": "r"}, "spec": {"driver": "d"}, "status": status});
            ResourcePoolStatusRequests.cells(&object, now)[2..].to_vec()
        };
        let nothing = json!(["-", "-", "-", "-", "-", 0, "Pending", "<none>"]);
        assert_eq!(Value::from(cells(json!(null))), nothing);
        let pools =
            json!([{"totalDevices": 3, "allocatedDevices": 1}, {"totalDevices": 2, "validationError": "x"}]);
        let complete =
            json!([{"type": "Complete", "status": "True", "lastTransitionTime": "1970-01-01T00:00:00Z"}]);
        assert_eq!(
            Value::from(cells(json!({"poolCount": 3, "pools": pools, "conditions": complete}))),
            json!(["5", "0", "1", "0", "1", 3, "Complete (2/3 pools)", "0s"])
        );
    }
}

//! Devices used for administration while others use them: only in namespaces that an administrator has labelled.

use crate::field::{FieldError, Path};
use crate::kinds::common::access::{flag, list, object};
use ferrite_json::Value;

const LABEL: &str = "resource.kubernetes.io/admin-access";

fn needed(path: &Path) -> (&'static str, FieldError) {
    let why =
        format!("admin access to devices requires the `{LABEL}: true` label on the containing namespace");
    (LABEL, FieldError::forbidden(&path.child("adminAccess"), why))
}

/// A claim asks for such use. As upstream: the path is that of a claim also where a template asks.
pub(super) fn requested(spec: &Value) -> Option<(&'static str, FieldError)> {
    let path = Path::new("spec").child("devices").child("requests");
    let asks =
        |request: &Value| object(request, "exactly").is_some_and(|exactly| flag(exactly, "adminAccess"));
    let requests = list(&spec["devices"], "requests");
    requests.iter().position(asks).map(|index| needed(&path.index(index)))
}

/// A status grants such use, and the status before did not.
pub(super) fn granted(new: &Value, old: &Value) -> Option<(&'static str, FieldError)> {
    let path = Path::new("status").child("allocation").child("devices").child("results");
    let first = |status: &Value| {
        let results = list(&status["allocation"]["devices"], "results");
        results.iter().position(|result| flag(result, "adminAccess"))
    };
    if first(old).is_some() {
        return None;
    }
    first(new).map(|index| needed(&path.index(index)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn administration_needs_a_labelled_namespace() {
        let spec = json!({"devices": {"requests": [
            {"name": "a", "exactly": {"deviceClassName": "c"}},
            {"name": "b", "exactly": {"deviceClassName": "c", "adminAccess": true}},
        ]}});
        let (label, error) = requested(&spec).expect("needed");
        assert_eq!((label, error.path.as_str()), (LABEL, "spec.devices.requests[1].adminAccess"));
        assert!(requested(&json!({"devices": {"requests": [{"name": "a"}]}})).is_none());
        let status = json!({"allocation": {"devices": {"results": [{"adminAccess": true}]}}});
        assert!(granted(&status, &json!({})).is_some());
        assert!(granted(&status, &status).is_none());
    }
}

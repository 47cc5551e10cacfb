//! Pods stay for five minutes on a node that is not ready or cannot be reached, unless they say otherwise.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::{Value, json};

pub(super) const NAME: &str = "DefaultTolerationSeconds";

/// Seconds for each of [`TAINTS`].
pub(super) struct DefaultTolerationSeconds([i64; 2]);

const TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
const SECONDS: i64 = 300;

/// `notReadySeconds` and `unreachableSeconds` are upstream's flags.
pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let seconds =
        |key: &str| configuration.and_then(|c| c.get(key)).and_then(Value::as_i64).unwrap_or(SECONDS);
    Ok(Box::new(DefaultTolerationSeconds([seconds("notReadySeconds"), seconds("unreachableSeconds")])))
}

impl Plugin for DefaultTolerationSeconds {
    fn name(&self) -> &'static str {
        NAME
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.writes("pods") {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let tolerations = spec.entry("tolerations").or_insert_with(|| json!([]));
        let Some(tolerations) = tolerations.as_array_mut() else { return Ok(()) };
        for (taint, seconds) in TAINTS.into_iter().zip(self.0) {
            if !tolerations.iter().any(|t| tolerates_execution(t, taint)) {
                tolerations.push(json!({
                    "key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds,
                }));
            }
        }
        Ok(())
    }
}

fn tolerates_execution(toleration: &Value, taint: &str) -> bool {
    let text = |key: &str| toleration.get(key).and_then(Value::as_str).unwrap_or_default();
    (text("key").is_empty() || text("key") == taint) && matches!(text("effect"), "" | "NoExecute")
}

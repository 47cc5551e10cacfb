//! A namespace's annotation decides on which nodes its pods run.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use serde_json::{Map, Value, json};

pub(super) struct PodNodeSelector;

const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/node-selector";

impl Plugin for PodNodeSelector {
    fn name(&self) -> &'static str {
        "PodNodeSelector"
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let namespace = view.get("", "namespaces", "", attributes.namespace).unwrap_or_default();
        let Some(text) = namespace["metadata"]["annotations"].get(ANNOTATION).and_then(Value::as_str) else {
            return Ok(());
        };
        let wanted = parse(text).map_err(|why| attributes.forbid(why))?;
        let Some(spec) = object["spec"].as_object_mut() else { return Ok(()) };
        let Some(given) = spec.entry("nodeSelector").or_insert_with(|| json!({})).as_object_mut() else {
            return Ok(());
        };
        if wanted.iter().any(|(key, value)| given.get(key).is_some_and(|other| other != value)) {
            return Err(
                attributes.forbid("pod node label selector conflicts with its namespace node label selector")
            );
        }
        given.extend(wanted);
        Ok(())
    }
}

/// `a=b,c=d`
fn parse(text: &str) -> Result<Map<String, Value>, String> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("invalid selector: {text:?} is no list of labels"))?;
            Ok((key.trim().to_owned(), value.trim_start_matches('=').trim().into()))
        })
        .collect()
}

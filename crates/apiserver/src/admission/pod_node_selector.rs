//! A namespace's annotation decides on which nodes its pods run.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::{Map, Value, json};
use std::collections::BTreeMap;

pub(super) const NAME: &str = "PodNodeSelector";
const ANNOTATION: &str = "scheduler.alpha.kubernetes.io/node-selector";
const CLUSTER: &str = "clusterDefaultNodeSelector";

/// The selector of namespaces without one of their own, and the labels that their pods may select.
#[derive(Default)]
struct PodNodeSelector {
    default: String,
    /// By namespace.
    allowed: BTreeMap<String, Map>,
}

pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let mut plugin = PodNodeSelector::default();
    let told = configuration.map(|c| &c["podNodeSelectorPluginConfig"]).and_then(Value::as_object);
    if configuration.is_some() && told.is_none() {
        return Err("the configuration must have podNodeSelectorPluginConfig".into());
    }
    for (key, text) in told.into_iter().flatten() {
        let text = text.as_str().ok_or_else(|| format!("{key} must be a list of labels"))?;
        let selector = parse(text)?;
        match key.as_str() {
            CLUSTER => plugin.default = text.to_owned(),
            _ => drop(plugin.allowed.insert(key.to_string(), selector)),
        }
    }
    Ok(Box::new(plugin))
}

impl PodNodeSelector {
    /// The labels that the namespace adds to its pods' selectors.
    fn wanted(&self, view: &View, attributes: &Attributes<'_>) -> Result<Map, Status> {
        let namespace = view.get("", "namespaces", "", attributes.namespace).unwrap_or_default();
        let own = namespace["metadata"]["annotations"].get(ANNOTATION).and_then(Value::as_str);
        parse(own.unwrap_or(&self.default)).map_err(|why| attributes.forbid(why))
    }
}

impl Plugin for PodNodeSelector {
    fn name(&self) -> &'static str {
        NAME
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let wanted = self.wanted(view, attributes)?;
        let Some(spec) = object["spec"].as_object_mut().filter(|_| !wanted.is_empty()) else { return Ok(()) };
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

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let allowed = self.allowed.get(attributes.namespace);
        let (Some(pod), Some(allowed)) = (object.filter(|_| attributes.creates("pods")), allowed) else {
            return Ok(());
        };
        let mut given = pod["spec"]["nodeSelector"].as_object().into_iter().flatten();
        match given.all(|(key, value)| allowed.get(key) == Some(value)) {
            true => Ok(()),
            false => {
                Err(attributes.forbid("pod node label selector labels conflict with its namespace whitelist"))
            }
        }
    }
}

/// `a=b,c=d`
fn parse(text: &str) -> Result<Map, String> {
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

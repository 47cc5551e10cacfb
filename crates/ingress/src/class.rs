//! Which Ingresses are ours.

use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use kube::ResourceExt;
use std::cmp::Reverse;
use std::sync::Arc;

/// The name by which an IngressClass names this controller.
pub const CONTROLLER: &str = "ferrite.io/ingress";
/// The mark of the class for Ingresses that name none.
pub const DEFAULT_CLASS: &str = "ingressclass.kubernetes.io/is-default-class";
/// The annotation by which an Ingress named its controller before there were classes.
const LEGACY_CLASS: &str = "kubernetes.io/ingress.class";

/// The relation of an Ingress to this controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is routed.
    Ours,
    /// Its class names us, but wants parameters, and we have none.
    WithParameters,
    /// Another controller's, or nobody's.
    Foreign,
}

/// The relation of `ingress` to this controller. The field counts before the annotation, as upstream
/// advises. An Ingress that names no class belongs to the default class: the newest one that is marked, as
/// the API server chooses.
pub fn standing(ingress: &Ingress, classes: &[Arc<IngressClass>]) -> Standing {
    let named = ingress.spec.as_ref().and_then(|spec| spec.ingress_class_name.as_deref());
    let legacy = ingress.annotations().get(LEGACY_CLASS).map(String::as_str);
    let class = match named.or(legacy) {
        Some(name) => classes.iter().find(|class| class.metadata.name.as_deref() == Some(name)),
        None => default_class(classes),
    };
    let Some(spec) = class.and_then(|class| class.spec.as_ref()) else { return Standing::Foreign };
    match (spec.controller.as_deref() == Some(CONTROLLER), &spec.parameters) {
        (false, _) => Standing::Foreign,
        (true, Some(_)) => Standing::WithParameters,
        (true, None) => Standing::Ours,
    }
}

fn default_class(classes: &[Arc<IngressClass>]) -> Option<&Arc<IngressClass>> {
    let marked = |class: &&Arc<IngressClass>| {
        class.annotations().get(DEFAULT_CLASS).is_some_and(|value| value == "true")
    };
    classes.iter().filter(marked).min_by_key(|class| {
        (Reverse(class.metadata.creation_timestamp.as_ref().map(|time| time.0)), class.name_any())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn class(name: &str, created: &str, default: bool, controller: &str) -> Arc<IngressClass> {
        let mark = if default { json!({ DEFAULT_CLASS: "true" }) } else { json!({}) };
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "creationTimestamp": created, "annotations": mark},
                "spec": {"controller": controller},
            }))
            .unwrap(),
        )
    }

    fn ingress(class: Option<&str>, legacy: Option<&str>) -> Ingress {
        let annotations = legacy.map_or(json!({}), |name| json!({ LEGACY_CLASS: name }));
        let spec = class.map_or(json!({}), |name| json!({"ingressClassName": name}));
        let object: Value = json!({"metadata": {"name": "x", "annotations": annotations}, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_ingress_is_ours_by_its_class() {
        const OLD: &str = "2024-01-01T00:00:00Z";
        const NEW: &str = "2025-01-01T00:00:00Z";
        let ours = |default| class("ferrite", OLD, default, CONTROLLER);
        let other = |default| class("nginx", NEW, default, "k8s.io/ingress-nginx");
        let mut parameters = (*class("special", OLD, false, CONTROLLER)).clone();
        parameters.spec.as_mut().unwrap().parameters = Some(Default::default());
        for (what, named, legacy, classes, want) in [
            ("by name", Some("ferrite"), None, vec![ours(false)], Standing::Ours),
            ("another's", Some("nginx"), None, vec![ours(true), other(false)], Standing::Foreign),
            ("a class that is not there", Some("gone"), None, vec![ours(true)], Standing::Foreign),
            ("the annotation", None, Some("ferrite"), vec![ours(false)], Standing::Ours),
            ("the annotation of another", None, Some("nginx"), vec![ours(true)], Standing::Foreign),
            (
                "the field before the annotation",
                Some("ferrite"),
                Some("nginx"),
                vec![ours(false)],
                Standing::Ours,
            ),
            ("no class, and ours is the default", None, None, vec![ours(true), other(false)], Standing::Ours),
            ("no class, and no default", None, None, vec![ours(false)], Standing::Foreign),
            ("no class, and a newer default", None, None, vec![ours(true), other(true)], Standing::Foreign),
            ("parameters", Some("special"), None, vec![Arc::new(parameters)], Standing::WithParameters),
        ] {
            assert_eq!(standing(&ingress(named, legacy), &classes), want, "{what}");
        }
    }
}

//! AppArmor profiles: which one a container asks for, and the pods this node cannot confine.

use crate::pod::model::{self, PodContainer};
use ferrite_cri::v1::{SecurityProfile, security_profile::ProfileType};
use k8s_openapi::api::core::v1::Pod;

/// Annotations of this prefix named profiles before there was a field; static pods may still have them.
const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Why a pod's profiles cannot be enforced, worded as upstream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum AppArmorError {
    #[error("AppArmor is not enabled on the host")]
    NotEnabled,
    #[error("invalid empty AppArmor profile name: {0:?}")]
    EmptyName(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Profile {
    RuntimeDefault,
    Unconfined,
    Localhost(String),
}

fn of_fields(profile: &k8s_openapi::api::core::v1::AppArmorProfile) -> Profile {
    match profile.type_.as_str() {
        "RuntimeDefault" => Profile::RuntimeDefault,
        "Localhost" => Profile::Localhost(profile.localhost_profile.clone().unwrap_or_default()),
        _ => Profile::Unconfined,
    }
}

fn of_annotation(text: &str) -> Option<Profile> {
    match text {
        "runtime/default" => Some(Profile::RuntimeDefault),
        "unconfined" => Some(Profile::Unconfined),
        _ => Some(Profile::Localhost(text.strip_prefix("localhost/")?.to_string())),
    }
}

/// The container's own word, then the annotation for it, then the pod's.
fn profile(pod: &Pod, container: &PodContainer) -> Option<Profile> {
    let own = container.spec.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
    let annotation = || {
        let name = format!("{ANNOTATION}{}", container.name());
        pod.metadata.annotations.as_ref()?.get(&name).and_then(|text| of_annotation(text))
    };
    let of_pod = || model::spec(pod).security_context.as_ref()?.app_armor_profile.as_ref().map(of_fields);
    own.map(of_fields).or_else(annotation).or_else(of_pod)
}

/// The container's profile in the runtime's words.
pub(crate) fn security_profile(pod: &Pod, container: &PodContainer) -> Option<SecurityProfile> {
    let (profile_type, localhost_ref) = match profile(pod, container)? {
        Profile::RuntimeDefault => (ProfileType::RuntimeDefault, String::new()),
        Profile::Unconfined => (ProfileType::Unconfined, String::new()),
        Profile::Localhost(name) => (ProfileType::Localhost, name),
    };
    Some(SecurityProfile { profile_type: profile_type.into(), localhost_ref })
}

/// Refuses a pod that asks to be confined by a node that cannot.
pub(crate) fn check(pod: &Pod, enabled: bool) -> Result<(), AppArmorError> {
    let containers = model::containers(pod);
    let of_pod = model::spec(pod).security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
    let own = containers
        .iter()
        .filter_map(|c| c.spec.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref()));
    let mut annotations =
        pod.metadata.annotations.iter().flatten().filter(|(k, _)| k.starts_with(ANNOTATION));
    let required = of_pod.into_iter().chain(own).any(|p| p.type_ != "Unconfined")
        || annotations.any(|(_, value)| value != "unconfined");
    if required && !enabled {
        return Err(AppArmorError::NotEnabled);
    }
    for container in &containers {
        if let Some(Profile::Localhost(name)) = profile(pod, container)
            && name.trim().is_empty()
        {
            return Err(AppArmorError::EmptyName(name));
        }
    }
    Ok(())
}

/// Returns true if the kernel supports AppArmor.
pub(crate) fn is_enabled() -> bool {
    std::fs::read_to_string("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.starts_with('Y'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn profiles() {
        let make = |of_pod: Value, own: Value, annotation: Option<&str>| -> Pod {
            let key = format!("{ANNOTATION}c");
            let annotations = annotation.map_or(json!({}), |text| json!({key: text}));
            ferrite_json::from_value(json!({
                "metadata": {"name": "p", "annotations": annotations},
                "spec": {"securityContext": {"appArmorProfile": of_pod},
                         "containers": [{"name": "c", "securityContext": {"appArmorProfile": own}}]},
            }))
            .unwrap()
        };
        let none = Value::Null;
        let kind = |name: &str| json!({"type": name});
        let named = |name: &str| json!({"type": "Localhost", "localhostProfile": name});
        for (what, pod, chosen, without_apparmor, with_apparmor) in [
            ("nothing", make(none.clone(), none.clone(), None), None, true, true),
            ("unconfined", make(kind("Unconfined"), none.clone(), None), Some((1, "")), true, true),
            ("default", make(kind("RuntimeDefault"), none.clone(), None), Some((0, "")), false, true),
            ("own before pod's", make(kind("Unconfined"), named("x"), None), Some((2, "x")), false, true),
            (
                "annotation",
                make(none.clone(), none.clone(), Some("localhost/y")),
                Some((2, "y")),
                false,
                true,
            ),
            (
                "annotation, open",
                make(none.clone(), none.clone(), Some("unconfined")),
                Some((1, "")),
                true,
                true,
            ),
            ("no name", make(none.clone(), named(" "), None), Some((2, " ")), false, false),
        ] {
            let container = model::containers(&pod).remove(0);
            let got = security_profile(&pod, &container).map(|p| (p.profile_type, p.localhost_ref));
            assert_eq!(got, chosen.map(|(kind, name): (i32, &str)| (kind, name.to_string())), "{what}");
            assert_eq!(check(&pod, false).is_ok(), without_apparmor, "{what}");
            assert_eq!(check(&pod, true).is_ok(), with_apparmor, "{what}");
        }
    }
}

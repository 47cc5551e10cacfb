//! The approval that definitions in the groups of the Kubernetes project need.

use crate::kinds::common::access::text;
use ferrite_json::Value;

const ANNOTATION: &str = "api-approved.kubernetes.io";
const PROTECTED: &[&str] = &["k8s.io", "kubernetes.io"];
const POLICY: &str = "https://github.com/kubernetes/enhancements/pull/1111";

/// The state of the annotation that approves a definition in a protected group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approval {
    Missing,
    Invalid,
    /// Its author says that nobody has approved it.
    Bypassed,
    Approved,
}

impl Approval {
    /// None of a definition whose group is not protected.
    pub fn of(definition: &Value) -> Option<Self> {
        let group = text(&definition["spec"], "group");
        let is_in = |domain: &&str| {
            group.strip_suffix(*domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        if !PROTECTED.iter().any(is_in) {
            return None;
        }
        Some(match annotation(definition) {
            "" => Self::Missing,
            given if given.starts_with("unapproved") => Self::Bypassed,
            given => match given.split_once("://") {
                Some((scheme, host)) if !scheme.is_empty() && !host.is_empty() => Self::Approved,
                _ => Self::Invalid,
            },
        })
    }

    /// Status and reason of condition `KubernetesAPIApprovalPolicyConformant`.
    pub fn condition(self) -> (&'static str, &'static str) {
        match self {
            Self::Missing => ("False", "MissingAnnotation"),
            Self::Invalid => ("False", "InvalidAnnotation"),
            Self::Bypassed => ("False", "UnapprovedAnnotation"),
            Self::Approved => ("True", "ApprovedAnnotation"),
        }
    }

    /// The state in upstream's words.
    pub fn message(self, definition: &Value) -> String {
        let needed = format!("protected groups must have approval annotation \"{ANNOTATION}\"");
        match self {
            Self::Missing => format!("{needed}, see {POLICY}"),
            Self::Invalid => {
                format!("{needed} with either a URL or a reason starting with \"unapproved\", see {POLICY}")
            }
            Self::Bypassed => format!("not approved: {}", Value::from(annotation(definition))),
            Self::Approved => format!("approved in {}", annotation(definition)),
        }
    }

    /// Name of the annotation.
    pub(crate) fn annotation() -> &'static str {
        ANNOTATION
    }
}

pub(crate) fn annotation(definition: &Value) -> &str {
    definition.pointer("/metadata/annotations").map(|all| text(all, ANNOTATION)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn protected_groups_need_an_approval() {
        for (group, annotation, expected) in [
            ("example.com", "", None),
            ("notk8s.io", "", None),
            (
                "k8s.io",
                "",
                Some((Approval::Missing, "False", "MissingAnnotation", "protected groups must have")),
            ),
            ("a.k8s.io", "yes", Some((Approval::Invalid, "False", "InvalidAnnotation", "with either a URL"))),
            (
                "a.kubernetes.io",
                "unapproved, a trial",
                Some((
                    Approval::Bypassed,
                    "False",
                    "UnapprovedAnnotation",
                    "not approved: \"unapproved, a trial\"",
                )),
            ),
            (
                "a.k8s.io",
                "https://k8s.io/1",
                Some((Approval::Approved, "True", "ApprovedAnnotation", "approved in https://k8s.io/1")),
            ),
        ] {
            let definition =
                json!({"metadata": {"annotations": {ANNOTATION: annotation}}, "spec": {"group": group}});
            let approval = Approval::of(&definition);
            assert_eq!(approval, expected.map(|row| row.0), "{group} {annotation}");
            if let (Some(approval), Some((_, status, reason, words))) = (approval, expected) {
                assert_eq!(approval.condition(), (status, reason));
                assert!(approval.message(&definition).contains(words), "{}", approval.message(&definition));
            }
        }
    }
}

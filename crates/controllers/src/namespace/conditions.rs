//! The conditions by which a namespace says why it is still there, with upstream's texts.

use super::content::Content;

/// A condition: its type, if it holds, reason and message.
type Condition = (&'static str, bool, &'static str, String);

pub(super) fn conditions(content: &Content) -> Vec<Condition> {
    // One condition: its type, reason and message where all is well, reason and message where not.
    let row = |kind, fine: (&'static str, &str), reason: &'static str, failure: Option<String>| match failure
    {
        Some(message) => (kind, true, reason, message),
        None => (kind, false, fine.0, fine.1.to_owned()),
    };
    vec![
        row(
            "NamespaceDeletionDiscoveryFailure",
            ("ResourcesDiscovered", "All resources successfully discovered"),
            "DiscoveryFailed",
            content.discovery_failure.clone(),
        ),
        row(
            "NamespaceDeletionGroupVersionParsingFailure",
            ("ParsedGroupVersions", "All legacy kube types successfully parsed"),
            "GroupVersionParsingFailed",
            None,
        ),
        row(
            "NamespaceDeletionContentFailure",
            ("ContentDeleted", "All content successfully deleted, may be waiting on finalization"),
            "ContentDeletionFailed",
            failures(&content.failures),
        ),
        row(
            "NamespaceContentRemaining",
            ("ContentRemoved", "All content successfully removed"),
            "SomeResourcesRemain",
            listed("Some resources are remaining", "has", content.remaining.iter()),
        ),
        row(
            "NamespaceFinalizersRemaining",
            ("ContentHasNoFinalizers", "All content-preserving finalizers finished"),
            "SomeFinalizersRemain",
            listed("Some content in the namespace has finalizers remaining", "in", content.finalizers.iter()),
        ),
    ]
}

fn failures(failures: &[String]) -> Option<String> {
    let mut sorted: Vec<&str> = failures.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    let all = sorted.join(", ");
    let count = sorted.len();
    (count > 0).then(|| format!("Failed to delete all resource types, {count} remaining: {all}"))
}

fn listed<'a>(of: &str, verb: &str, counts: impl Iterator<Item = (&'a String, &'a usize)>) -> Option<String> {
    let mut parts: Vec<_> =
        counts.map(|(name, count)| format!("{name} {verb} {count} resource instances")).collect();
    parts.sort_unstable();
    (!parts.is_empty()).then(|| format!("{of}: {}", parts.join(", ")))
}

//! The protocol between the local-path provisioner and the kubelets.
//!
//! The provisioner runs in the control plane and never touches a disk; a kubelet touches its own disk and writes no object
//! but its own Node. They speak through annotations of that Node: the kubelet publishes its directory, the provisioner
//! lists the volumes to remove, and the kubelet lists those that are removed.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Node;

/// The provisioner's name in a StorageClass.
pub const PROVISIONER: &str = "ferrite.io/local-path";
/// The default StorageClass.
pub const CLASS: &str = "local-path";
/// Keeps a volume until its data is removed.
pub const FINALIZER: &str = "ferrite.io/local-path";
/// Annotation of a volume: the node that has it.
pub const NODE: &str = "local-path.ferrite.io/node";
/// Annotation of a Node: the directory below which it keeps local volumes.
pub const DIRECTORY: &str = "local-path.ferrite.io/directory";
/// Annotation of a Node, written by the provisioner: volumes whose data the node shall remove.
pub const REMOVE: &str = "local-path.ferrite.io/remove";
/// Annotation of a Node, written by its kubelet: volumes of [`REMOVE`] whose data is gone.
pub const REMOVED: &str = "local-path.ferrite.io/removed";
/// Volumes that a list names at most; annotations have limited space.
pub const MOST_NAMES: usize = 500;

/// The value of an annotation of a node.
pub fn annotation<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// The volumes that an annotation of a node lists. Text that is no volume's name is left out.
pub fn names(node: &Node, key: &str) -> BTreeSet<String> {
    let text = annotation(node, key).unwrap_or_default();
    text.split(',').filter(|name| is_volume_name(name)).take(MOST_NAMES).map(str::to_owned).collect()
}

/// The value of an annotation that lists these volumes; none lists nothing.
pub fn list(names: &BTreeSet<String>) -> Option<String> {
    (!names.is_empty()).then(|| names.iter().map(String::as_str).collect::<Vec<_>>().join(","))
}

/// Returns true if the text can be the name of a PersistentVolume. Such a name is one part of a path, and
/// none of those with a meaning of their own.
pub fn is_volume_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let label = |part: &str| {
        let bytes = part.as_bytes();
        bytes.first().is_some_and(|b| inner(*b))
            && bytes.last().is_some_and(|b| inner(*b))
            && bytes.iter().all(|b| inner(*b) || *b == b'-')
    };
    text.len() <= 253 && text.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_volumes_are_read() {
        let node = |text: &str| Node {
            metadata: kube::api::ObjectMeta {
                annotations: Some([(REMOVE.to_owned(), text.to_owned())].into()),
                ..Default::default()
            },
            ..Node::default()
        };
        let long = "a".repeat(254);
        for (text, expected) in [
            ("", vec![]),
            ("pvc-1,pvc-2", vec!["pvc-1", "pvc-2"]),
            ("../etc,pvc-1", vec!["pvc-1"]),
            (".,..,/,a/b,.new-a,A,a..b,-a,a-", vec![]),
            ("a.b", vec!["a.b"]),
            (long.as_str(), vec![]),
        ] {
            let found = names(&node(text), REMOVE);
            assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{text}");
        }
        assert_eq!(list(&names(&node("b,a"), REMOVE)).as_deref(), Some("a,b"));
        assert_eq!(list(&BTreeSet::new()), None);
    }
}

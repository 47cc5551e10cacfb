//! The graph as a document in Graphviz's language, for `/debug/controllers/garbage-collector-controller/graph`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::graph::{Graph, Identity, Node, Uid};

/// An object of the document.
#[derive(Debug)]
struct Vertex {
    identity: Identity,
    /// No watch has reported it, and no other object has its place.
    missing: bool,
    being_deleted: bool,
    deleting_dependents: bool,
    /// Only a dependent names it so far.
    is_virtual: bool,
}

/// The part of the graph that a reader asks for, taken while nobody changes it.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    vertices: BTreeMap<Uid, Vertex>,
    edges: BTreeSet<(Uid, Uid)>,
}

impl Snapshot {
    /// The objects that are connected with those of `uids`; all that own or are owned without any.
    pub(super) fn of(graph: &Graph, uids: &[Uid]) -> Self {
        let mut snapshot = Self::default();
        if uids.is_empty() {
            graph.nodes().for_each(|node| snapshot.add(graph, node));
            return snapshot;
        }
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut left: Vec<&str> = uids.iter().map(String::as_str).collect();
        while let Some(uid) = left.pop() {
            let Some(node) = graph.get(uid) else { continue };
            if seen.insert(&node.identity.uid) {
                snapshot.add(graph, node);
                left.extend(node.owners.iter().map(|owner| owner.uid.as_str()));
                left.extend(node.dependents.iter().map(String::as_str));
            }
        }
        snapshot
    }

    fn add(&mut self, graph: &Graph, node: &Node) {
        if node.owners.is_empty() && node.dependents.is_empty() {
            return;
        }
        let uid = &node.identity.uid;
        let vertex = Vertex {
            identity: node.identity.clone(),
            missing: false,
            being_deleted: node.deleting,
            deleting_dependents: node.deleting_dependents,
            is_virtual: !node.observed,
        };
        self.vertices.insert(uid.clone(), vertex);
        for owner in &node.owners {
            self.edges.insert((uid.clone(), owner.uid.clone()));
            if graph.get(&owner.uid).is_none() {
                self.vertices.entry(owner.uid.clone()).or_insert_with(|| missing(owner));
            }
        }
    }

    pub(super) fn to_dot(&self) -> String {
        let mut out = String::from("strict digraph full {\n");
        if !self.vertices.is_empty() {
            out.push_str("  // Node definitions.\n");
        }
        for vertex in self.vertices.values() {
            vertex.write(&mut out);
        }
        if !self.edges.is_empty() {
            out.push_str("  // Edge definitions.\n");
        }
        for (from, to) in &self.edges {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "  {from:?} -> {to:?};");
        }
        out.push_str("}\n");
        out
    }
}

fn missing(owner: &OwnerReference) -> Vertex {
    Vertex {
        identity: Identity::of_owner(owner, ""),
        missing: true,
        being_deleted: false,
        deleting_dependents: false,
        is_virtual: false,
    }
}

impl Vertex {
    fn write(&self, out: &mut String) {
        let Identity { api_version, kind, namespace, name, uid } = &self.identity;
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let dot = if group.is_empty() { "" } else { "." };
        let mut label = format!("uid={uid}\nnamespace={namespace}\n{kind}.{version}{dot}{group}/{name}\n");
        let conditions: Vec<&str> = [
            (self.being_deleted, "beingDeleted"),
            (self.deleting_dependents, "deletingDependents"),
            (self.is_virtual, "virtual"),
            (self.missing, "missingFromGraph"),
        ]
        .into_iter()
        .filter_map(|(holds, name)| holds.then_some(name))
        .collect();
        if !conditions.is_empty() {
            label.push_str(&conditions.join(","));
            label.push('\n');
        }
        let flag = |value: bool| if value { "true" } else { "false" };
        let attributes = [
            ("label", label.as_str()),
            ("group", group),
            ("version", version),
            ("kind", &**kind),
            ("namespace", &**namespace),
            ("name", &**name),
            ("uid", uid),
            ("missing", flag(self.missing)),
            ("beingDeleted", flag(self.being_deleted)),
            ("deletingDependents", flag(self.deleting_dependents)),
            ("virtual", flag(self.is_virtual)),
        ];
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {uid:?} [");
        for (key, value) in attributes {
            let _ = writeln!(out, "    {key}={value:?}");
        }
        out.push_str("  ];\n");
    }
}

/// The UIDs that a query names: `uid=a&uid=b`.
pub(super) fn uids(query: &str) -> Vec<Uid> {
    let values = query.split('&').filter_map(|pair| pair.strip_prefix("uid="));
    values.map(|value| percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::graph::Observation;
    use super::*;

    fn seen(kind: &str, uid: &str, owner: Option<&str>) -> Observation {
        Observation {
            identity: Identity {
                api_version: "apps/v1".into(),
                kind: kind.into(),
                namespace: "ns".into(),
                name: uid.into(),
                uid: uid.into(),
            },
            owners: owner
                .map(|uid| OwnerReference {
                    api_version: "apps/v1".into(),
                    kind: "Deployment".into(),
                    name: "d".into(),
                    uid: uid.into(),
                    ..OwnerReference::default()
                })
                .into_iter()
                .collect(),
            deleting: false,
            foreground: false,
            orphan: false,
        }
    }

    #[test]
    fn the_document_has_owners_and_owned() {
        let mut graph = Graph::default();
        graph.present(seen("Deployment", "d", None));
        graph.present(seen("Deployment", "alone", None));
        graph.present(Observation { deleting: true, ..seen("ReplicaSet", "r", Some("d")) });
        graph.present(seen("ReplicaSet", "other", Some("unseen")));
        let whole = Snapshot::of(&graph, &[]).to_dot();
        assert!(whole.starts_with("strict digraph full {\n  // Node definitions.\n  \"d\" [\n    label=\"uid=d\\nnamespace=ns\\nDeployment.v1.apps/d\\n\"\n"), "{whole}");
        assert!(whole.contains("\\nbeingDeleted\\n\""), "{whole}");
        assert!(
            whole.contains("  \"r\" -> \"d\";\n") && whole.contains("  \"other\" -> \"unseen\";\n"),
            "{whole}"
        );
        assert!(whole.contains("virtual=\"true\"") && !whole.contains("alone"), "{whole}");
        let part = Snapshot::of(&graph, &uids("x=1&uid=r")).to_dot();
        assert!(part.contains("\"d\" [") && !part.contains("other"), "{part}");
        assert_eq!(Snapshot::of(&graph, &uids("uid=nobody")).to_dot(), "strict digraph full {\n}\n");
    }
}

//! Mirror pods: the node's static pods as the API shows them. The API never decides about a static pod; a
//! mirror that a user deletes or changes is put back.

use super::manifest::{HASH, MIRROR};
use crate::pod::context::Context;
use crate::pod::{PodId, write_status};
use ferrite_client::{Api, Backoff, Change, is_already_exists, is_conflict, is_not_found, message_of};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, PostParams, Preconditions};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Returns true if a pod of the API only shows a static pod, and is not to be run.
pub(crate) fn is_mirror(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(MIRROR))
}

/// An action that brings the mirror pods in line with the static pods.
#[derive(Debug, PartialEq)]
enum MirrorAction {
    Create(Box<Pod>),
    Delete(PodId),
    /// The mirror has to show this pod's status.
    Report {
        mirror: Arc<Pod>,
        local: Arc<Pod>,
    },
}

/// Inputs for deciding which mirror pods the API should have.
struct Shown<'a> {
    /// Static pods that should run.
    local: &'a [Arc<Pod>],
    /// Namespaces and names of static pods that are still ending.
    ending: &'a BTreeSet<(String, String)>,
    mirrors: &'a [Arc<Pod>],
    node: Option<&'a Node>,
}

fn name_of(pod: &Pod) -> (String, String) {
    let id = PodId::of(pod);
    (id.namespace, id.name)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn decide(shown: &Shown<'_>) -> Vec<MirrorAction> {
    let mut actions = Vec::new();
    for mirror in shown.mirrors {
        let local = shown.local.iter().find(|local| name_of(local) == name_of(mirror));
        match local {
            Some(local)
                if mirror.metadata.deletion_timestamp.is_none()
                    && annotation(mirror, MIRROR) == annotation(local, HASH) =>
            {
                actions.push(MirrorAction::Report { mirror: mirror.clone(), local: local.clone() });
            }
            // It stays until nothing runs any more.
            None if shown.ending.contains(&name_of(mirror))
                && mirror.metadata.deletion_timestamp.is_none() => {}
            _ => actions.push(MirrorAction::Delete(PodId::of(mirror))),
        }
    }
    let Some(owner) = shown.node.and_then(owner) else { return actions };
    for local in shown.local {
        if !shown.mirrors.iter().any(|mirror| name_of(mirror) == name_of(local)) {
            actions.push(MirrorAction::Create(Box::new(mirror_of(local, &owner))));
        }
    }
    actions
}

/// Nodes may create pods that belong to them, and no others.
fn owner(node: &Node) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.metadata.name.clone()?,
        uid: node.metadata.uid.clone().filter(|uid| !uid.is_empty())?,
        controller: Some(true),
        ..OwnerReference::default()
    })
}

fn mirror_of(local: &Pod, owner: &OwnerReference) -> Pod {
    let mut mirror = local.clone();
    let annotations = mirror.metadata.annotations.get_or_insert_default();
    if let Some(hash) = annotations.get(HASH).cloned() {
        annotations.insert(MIRROR.to_owned(), hash);
    }
    mirror.metadata.owner_references = Some(vec![owner.clone()]);
    mirror.metadata.uid = None;
    mirror.status = None;
    mirror
}

/// Keeps the mirrors true until the scope ends.
pub(crate) async fn run(context: Arc<Context>, ending: impl Fn() -> BTreeSet<(String, String)> + Send) {
    let wake: Arc<Notify> = Arc::default();
    let woken = wake.clone();
    context.pods.api().subscribe(move |change: &Change<Pod>| {
        if is_mirror(change.object()) {
            woken.notify_one();
        }
    });
    let woken = wake.clone();
    context.node.subscribe(move |change: &Change<Node>| {
        if !matches!(change, Change::Updated { .. }) {
            woken.notify_one();
        }
    });
    context.pods.api().synced().await;
    context.node.synced().await;
    context.pods.local().ready().await;
    let mut changes = context.pods.local().changes();
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10), 0.2);
    loop {
        changes.borrow_and_update();
        let node = context.node.list().into_iter().next();
        let actions = decide(&Shown {
            local: &context.pods.local().list(),
            ending: &ending(),
            mirrors: &context.pods.mirrors(),
            node: node.as_deref(),
        });
        let mut failed = false;
        for action in actions {
            if let Err(e) = act(&context, action).await {
                tracing::warn!(error = %message_of(&e), "the API does not show the static pods as they are; will try again");
                failed = true;
            }
        }
        if failed {
            tokio::time::sleep(backoff.next_delay()).await;
            continue;
        }
        backoff.reset();
        tokio::select! {
            () = wake.notified() => {}
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

async fn act(context: &Context, action: MirrorAction) -> kube::Result<()> {
    match action {
        MirrorAction::Create(pod) => {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let api = Api::<Pod>::namespaced(context.client.clone(), namespace);
            tracing::info!(pod = %PodId::of(&pod), "creating a mirror pod for a static pod");
            match api.create(&PostParams::default(), &pod).await {
                // Ours, which the watch has not shown yet; any other pod of that name is in the way.
                Err(e) if is_already_exists(&e) => match api.get_opt(&PodId::of(&pod).name).await? {
                    Some(found) if annotation(&found, MIRROR) == annotation(&pod, MIRROR) => Ok(()),
                    _ => Err(e),
                },
                other => other.map(drop),
            }
        }
        MirrorAction::Delete(id) => {
            let api = Api::<Pod>::namespaced(context.client.clone(), &id.namespace);
            let preconditions = Preconditions { uid: Some(id.uid.clone()), resource_version: None };
            let params = DeleteParams::default().grace_period(0).preconditions(preconditions);
            tracing::info!(pod = %id, "deleting a mirror pod");
            match api.delete(&id.name, &params).await {
                Err(e) if !is_not_found(&e) && !is_conflict(&e) => Err(e),
                _ => Ok(()),
            }
        }
        MirrorAction::Report { mirror, local } => {
            let Some(status) = local.status.clone() else { return Ok(()) };
            let id = PodId::of(&mirror);
            let api = Api::<Pod>::namespaced(context.client.clone(), &id.namespace);
            match write_status(&api, &id, status, (*mirror).clone()).await {
                // The watch shows the newer one.
                Err(e) if is_conflict(&e) || is_not_found(&e) => Ok(()),
                other => other.map(drop),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(metadata: Value) -> Arc<Pod> {
        Arc::new(ferrite_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap())
    }

    fn local(name: &str, hash: &str) -> Arc<Pod> {
        pod(json!({"name": name, "namespace": "d", "uid": hash, "annotations": {HASH: hash}}))
    }

    fn mirror(name: &str, hash: &str) -> Arc<Pod> {
        pod(
            json!({"name": name, "namespace": "d", "uid": format!("m-{name}"), "annotations": {HASH: hash, MIRROR: hash}}),
        )
    }

    fn deleted(name: &str, hash: &str) -> Arc<Pod> {
        let mut pod = (*mirror(name, hash)).clone();
        pod.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        Arc::new(pod)
    }

    #[test]
    fn the_api_shows_what_runs() {
        let node: Node =
            ferrite_json::from_value(json!({"metadata": {"name": "n", "uid": "node-uid"}})).unwrap();
        let web = [local("web", "1")];
        for (what, local, ending, mirrors, node, expected) in [
            ("nothing", &[][..], "", vec![], Some(&node), ""),
            ("no mirror", &web, "", vec![], Some(&node), "create web"),
            ("no node yet", &web, "", vec![], None, ""),
            ("in order", &web, "", vec![mirror("web", "1")], Some(&node), "report web"),
            ("manifest changed", &web, "", vec![mirror("web", "0")], Some(&node), "delete web"),
            ("user deletes", &web, "", vec![deleted("web", "1")], Some(&node), "delete web"),
            ("manifest removed", &[], "", vec![mirror("web", "1")], Some(&node), "delete web"),
            ("still ending", &[], "web", vec![mirror("web", "1")], Some(&node), ""),
            ("deleted while ending", &[], "web", vec![deleted("web", "1")], Some(&node), "delete web"),
            (
                "somebody's own",
                &web,
                "",
                vec![mirror("web", "1"), mirror("x", "1")],
                Some(&node),
                "report web, delete x",
            ),
        ] {
            let ending = ending.split_whitespace().map(|name| ("d".to_owned(), name.to_owned())).collect();
            let actions = decide(&Shown { local, ending: &ending, mirrors: &mirrors, node });
            let said: Vec<String> = actions
                .iter()
                .map(|action| match action {
                    MirrorAction::Create(pod) => format!("create {}", name_of(pod).1),
                    MirrorAction::Delete(id) => format!("delete {}", id.name),
                    MirrorAction::Report { mirror, .. } => format!("report {}", name_of(mirror).1),
                })
                .collect();
            assert_eq!(said.join(", "), expected, "{what}");
        }
    }

    #[test]
    fn a_mirror_belongs_to_the_node() {
        let node: Node =
            ferrite_json::from_value(json!({"metadata": {"name": "n", "uid": "node-uid"}})).unwrap();
        let mirror = mirror_of(&local("web", "1"), &owner(&node).unwrap());
        assert!(is_mirror(&mirror));
        assert_eq!(annotation(&mirror, MIRROR), Some("1"));
        assert_eq!(mirror.metadata.owner_references.unwrap()[0].uid, "node-uid");
        assert_eq!((mirror.metadata.uid, mirror.status), (None, None));
        let unregistered = Node::default();
        assert_eq!(owner(&unregistered), None);
    }
}

//! Waiting for nodes that start.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ListSelector, Scope};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};

use crate::apiserver::BoxError;
use crate::machines::Machines;
use crate::paths::Paths;
use crate::progress::Progress;

/// Whoever waits for a node for so long is told where to look.
const LATE: Duration = Duration::from_secs(15);

/// Waits until these nodes say that they are ready and a pod could be created.
pub async fn wait_for_nodes(
    client: &kube::Client,
    names: impl Iterator<Item = &String>,
    paths: &Paths,
    progress: &Progress,
    scope: &Scope,
) -> Result<(), BoxError> {
    let nodes = Api::<Node>::all(client.clone());
    for name in names {
        let mut ready = pin!(wait_until(nodes.clone(), name, scope, |node: &Node| {
            let conditions = node.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
            conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
        }));
        match tokio::time::timeout(LATE, &mut ready).await {
            Ok(outcome) => outcome?,
            Err(_) => {
                let log = log_of(paths, name);
                progress
                    .line(&format!("  still waiting for node {name} to become Ready; see {}", log.display()));
                ready.await?;
            }
        }
    }
    // Pods run as a service account; its controller makes one in every namespace.
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), "default");
    wait_until(accounts, "default", scope, |_| true).await
}

/// The log of the process that runs this node: an agent's, or the cluster's own.
fn log_of(paths: &Paths, node: &str) -> PathBuf {
    let agent = Machines::paths_of(paths, node).log();
    if agent.exists() { agent } else { paths.log() }
}

/// Waits until the object of that name is as `accept` wants it.
async fn wait_until<K>(
    api: Api<K>,
    name: &str,
    scope: &Scope,
    accept: impl Fn(&K) -> bool + Send + Sync + 'static,
) -> Result<(), BoxError>
where
    K: ferrite_client::Object,
{
    let scope = scope.child();
    let selector = ListSelector::fields(format!("metadata.name={name}"));
    let informer = Informer::<K>::start(api, selector, &scope);
    let (found, mut seen) = tokio::sync::mpsc::channel(1);
    informer.subscribe(move |change| {
        let (Change::Added(object) | Change::Updated { new: object, .. }) = change else { return };
        if accept(object) {
            // One message is enough; later ones find the channel full or closed.
            let _ = found.try_send(());
        }
    });
    let told = seen.recv().await;
    scope.shutdown().await;
    told.ok_or_else(|| format!("{name} never came to be").into())
}

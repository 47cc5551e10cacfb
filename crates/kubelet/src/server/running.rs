//! `/runningpods` and `/run`.

use super::{Answer, Server, answer, full, json, query, text};
use crate::pod::labels;
use ferrite_cri::v1::{ContainerFilter, ContainerStateValue};
use ferrite_cri::v1::{ContainerState, ExecSyncRequest, ListContainersRequest};
use ferrite_json::{Value, json};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use std::collections::BTreeMap;

/// A command that takes longer is stopped.
const RUN_SECONDS: i64 = 600;

impl Server {
    /// Lists the runtime's pods, not the API's: pods are named by the labels of their containers.
    pub(super) async fn running_pods(&self) -> Answer {
        let state = Some(ContainerStateValue { state: ContainerState::ContainerRunning.into() });
        let filter = Some(ContainerFilter { state, ..ContainerFilter::default() });
        let listed = match self.context.runtime.list_containers(ListContainersRequest { filter }).await {
            Ok(listed) => listed.containers,
            Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
        };
        let mut pods: BTreeMap<(String, String, String), Vec<Value>> = BTreeMap::new();
        for container in listed {
            let label = |key: &str| container.labels.get(key).cloned().unwrap_or_default();
            let key = (label(labels::POD_NAMESPACE), label(labels::POD_NAME), label(labels::POD_UID));
            // Containers of others.
            if key.2.is_empty() {
                continue;
            }
            let image = container.image.map(|image| image.image).unwrap_or_default();
            let named = json!({"name": label(labels::CONTAINER_NAME), "image": image, "resources": {}});
            pods.entry(key).or_default().push(named);
        }
        let items: Vec<Value> = pods
            .into_iter()
            .map(|((namespace, name, uid), containers)| {
                json!({
                    "metadata": {"name": name, "namespace": namespace, "uid": uid},
                    "spec": {"containers": containers},
                    "status": {},
                })
            })
            .collect();
        json(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
    }

    /// Runs a command to its end and answers with its output.
    pub(super) async fn run(
        &self,
        request: &Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Answer {
        let id = match self.running(namespace, pod, container).await {
            Ok(id) => id,
            Err(answer) => return answer,
        };
        let command = query(request).into_iter().find(|(key, _)| key == "cmd").map(|(_, value)| value);
        let cmd = command.unwrap_or_default().split(' ').map(str::to_owned).collect();
        let exec = ExecSyncRequest { container_id: id, cmd, timeout: RUN_SECONDS };
        match self.context.runtime.exec_sync(exec).await {
            Ok(done) => {
                let mut output = done.stdout;
                output.extend_from_slice(&done.stderr);
                if done.exit_code == 0 {
                    return answer(StatusCode::OK, "application/json", full(output));
                }
                let message = format!(
                    "command terminated with exit code {}: {}",
                    done.exit_code,
                    String::from_utf8_lossy(&output)
                );
                text(StatusCode::INTERNAL_SERVER_ERROR, message)
            }
            Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
        }
    }
}

//! `/checkpoint`: the runtime writes a container's state to a file of the node.

use super::{Answer, Server, json, query, text};
use ferrite_cri::Code;
use ferrite_cri::v1::CheckpointContainerRequest;
use ferrite_json::json;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};

impl Server {
    pub(super) async fn checkpoint(
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
        let asked = query(request).into_iter().find(|(key, _)| key == "timeout").map(|(_, value)| value);
        let timeout = match asked.as_deref().map(str::parse::<i64>) {
            None => 0,
            Some(Ok(seconds)) if seconds >= 0 => seconds,
            _ => return text(StatusCode::BAD_REQUEST, "cannot parse value of timeout parameter\n"),
        };
        let dir = self.config.root_dir.join("checkpoints");
        if let Err(e) = ferrite_hostfs::private_dir(&dir) {
            return text(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot make {}: {e}\n", dir.display()));
        }
        let at = self.context.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ");
        let file = dir.join(format!("checkpoint-{pod}_{namespace}-{container}-{at}.tar"));
        let location = file.to_string_lossy().into_owned();
        let asked = CheckpointContainerRequest { container_id: id, location: location.clone(), timeout };
        match self.context.runtime.checkpoint_container(asked).await {
            Ok(_) => json(&json!({"items": [location]})),
            // As upstream: a runtime that cannot has no such path.
            Err(e) if e.code == Code::Unimplemented => text(
                StatusCode::NOT_FOUND,
                format!("checkpointing of {namespace}/{pod}/{container} failed ({e})\n"),
            ),
            Err(e) => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("checkpointing of {namespace}/{pod}/{container} failed ({e})\n"),
            ),
        }
    }
}

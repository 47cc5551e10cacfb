//! One check: run a command, ask over HTTP or gRPC, or open a connection.

use super::http::{self, HttpRequest};
use super::{Outcome, grpc};
use crate::clock;
use crate::container::expand::expand;
use ferrite_cri::v1::ExecSyncRequest;
use ferrite_cri::{Code, RuntimeService};
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Output kept of a check; the rest would only fill events.
const MAX_OUTPUT: usize = 10 * 1024;

/// A probe or a hook names no port that the container has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("couldn't find a valid port")]
pub(crate) struct PortError;

/// The target of a check.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub container_id: String,
    pub pod_ip: String,
    pub container: Container,
}

impl Target {
    /// A port by number, or by its name among the container's ports.
    pub(crate) fn port(&self, port: &IntOrString) -> Result<u16, PortError> {
        let number = match port {
            IntOrString::Int(n) => Some(*n),
            IntOrString::String(name) => match name.parse() {
                Ok(n) => Some(n),
                Err(_) => self
                    .container
                    .ports
                    .iter()
                    .flatten()
                    .find(|p| p.name.as_deref() == Some(name))
                    .map(|p| p.container_port),
            },
        };
        number.and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0).ok_or(PortError)
    }

    /// A command with the references to the container's variables replaced. As upstream: only by values that are in the
    /// spec itself.
    fn command(&self, command: &[String]) -> Vec<String> {
        let value = |name: &str| {
            let variable = self.container.env.iter().flatten().rfind(|variable| variable.name == name)?;
            Some(variable.value.clone().unwrap_or_default())
        };
        command.iter().map(|word| expand(word, value)).collect()
    }

    /// The request of an `httpGet` action.
    pub(crate) fn http_request(&self, action: &HTTPGetAction) -> Result<HttpRequest, PortError> {
        let host = action.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(&self.pod_ip);
        let path = action.path.as_deref().filter(|p| !p.is_empty()).unwrap_or("/");
        Ok(HttpRequest {
            tls: action.scheme.as_deref() == Some("HTTPS"),
            host: host.to_string(),
            port: self.port(&action.port)?,
            path: if path.starts_with('/') { path.to_string() } else { format!("/{path}") },
            headers: action
                .http_headers
                .iter()
                .flatten()
                .map(|h| (h.name.clone(), h.value.clone()))
                .collect(),
        })
    }
}

#[derive(Clone)]
pub(crate) struct Checker {
    runtime: Arc<dyn RuntimeService>,
}

impl Checker {
    pub(crate) fn new(runtime: Arc<dyn RuntimeService>) -> Self {
        Self { runtime }
    }

    pub(crate) async fn check(&self, probe: &Probe, target: &Target, limit: Duration) -> Outcome {
        if let Some(action) = &probe.exec {
            return self
                .exec(target.command(action.command.as_deref().unwrap_or_default()), target, limit)
                .await;
        }
        if let Some(action) = &probe.http_get {
            return match target.http_request(action) {
                Ok(request) => http_outcome(&request, limit).await,
                Err(error) => Outcome::Error(error.to_string()),
            };
        }
        if let Some(action) = &probe.tcp_socket {
            let host = action.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(&target.pod_ip);
            return match target.port(&action.port) {
                Ok(port) => tcp(host, port, limit).await,
                Err(error) => Outcome::Error(error.to_string()),
            };
        }
        if let Some(action) = &probe.grpc {
            let service = action.service.as_deref().unwrap_or_default();
            return match u16::try_from(action.port) {
                Ok(port) => grpc::check(&target.pod_ip, port, service, limit).await,
                Err(_) => Outcome::Error(PortError.to_string()),
            };
        }
        Outcome::Error(format!("missing probe handler for {}", target.container.name))
    }

    async fn exec(&self, cmd: Vec<String>, target: &Target, limit: Duration) -> Outcome {
        let request = ExecSyncRequest {
            container_id: target.container_id.clone(),
            cmd: cmd.clone(),
            timeout: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        };
        // The runtime enforces the limit; ours only guards against a runtime that does not answer.
        let answer = timeout(limit + Duration::from_secs(5), self.runtime.exec_sync(request)).await;
        let timed_out = || {
            Outcome::Failure(format!(
                "command timed out: {:?} timed out after {}",
                cmd.join(" "),
                clock::go_duration(limit)
            ))
        };
        match answer {
            Err(_) => timed_out(),
            Ok(Err(e)) if e.code == Code::DeadlineExceeded => timed_out(),
            Ok(Err(e)) => Outcome::Error(e.to_string()),
            Ok(Ok(r)) if r.exit_code == 0 => Outcome::Success,
            Ok(Ok(r)) => {
                let mut output = r.stdout;
                output.extend_from_slice(&r.stderr);
                output.truncate(MAX_OUTPUT);
                Outcome::Failure(String::from_utf8_lossy(&output).into_owned())
            }
        }
    }
}

async fn http_outcome(request: &HttpRequest, limit: Duration) -> Outcome {
    match http::get(request, limit).await {
        Ok(answer) if (200..300).contains(&answer.status) => Outcome::Success,
        // As upstream: it points to another host, or nowhere.
        Ok(answer) if (300..400).contains(&answer.status) => {
            let body = String::from_utf8_lossy(&answer.body).into_owned();
            Outcome::Warning(format!("Probe terminated redirects, Response body: {body}"))
        }
        Ok(answer) => Outcome::Failure(format!("HTTP probe failed with statuscode: {}", answer.status)),
        Err(e) => Outcome::Failure(format!("Get {:?}: {e}", request.url())),
    }
}

async fn tcp(host: &str, port: u16, limit: Duration) -> Outcome {
    match timeout(limit, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Outcome::Success,
        Ok(Err(e)) => Outcome::Failure(http::dial_error(host, port, &e)),
        Err(_) => Outcome::Failure(format!("dial tcp {}: i/o timeout", http::authority(host, port))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn commands_name_the_variables_of_the_spec() {
        let env = json!([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}, {"name": "B", "value": "$(A)"},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
        let container = ferrite_json::from_value(json!({"name": "c", "env": env})).unwrap();
        let target = Target { container_id: "i".into(), pod_ip: "192.0.2.1".into(), container };
        let command = ["x", "$(A)", "$(B)", "[$(C)]", "$(D)", "$$(A)"].map(str::to_owned);
        assert_eq!(target.command(&command), ["x", "2", "$(A)", "[]", "$(D)", "$(A)"]);
    }
}

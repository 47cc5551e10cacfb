//! Lifecycle hooks of containers.

use crate::probe::{HttpError, HttpRequest, Target, authority, http_get};
use ferrite_component::metrics::{Counter, registry};
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::ExecSyncRequest;
use k8s_openapi::api::core::v1::LifecycleHandler;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// A hook over HTTP that does not answer at all is given up after this long.
const HTTP_LIMIT: Duration = Duration::from_secs(3600);

#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error(
        "Exec lifecycle hook ({command:?}) for Container {container:?} failed - error: command exited with {code}, message: {output:?}"
    )]
    Exit { command: Vec<String>, container: String, code: i32, output: String },
    #[error("Exec lifecycle hook ({command:?}) for Container {container:?} failed - error: {source}")]
    Exec { command: Vec<String>, container: String, source: ferrite_cri::Error },
    #[error("HTTP lifecycle hook ({path}) for Container {container:?} failed - error: {problem}")]
    Http { path: String, container: String, problem: String },
    #[error("invalid handler: no action")]
    NoAction,
}

/// The way to a hook that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reached {
    AsAsked,
    /// The server of an HTTPS hook does not speak TLS.
    WithoutTls {
        authority: String,
    },
}

static FALLBACKS: LazyLock<Arc<Counter>> = LazyLock::new(|| {
    let help = "The number of times lifecycle handlers successfully fell back to http from https.";
    registry().counter("kubelet_lifecycle_handler_http_fallbacks_total", help, &[]).with(&[])
});

/// Runs a hook to its end. The caller limits the time.
pub(crate) async fn run(
    runtime: &dyn RuntimeService,
    hook: &LifecycleHandler,
    target: &Target,
) -> Result<Reached, HookError> {
    let container = target.container.name.clone();
    if let Some(action) = &hook.exec {
        let command = action.command.clone().unwrap_or_default();
        let request =
            ExecSyncRequest { container_id: target.container_id.clone(), cmd: command.clone(), timeout: 0 };
        return match runtime.exec_sync(request).await {
            Ok(answer) if answer.exit_code == 0 => Ok(Reached::AsAsked),
            Ok(answer) => {
                let mut output = answer.stdout;
                output.extend_from_slice(&answer.stderr);
                output.truncate(1024);
                let output = String::from_utf8_lossy(&output).into_owned();
                Err(HookError::Exit { command, container, code: answer.exit_code, output })
            }
            Err(source) => Err(HookError::Exec { command, container, source }),
        };
    }
    if let Some(action) = &hook.http_get {
        let path = action.path.clone().unwrap_or_default();
        let request = target.http_request(action).map_err(|error| HookError::Http {
            path: path.clone(),
            container: container.clone(),
            problem: error.to_string(),
        })?;
        let failed = |error: HttpError| HookError::Http {
            path: path.clone(),
            container: container.clone(),
            problem: error.to_string(),
        };
        // As upstream: an answer of any status will do.
        return match http_get(&request, HTTP_LIMIT).await {
            Ok(_) => Ok(Reached::AsAsked),
            Err(HttpError::NotTls) => {
                let mut plain = HttpRequest { tls: false, ..request };
                // Nobody else on the way may read it.
                plain.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("authorization"));
                http_get(&plain, HTTP_LIMIT).await.map_err(failed)?;
                FALLBACKS.increment();
                Ok(Reached::WithoutTls { authority: authority(&plain.host, plain.port) })
            }
            Err(error) => Err(failed(error)),
        };
    }
    if let Some(action) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(action.seconds).unwrap_or(0))).await;
        return Ok(Reached::AsAsked);
    }
    Err(HookError::NoAction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::testing::FakeRuntime;
    use ferrite_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Answers one connection, and gives what it read.
    async fn answer_once(listener: &tokio::net::TcpListener, answer: &str) -> Vec<u8> {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = vec![0; 4096];
        let n = stream.read(&mut seen).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        seen.truncate(n);
        seen
    }

    async fn run_at(port: u16, scheme: &str) -> Result<Reached, HookError> {
        let headers = json!([{"name": "Authorization", "value": "secret"}, {"name": "X-A", "value": "b"}]);
        let hook = json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/private", "scheme": scheme,
            "httpHeaders": headers}});
        let hook: LifecycleHandler = ferrite_json::from_value(hook).unwrap();
        let container = ferrite_json::from_value(json!({"name": "c"})).unwrap();
        let target = Target { container_id: "i".into(), pod_ip: "192.0.2.1".into(), container };
        run(&FakeRuntime::new(Clock::System), &hook, &target).await
    }

    #[tokio::test]
    async fn an_answer_of_any_status_will_do() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let answer = "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n";
        let (_, reached) = tokio::join!(answer_once(&listener, answer), run_at(port, "HTTP"));
        assert_eq!(reached.unwrap(), Reached::AsAsked);
        drop(listener);
        let refused = run_at(port, "HTTP").await.unwrap_err().to_string();
        assert!(refused.contains("connection refused"), "{refused}");
    }

    #[tokio::test]
    async fn a_server_without_tls_is_asked_without_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = async {
            answer_once(&listener, "HTTP/1.0 400 Bad Request\r\n\r\nplease without TLS").await;
            answer_once(&listener, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await
        };
        let (seen, reached) = tokio::join!(server, run_at(port, "HTTPS"));
        assert_eq!(reached.unwrap(), Reached::WithoutTls { authority: format!("127.0.0.1:{port}") });
        let seen = String::from_utf8(seen).unwrap().to_lowercase();
        assert!(seen.starts_with("get /private") && seen.contains("x-a: b"), "{seen}");
        assert!(!seen.contains("authorization"), "{seen}");
    }
}

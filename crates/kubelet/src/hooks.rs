//! Lifecycle hooks of containers.

use crate::probe::{Target, http_get};
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::ExecSyncRequest;
use k8s_openapi::api::core::v1::LifecycleHandler;
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

/// Runs a hook to its end. The caller limits the time.
pub(crate) async fn run(
    runtime: &dyn RuntimeService,
    hook: &LifecycleHandler,
    target: &Target,
) -> Result<(), HookError> {
    let container = target.container.name.clone();
    if let Some(action) = &hook.exec {
        let command = action.command.clone().unwrap_or_default();
        let request =
            ExecSyncRequest { container_id: target.container_id.clone(), cmd: command.clone(), timeout: 0 };
        return match runtime.exec_sync(request).await {
            Ok(answer) if answer.exit_code == 0 => Ok(()),
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
        return match http_get(&request, HTTP_LIMIT).await {
            Ok(answer) if (200..400).contains(&answer.status) => Ok(()),
            // The body is not repeated: the pod's author chose the host, and the node may reach more than they do.
            Ok(answer) => {
                let problem = format!("HTTP request failed with status {}", answer.status);
                Err(HookError::Http { path, container, problem })
            }
            Err(error) => Err(HookError::Http { path, container, problem: error.to_string() }),
        };
    }
    if let Some(action) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(action.seconds).unwrap_or(0))).await;
        return Ok(());
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

    #[tokio::test]
    async fn an_error_does_not_show_what_the_node_can_read() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            stream.write_all(b"HTTP/1.1 403 No\r\nContent-Length: 6\r\n\r\nsecret").await.unwrap();
        });
        let hook = json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/private"}});
        let hook: LifecycleHandler = ferrite_json::from_value(hook).unwrap();
        let container = ferrite_json::from_value(json!({"name": "c"})).unwrap();
        let target = Target { container_id: "i".into(), pod_ip: "192.0.2.1".into(), container };
        let error = run(&FakeRuntime::new(Clock::System), &hook, &target).await.unwrap_err().to_string();
        server.await.unwrap();
        assert!(error.contains("403") && !error.contains("secret"), "{error}");
    }
}

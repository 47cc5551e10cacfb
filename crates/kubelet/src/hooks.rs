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
            Ok(answer) => {
                let body = String::from_utf8_lossy(&answer.body).into_owned();
                let problem = format!("HTTP request failed with status {}: {body}", answer.status);
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

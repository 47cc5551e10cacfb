//! One call of a plugin: a program that reads its configuration and writes a result.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

/// No result and no message is larger.
const MAX_BYTES: u64 = 1 << 20;

/// A failure of a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    #[error("plugin {kind:?} is in none of {}", dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(":"))]
    Missing { kind: String, dirs: Vec<PathBuf> },
    #[error("plugin {kind} cannot be started")]
    Start {
        kind: String,
        #[source]
        source: io::Error,
    },
    #[error("plugin {kind} did not answer {command} within {} s", patience.as_secs_f32())]
    Late { kind: String, command: &'static str, patience: Duration },
    #[error("plugin {kind} failed ({command}): {message}")]
    Failed { kind: String, command: &'static str, code: Option<i64>, message: String },
    #[error("plugin {kind} answered {command} with something else than a result: {what}")]
    BadResult { kind: String, command: &'static str, what: String },
}

/// The arguments of a plugin besides its configuration.
#[derive(Debug, Clone)]
pub struct Invocation<'a> {
    pub command: &'static str,
    pub container: &'a str,
    pub netns: &'a Path,
    pub interface: &'a str,
    pub args: &'a str,
    pub dirs: &'a [PathBuf],
    pub patience: Duration,
}

fn find(kind: &str, dirs: &[PathBuf]) -> Result<PathBuf, PluginError> {
    let found = dirs.iter().map(|dir| dir.join(kind)).find(|path| path.is_file());
    found.ok_or_else(|| PluginError::Missing { kind: kind.to_owned(), dirs: dirs.to_vec() })
}

/// Calls the plugin. Returns its result; `None` if it wrote nothing.
pub async fn call(
    kind: &str,
    input: &Value,
    invocation: &Invocation<'_>,
) -> Result<Option<Value>, PluginError> {
    let program = find(kind, invocation.dirs)?;
    let start = |source| PluginError::Start { kind: kind.to_owned(), source };
    let path: Vec<String> = invocation.dirs.iter().map(|dir| dir.display().to_string()).collect();
    let mut command = Command::new(&program);
    command
        .env("CNI_COMMAND", invocation.command)
        .env("CNI_PATH", path.join(":"))
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // In a process group of its own: processes that the plugin starts end with it.
        .process_group(0)
        .kill_on_drop(true);
    if !invocation.container.is_empty() {
        command
            .env("CNI_CONTAINERID", invocation.container)
            .env("CNI_NETNS", invocation.netns)
            .env("CNI_IFNAME", invocation.interface)
            .env("CNI_ARGS", invocation.args);
    }
    let mut child = command.spawn().map_err(start)?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let (mut stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let text = input.to_string();
    let write = async move {
        if let Some(stdin) = &mut stdin {
            // A plugin need not read its input.
            let _ = stdin.write_all(text.as_bytes()).await;
        }
        drop(stdin);
    };
    let talk = async {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let read_out = async {
            match stdout {
                Some(stdout) => stdout.take(MAX_BYTES).read_to_end(&mut out).await.map(drop),
                None => Ok(()),
            }
        };
        let read_err = async {
            match stderr {
                Some(stderr) => stderr.take(MAX_BYTES).read_to_end(&mut err).await.map(drop),
                None => Ok(()),
            }
        };
        let ((), read, _) = tokio::join!(write, read_out, read_err);
        read?;
        Ok::<_, io::Error>((child.wait().await?, out, err))
    };
    let (status, out, err) = match tokio::time::timeout(invocation.patience, talk).await {
        Ok(talked) => talked.map_err(start)?,
        Err(_) => {
            if let Some(group) = group {
                let _ = killpg(group, Signal::SIGKILL);
            }
            let (kind, patience) = (kind.to_owned(), invocation.patience);
            return Err(PluginError::Late { kind, command: invocation.command, patience });
        }
    };
    if !status.success() {
        let (code, message) = failure(&out, &err, &status.to_string());
        return Err(PluginError::Failed {
            kind: kind.to_owned(),
            command: invocation.command,
            code,
            message,
        });
    }
    if out.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    serde_json::from_slice(&out).map(Some).map_err(|error| PluginError::BadResult {
        kind: kind.to_owned(),
        command: invocation.command,
        what: error.to_string(),
    })
}

/// The error object that the specification wants, else whatever the plugin said.
fn failure(out: &[u8], err: &[u8], status: &str) -> (Option<i64>, String) {
    let object: Option<Value> = serde_json::from_slice(out).ok();
    let text = |key: &str| object.as_ref().and_then(|object| object.get(key)).and_then(Value::as_str);
    let code = object.as_ref().and_then(|object| object.get("code")).and_then(Value::as_i64);
    if let Some(message) = text("msg") {
        let details = text("details").filter(|details| !details.is_empty());
        return (code, details.map_or(message.to_owned(), |details| format!("{message}; {details}")));
    }
    let said = [err, out].into_iter().map(String::from_utf8_lossy).find(|said| !said.trim().is_empty());
    let said = said.map_or_else(|| status.to_owned(), |said| said.trim().to_owned());
    (code, said.chars().filter(|c| !c.is_control() || *c == '\n').take(1024).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_in_the_plugins_words() {
        let rows = [
            (r#"{"code":7,"msg":"no range","details":"x"}"#, "", Some(7), "no range; x"),
            (r#"{"code":7,"msg":"no range"}"#, "log", Some(7), "no range"),
            ("plain", "", None, "plain"),
            ("", "on the other way\n", None, "on the other way"),
            ("", "", None, "exit status: 3"),
        ];
        for (out, err, code, message) in rows {
            let seen = failure(out.as_bytes(), err.as_bytes(), "exit status: 3");
            assert_eq!(seen, (code, message.to_owned()));
        }
    }
}

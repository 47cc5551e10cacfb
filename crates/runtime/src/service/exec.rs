//! Running further commands in containers.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferrite_cri::v1::{ExecSyncRequest, ExecSyncResponse};
use ferrite_cri::{Code, Error, Result};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use super::Inner;
use super::client::{Conversation, ask};
use super::state::{Container, Sandbox, Status};
use crate::supervisor::protocol::{Decoder, Exec, Failure, Reply, Request};

/// Most output kept of one stream of an exec_sync, as containerd has it.
const MAX_OUTPUT: usize = 16 << 20;
/// Bytes of output that each stream may have in any case.
const FREE_OUTPUT: usize = 64 << 10;
/// Bytes of output that all calls of exec_sync have together, beside the free ones. Pods with many probes, each of
/// which prints as much as it may, must not take the memory of the node.
const ALL_OUTPUT: usize = 128 << 20;
/// Longest wait for output after the command has ended (a process that it left may hold the pipe).
const DRAIN: Duration = Duration::from_secs(5);

/// A command that runs in a container.
pub struct Running {
    pub name: String,
    /// Its process, as the host counts.
    pub pid: i32,
    /// Its terminal, when it has one.
    pub terminal: Option<OwnedFd>,
    conversation: tokio::net::UnixStream,
    decoder: Decoder,
}

impl Running {
    /// Waits for the command's end.
    pub async fn exit_code(&mut self) -> Result<i32> {
        let mut buffer = [0; 512];
        loop {
            match self.decoder.next::<Reply>() {
                Ok(Some(Reply::Exited { code })) => return Ok(code),
                Ok(Some(_)) => {}
                Ok(None) => {
                    let count = self.conversation.read(&mut buffer).await.unwrap_or(0);
                    if count == 0 {
                        return Err(Error::internal("the pod's supervisor ended"));
                    }
                    self.decoder.push(&buffer[..count]);
                }
                Err(error) => return Err(Error::internal(error.to_string())),
            }
        }
    }
}

/// A name no other exec has.
pub(crate) fn exec_name() -> String {
    format!("exec-{:016x}", rand::random::<u64>())
}

/// Has a supervisor run a command. Without `streams` it gets a terminal.
pub(crate) async fn run_exec(
    run_dir: &std::path::Path,
    exec: Exec,
    streams: Option<[OwnedFd; 3]>,
) -> Result<Running> {
    let (id, name) = (exec.id.clone(), exec.exec.clone());
    let fds = streams.map(Vec::from).unwrap_or_default();
    let (reply, mut received, Conversation { socket, decoder }) = ask(run_dir, Request::Exec(exec), fds)
        .await
        .map_err(|error| Error::internal(format!("exec in container {id}: {error}")))?;
    match reply {
        Reply::Started { pid, .. } => {
            socket.set_nonblocking(true).map_err(|error| Error::internal(error.to_string()))?;
            let conversation = tokio::net::UnixStream::from_std(socket)
                .map_err(|error| Error::internal(error.to_string()))?;
            Ok(Running { name, pid, terminal: received.pop(), conversation, decoder })
        }
        Reply::Failed { failure: Failure::NotRunning, message } => {
            Err(Error::new(Code::FailedPrecondition, message))
        }
        Reply::Failed { message, .. } => {
            Err(Error::internal(format!("failed to exec in container: {message}")))
        }
        _ => Err(Error::internal("the supervisor gave an answer that makes no sense")),
    }
}

impl Inner {
    /// The container and its sandbox, if it runs.
    pub(crate) fn running(&self, id: &str) -> Result<(std::sync::Arc<Container>, std::sync::Arc<Sandbox>)> {
        let container = self.index.container(id)?;
        if !matches!(container.status(), Status::Running { .. }) {
            let message = format!("container {} is not running", container.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        let sandbox = self.index.sandbox(&container.sandbox)?;
        Ok((container, sandbox))
    }

    /// Starts a command. Without `streams` it gets a terminal.
    pub(crate) async fn start_exec(
        &self,
        id: &str,
        args: Vec<String>,
        streams: Option<[OwnedFd; 3]>,
    ) -> Result<Running> {
        if args.is_empty() {
            return Err(Error::invalid("no command specified"));
        }
        let (container, sandbox) = self.running(id)?;
        let exec = Exec {
            id: container.id.clone(),
            exec: exec_name(),
            terminal: streams.is_none(),
            args,
            bundle: container.bundle.clone(),
            process: None,
        };
        run_exec(&sandbox.run_dir, exec, streams).await
    }

    /// Ends everything an exec has started.
    pub(crate) async fn kill_exec(&self, id: &str, exec: &str) {
        if let Ok((container, sandbox)) = self.running(id) {
            let request = Request::KillExec { id: container.id.clone(), exec: exec.to_owned() };
            if let Err(error) = ask(&sandbox.run_dir, request, Vec::new()).await {
                tracing::warn!(container = %container.id, %error, "exec not killed");
            }
        }
    }

    pub(super) async fn exec_sync(&self, request: ExecSyncRequest) -> Result<ExecSyncResponse> {
        let internal = |error: std::io::Error| Error::internal(format!("exec: {error}"));
        let null = std::fs::File::open("/dev/null").map_err(internal)?;
        let (out_write, mut out_read) = pipe::pipe().map_err(internal)?;
        let (err_write, mut err_read) = pipe::pipe().map_err(internal)?;
        let streams = [
            null.into(),
            out_write.into_blocking_fd().map_err(internal)?,
            err_write.into_blocking_fd().map_err(internal)?,
        ];
        let mut running = self.start_exec(&request.container_id, request.cmd, Some(streams)).await?;
        let name = running.name.clone();
        let work = async {
            let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
            // Kept as long as the output is, also of a stream that has ended.
            let (mut of_stdout, mut of_stderr) = (OUTPUT.share(), OUTPUT.share());
            let mut drained = false;
            let code = {
                let output = async {
                    tokio::join!(
                        collect(&mut out_read, &mut stdout, &mut of_stdout),
                        collect(&mut err_read, &mut stderr, &mut of_stderr)
                    );
                };
                tokio::pin!(output);
                let exit = running.exit_code();
                tokio::pin!(exit);
                let code = loop {
                    tokio::select! {
                        () = &mut output, if !drained => drained = true,
                        code = &mut exit => break code?,
                    }
                };
                if !drained {
                    let _ = tokio::time::timeout(DRAIN, &mut output).await;
                }
                code
            };
            Ok::<_, Error>((code, stdout, stderr))
        };
        let result = if request.timeout > 0 {
            let limit = Duration::from_secs(request.timeout.unsigned_abs());
            tokio::time::timeout(limit, work).await.map_err(|_| limit)
        } else {
            Ok(work.await)
        };
        match result {
            Ok(result) => {
                let (exit_code, stdout, stderr) = result?;
                Ok(ExecSyncResponse { stdout, stderr, exit_code })
            }
            Err(limit) => {
                self.kill_exec(&request.container_id, &name).await;
                let message = format!("failed to exec in container: timeout {}s exceeded", limit.as_secs());
                Err(Error::new(Code::DeadlineExceeded, message))
            }
        }
    }
}

/// The output of all calls that are under way.
static OUTPUT: Budget = Budget { left: AtomicUsize::new(ALL_OUTPUT) };

/// Bytes that several calls share.
struct Budget {
    left: AtomicUsize,
}

/// The part of a budget that one stream has, until dropped.
struct Share<'a> {
    budget: &'a Budget,
    bytes: usize,
}

impl Budget {
    fn share(&self) -> Share<'_> {
        Share { budget: self, bytes: 0 }
    }
}

impl Share<'_> {
    /// Takes so many bytes, or those that are left.
    fn take(&mut self, wanted: usize) -> usize {
        let rest = |left: usize| Some(left.saturating_sub(wanted));
        let before = self.budget.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, rest);
        let taken = before.unwrap_or_else(|left| left).min(wanted);
        self.bytes += taken;
        taken
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.bytes, Ordering::AcqRel);
    }
}

/// Reads to the end, keeping no more than the limit and the budget allow.
async fn collect(source: &mut pipe::Receiver, into: &mut Vec<u8>, share: &mut Share<'_>) {
    let mut buffer = vec![0; 8192];
    loop {
        match source.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => {
                let wanted = count.min(MAX_OUTPUT.saturating_sub(into.len()));
                let free = wanted.min(FREE_OUTPUT.saturating_sub(into.len()));
                let kept = free + share.take(wanted - free);
                into.extend_from_slice(&buffer[..kept]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_shared_and_given_back() {
        let budget = Budget { left: AtomicUsize::new(10) };
        let (mut a, mut b) = (budget.share(), budget.share());
        assert_eq!((a.take(4), b.take(4), a.take(4), b.take(1)), (4, 4, 2, 0));
        drop(a);
        assert_eq!(b.take(100), 6);
        drop(b);
        assert_eq!(budget.left.into_inner(), 10);
    }
}

//! Talking to supervisors.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::supervisor::protocol::{self, Decoder, Reply, Request};

/// Longest wait for a supervisor's reply. Setting up a container takes milliseconds; a hung network file
/// system may take much longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// A request and its reply, with the descriptors that came along. Blocks.
pub fn call(
    run_dir: &Path,
    request: &Request,
    fds: &[RawFd],
) -> io::Result<(Reply, Vec<OwnedFd>, Conversation)> {
    let socket = protocol::connect(run_dir)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    protocol::send(&socket, request, fds)?;
    let (mut decoder, mut received) = (Decoder::default(), Vec::new());
    let reply = protocol::receive(&socket, &mut decoder, &mut received)?;
    Ok((reply, received, Conversation { socket, decoder }))
}

/// An open connection on which more may follow.
pub struct Conversation {
    pub socket: std::os::unix::net::UnixStream,
    pub decoder: Decoder,
}

/// As [`call`], away from the threads that must not block.
pub async fn ask(
    run_dir: &Path,
    request: Request,
    fds: Vec<OwnedFd>,
) -> io::Result<(Reply, Vec<OwnedFd>, Conversation)> {
    let run_dir: PathBuf = run_dir.to_owned();
    blocking(move || {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        call(&run_dir, &request, &raw)
    })
    .await
}

/// Runs blocking work; a panic in it becomes an error.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

//! Exec and attach between a container's streams and a client's channels, whatever the transport.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use hyper::body::Bytes;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use super::Action;
use super::budget::Piece;
use super::status::Outcome;
use crate::service::Inner;
use crate::service::state::Status;
use crate::supervisor::protocol::{Reply, Request};

/// Pieces waiting in one channel; a client that does not read slows its own command down.
pub const DEPTH: usize = 8;
const CHUNK: usize = 32 * 1024;

/// A terminal's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Size {
    pub width: u16,
    pub height: u16,
}

/// The container's side of a client's channels. A closed stdin channel is the end of input.
pub struct Channels {
    pub stdin: mpsc::Receiver<Piece>,
    pub resize: mpsc::Receiver<Size>,
    pub stdout: mpsc::Sender<Bytes>,
    pub stderr: mpsc::Sender<Bytes>,
}

/// The transport's side.
pub struct Ends {
    pub stdin: Option<mpsc::Sender<Piece>>,
    pub resize: Option<mpsc::Sender<Size>>,
    pub stdout: mpsc::Receiver<Bytes>,
    pub stderr: mpsc::Receiver<Bytes>,
}

pub fn channels() -> (Channels, Ends) {
    let (stdin_in, stdin) = mpsc::channel(DEPTH);
    let (resize_in, resize) = mpsc::channel(DEPTH);
    let (stdout, stdout_out) = mpsc::channel(DEPTH);
    let (stderr, stderr_out) = mpsc::channel(DEPTH);
    (
        Channels { stdin, resize, stdout, stderr },
        Ends { stdin: Some(stdin_in), resize: Some(resize_in), stdout: stdout_out, stderr: stderr_out },
    )
}

/// Which streams a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

impl Action {
    pub(super) fn wanted(&self) -> Wanted {
        match self {
            // A terminal has one output.
            Self::Exec(r) => {
                Wanted { stdin: r.stdin, stdout: r.stdout, stderr: r.stderr && !r.tty, tty: r.tty }
            }
            Self::Attach(r) => {
                Wanted { stdin: r.stdin, stdout: r.stdout, stderr: r.stderr && !r.tty, tty: r.tty }
            }
            Self::Forward { .. } => Wanted { stdin: false, stdout: false, stderr: false, tty: false },
        }
    }
}

/// Runs the action to its end.
pub async fn run(inner: &Arc<Inner>, action: &Action, channels: Channels) -> Outcome {
    let result = match action {
        Action::Exec(request) if request.tty => {
            exec_terminal(inner, &request.container_id, &request.cmd, channels).await
        }
        Action::Exec(request) => {
            exec(inner, &request.container_id, &request.cmd, request.stdin, channels).await
        }
        Action::Attach(request) => {
            let wanted = action.wanted();
            attach(inner, &request.container_id, wanted, channels).await
        }
        Action::Forward { .. } => Err("not an exec".to_owned()),
    };
    match result {
        Ok(code) => Outcome::Ended(code),
        Err(message) => Outcome::Failed(message),
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn exec(
    inner: &Arc<Inner>,
    id: &str,
    command: &[String],
    stdin: bool,
    channels: Channels,
) -> Result<i32, String> {
    let (out_write, out_read) = pipe::pipe().map_err(text)?;
    let (err_write, err_read) = pipe::pipe().map_err(text)?;
    let (input, feed): (OwnedFd, _) = if stdin {
        let (write, read) = pipe::pipe().map_err(text)?;
        (read.into_blocking_fd().map_err(text)?, Some(write))
    } else {
        (std::fs::File::open("/dev/null").map_err(text)?.into(), None)
    };
    let streams =
        [input, out_write.into_blocking_fd().map_err(text)?, err_write.into_blocking_fd().map_err(text)?];
    let mut running = inner.start_exec(id, command.to_vec(), Some(streams)).await.map_err(text)?;
    let Channels { stdin: incoming, stdout, stderr, resize: _resize } = channels;
    let output = async {
        tokio::join!(drain(out_read, stdout), drain(err_read, stderr));
    };
    let input = async {
        if let Some(feed) = feed {
            pump(incoming, feed).await;
        }
        std::future::pending::<()>().await;
    };
    until_exit(running.exit_code(), output, input).await
}

/// The command's end decides; its output is waited for a moment longer, its input is not.
async fn until_exit(
    exit: impl Future<Output = ferrite_cri::Result<i32>>,
    output: impl Future<Output = ()>,
    input: impl Future<Output = ()>,
) -> Result<i32, String> {
    tokio::pin!(exit, output, input);
    let mut drained = false;
    let code = loop {
        tokio::select! {
            code = &mut exit => break code.map_err(text)?,
            () = &mut output, if !drained => drained = true,
            () = &mut input => {}
        }
    };
    if !drained {
        let _ = tokio::time::timeout(std::time::Duration::from_secs(5), &mut output).await;
    }
    Ok(code)
}

async fn drain(mut from: impl tokio::io::AsyncRead + Unpin, into: mpsc::Sender<Bytes>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count) = from.read(&mut buffer).await {
        // With nobody listening the output is still read, or the command would wait for ever.
        if count == 0 {
            return;
        }
        let _ = into.send(Bytes::copy_from_slice(&buffer[..count])).await;
    }
}

async fn pump(mut from: mpsc::Receiver<Piece>, mut into: impl tokio::io::AsyncWrite + Unpin) {
    while let Some(bytes) = from.recv().await {
        if into.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// A terminal's master as tokio sees it.
struct Terminal(AsyncFd<OwnedFd>);

impl Terminal {
    fn new(master: OwnedFd) -> io::Result<Self> {
        // SAFETY: changes a flag of a descriptor we own.
        unsafe {
            let flags = libc::fcntl(master.as_raw_fd(), libc::F_GETFL);
            libc::fcntl(master.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
        // SAFETY: the descriptor is owned by the value that registers it and closed only with it.
        Ok(Self(unsafe { AsyncFd::register(master) }?))
    }

    async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|fd| Ok(nix::unistd::read(fd.get_ref(), buffer)?)) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.0.writable().await?;
            if let Ok(result) = ready.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), bytes)?)) {
                bytes = &bytes[result?..];
            }
        }
        Ok(())
    }

    fn resize(&self, size: Size) {
        let size = libc::winsize { ws_row: size.height, ws_col: size.width, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the ioctl reads one winsize.
        unsafe { libc::ioctl(self.0.get_ref().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    }
}

async fn exec_terminal(
    inner: &Arc<Inner>,
    id: &str,
    command: &[String],
    channels: Channels,
) -> Result<i32, String> {
    let mut running = inner.start_exec(id, command.to_vec(), None).await.map_err(text)?;
    let master = running.terminal.take().ok_or("the supervisor sent no terminal")?;
    let terminal = Terminal::new(master).map_err(text)?;
    let Channels { mut stdin, mut resize, stdout, stderr: _stderr } = channels;
    let output = async {
        let mut buffer = vec![0; CHUNK];
        // The end of a terminal is an error (EIO), not an end of file.
        while let Ok(count) = terminal.read(&mut buffer).await {
            if count == 0 {
                return;
            }
            let _ = stdout.send(Bytes::copy_from_slice(&buffer[..count])).await;
        }
    };
    let input = async {
        let (mut typing, mut sizing) = (true, true);
        while typing || sizing {
            tokio::select! {
                bytes = stdin.recv(), if typing => match bytes {
                    Some(bytes) => typing = terminal.write_all(&bytes).await.is_ok(),
                    None => typing = false,
                },
                size = resize.recv(), if sizing => match size {
                    Some(size) => terminal.resize(size),
                    None => sizing = false,
                },
            }
        }
        std::future::pending::<()>().await;
    };
    until_exit(running.exit_code(), output, input).await
}

async fn attach(inner: &Arc<Inner>, id: &str, wanted: Wanted, channels: Channels) -> Result<i32, String> {
    let (container, sandbox) = inner.running(id).map_err(text)?;
    let (mut fds, mut feed) = (Vec::new(), None);
    let with_stdin = wanted.stdin && container.config.stdin;
    if with_stdin {
        let (write, read) = pipe::pipe().map_err(text)?;
        fds.push(read.into_blocking_fd().map_err(text)?);
        feed = Some(write);
    }
    let mut output = |wanted: bool| -> Result<Option<pipe::Receiver>, String> {
        if !wanted {
            return Ok(None);
        }
        let (write, read) = pipe::pipe().map_err(text)?;
        fds.push(write.into_blocking_fd().map_err(text)?);
        Ok(Some(read))
    };
    let (out, err) = (output(wanted.stdout)?, output(wanted.stderr)?);
    let request = Request::Attach {
        id: container.id.clone(),
        stdin: with_stdin,
        stdout: wanted.stdout,
        stderr: wanted.stderr,
        lossless: false,
    };
    match crate::service::client::ask(&sandbox.run_dir, request, fds).await.map_err(text)? {
        (Reply::Done, ..) => {}
        (Reply::Failed { message, .. }, ..) => return Err(message),
        _ => return Err("the supervisor gave an answer that makes no sense".to_owned()),
    }
    let Channels { stdin, mut resize, stdout, stderr } = channels;
    let output = async {
        tokio::join!(
            async {
                if let Some(out) = out {
                    drain(out, stdout).await;
                }
            },
            async {
                if let Some(err) = err {
                    drain(err, stderr).await;
                }
            }
        );
    };
    let input = async {
        let typing = async {
            if let Some(feed) = feed {
                pump(stdin, feed).await;
            }
        };
        let sizing = async {
            while let Some(Size { width, height }) = resize.recv().await {
                let request = Request::Resize { id: container.id.clone(), width, height };
                let _ = crate::service::client::ask(&sandbox.run_dir, request, Vec::new()).await;
            }
        };
        tokio::join!(typing, sizing);
        std::future::pending::<()>().await;
    };
    let exit = async {
        container.ended().await;
        Ok(match container.status() {
            Status::Exited(ended) => ended.code,
            _ => 0,
        })
    };
    until_exit(exit, output, input).await
}

//! Our standard streams and a container's: copied, with a terminal set up and put back.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ferrite_runtime::standalone::{Streams, Task};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::Failure;

/// The terminal without line editing and signals, put back when dropped.
pub struct RawTerminal(Termios);

impl RawTerminal {
    pub fn enter() -> Option<Self> {
        let before = tcgetattr(io::stdin()).ok()?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw).ok()?;
        Some(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.0);
    }
}

/// Width and height of our terminal.
pub fn terminal_size() -> Option<(u16, u16)> {
    // SAFETY: winsize is plain data the ioctl fills.
    unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        (libc::ioctl(0, libc::TIOCGWINSZ, &raw mut size) == 0 && size.ws_col > 0)
            .then_some((size.ws_col, size.ws_row))
    }
}

/// The keys that leave a container running: `ctrl-p,ctrl-q`.
pub fn parse_keys(text: &str) -> Result<Vec<u8>, String> {
    let key = |word: &str| -> Option<u8> {
        match word.strip_prefix("ctrl-") {
            Some(letter) => match letter.as_bytes() {
                [b @ b'a'..=b'z'] => Some(b - b'a' + 1),
                [b'@'] => Some(0),
                [b'['] => Some(27),
                [b'\\'] => Some(28),
                [b']'] => Some(29),
                [b'^'] => Some(30),
                [b'_'] => Some(31),
                _ => None,
            },
            None => match word.as_bytes() {
                [b] if b.is_ascii_graphic() => Some(*b),
                _ => None,
            },
        }
    };
    let keys = text.split(',').map(|word| key(word).ok_or_else(|| format!("Unknown character: '{word}'")));
    keys.collect()
}

/// Finds the detach keys in the input.
pub struct DetachKeys {
    keys: Vec<u8>,
    matched: usize,
}

impl DetachKeys {
    pub fn new(keys: Vec<u8>) -> Self {
        Self { keys, matched: 0 }
    }

    /// Returns the input without the detach keys, and true if the keys were typed.
    pub fn filter(&mut self, input: &[u8]) -> (Vec<u8>, bool) {
        let mut out = Vec::new();
        for byte in input {
            if self.keys.get(self.matched) == Some(byte) {
                self.matched += 1;
                if self.matched == self.keys.len() {
                    return (out, true);
                }
                continue;
            }
            // Held back in vain: it was the beginning of something else.
            out.extend_from_slice(&self.keys[..self.matched]);
            self.matched = 0;
            if self.keys.first() == Some(byte) && self.keys.len() > 1 {
                self.matched = 1;
            } else {
                out.push(*byte);
            }
        }
        (out, false)
    }
}

/// Which streams to join.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

/// Our ends of the pipes to a container.
pub struct Pipes {
    pub stdin: Option<PipeWriter>,
    pub stdout: Option<PipeReader>,
    pub stderr: Option<PipeReader>,
}

/// Pipes for the streams that are wanted: the container's ends, and ours.
pub fn pipes(wanted: Wanted) -> io::Result<(Streams, Pipes)> {
    let mut theirs = Streams::default();
    let mut ours = Pipes { stdin: None, stdout: None, stderr: None };
    if wanted.stdin {
        let (reader, writer) = io::pipe()?;
        (theirs.stdin, ours.stdin) = (Some(reader.into()), Some(writer));
    }
    if wanted.stdout {
        let (reader, writer) = io::pipe()?;
        (theirs.stdout, ours.stdout) = (Some(writer.into()), Some(reader));
    }
    if wanted.stderr {
        let (reader, writer) = io::pipe()?;
        (theirs.stderr, ours.stderr) = (Some(writer.into()), Some(reader));
    }
    Ok((theirs, ours))
}

fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                if to.write_all(&buffer[..count]).and_then(|()| to.flush()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A terminal whose last process is gone.
            Err(_) => return,
        }
    }
}

/// The end of a session at a container's streams.
pub enum Left {
    /// All output has come.
    Finished,
    /// The detach keys were typed.
    Detached,
}

/// A running copy between our streams and a container's.
pub struct Session {
    outputs: Vec<oneshot::Receiver<()>>,
    detached: oneshot::Receiver<()>,
    _raw: Option<RawTerminal>,
}

impl Session {
    /// Starts copying. With `keys` the input is watched for them.
    pub fn start(pipes: Pipes, tty: bool, keys: Option<Vec<u8>>) -> Self {
        let raw = if tty && pipes.stdin.is_some() { RawTerminal::enter() } else { None };
        let (tell, detached) = oneshot::channel();
        if let Some(stdin) = pipes.stdin {
            std::thread::spawn(move || read_input(stdin, keys, tell));
        }
        let mut outputs = Vec::new();
        let mut output = |from: Option<PipeReader>, to: fn() -> Box<dyn Write>| {
            if let Some(from) = from {
                let (done, finished) = oneshot::channel();
                std::thread::spawn(move || {
                    copy(from, to());
                    let _ = done.send(());
                });
                outputs.push(finished);
            }
        };
        output(pipes.stdout, || Box::new(io::stdout()));
        output(pipes.stderr, || Box::new(io::stderr()));
        Self { outputs, detached, _raw: raw }
    }

    /// Waits until everything has come out or the user has left.
    pub async fn wait(self) -> Left {
        let mut detached = self.detached;
        let mut all = std::pin::pin!(async {
            for output in self.outputs {
                let _ = output.await;
            }
        });
        tokio::select! {
            () = &mut all => return Left::Finished,
            left = &mut detached => {
                if left.is_ok() {
                    return Left::Detached;
                }
            }
        }
        // Input has ended; output goes on.
        all.await;
        Left::Finished
    }
}

fn read_input(mut stdin: PipeWriter, keys: Option<Vec<u8>>, tell: oneshot::Sender<()>) {
    let mut keys = keys.map(DetachKeys::new);
    let mut buffer = vec![0; 32 << 10];
    loop {
        let count = match io::stdin().lock().read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let written = match &mut keys {
            None => stdin.write_all(&buffer[..count]),
            Some(keys) => {
                let (bytes, detach) = keys.filter(&buffer[..count]);
                let written = stdin.write_all(&bytes);
                if detach {
                    let _ = tell.send(());
                    return;
                }
                written
            }
        };
        if written.is_err() {
            return;
        }
    }
}

/// A receiver of our terminal's size.
pub enum Sized {
    Container(Task),
    Terminal(Arc<OwnedFd>),
}

impl Sized {
    async fn resize(&self, width: u16, height: u16) {
        match self {
            Self::Container(task) => {
                let _ = task.resize(width, height).await;
            }
            Self::Terminal(terminal) => {
                use std::os::fd::AsRawFd;
                let size = libc::winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
                // SAFETY: the ioctl reads one winsize of a descriptor we own.
                unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
            }
        }
    }

    /// Tells the size now and whenever it changes, for as long as it is polled.
    pub async fn follow(self) {
        let Ok(mut changes) = signal(SignalKind::window_change()) else { return };
        loop {
            if let Some((width, height)) = terminal_size() {
                self.resize(width, height).await;
            }
            if changes.recv().await.is_none() {
                return;
            }
        }
    }
}

/// Passes the signals we get on to the container, for as long as it is polled.
pub async fn forward_signals(task: &Task) -> Result<(), Failure> {
    let mut hangup = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut first = signal(SignalKind::user_defined1())?;
    let mut second = signal(SignalKind::user_defined2())?;
    loop {
        let number = tokio::select! {
            _ = hangup.recv() => libc::SIGHUP,
            _ = interrupt.recv() => libc::SIGINT,
            _ = quit.recv() => libc::SIGQUIT,
            _ = terminate.recv() => libc::SIGTERM,
            _ = first.recv() => libc::SIGUSR1,
            _ = second.recv() => libc::SIGUSR2,
        };
        let _ = task.signal(number).await;
    }
}

/// Returns true if standard input is a terminal.
pub fn input_is_terminal() -> bool {
    use std::io::IsTerminal;
    io::stdin().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        assert_eq!(parse_keys("ctrl-p,ctrl-q"), Ok(vec![16, 17]));
        assert_eq!(parse_keys("a,ctrl-]"), Ok(vec![b'a', 29]));
        assert!(parse_keys("ctrl-aa").is_err() && parse_keys("").is_err());
    }

    #[test]
    fn detaching() {
        type Row = (&'static [&'static [u8]], &'static [u8], bool);
        let rows: &[Row] = &[
            (&[b"ab"], b"ab", false),
            (&[b"a\x10\x11b"], b"a", true),
            (&[b"a\x10", b"\x11"], b"a", true),
            (&[b"\x10x"], b"\x10x", false),
            (&[b"\x10\x10\x11"], b"\x10", true),
        ];
        for (inputs, want, detached) in rows {
            let mut keys = DetachKeys::new(vec![16, 17]);
            let (mut out, mut left) = (Vec::new(), false);
            for input in *inputs {
                let (bytes, detach) = keys.filter(input);
                out.extend(bytes);
                left |= detach;
            }
            assert_eq!((out.as_slice(), left), (*want, *detached), "{inputs:?}");
        }
    }
}

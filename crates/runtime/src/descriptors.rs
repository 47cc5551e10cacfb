//! Limits of open files and connections for this process and its containers.

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

/// The limits this process was started with.
static STARTED_WITH: OnceLock<(rlim_t, rlim_t)> = OnceLock::new();

/// The limit Linux gives where nobody says otherwise.
const DEFAULT: usize = 1024;

/// Raises the limit of this process to the system's maximum, and returns it. A server has a connection for
/// every client, and a store that must always be able to open a file. Containers keep the limit the process
/// was started with.
pub fn raise() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return DEFAULT };
    let (_, hard) = *STARTED_WITH.get_or_init(|| (soft, hard));
    let raised = match soft < hard {
        true if setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() => hard,
        _ => soft,
    };
    usize::try_from(raised).unwrap_or(usize::MAX)
}

/// Gives a child process the limits this process was started with.
pub(crate) fn restore_in(command: &mut Command) -> &mut Command {
    let Some((soft, hard)) = STARTED_WITH.get().copied() else { return command };
    let restore = move || setrlimit(Resource::RLIMIT_NOFILE, soft, hard).map_err(io::Error::from);
    // SAFETY: the closure makes one system call, which is async-signal-safe, and allocates nothing.
    unsafe { command.pre_exec(restore) }
}

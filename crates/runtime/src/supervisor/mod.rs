//! The supervisor: one small process per pod sandbox.
//!
//! It holds the pod's namespaces, is the parent of its containers, keeps their output and records how
//! they ended, whether or not the rest of Ferrite runs. It is single-threaded and waits in one `poll`.

pub(crate) mod bundle;
mod child;
mod error;
mod handler;
mod hook;
mod interpreter;
mod log;
mod mounts;
mod process;
pub(crate) mod protocol;
pub(crate) mod sandbox;
mod server;
mod spawner;
mod userns;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

pub(crate) use sandbox::Setup;

/// The name under which the binary is started as a supervisor (`argv[0]`).
pub const NAME: &str = "ferrite-supervisor";

/// A supervisor prints this once it listens.
pub(crate) const READY: &str = "ready\n";

/// The argument that makes the binary the spawner, which forks supervisors.
pub(crate) const SPAWN: &str = "--spawn";

/// Room kept in the command line for a supervisor's directory.
pub(crate) const ROOM: usize = 240;

/// Entry point: `ferrite-supervisor --spawn`, with a socket as standard input.
///
/// Every message on the socket is the run directory of a sandbox, with a pipe for the answer: one line,
/// `ready` or the error. The supervisors outlive this process, which ends with the socket. It must be
/// called before any thread is started.
pub fn main(mut args: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    if args.nth(1).is_none_or(|first| first != SPAWN) {
        eprintln!("{NAME} is started by the container runtime, not by hand");
        return ExitCode::from(2);
    }
    spawner::serve()
}

/// Becomes the supervisor of a sandbox, which answers on standard output.
fn supervise(directory: &Path) -> ExitCode {
    // A session of its own: no terminal and no signal of our parent reaches the pod.
    let _ = nix::unistd::setsid();
    match start(directory) {
        Ok(mut server) => {
            server.run();
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(std::io::stdout(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn start(directory: &Path) -> Result<server::Server, error::SetupError> {
    let mut server = sandbox::establish(directory)?;
    let mut stdout = std::io::stdout();
    let _ = stdout.write_all(READY.as_bytes());
    let _ = stdout.flush();
    sandbox::leave_standard_streams();
    server.forget_start_up();
    Ok(server)
}

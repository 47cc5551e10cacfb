//! The supervisor: one small process per pod sandbox.
//!
//! It holds the pod's namespaces, is the parent of its containers, keeps their output and records how
//! they ended, whether or not the rest of Ferrite runs. It is single-threaded and waits in one `poll`.

pub(crate) mod bundle;
mod child;
mod error;
mod log;
mod mounts;
mod process;
pub(crate) mod protocol;
pub(crate) mod sandbox;
mod server;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) use sandbox::Setup;

/// The name under which the binary is started as a supervisor (`argv[0]`).
pub const NAME: &str = "ferrite-supervisor";

/// What a supervisor prints once it listens.
pub(crate) const READY: &str = "ready\n";

/// Entry point: `ferrite-supervisor <run directory of the sandbox>`.
///
/// Answers on standard output with one line, `ready` or what is wrong, and goes on in the background.
/// It must be called before any thread is started.
pub fn main(args: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    let Some(directory) = args.skip(1).last().map(PathBuf::from) else {
        eprintln!("usage: {NAME} <run directory of the sandbox>");
        return ExitCode::from(2);
    };
    // SAFETY: no thread has been started. The parent leaves at once, so that the supervisor belongs to
    // init and nobody has to reap it.
    match unsafe { nix::unistd::fork() } {
        Ok(nix::unistd::ForkResult::Parent { .. }) => return ExitCode::SUCCESS,
        Ok(nix::unistd::ForkResult::Child) => {}
        Err(error) => {
            println!("fork: {error}");
            return ExitCode::FAILURE;
        }
    }
    // A session of its own: no terminal and no signal of whoever started us reaches the pod.
    let _ = nix::unistd::setsid();
    match start(&directory) {
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

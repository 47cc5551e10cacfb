//! The command to run, as a new process, when a container has ended.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use nix::sched::{CloneFlags, setns};

use super::error::{Context, SetupError};
use crate::sys::{self, Forked};

/// A command to run in the namespaces the supervisor came from.
pub struct ExitHook {
    command: Vec<String>,
    namespaces: [(CloneFlags, File); 3],
}

impl ExitHook {
    /// Must be made before the supervisor enters the pod's namespaces.
    pub fn new(command: Vec<String>) -> Result<Self, SetupError> {
        let open = |flag, name: &str| {
            let path = format!("/proc/self/ns/{name}");
            File::open(&path).with(|| format!("open {path}")).map(|file| (flag, file))
        };
        let namespaces = [
            open(CloneFlags::CLONE_NEWNET, "net")?,
            open(CloneFlags::CLONE_NEWIPC, "ipc")?,
            open(CloneFlags::CLONE_NEWUTS, "uts")?,
        ];
        Ok(Self { command, namespaces })
    }

    /// Starts the command and does not wait for it.
    pub fn run(&self) -> io::Result<()> {
        let arguments = self.command.iter().map(sys::cstring).collect::<io::Result<Vec<_>>>()?;
        // SAFETY: the supervisor is single-threaded. The child only prepares itself and becomes the command.
        match unsafe { sys::fork_with(0, None) }? {
            Forked::Parent { .. } => Ok(()),
            Forked::Child => {
                let _ = nix::unistd::setsid();
                for (flag, namespace) in &self.namespaces {
                    let _ = setns(namespace.as_fd(), *flag);
                }
                super::child::reset_signals();
                // The supervisor's place before the killer for want of memory is its own.
                let _ = std::fs::write(Path::new("/proc/self/oom_score_adj"), "0");
                sys::close_all_on_exec();
                if let Some(program) = arguments.first() {
                    let _ =
                        nix::unistd::execve(program, &arguments, &[c"PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
                }
                // SAFETY: nothing of the supervisor may run in the child.
                unsafe { libc::_exit(127) }
            }
        }
    }
}

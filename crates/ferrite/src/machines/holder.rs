//! The machine of a virtual node: a process that does nothing but hold the namespaces.
//!
//! As long as it lives the node is switched on: its links, addresses, rules and mounts are there, whether or not its
//! agent runs. Nothing is mounted or named on the host for it, so that nothing is left behind when it ends.

use std::ffi::CString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

/// The name under which the binary is started as a machine (`argv[0]`).
pub const NAME: &str = "ferrite-node";

/// Waits until it is killed.
pub fn main() -> ExitCode {
    // Lists of processes show this name.
    let _ = nix::sys::prctl::set_name(c"ferrite-node");
    loop {
        nix::unistd::pause();
    }
}

/// Switches a machine on: a process in a network, a mount and a host name of its own.
pub fn start(hostname: &str) -> io::Result<tokio::process::Child> {
    let hostname = CString::new(hostname).map_err(io::Error::other)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0(NAME).current_dir("/").env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: only system calls that are safe after a fork, on memory that was made before it.
    unsafe {
        command.pre_exec(move || {
            check(libc::setsid())?;
            check(libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWUTS))?;
            // An unmount on the host applies here, too; mounts made here stay here. Pods may share them
            // among themselves.
            for flag in [libc::MS_SLAVE, libc::MS_SHARED] {
                let root = c"/".as_ptr();
                check(libc::mount(
                    std::ptr::null(),
                    root,
                    std::ptr::null(),
                    libc::MS_REC | flag,
                    std::ptr::null(),
                ))?;
            }
            check(libc::sethostname(hostname.as_ptr(), hostname.as_bytes().len()))
        });
    }
    tokio::process::Command::from(command).spawn()
}

/// Makes a command run on the machine of this process.
pub fn enter(command: &mut Command, machine: i32) -> io::Result<()> {
    let open = |namespace: &str| std::fs::File::open(format!("/proc/{machine}/ns/{namespace}"));
    let spaces = [
        (open("net")?, libc::CLONE_NEWNET),
        (open("uts")?, libc::CLONE_NEWUTS),
        (open("mnt")?, libc::CLONE_NEWNS),
    ];
    // SAFETY: setns and setsid are safe after a fork; the descriptors are open until the command is dropped.
    unsafe {
        command.pre_exec(move || {
            check(libc::setsid())?;
            spaces.iter().try_for_each(|(file, kind)| check(libc::setns(file.as_raw_fd(), *kind)))
        });
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! The process supervisors are forked from: it has the binary loaded and nothing else.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::unistd::{ForkResult, fork};

use super::{NAME, ROOM, supervise};
use crate::sys;

pub fn serve() -> ExitCode {
    // SAFETY: plain integers. Nothing of a pod may inspect this process either.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"ferrite-spawner".as_ptr());
    }
    // Restore huge pages for the processes that this one starts.
    ferrite_memory::allow_huge_pages_again();
    // A session of its own, so that an interrupt at a terminal ends the runtime and not this.
    let _ = nix::unistd::setsid();
    let line = command_line();
    loop {
        // SAFETY: standard input stays open for the life of this process.
        let socket = unsafe { BorrowedFd::borrow_raw(0) };
        let (mut buffer, mut fds) = ([0; libc::PATH_MAX as usize], Vec::new());
        let count = match sys::receive_with_fds(socket, &mut buffer, &mut fds) {
            Ok(0) => return ExitCode::SUCCESS,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => return ExitCode::FAILURE,
        };
        let directory = PathBuf::from(OsString::from_vec(buffer[..count].to_vec()));
        let Some(answer) = fds.pop() else { continue };
        // SAFETY: this process is single-threaded. The child leaves at once, so that the supervisor belongs
        // to init and nobody has to reap it.
        match unsafe { fork() } {
            Ok(ForkResult::Parent { child }) => {
                let _ = nix::sys::wait::waitpid(child, None);
            }
            Ok(ForkResult::Child) => return become_supervisor(&directory, &answer, line),
            // The answer's end is closed without a word, which is answer enough.
            Err(_) => {}
        }
    }
}

fn become_supervisor(directory: &Path, answer: &OwnedFd, line: Option<CommandLine>) -> ExitCode {
    // SAFETY: as in `serve`.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {}
        Ok(ForkResult::Parent { .. }) => return ExitCode::SUCCESS,
        Err(_) => return ExitCode::FAILURE,
    }
    if let Some(line) = line {
        line.show(directory);
    }
    // SAFETY: replaces our own standard streams; the socket at 0 must not stay.
    unsafe {
        libc::dup2(answer.as_raw_fd(), 1);
        if let Ok(null) = std::fs::File::open("/dev/null") {
            libc::dup2(null.as_fd().as_raw_fd(), 0);
        }
    }
    sys::close_all_but_stdio();
    let code = supervise(directory);
    // The pipe was closed above by its number: leave without giving it back a second time.
    std::process::exit(i32::from(code != ExitCode::SUCCESS))
}

/// Where the kernel keeps this process' command line.
#[derive(Clone, Copy)]
struct CommandLine {
    start: usize,
    length: usize,
}

fn command_line() -> Option<CommandLine> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(45);
    let start: usize = fields.next()?.parse().ok()?;
    let end: usize = fields.next()?.parse().ok()?;
    let length = end.checked_sub(start)?;
    (start != 0 && length > ROOM && length < 4096).then_some(CommandLine { start, length })
}

impl CommandLine {
    /// Shows the directory behind the name, as if the process had been started with it.
    fn show(self, directory: &Path) {
        let mut text = format!("{NAME}\0").into_bytes();
        text.extend(directory.as_os_str().as_bytes());
        text.truncate(self.length - 1);
        text.resize(self.length, 0);
        // SAFETY: the kernel says that this process' arguments are there, writable and of this length. They
        // were copied before main and are not read again.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.start as *mut u8, self.length) };
    }
}

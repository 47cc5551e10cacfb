//! `ferrite docker`: containers for a person at a shell.

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the command line if it is docker's: the arguments after the name have a grammar and exit codes of
/// their own.
pub fn run(arguments: &[OsString]) -> Option<ExitCode> {
    if arguments.get(1).is_none_or(|name| name != "docker") {
        return None;
    }
    crate::logging::start(0);
    Some(ferrite_docker::cli::main(arguments[1..].to_vec()))
}

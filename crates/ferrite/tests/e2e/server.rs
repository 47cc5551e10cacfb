//! An API server alone, for one test.

use crate::world::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

/// An API server alone, ended with this value.
pub struct Server(pub Child);

impl Server {
    pub fn try_start(world: &World, extra: &[&str]) -> Result<Self, String> {
        Self::try_run(world, "kube-apiserver", extra)
    }

    pub fn try_run(world: &World, subcommand: &str, extra: &[&str]) -> Result<Self, String> {
        let mut command = command(world, &[subcommand, "--bind-address", "127.0.0.1"]);
        command.args(extra);
        Self::try_spawn(&mut command)
    }

    /// Starts the command and waits until it serves.
    pub fn try_spawn(command: &mut Command) -> Result<Self, String> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        if lines.by_ref().any(|line| line.starts_with("serving")) {
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(Self(child));
        }
        let output = child.wait_with_output().unwrap();
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub fn start(world: &World, extra: &[&str]) -> Self {
        Self::try_start(world, extra).unwrap()
    }

    /// Asks it to stop and waits until it has.
    pub fn stop(mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `ferrite` with the directory of this world, where subcommands take it.
pub fn command(world: &World, arguments: &[&str]) -> Command {
    let mut command = world.command(ferrite().to_str().unwrap(), arguments);
    command.arg("--data-dir").arg(world.data());
    command
}

pub fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

pub fn succeeds(world: &World, arguments: &[&str]) -> String {
    let output = command(world, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    text(&output)
}

pub fn fails(world: &World, arguments: &[&str]) -> String {
    let output = command(world, arguments).output().unwrap();
    assert!(!output.status.success(), "{arguments:?} did not fail: {}", text(&output));
    text(&output)
}

pub fn kubectl(world: &World, arguments: &[&str]) -> String {
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let output = world.command("kubectl", arguments).env("KUBECONFIG", kubeconfig).output().unwrap();
    assert!(output.status.success(), "kubectl {arguments:?}: {}", text(&output));
    text(&output)
}

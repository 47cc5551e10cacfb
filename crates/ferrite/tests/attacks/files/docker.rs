//! Containers of `ferrite docker`.

use crate::archive;
use crate::world::{Netns, ferrite};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

struct Engine {
    netns: Netns,
    dir: tempfile::TempDir,
}

impl Engine {
    fn new() -> Self {
        let engine =
            Self { netns: Netns::new(), dir: tempfile::Builder::new().prefix("fd").tempdir().unwrap() };
        let archive = engine.path("shell.tar");
        archive::image(&archive, "shell:latest", "page", &["/bin/busybox", "sleep", "100000"]);
        engine.ok(&["load", "-i", archive.to_str().unwrap()]);
        engine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "120"]).arg(ferrite()).args(["docker", "--data-dir"]);
        command.arg(self.path("d")).args(arguments);
        command.env("HOME", self.dir.path()).stdin(Stdio::null());
        self.netns.enter(&mut command);
        command.output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let ids = self.run(&["ps", "-aq"]);
        for id in String::from_utf8_lossy(&ids.stdout).split_whitespace() {
            self.run(&["rm", "-f", id]);
        }
    }
}

#[test]
fn a_link_left_in_a_layer_is_not_written_through() {
    let engine = Engine::new();
    let victim = engine.path("victim");
    let script = format!("busybox rm /.dockerenv; busybox ln -s {} /.dockerenv", victim.display());
    engine.ok(&["run", "--name", "aa", "shell", "busybox", "sh", "-c", &script]);
    engine.ok(&["start", "-a", "aa"]);
    assert!(!victim.exists());
}

#[test]
fn deep_trees_are_measured_compared_and_removed() {
    let engine = Engine::new();
    engine.ok(&["run", "-d", "--name", "aa", "-v", "vol:/vol", "shell"]);
    let id = engine.ok(&["inspect", "-f", "{{.Id}}", "aa"]).trim().to_owned();
    let upper = engine.path("d/docker/containers").join(&id).join("layer/upper");
    assert!(upper.is_dir(), "{}", upper.display());
    super::nest(super::open(&engine.path("d/docker/volumes/vol/_data")), 3_000);
    let pid: i32 = engine.ok(&["inspect", "-f", "{{.State.Pid}}", "aa"]).trim().parse().unwrap();
    super::nest(super::inside(pid, "tmp"), 3_000);
    assert!(engine.ok(&["diff", "aa"]).contains("A /tmp/d/d/d"));
    engine.ok(&["ps", "-as"]);
    engine.ok(&["rm", "-f", "aa"]);
    engine.ok(&["volume", "rm", "vol"]);
    assert!(!upper.exists() && !engine.path("d/docker/volumes/vol").exists());
}

#[test]
fn a_volume_begins_with_what_the_image_has() {
    let engine = Engine::new();
    let read = engine.ok(&["run", "--rm", "-v", "vol:/www", "shell", "busybox", "cat", "/www/index.html"]);
    assert_eq!(read, "page");
    let seeded = engine.path("d/docker/volumes/vol/_data/index.html");
    assert_eq!(std::fs::read_to_string(seeded).unwrap(), "page");
}

#[test]
fn users_of_the_node_reach_no_data() {
    let engine = Engine::new();
    engine.ok(&["run", "--rm", "-u", "1000", "-v", "vol:/vol", "shell", "busybox", "ls", "/vol"]);
    for name in ["", "containers", "volumes", "images", "images/layers", "network"] {
        let path = engine.path("d/docker").join(name);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o077, 0, "{}", path.display());
    }
}

//! Containers without a cluster, as a person at a shell has them.

use crate::archive::web_image;
use crate::registry::Registry;
use crate::world::{Netns, eventually, ferrite, processes};
use ferrite_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// An engine of its own, removed with everything it made.
pub(crate) struct Engine {
    pub(crate) netns: Netns,
    dir: tempfile::TempDir,
}

impl Engine {
    pub(crate) fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "the end-to-end tests run containers and need root");
        Self { netns: Netns::new(), dir: tempfile::Builder::new().prefix("fd").tempdir().unwrap() }
    }

    /// An engine that has an image called `web`.
    pub(crate) fn with_image() -> Self {
        let engine = Self::new();
        let archive = engine.path("web.tar");
        web_image(&archive, "web:latest", "hello");
        assert_eq!(engine.ok(&["load", "-i", archive.to_str().unwrap()]), "Loaded image: web:latest\n");
        engine
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        // A time limit for everything: a hanging command must not hang the suite.
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "120"]).arg(ferrite());
        self.finish(command, arguments)
    }

    pub(crate) fn finish(&self, mut command: Command, arguments: &[&str]) -> Command {
        command.args(["docker", "--data-dir"]).arg(self.path("d")).args(arguments);
        command.env("HOME", self.dir.path()).stdin(Stdio::null());
        self.netns.enter(&mut command);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The output of a command that must succeed.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{arguments:?}: {}\n{}{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// The exit code and the complaint of a command that must fail.
    pub(crate) fn fails(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        assert!(!output.status.success(), "{arguments:?} did not fail");
        (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub(crate) fn inspect(&self, name: &str, template: &str) -> String {
        self.ok(&["inspect", "-f", template, name]).trim_end().to_owned()
    }

    pub(crate) fn wait_for(&self, name: &str, template: &str, want: &str) {
        eventually(&format!("{name}: {template} is {want}"), || {
            (self.inspect(name, template) == want).then_some(())
        });
    }

    /// The control groups this engine has.
    pub(crate) fn groups(&self) -> Vec<PathBuf> {
        let name = ferrite_docker::Paths::new(&self.path("d")).cgroup();
        let root = Path::new("/sys/fs/cgroup");
        let below = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
        let places = below.chain([root.to_owned()]).map(|mount| mount.join(name.trim_start_matches('/')));
        places.filter(|group| group.exists()).collect()
    }

    /// The traces of this engine on the machine.
    pub(crate) fn traces(&self) -> Vec<String> {
        let data = self.path("d").display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mut traces: Vec<String> =
            mounts.lines().filter(|line| line.contains(&data)).map(str::to_owned).collect();
        for pid in processes() {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            if line.contains(&data) {
                traces.push(format!("process {pid}: {line}"));
            }
        }
        traces
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let ids = self.run(&["ps", "-aq"]).stdout;
        let ids = String::from_utf8_lossy(&ids).into_owned();
        for id in ids.lines() {
            self.run(&["rm", "-f", "-v", id]);
        }
        if !std::thread::panicking() {
            eventually("everything is gone", || self.traces().is_empty().then_some(()));
            eventually("its control groups are gone", || self.groups().is_empty().then_some(()));
        }
    }
}

#[test]
fn a_container_from_run_to_rm() {
    let engine = Engine::with_image();
    let images = engine.ok(&["images"]);
    assert!(images.starts_with("REPOSITORY") && images.contains("web          latest"), "{images}");

    assert_eq!(
        engine.ok(&["run", "--rm", "web", "echo", "-n", "hi"]),
        "hi",
        "flags after the image are the command's"
    );
    let id = engine.ok(&["run", "-d", "--name", "one", "web"]);
    assert_eq!(id.trim_end().len(), 64, "only the id: {id:?}");
    let id = id.trim_end();

    let listed = engine.ok(&["ps", "--format", "{{.ID}} {{.Names}} {{.Image}} {{.State}}"]);
    assert_eq!(listed, format!("{} one web running\n", &id[..12]));
    let (code, text) = engine.fails(&["run", "--name", "one", "web"]);
    assert_eq!(code, 125);
    assert!(text.contains("Conflict. The container name \"/one\" is already in use"), "{text}");

    for name in ["one", id, &id[..6]] {
        assert_eq!(engine.inspect(name, "{{.Id}}"), id);
    }
    assert_eq!(
        engine.ok(&[
            "exec",
            "-e",
            "A=b",
            "-w",
            "/tmp",
            "-u",
            "web",
            "one",
            "sh",
            "-c",
            "echo $A $PWD; id -u"
        ]),
        "b /tmp\n1000\n"
    );
    let value: Value = ferrite_json::from_str(&engine.ok(&["inspect", "one"])).unwrap();
    assert_eq!(value[0]["Config"]["Hostname"], id[..12]);
    let address = value[0]["NetworkSettings"]["Networks"]["bridge"]["IPAddress"].as_str().unwrap();
    assert!(address.starts_with("172.17.0."), "{address}");
    assert!(engine.ok(&["exec", "one", "cat", "/etc/hosts"]).contains(&format!("{address}\t{}", &id[..12])));

    let top = engine.ok(&["top", "one"]);
    assert!(top.starts_with("UID") && top.contains("httpd"), "{top}");
    assert!(engine.ok(&["stats", "--no-stream", "one"]).contains("MiB") || !top.is_empty());

    let (code, text) = engine.fails(&["rm", "one"]);
    assert_eq!(code, 1);
    assert!(text.contains("You cannot remove a running container"), "{text}");
    assert_eq!(engine.ok(&["stop", "-t", "0", "one"]), "one\n");
    assert_eq!(engine.inspect("one", "{{.State.Status}} {{.State.ExitCode}}"), "exited 137");
    assert_eq!(engine.ok(&["start", "one"]), "one\n", "its files are still there");
    assert_eq!(engine.ok(&["pause", "one"]), "one\n");
    assert_eq!(engine.inspect("one", "{{.State.Paused}}"), "true");
    assert_eq!(engine.ok(&["unpause", "one"]), "one\n");
    engine.ok(&["rename", "one", "two"]);
    assert_eq!(engine.ok(&["restart", "-t", "0", "two"]), "two\n");
    assert_eq!(engine.ok(&["rm", "-f", "two"]), "two\n");
    let (_, text) = engine.fails(&["logs", "two"]);
    assert!(text.contains("Error response from daemon: No such container: two"), "{text}");
}

#[test]
fn exit_codes_and_complaints() {
    let engine = Engine::with_image();
    for (arguments, want) in [
        (&["sh", "-c", "exit 3"][..], 3),
        (&["no-such-program"], 127),
        (&["/etc"], 126),
        (&["/etc/passwd"], 126),
        (&["sh", "-c", "kill -9 $$"], 137),
    ] {
        let (code, text) = engine.fails(&[&["run", "--rm", "--init", "web"], arguments].concat());
        assert_eq!(code, want, "{arguments:?}: {text}");
    }
    for arguments in [
        &["run", "--no-such-option", "web"][..],
        &["run", "-d", "-a", "stdout", "web"],
        &["run", "--memory", "1m", "web"],
        &["run", "--pull", "never", "nothing"],
        &["run", "--restart", "sometimes", "web"],
        &["run", "--rm", "--restart", "always", "web"],
        &["run", "-v", ":/x", "web"],
        &["run", "-p", "x:80", "web"],
        &["run", "--network", "nowhere", "web"],
        &["run", "--entrypoint", "", "web"],
    ] {
        let (code, text) = engine.fails(arguments);
        assert_eq!(code, 125, "{arguments:?}: {text}");
    }
    let (code, text) = engine.fails(&["frobnicate"]);
    assert_eq!(code, 1);
    assert!(text.contains("'frobnicate' is not a docker command"), "{text}");
    assert_eq!(engine.ok(&["ps", "-aq"]), "", "nothing that failed is left");
    let (code, _) = engine.fails(&["inspect", "nothing"]);
    assert_eq!(code, 1);
}

#[test]
fn streams_are_whole() {
    let engine = Engine::with_image();
    let mut child = engine.command(&["run", "--rm", "-i", "web", "cat"]);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let mut received = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut received).unwrap();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success());
    assert!(received == bytes, "{} of {} bytes came back", received.len(), bytes.len());

    engine.ok(&["run", "--name", "both", "web", "sh", "-c", "echo out; echo err >&2"]);
    let logs = engine.run(&["logs", "both"]);
    assert_eq!((logs.stdout.as_slice(), logs.stderr.as_slice()), (b"out\n".as_slice(), b"err\n".as_slice()));
    assert_eq!(engine.ok(&["wait", "both"]), "0\n");
    engine.ok(&["run", "--name", "many", "web", "busybox", "seq", "1", "100"]);
    assert_eq!(engine.ok(&["logs", "--tail", "2", "many"]), "99\n100\n");
}

#[test]
fn a_terminal_can_be_left_and_joined() {
    let engine = Engine::with_image();
    let pair = nix::pty::openpty(None, None).unwrap();
    let mut command = engine.command(&["run", "-it", "--name", "term", "web", "sh"]);
    let slave = || pair.slave.try_clone().unwrap();
    let mut child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap();
    drop(command);
    let mut master = std::fs::File::from(pair.master);
    master.write_all(b"echo to''gether; test -t 0 && echo a''terminal\n").unwrap();
    let mut seen = String::new();
    let mut buffer = [0; 1024];
    while !(seen.contains("together") && seen.contains("aterminal")) {
        let count = master.read(&mut buffer).unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    master.write_all(b"\x10\x11").unwrap();
    assert!(child.wait().unwrap().success(), "leaving is no failure");
    assert_eq!(engine.inspect("term", "{{.State.Running}}"), "true");
}

#[test]
fn ports_and_networks() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-d", "--name", "one", "-p", "127.0.0.1:18080:8080", "-p", "8080", "web"]);
    assert_eq!(engine.ok(&["port", "one", "8080"]).lines().next(), Some("127.0.0.1:18080"));
    let random = engine.ok(&["port", "one", "8080/tcp"]).lines().nth(1).unwrap().to_owned();
    for address in
        ["127.0.0.1:18080".to_owned(), random.replace("0.0.0.0", "127.0.0.1"), "172.17.0.2:8080".into()]
    {
        let address: std::net::SocketAddr = address.parse().unwrap();
        let page = eventually("the page is served", || engine.netns.http_get(address, "/").ok());
        assert_eq!(page, "hello", "{address}");
    }
    let (code, text) = engine.fails(&["run", "-d", "--name", "two", "-p", "127.0.0.1:18080:8080", "web"]);
    assert_eq!(code, 125);
    assert!(text.contains("port is already allocated"), "{text}");
    engine.ok(&["rm", "two"]);

    assert_eq!(
        engine.ok(&["run", "--rm", "web", "busybox", "wget", "-qO-", "http://172.17.0.2:8080/"]),
        "hello"
    );
    let shared = [
        "run",
        "--rm",
        "--network",
        "container:one",
        "web",
        "busybox",
        "wget",
        "-qO-",
        "http://127.0.0.1:8080/",
    ];
    assert_eq!(engine.ok(&shared), "hello");
    let links =
        |network: &str| engine.ok(&["run", "--rm", "--network", network, "web", "ls", "/sys/class/net"]);
    assert_eq!(links("none"), "lo\n");
    assert!(links("host").contains("fd-"), "the bridge is the host's");
    assert_eq!(links("bridge"), "eth0\nlo\n");

    engine.ok(&["rm", "-f", "one"]);
    let gone = "127.0.0.1:18080".parse().unwrap();
    eventually("nobody listens", || engine.netns.http_get(gone, "/").err());
}

#[test]
fn files_volumes_and_limits() {
    let engine = Engine::with_image();
    let here = engine.path("here");
    std::fs::create_dir(&here).unwrap();
    let bind = format!("{}:/there", here.display());
    engine.ok(&[
        "run",
        "--rm",
        "-v",
        &bind,
        "-v",
        "data:/www",
        "web",
        "sh",
        "-c",
        "echo x > /there/file; echo new > /www/new",
    ]);
    assert_eq!(std::fs::read_to_string(here.join("file")).unwrap(), "x\n");
    let kept = engine.ok(&[
        "run",
        "--rm",
        "-v",
        "data:/www:ro",
        "web",
        "sh",
        "-c",
        "cat /www/new /www/index.html; touch /www/no || true",
    ]);
    assert_eq!(kept, "new\nhello", "a new volume begins with the image's files");
    assert!(
        engine
            .fails(&["run", "--rm", "--mount", "type=bind,src=/no/such/path,dst=/x", "web"])
            .1
            .contains("does not exist")
    );
    engine.ok(&["volume", "rm", "data"]);

    let limited = engine.ok(&[
        "run", "--rm", "-m", "64m", "--pids-limit", "50", "--ulimit", "nofile=100", "--tmpfs", "/t:size=1m", "--read-only",
        "--shm-size", "1m", "--cap-drop", "ALL", "web", "sh", "-c",
        "ulimit -n; touch /t/ok && echo tmpfs; touch /no 2>/dev/null || echo read-only; busybox grep CapEff /proc/self/status",
    ]);
    assert_eq!(limited, "100\ntmpfs\nread-only\nCapEff:\t0000000000000000\n");
    let (code, _) = engine.fails(&[
        "run",
        "--name",
        "greedy",
        "-m",
        "8m",
        "web",
        "busybox",
        "dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=64M",
        "count=1",
    ]);
    assert_eq!(code, 137);
    assert_eq!(engine.inspect("greedy", "{{.State.OOMKilled}}"), "true");

    engine.ok(&[
        "run",
        "--name",
        "files",
        "web",
        "sh",
        "-c",
        "touch /tmp/new; echo changed > /www/index.html; busybox rm /etc/passwd",
    ]);
    assert_eq!(
        engine.ok(&["diff", "files"]),
        "C /etc\nD /etc/passwd\nC /tmp\nA /tmp/new\nC /www\nC /www/index.html\n"
    );
    let copy = engine.path("copy");
    engine.ok(&["cp", "files:/www/index.html", copy.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), "changed\n");
    std::fs::write(&copy, "from here").unwrap();
    engine.ok(&["cp", copy.to_str().unwrap(), "files:/tmp/"]);
    engine.ok(&["cp", "files:/tmp", engine.path("tmp").to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(engine.path("tmp/copy")).unwrap(), "from here");

    // A link in the container leads nowhere outside of it.
    engine.ok(&["run", "--name", "trap", "web", "busybox", "ln", "-s", "/etc", "/trap"]);
    engine.ok(&["cp", copy.to_str().unwrap(), "trap:/trap/ferrite-test-file"]);
    assert!(!Path::new("/etc/ferrite-test-file").exists());
}

#[test]
fn ends_are_followed_without_a_daemon() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-d", "--rm", "--name", "brief", "web", "busybox", "true"]);
    eventually("a container removes itself", || engine.ok(&["ps", "-aq"]).is_empty().then_some(()));

    engine.ok(&[
        "run",
        "-d",
        "--name",
        "failing",
        "--restart",
        "on-failure:2",
        "web",
        "sh",
        "-c",
        "echo again; exit 7",
    ]);
    engine.wait_for("failing", "{{.RestartCount}} {{.State.Status}} {{.State.ExitCode}}", "2 exited 7");
    assert_eq!(engine.ok(&["logs", "failing"]), "again\nagain\nagain\n");
    engine.ok(&["run", "-d", "--name", "always", "--restart", "always", "web", "sleep", "0.1"]);
    eventually("it starts again", || (engine.inspect("always", "{{.RestartCount}}") != "0").then_some(()));
    engine.ok(&["stop", "always"]);
    assert_eq!(engine.inspect("always", "{{.State.Status}}"), "exited");

    let events = engine.ok(&[
        "events",
        "--since",
        "0",
        "--until",
        "0s",
        "--filter",
        "container=failing",
        "--format",
        "{{.Action}}",
    ]);
    assert_eq!(
        events.lines().collect::<Vec<_>>(),
        ["create", "start", "die", "start", "die", "start", "die"]
    );
    let line = engine.ok(&[
        "events",
        "--since",
        "0",
        "--until",
        "0s",
        "--filter",
        "event=die",
        "--filter",
        "container=failing",
    ]);
    assert!(line.contains("(exitCode=7, image=web, name=failing)"), "{line}");
}

fn pids_of(engine: &Engine, name: &str) -> i32 {
    engine.inspect(name, "{{.State.Pid}}").parse().unwrap()
}

#[test]
fn killing_the_client_leaks_nothing() {
    let engine = Engine::with_image();
    let mut command =
        engine.finish(Command::new(ferrite()), &["run", "--name", "orphan", "-p", "18081:8080", "web"]);
    let mut client: Child = command.stdout(Stdio::null()).spawn().unwrap();
    eventually("it runs", || {
        engine
            .run(&["inspect", "-f", "{{.State.Status}}", "orphan"])
            .stdout
            .starts_with(b"running")
            .then_some(())
    });
    let pid = pids_of(&engine, "orphan");
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(engine.ok(&["ps", "--format", "{{.Names}}"]), "orphan\n");
    let address = "127.0.0.1:18081".parse().unwrap();
    eventually("it is still served", || engine.netns.http_get(address, "/").ok());
    engine.ok(&["rm", "-f", "orphan"]);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    eventually("mounts and processes are gone", || engine.traces().is_empty().then_some(()));
    assert!(std::fs::read_dir(engine.path("d/run/docker")).is_ok_and(|mut entries| entries.next().is_none()));
    let links = engine.ok(&["run", "--rm", "--network", "host", "web", "ls", "/sys/class/net"]);
    assert!(!links.contains("veth"), "{links}");
}

#[test]
fn many_at_once() {
    let engine = Engine::with_image();
    let children: Vec<Child> =
        (0..12).map(|_| engine.command(&["create", "web"]).stdout(Stdio::piped()).spawn().unwrap()).collect();
    let ids: std::collections::BTreeSet<Vec<u8>> =
        children.into_iter().map(|child| child.wait_with_output().unwrap().stdout).collect();
    assert_eq!(ids.len(), 12);
    let names = engine.ok(&["ps", "-a", "--format", "{{.Names}}"]);
    assert_eq!(names.lines().collect::<std::collections::BTreeSet<_>>().len(), 12, "{names}");
    let started: Vec<Child> = names
        .lines()
        .take(4)
        .map(|name| engine.command(&["start", name]).stdout(Stdio::piped()).spawn().unwrap())
        .collect();
    assert!(started.into_iter().all(|child| child.wait_with_output().unwrap().status.success()));
    let addresses = engine.ok(&["ps", "-q"]);
    let addresses: std::collections::BTreeSet<String> =
        addresses.lines().map(|id| engine.inspect(id, "{{.NetworkSettings.IPAddress}}")).collect();
    assert_eq!(addresses.len(), 4, "{addresses:?}");
}

#[test]
fn images_travel() {
    let engine = Engine::with_image();
    let id = engine.inspect("web", "{{.Id}}");
    engine.ok(&["tag", "web", "other:1"]);
    let archive = engine.path("saved.tar");
    engine.ok(&["save", "-o", archive.to_str().unwrap(), "web", "other:1"]);
    assert_eq!(engine.ok(&["rmi", "other:1"]), "Untagged: other:1\n");
    engine.ok(&["create", "--name", "user", "web"]);
    let (_, text) = engine.fails(&["rmi", "web"]);
    assert!(text.contains("conflict: unable to remove repository reference"), "{text}");
    engine.ok(&["rm", "user"]);
    let removed = engine.ok(&["rmi", "web"]);
    assert!(removed.starts_with("Untagged: web:latest\nDeleted: sha256:"), "{removed}");
    assert_eq!(engine.ok(&["images", "-q"]), "");
    engine.ok(&["load", "-i", archive.to_str().unwrap()]);
    assert_eq!(
        engine.ok(&["images", "--no-trunc", "--format", "{{.ID}} {{.Repository}}:{{.Tag}}"]).lines().count(),
        2
    );
    assert_eq!(engine.inspect("other:1", "{{.Id}}"), id, "an image that travelled is the same");
}

#[test]
fn an_absent_image_is_pulled() {
    let engine = Engine::new();
    let registry = Registry::start(&engine.netns, &engine.path("registry"), false);
    let archive = engine.path("web.tar");
    web_image(&archive, "web:latest", "hello");
    let (address, manifest_digest) = (registry.address, registry.push(&engine.netns, "web", &archive));
    let name = format!("{address}/web");
    let output = engine.run(&["run", "-d", "--name", "pulled", &name]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(
        complaint.starts_with(&format!(
            "Unable to find image '{name}:latest' locally\nUsing default tag: latest\n"
        )),
        "{complaint}"
    );
    assert!(
        complaint.contains(&format!(
            "Digest: {manifest_digest}\nStatus: Downloaded newer image for {name}:latest"
        )),
        "{complaint}"
    );
    assert_eq!(output.stdout.len(), 65, "only the id on standard output");
    let again = engine.ok(&["pull", &name]);
    assert!(
        again.contains("Status: Image is up to date") && again.ends_with(&format!("{name}:latest\n")),
        "{again}"
    );
    let (code, text) = engine.fails(&["run", &format!("{name}:nothing")]);
    assert_eq!(code, 125);
    assert!(text.contains("manifest unknown"), "{text}");
}

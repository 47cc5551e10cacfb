//! Options of containers without a cluster that need the kernel to be tried.

use crate::docker::Engine;
use crate::world::{World, eventually};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Stdio;

#[test]
fn namespaces_of_others() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-d", "--name", "donor", "--ipc", "shareable", "--hostname", "giver", "web"]);
    let seen = engine.ok(&["run", "--rm", "--pid", "container:donor", "web", "busybox", "ps"]);
    assert!(seen.contains("httpd"), "{seen}");
    let own = engine.ok(&["run", "--rm", "web", "busybox", "ps"]);
    assert!(!own.contains("httpd"), "{own}");
    let host = engine.ok(&["run", "--rm", "--pid", "host", "web", "busybox", "ps"]);
    assert!(host.contains("httpd") && host.lines().count() > seen.lines().count(), "{host}");

    engine.ok(&["exec", "donor", "sh", "-c", "echo left > /dev/shm/note"]);
    let note = engine.ok(&["run", "--rm", "--ipc", "container:donor", "web", "cat", "/dev/shm/note"]);
    assert_eq!(note, "left\n");
    let spaces = |options: &[&str]| {
        engine.ok(&[&["run", "--rm"], options, &["web", "busybox", "readlink", "/proc/self/ns/ipc"]].concat())
    };
    let donors = engine.ok(&["exec", "donor", "busybox", "readlink", "/proc/self/ns/ipc"]);
    assert_eq!(spaces(&["--ipc", "container:donor"]), donors);
    let hosts = std::fs::read_link("/proc/self/ns/ipc").unwrap().display().to_string();
    assert_eq!(spaces(&["--ipc", "host"]).trim_end(), hosts);
    assert_ne!(spaces(&[]), donors);
    assert!(!engine.ok(&["run", "--rm", "--ipc", "none", "web", "ls", "/dev"]).contains("shm"));

    let name = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let uts = engine.ok(&["run", "--rm", "--uts", "host", "web", "busybox", "hostname"]);
    assert_eq!(uts.trim_end(), name);
    engine.ok(&["run", "-d", "--name", "private", "web"]);
    for (options, want) in [
        (&["--ipc", "container:private"][..], "non-shareable IPC"),
        (&["--pid", "container:nobody"], "No such container: nobody"),
        (&["--pid", "what"], "invalid PID mode"),
        (&["--uts", "host", "--hostname", "x"], "hostname and the UTS mode"),
    ] {
        let (code, text) = engine.fails(&[&["run", "--rm"], options, &["web", "echo"]].concat());
        assert_eq!(code, 125, "{options:?}: {text}");
        assert!(text.contains(want), "{options:?}: {text}");
    }
    // With the first process of its namespace a container ends, too.
    engine.ok(&["run", "-d", "--name", "guest", "--pid", "container:private", "web", "sleep", "1000"]);
    engine.ok(&["stop", "-t", "0", "private"]);
    engine.wait_for("guest", "{{.State.Status}} {{.State.ExitCode}}", "exited 137");
    let (_, text) = engine.fails(&["start", "guest"]);
    assert!(text.contains("cannot join PID of a non running container"), "{text}");
}

#[test]
fn groups_devices_and_kernel_settings() {
    let engine = Engine::with_image();
    let file = engine.path("group");
    std::fs::write(&file, "root:x:0:\nvideo:x:44:\n").unwrap();
    engine.ok(&[
        "create",
        "--name",
        "grouped",
        "--group-add",
        "video",
        "--group-add",
        "77",
        "web",
        "id",
        "-G",
    ]);
    let (_, text) = engine.fails(&["start", "-a", "grouped"]);
    assert!(text.contains("Unable to find group video"), "{text}");
    engine.ok(&["cp", file.to_str().unwrap(), "grouped:/etc/group"]);
    assert_eq!(engine.ok(&["start", "-a", "grouped"]), "0 44 77\n");

    let looked = [
        "web",
        "sh",
        "-c",
        "busybox head -c 4 /dev/nothing | busybox od -An -tx1; echo x > /dev/nothing && echo written",
    ];
    let all = engine.ok(&[&["run", "--rm", "--device", "/dev/zero:/dev/nothing"], &looked[..]].concat());
    assert_eq!(all, " 00 00 00 00\nwritten\n");
    // Opened and closed, nothing more: for reading, and for writing where only reading was allowed.
    for (permissions, script, allowed) in [
        ("r", ": < /dev/control", true),
        ("r", ": > /dev/control", false),
        ("rw", ": > /dev/control", true),
        ("w", ": < /dev/control", false),
    ] {
        let device = format!("/dev/loop-control:/dev/control:{permissions}");
        let output = engine.run(&["run", "--rm", "--device", &device, "web", "sh", "-c", script]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), allowed, "{permissions} {script}: {said}");
        assert!(allowed || said.contains("Operation not permitted"), "{permissions} {script}: {said}");
    }
    let none = engine.run(&[
        "run",
        "--rm",
        "--cap-add",
        "MKNOD",
        "web",
        "sh",
        "-c",
        "busybox mknod /tmp/kmsg c 1 11 && cat /tmp/kmsg",
    ]);
    assert!(!none.status.success(), "a device nobody gave cannot be opened");
    let (code, text) = engine.fails(&["run", "--rm", "--device", "/dev/no-such-device", "web", "echo"]);
    assert_eq!(code, 125, "{text}");

    let setting = ["web", "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"];
    let set =
        engine
            .ok(&[&["run", "--rm", "--sysctl", "net.ipv4.ip_unprivileged_port_start=99"], &setting[..]]
                .concat());
    assert_eq!(set, "99\n");
    for (options, want) in [
        (&["--sysctl", "kernel.panic=1"][..], "not in a separate kernel namespace"),
        (
            &["--network", "host", "--sysctl", "net.core.somaxconn=99"],
            "not allowed in host network namespace",
        ),
        (&["--ipc", "host", "--sysctl", "kernel.msgmax=99"], "not allowed in the hosts ipc namespace"),
    ] {
        let (code, text) = engine.fails(&[&["run", "--rm"], options, &["web", "echo"]].concat());
        assert_eq!(code, 125, "{options:?}: {text}");
        assert!(text.contains(want), "{options:?}: {text}");
    }
}

fn resize(terminal: &impl AsRawFd, columns: u16, rows: u16) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the ioctl reads one winsize of an open terminal.
    assert_eq!(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }, 0);
}

#[test]
fn a_terminal_is_joined_and_resized() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-dit", "--name", "term", "web", "sh"]);
    let pair = nix::pty::openpty(None, None).unwrap();
    resize(&pair.master, 101, 33);
    let mut command = engine.command(&["attach", "term"]);
    let slave = || pair.slave.try_clone().unwrap();
    command.stdin(slave()).stdout(slave()).stderr(slave());
    // A terminal tells its foreground group about a new size: the client leads a session of its own there.
    // SAFETY: two system calls between fork and exec.
    unsafe {
        use std::os::unix::process::CommandExt;
        command.pre_exec(|| {
            libc::setsid();
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            Ok(())
        });
    }
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut master = std::fs::File::from(pair.master);
    let mut seen = String::new();
    let mut expect = |master: &mut std::fs::File, typed: &str, want: &str| {
        // Asked until it is so: a size travels on its own way.
        eventually(want, || {
            master.write_all(typed.as_bytes()).ok()?;
            let mut buffer = [0; 4096];
            let count = master.read(&mut buffer).ok()?;
            seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
            seen.contains(want).then_some(())
        });
    };
    expect(&mut master, "busybox stty size\n", "33 101");
    resize(&master, 77, 22);
    expect(&mut master, "busybox stty size\n", "22 77");
    master.write_all(b"\x10\x11").unwrap();
    assert!(child.wait().unwrap().success(), "leaving is no failure");
    assert_eq!(engine.inspect("term", "{{.State.Running}}"), "true");
}

#[test]
fn attached_without_a_terminal() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-d", "-i", "--name", "echoing", "web", "sh", "-c", "cat; exit 5"]);
    let mut command = engine.command(&["attach", "echoing"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    stdin.write_all(b"through\n").unwrap();
    let mut line = [0; 8];
    stdout.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"through\n");
    engine.ok(&["kill", "-s", "KILL", "echoing"]);
    assert_eq!(child.wait().unwrap().code(), Some(137), "the container's code is the client's");
    let (_, text) = engine.fails(&["attach", "echoing"]);
    assert!(text.contains("You cannot attach to a stopped container"), "{text}");
}

/// Removes the container whatever becomes of the test.
struct Removed<'a>(&'a World);

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        let _ = self.0.ferrite(&["docker", "rm", "-f", "kept"]).output();
    }
}

#[test]
fn a_cluster_that_goes_takes_no_container_along() {
    let mut world = World::start();
    let archive = world.path("web.tar");
    crate::archive::web_image(&archive, "web:latest", "hello");
    let docker = |world: &World, arguments: &[&str]| {
        let output = world.ferrite(&[&["docker"], arguments].concat()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    docker(&world, &["load", "-i", archive.to_str().unwrap()]);
    docker(&world, &["run", "-d", "--name", "kept", "-p", "127.0.0.1:18090:8080", "web"]);
    let before = docker(&world, &["inspect", "-f", "{{.State.Pid}}", "kept"]);
    let output = world.down(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let guard = Removed(&world);
    assert_eq!(docker(&world, &["inspect", "-f", "{{.State.Pid}}", "kept"]), before, "it never ended");
    assert_eq!(docker(&world, &["exec", "kept", "echo", "here"]), "here\n");
    let address = "127.0.0.1:18090".parse().unwrap();
    assert_eq!(eventually("it is still served", || world.netns.http_get(address, "/").ok()), "hello");
    let forwarding = world.netns.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap());
    assert_eq!(forwarding.trim(), "1", "its network still needs forwarding");
    let left: Vec<String> = std::fs::read_dir(world.data())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(left.iter().all(|name| name == "docker" || name == "run"), "{left:?}");
    docker(&world, &["rm", "-f", "kept"]);
    drop(guard);
    let again = world.ferrite(&["down"]).output().unwrap();
    assert!(String::from_utf8_lossy(&again.stdout).contains("no cluster"), "{again:?}");
}

#[test]
fn a_restart_whose_waiter_was_killed() {
    let engine = Engine::with_image();
    engine.ok(&["run", "-d", "--name", "again", "--restart", "always", "web", "sh", "-c", "exit 3"]);
    let waiter = || {
        crate::world::processes().into_iter().find(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("internal-ended") && line.contains(&engine.path("d").display().to_string())
        })
    };
    // Its pauses grow: after some rounds there is time to find the waiting process.
    eventually("it waits for a while", || {
        let state = engine.inspect("again", "{{.State.Status}} {{.RestartCount}}");
        let (status, count) = state.split_once(' ')?;
        (status == "restarting" && count.parse::<u32>().ok()? >= 4).then_some(())
    });
    let pid = eventually("somebody waits", waiter);
    let before: u32 = engine.inspect("again", "{{.RestartCount}}").parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("it starts again all the same", || {
        let count: u32 = engine.inspect("again", "{{.RestartCount}}").parse().ok()?;
        (count > before).then_some(())
    });
    engine.ok(&["stop", "again"]);
    assert_eq!(engine.inspect("again", "{{.State.Status}}"), "exited");
}

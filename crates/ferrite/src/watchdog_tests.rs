use super::*;

const SECOND: Duration = Duration::from_secs(1);
const IMPATIENT: Times = Times {
    tick: Duration::from_millis(20),
    limit: Duration::from_millis(200),
    ending: Duration::from_millis(200),
};
/// Names the FIFO to the process that is to get stuck.
const FIFO: &str = "WATCHDOG_TEST_FIFO";

#[test]
fn a_worker_is_stuck_when_it_neither_pauses_nor_computes() {
    let look = |active, parked, used| Look { active, parked, used: Duration::from_millis(used) };
    let limit = 3 * SECOND;
    for (what, looks, expected) in [
        ("idle", vec![look(1, true, 0); 6], vec![]),
        ("works and pauses", (0..6).map(|n| look(n, false, 0)).collect(), vec![]),
        ("computes", (0..6).map(|n| look(1, false, n * 900)).collect(), vec![]),
        ("waits", vec![look(1, false, 0); 6], vec![Finding::Stuck(3 * SECOND)]),
        (
            "waits and goes on",
            [vec![look(1, false, 0); 5], vec![look(2, false, 0)], vec![look(3, true, 0)]].concat(),
            vec![Finding::Stuck(3 * SECOND), Finding::GoesOn(4 * SECOND)],
        ),
    ] {
        let mut watched = Watched::default();
        let mut found = Vec::new();
        for look in looks {
            let (next, finding) = watched.after(look, SECOND, limit);
            watched = next;
            found.extend(Some(finding).filter(|finding| *finding != Finding::Nothing));
        }
        assert_eq!(found, expected, "{what}");
    }
}

/// The real thing: a task opens a FIFO that nobody writes.
#[test]
fn a_blocked_worker_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("nobody-writes-here");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let workers = Workers::default();
    let mut builder = Builder::new_multi_thread();
    let runtime = workers.build(builder.enable_all(), 2).unwrap();
    let (told, reports) = mpsc::channel();
    let watch = start(workers, runtime.handle().clone(), IMPATIENT, move |report| {
        let _ = told.send(report);
    });
    let opened = pipe.clone();
    let blocked = runtime.spawn(async move { std::fs::File::open(opened).map(drop) });
    let next = || reports.recv_timeout(Duration::from_secs(60)).unwrap();
    let place = loop {
        if let Report::Stuck(_, place) = next() {
            break place;
        }
    };
    assert_eq!(place.call, format!("openat({:?})", pipe.display().to_string()));
    assert_eq!(place.state, "S");
    // Opened from the other side, the FIFO lets the worker go on.
    drop(std::fs::File::options().write(true).open(&pipe).unwrap());
    while !matches!(next(), Report::GoesOn(..)) {}
    runtime.block_on(blocked).unwrap().unwrap();
    drop(watch);
}

#[test]
fn when_every_worker_is_blocked_nothing_answers() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut builder = Builder::new_multi_thread();
    let workers = Workers::default();
    let runtime = workers.build(builder.enable_all(), 1).unwrap();
    let opened = pipe.clone();
    let blocked = runtime.spawn(async move { std::fs::File::open(opened).map(drop) });
    let (told, reports) = mpsc::channel();
    let watch = start(workers, runtime.handle().clone(), IMPATIENT, move |report| {
        let _ = told.send(report);
    });
    while !matches!(reports.recv_timeout(Duration::from_secs(60)).unwrap(), Report::NoAnswer(_)) {}
    drop(std::fs::File::options().write(true).open(&pipe).unwrap());
    runtime.block_on(blocked).unwrap().unwrap();
    drop(watch);
}

#[test]
fn calls_are_named() {
    let path = c"/some/file";
    let line = format!(
        "{} 0xffffff9c {:#x} 0x80000 0x0 0x0 0x0 0x7ffc 0x7f00",
        libc::SYS_openat,
        path.as_ptr() as usize
    );
    for (line, expected) in [
        (line.as_str(), "openat(\"/some/file\")"),
        ("running", "no system call"),
        ("9999 0x0", "system call 9999"),
        ("", "no system call"),
    ] {
        assert_eq!(call(line), expected, "{line}");
    }
    assert_eq!(processor_time("2000000000 5 7"), 2 * SECOND);
}

/// Run by the next test as a process of its own: both workers wait for a FIFO, and so would every signal.
#[test]
#[ignore = "it never ends by itself"]
fn a_process_that_is_stuck() {
    let pipe = std::env::var_os(FIFO).unwrap();
    let workers = Workers::default();
    let mut builder = Builder::new_multi_thread();
    let runtime = workers.build(builder.enable_all(), 2).unwrap();
    let _watch = start(workers, runtime.handle().clone(), IMPATIENT, |report| eprintln!("{report}"));
    bound_ending().unwrap();
    let mut terminate = runtime.block_on(async {
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap()
    });
    for _ in 0..2 {
        let pipe = pipe.clone();
        drop(runtime.spawn(async move { std::fs::File::open(pipe).map(drop) }));
    }
    eprintln!("ready");
    runtime.block_on(async move { terminate.recv().await });
}

#[test]
fn a_signal_is_obeyed_when_every_worker_is_stuck() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "watchdog::tests::a_process_that_is_stuck", "--nocapture", "--ignored"]);
    let mut child = command.env(FIFO, &pipe).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.by_ref().any(|line| line.contains("stuck for")), "the watchdog tells");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    assert!(lines.any(|line| line.contains("ends at once")), "the watchdog ends the process");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

/// Run by the next test as a process of its own, because the signal is the whole process's.
#[test]
#[ignore = "it ends its process's waiting for good"]
fn a_process_that_gets_a_signal_between_two_waits() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // The command has started before a signal came.
        tokio::select! {
            biased;
            _ = crate::cli::interrupted() => panic!("nobody has sent a signal"),
            () = std::future::ready(()) => {}
        }
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGTERM).unwrap();
        crate::cli::interrupted().await.unwrap();
    });
    eprintln!("interrupted");
}

#[test]
fn a_signal_between_two_waits_is_not_lost() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = "watchdog::tests::a_process_that_gets_a_signal_between_two_waits";
    command.args(["--exact", test, "--nocapture", "--ignored"]);
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("interrupted")), "the second wait ends");
    assert!(child.wait().unwrap().success());
}

//! Notices a worker thread that is stuck, says where, and ends a process that was asked to end and does not.
//!
//! A call that blocks on a worker takes every task of that worker with it, and a second one takes the process:
//! no signal, no timer and no log line gets through. The watchdog is an ordinary thread, so it still runs then.
//!
//! Workers only count how often they become active. The watchdog looks once a second: a worker that has been active
//! since the last looks and used hardly any processor time meanwhile waits in a call that it must not make.
//!
//! As it looks anyway, it also notices that a burst of work is over ([`Bursts`]) and has its free memory returned.

use std::cell::OnceCell;
use std::fmt;
use std::io::{Read, Seek, SeekFrom};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::bursts::Bursts;

/// Interval between the watchdog's checks.
const TICK: Duration = Duration::from_secs(1);
/// A worker that does nothing else for so long is stuck.
const LIMIT: Duration = Duration::from_secs(10);
/// Time limit for the process to end after a signal. `ferrite down` waits longer before it kills.
const ENDING: Duration = Duration::from_secs(15);

/// Set when a signal has asked the process to end.
static ASKED_TO_END: AtomicBool = AtomicBool::new(false);

/// From now on a SIGINT or SIGTERM is obeyed within [`ENDING`], even when no worker gets to know of it.
pub fn bound_ending() -> std::io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the action stores to an atomic and does nothing else, which is allowed in a signal handler.
        unsafe { signal_hook_registry::register(signal, || ASKED_TO_END.store(true, Ordering::Relaxed))? };
    }
    Ok(())
}

/// True if a signal has asked the process to end since the first call of [`bound_ending`].
pub fn is_asked_to_end() -> bool {
    ASKED_TO_END.load(Ordering::Relaxed)
}

/// A worker thread, as it reports itself.
#[derive(Debug)]
struct Worker {
    thread: i32,
    /// Number of times it became active.
    active: AtomicU64,
    parked: AtomicBool,
}

/// The workers of one runtime.
#[derive(Debug, Clone, Default)]
pub struct Workers(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    workers: Mutex<Vec<Arc<Worker>>>,
    joined: Condvar,
}

thread_local! {
    static OWN: OnceCell<Arc<Worker>> = const { OnceCell::new() };
}

impl Workers {
    /// Builds a runtime with `count` workers that report.
    pub fn build(&self, builder: &mut Builder, count: usize) -> std::io::Result<Runtime> {
        let known = self.clone();
        builder.worker_threads(count);
        builder.on_thread_start(move || known.join(count));
        builder.on_thread_park(|| {
            own(|worker| worker.parked.store(true, Ordering::Relaxed));
            ferrite_memory::give_back_if_asked();
        });
        builder.on_thread_unpark(|| {
            own(|worker| {
                worker.active.fetch_add(1, Ordering::Relaxed);
                worker.parked.store(false, Ordering::Relaxed);
            });
        });
        let runtime = builder.build()?;
        // The threads for blocking calls start in the same way, but only when the runtime is given something to
        // do: until then every thread that joins is a worker.
        let joining = self.0.workers.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.joined.wait_while(joining, |workers| workers.len() < count));
        Ok(runtime)
    }

    fn join(&self, count: usize) {
        let mut workers = self.0.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if workers.len() == count {
            return;
        }
        let thread = nix::unistd::gettid().as_raw();
        let worker = Arc::new(Worker { thread, active: AtomicU64::new(0), parked: AtomicBool::new(false) });
        OWN.with(|own| drop(own.set(worker.clone())));
        workers.push(worker);
        self.0.joined.notify_all();
    }

    fn all(&self) -> Vec<Arc<Worker>> {
        self.0.workers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn own(note: impl FnOnce(&Worker)) {
    OWN.with(|own| {
        if let Some(worker) = own.get() {
            note(worker);
        }
    });
}

/// A worker's state at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Look {
    active: u64,
    parked: bool,
    /// Processor time used so far.
    used: Duration,
}

/// A worker's state over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Watched {
    last: Look,
    /// Time that it has been active without a pause.
    busy: Duration,
    /// Processor time that it used in that time.
    used: Duration,
    told: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    Nothing,
    /// It waits in a call, for so long.
    Stuck(Duration),
    /// It was stuck for so long and goes on.
    GoesOn(Duration),
}

impl Watched {
    /// Takes one more check into account, `passed` after the last.
    fn after(self, look: Look, passed: Duration, limit: Duration) -> (Self, Finding) {
        if look.parked || look.active != self.last.active {
            let finding = if self.told { Finding::GoesOn(self.busy) } else { Finding::Nothing };
            return (Self { last: look, ..Self::default() }, finding);
        }
        let busy = self.busy + passed;
        let used = self.used + look.used.saturating_sub(self.last.used);
        // A worker that computes is slow, not stuck.
        let stuck = busy >= limit && used < busy / 2 && !self.told;
        let finding = if stuck { Finding::Stuck(busy) } else { Finding::Nothing };
        (Self { last: look, busy, used, told: self.told || stuck }, finding)
    }
}

/// Ends the watch when dropped.
pub struct Watch {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Begins to watch the workers of the runtime.
pub fn watch(workers: Workers, handle: Handle) -> std::io::Result<Watch> {
    let times = Times { tick: TICK, limit: LIMIT, ending: ENDING };
    start(workers, handle, times, |report| tracing::error!("{report}"))
}

/// The watchdog's time limits.
#[derive(Debug, Clone, Copy)]
struct Times {
    tick: Duration,
    limit: Duration,
    ending: Duration,
}

fn start(
    workers: Workers,
    handle: Handle,
    times: Times,
    tell: impl Fn(Report) + Send + 'static,
) -> std::io::Result<Watch> {
    let Times { tick, limit, ending: patience } = times;
    let (stop, stopped) = mpsc::channel::<()>();
    let watcher = std::thread::Builder::new().name("watchdog".into()).stack_size(128 << 10);
    let thread = watcher.spawn(move || {
        let mut watched: Vec<Watched> = Vec::new();
        let mut ping = Ping::new(handle);
        let mut ending: Option<Instant> = None;
        let mut bursts = Bursts::started();
        let mut last = Instant::now();
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(tick) {
            let passed = last.elapsed();
            last = Instant::now();
            let all = workers.all();
            watched.resize(all.len(), Watched::default());
            for (worker, known) in all.iter().zip(&mut watched) {
                let (next, finding) = known.after(look(worker), passed, limit);
                *known = next;
                match finding {
                    Finding::Nothing => {}
                    Finding::Stuck(time) => tell(Report::Stuck(time, describe(worker.thread))),
                    Finding::GoesOn(time) => tell(Report::GoesOn(time, worker.thread)),
                }
            }
            if let Some(time) = ping.unanswered(limit) {
                tell(Report::NoAnswer(time));
            }
            if bursts.is_over(ferrite_memory::usage::processor_time(std::process::id()), passed) {
                ferrite_memory::give_back();
            }
            if is_asked_to_end() {
                let since = *ending.get_or_insert_with(Instant::now);
                if since.elapsed() >= patience {
                    let places = all.iter().map(|worker| describe(worker.thread)).collect();
                    tell(Report::Ends(patience, places));
                    // SAFETY: ends the process. Nothing is lost that a power failure would not lose: the store is
                    // durable, and containers go on.
                    unsafe { libc::_exit(1) };
                }
            }
        }
    })?;
    Ok(Watch { stop: Some(stop), thread: Some(thread) })
}

/// Asks the runtime to run something, and the pool for blocking calls, too.
struct Ping {
    handle: Handle,
    answered: Arc<AtomicU64>,
    sent: u64,
    since: Instant,
    told: bool,
}

impl Ping {
    fn new(handle: Handle) -> Self {
        Self { handle, answered: Arc::default(), sent: 0, since: Instant::now(), told: false }
    }

    /// Returns, once, the time that the last question has been waiting, if it is longer than `limit`.
    fn unanswered(&mut self, limit: Duration) -> Option<Duration> {
        if self.answered.load(Ordering::Relaxed) == self.sent {
            (self.sent, self.since, self.told) = (self.sent + 1, Instant::now(), false);
            let (answered, number) = (self.answered.clone(), self.sent);
            drop(self.handle.spawn(async move {
                let done = tokio::task::spawn_blocking(ferrite_memory::give_back_if_asked).await;
                if done.is_ok() {
                    answered.store(number, Ordering::Relaxed);
                }
            }));
            return None;
        }
        let waited = self.since.elapsed();
        let tell = waited >= limit && !self.told;
        self.told |= tell;
        tell.then_some(waited)
    }
}

/// A message of the watchdog.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Report {
    Stuck(Duration, Place),
    GoesOn(Duration, i32),
    NoAnswer(Duration),
    Ends(Duration, Vec<Place>),
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stuck(time, place) => write!(
                f,
                "a worker has been stuck for {} seconds: {place}. Its other tasks wait; report this as a bug",
                time.as_secs()
            ),
            Self::GoesOn(time, thread) => {
                write!(f, "worker thread {thread} goes on after {} seconds", time.as_secs())
            }
            Self::NoAnswer(time) => write!(
                f,
                "nothing new has been run for {} seconds: all workers, or all threads for blocking calls, are busy",
                time.as_secs()
            ),
            Self::Ends(time, places) => {
                write!(f, "asked to end {} seconds ago and still here; ends at once.", time.as_secs())?;
                places.iter().try_for_each(|place| write!(f, " {place}."))
            }
        }
    }
}

/// Where a thread is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Place {
    thread: i32,
    name: String,
    /// As in `ps`: R runs, S sleeps, D waits for a device.
    state: String,
    call: String,
    waits_in: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, name, state, call, waits_in } = self;
        write!(f, "thread {thread} ({name}), state {state}, in {call}, kernel function {waits_in}")
    }
}

fn task_file(thread: i32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/self/task/{thread}/{name}")).unwrap_or_default().trim().to_owned()
}

fn look(worker: &Worker) -> Look {
    Look {
        active: worker.active.load(Ordering::Relaxed),
        parked: worker.parked.load(Ordering::Relaxed),
        used: processor_time(&task_file(worker.thread, "schedstat")),
    }
}

/// The first number of `schedstat` is the processor time in nanoseconds.
fn processor_time(schedstat: &str) -> Duration {
    Duration::from_nanos(schedstat.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or_default())
}

fn describe(thread: i32) -> Place {
    let stat = task_file(thread, "stat");
    // The name stands in parentheses and may hold anything.
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    Place {
        thread,
        name: task_file(thread, "comm"),
        state: state.unwrap_or("?").to_owned(),
        call: call(&task_file(thread, "syscall")),
        waits_in: task_file(thread, "wchan"),
    }
}

/// The system call of a thread, with the file it is about where that is known.
fn call(line: &str) -> String {
    let mut words = line.split(' ');
    let Some(number) = words.next().and_then(|n| n.parse::<i64>().ok()) else {
        return "no system call".into();
    };
    let argument = |index: usize| {
        let text = line.split(' ').nth(index + 1)?.strip_prefix("0x")?;
        u64::from_str_radix(text, 16).ok()
    };
    let Some((_, name, path)) = CALLS.iter().find(|(known, ..)| *known == number) else {
        return format!("system call {number}");
    };
    let about = match path {
        About::Nothing => None,
        About::Path(index) => argument(*index).and_then(text_at),
        About::Descriptor => argument(0).and_then(|fd| {
            let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
            Some(link.display().to_string())
        }),
    };
    about.map_or_else(|| format!("{name}()"), |about| format!("{name}({about:?})"))
}

/// Which argument of a call names a file.
enum About {
    Nothing,
    Path(usize),
    Descriptor,
}

/// The calls in which a thread waits for a file, a lock or a process.
const CALLS: &[(i64, &str, About)] = &[
    (libc::SYS_openat, "openat", About::Path(1)),
    (libc::SYS_openat2, "openat2", About::Path(1)),
    (libc::SYS_newfstatat, "newfstatat", About::Path(1)),
    (libc::SYS_statx, "statx", About::Path(1)),
    (libc::SYS_unlinkat, "unlinkat", About::Path(1)),
    (libc::SYS_read, "read", About::Descriptor),
    (libc::SYS_write, "write", About::Descriptor),
    (libc::SYS_pread64, "pread64", About::Descriptor),
    (libc::SYS_pwrite64, "pwrite64", About::Descriptor),
    (libc::SYS_fsync, "fsync", About::Descriptor),
    (libc::SYS_fdatasync, "fdatasync", About::Descriptor),
    (libc::SYS_flock, "flock", About::Descriptor),
    (libc::SYS_getdents64, "getdents64", About::Descriptor),
    (libc::SYS_recvfrom, "recvfrom", About::Descriptor),
    (libc::SYS_recvmsg, "recvmsg", About::Descriptor),
    (libc::SYS_futex, "futex", About::Nothing),
    (libc::SYS_wait4, "wait4", About::Nothing),
    (libc::SYS_ppoll, "ppoll", About::Nothing),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", About::Nothing),
];

/// The text at an address of this process, or nothing where there is none.
fn text_at(address: u64) -> Option<String> {
    // Read through the kernel: the address may be invalid by now.
    let mut memory = std::fs::File::open("/proc/self/mem").ok()?;
    memory.seek(SeekFrom::Start(address)).ok()?;
    let mut bytes = [0; 256];
    let count = memory.read(&mut bytes).ok()?;
    let end = bytes[..count].iter().position(|byte| *byte == 0).unwrap_or(count);
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
#[path = "watchdog_tests.rs"]
mod tests;

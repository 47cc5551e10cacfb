//! The measurements. The runtimes take turns, so that all of them see the same machine.

use std::path::Path;
use std::time::Instant;

use ferrite_memory::usage::rollup;

use crate::images::Pushed;
use crate::runc::Runc;
use crate::sides::{Containerd, Ferrite, Network, Side};
use crate::table::{Table, Times};

const PULLS: usize = 5;
/// Begins the name of the directory of each round of pulls.
pub const ROUND: &str = "pull-";
const STARTS: usize = 40;
const EXECS: usize = 60;
const PODS: usize = 100;

/// The runtimes that take turns.
pub struct Sides<'a> {
    pub ours: &'a Side,
    pub theirs: Option<&'a Side>,
}

impl Sides<'_> {
    fn all(&self) -> impl Iterator<Item = &Side> {
        std::iter::once(self.ours).chain(self.theirs)
    }

    pub async fn pull_small(&self, image: &str) {
        for side in self.all() {
            side.pull(image).await;
        }
    }

    fn times(&self) -> Vec<Times> {
        self.all().map(|_| Times::default()).collect()
    }
}

/// Every round has runtimes of its own on directories of their own, and nothing is removed in between: file systems
/// are slow to reuse space that was just freed.
pub async fn pull(table: &mut Table, dir: &Path, pushed: &Pushed) {
    let (packed, unpacked) = pushed.large_size;
    println!("image of {} MB, {} MB compressed", unpacked / 1_000_000, packed / 1_000_000);
    let (mut pulled, mut durable) = (Vec::new(), Vec::new());
    for round in 0..=PULLS {
        let dir = dir.join(format!("{ROUND}{round}"));
        std::fs::create_dir(&dir).unwrap();
        let (ours, theirs) = (Ferrite::start(&dir).await, Containerd::start(&dir, &pushed.pause).await);
        let sides = Sides { ours: &ours.side, theirs: theirs.as_ref().map(|c| &c.side) };
        // The first round warms the registry's cache.
        if round < 2 {
            (pulled, durable) = (sides.times(), sides.times());
        }
        for (number, side) in sides.all().enumerate() {
            // Flush first, so that this runtime does not wait for the other's writes.
            nix::unistd::sync();
            let begin = Instant::now();
            side.pull(&pushed.large).await;
            pulled[number].add(begin.elapsed());
            nix::unistd::sync();
            durable[number].add(begin.elapsed());
        }
    }
    table.times("pull and unpack", &pulled[0], pulled.get(1), None);
    table.times("pull and unpack, all of it on disk", &durable[0], durable.get(1), None);
}

pub async fn start(table: &mut Table, sides: &Sides<'_>, runc: Option<&Runc>, image: &str) {
    let mut sandboxes = Vec::new();
    for side in sides.all() {
        sandboxes.push(side.run_sandbox("start", Network::Host).await);
    }
    let (mut times, mut by_hand) = (sides.times(), Times::default());
    for _ in 0..STARTS {
        for (number, side) in sides.all().enumerate() {
            let begin = Instant::now();
            let id = side.run_container(&sandboxes[number], "start", Network::Host, image).await;
            times[number].add(begin.elapsed());
            side.remove_container(&id).await;
        }
        if let Some(runc) = runc {
            by_hand.add(runc.run());
            runc.delete();
        }
    }
    for (side, sandbox) in sides.all().zip(&sandboxes) {
        side.remove_sandbox(sandbox).await;
    }
    table.times("create and start a container", &times[0], times.get(1), runc.map(|_| &by_hand));
}

pub async fn pod(table: &mut Table, sides: &Sides<'_>, image: &str) {
    let (mut times, mut own) = (sides.times(), Times::default());
    for _ in 0..STARTS {
        for (number, side) in sides.all().enumerate() {
            let begin = Instant::now();
            let pod = side.run_pod("pod", Network::Host, image).await;
            times[number].add(begin.elapsed());
            side.remove_pod(&pod).await;
        }
        let begin = Instant::now();
        let pod = sides.ours.run_pod("pod", Network::Own, image).await;
        own.add(begin.elapsed());
        sides.ours.remove_pod(&pod).await;
    }
    table.times("sandbox and container, the host's network", &times[0], times.get(1), None);
    table.times("sandbox and container, a network of its own", &own, None, None);
}

pub async fn exec(table: &mut Table, sides: &Sides<'_>, runc: Option<&Runc>, image: &str) {
    let mut pods = Vec::new();
    for side in sides.all() {
        pods.push(side.run_pod("exec", Network::Host, image).await);
    }
    if let Some(runc) = runc {
        runc.run();
    }
    let (mut times, mut by_hand) = (sides.times(), Times::default());
    for _ in 0..EXECS {
        for (number, side) in sides.all().enumerate() {
            let begin = Instant::now();
            side.exec(&pods[number].container).await;
            times[number].add(begin.elapsed());
        }
        if let Some(runc) = runc {
            by_hand.add(runc.exec());
        }
    }
    if let Some(runc) = runc {
        runc.delete();
    }
    for (side, pod) in sides.all().zip(&pods) {
        side.remove_pod(pod).await;
    }
    table.times("exec of true, there and back", &times[0], times.get(1), runc.map(|_| &by_hand));
}

/// Memory of the processes that serve pods but are not the pods' own.
pub async fn memory(table: &mut Table, sides: &Sides<'_>, image: &str) {
    let (mut before, mut with, mut each) = (Vec::new(), Vec::new(), Vec::new());
    for side in sides.all() {
        let few = side.processes();
        before.push(mebibytes(&few, "Pss:"));
        let mut pods = Vec::new();
        for number in 0..PODS {
            pods.push(side.run_pod(&format!("memory-{number}"), Network::Host, image).await);
        }
        let all = side.processes();
        with.push(mebibytes(&all, "Pss:"));
        let new: Vec<i32> = all.into_iter().filter(|pid| !few.contains(pid)).collect();
        each.push(mebibytes(&new, "Private_") * 1024.0 / PODS as f64);
        for pod in &pods {
            side.remove_pod(pod).await;
        }
    }
    table.row("the runtime's processes, no pods, PSS MiB", before[0], before.get(1).copied(), None);
    let row = format!("the runtime's processes, {PODS} pods, PSS MiB");
    table.row(&row, with[0], with.get(1).copied(), None);
    table.row("  that is more, MiB", with[0] - before[0], with.get(1).map(|with| with - before[1]), None);
    table.row("processes of each pod, private KiB", each[0], each.get(1).copied(), None);
}

/// The memory of processes, by the lines of smaps_rollup that begin with `key`.
fn mebibytes(processes: &[i32], key: &str) -> f64 {
    let kib: u64 = processes.iter().map(|pid| rollup(pid.unsigned_abs(), key)).sum();
    kib as f64 / 1024.0
}

//! Figures, for people: `cargo test -p ferrite-runtime --test measure -- --ignored --nocapture`.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::time::{Duration, Instant};

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::*;
use world::{World, secure, shell};

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: p50 {:?} p90 {:?} max {:?} (n={})", at(0.5), at(0.9), at(1.0), times.len());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures"]
async fn latency_and_memory() {
    let world = World::new().await;
    let (mut sandboxes, mut creates, mut starts, mut both, mut execs, mut removes) =
        (vec![], vec![], vec![], vec![], vec![], vec![]);
    let mut private = Vec::new();
    for attempt in 0..40 {
        let mut config = world.sandbox_config();
        config.metadata.as_mut().unwrap().attempt = attempt;
        let begin = Instant::now();
        let sandbox = world.run_sandbox(config).await;
        sandboxes.push(begin.elapsed());
        let config = secure(shell("a", "sleep 100"), |s| {
            s.seccomp = Some(SecurityProfile::default());
        });
        let begin = Instant::now();
        let id = world.create(&sandbox, config).await;
        creates.push(begin.elapsed());
        let middle = Instant::now();
        world.try_start(&id).await.unwrap();
        starts.push(middle.elapsed());
        both.push(begin.elapsed());
        let begin = Instant::now();
        world.exec(&id, &["true"], 10).await.unwrap();
        execs.push(begin.elapsed());
        let identity = world.config.run.join("sandboxes").join(&sandbox).join("supervisor");
        let text = std::fs::read_to_string(identity).unwrap();
        let pid = text.split(' ').next().unwrap();
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let field = |name: &str| -> u64 {
            let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        private.push((
            field("Private_Dirty") + field("Private_Clean"),
            field("Private_Dirty"),
            field("Pss:"),
        ));
        let begin = Instant::now();
        let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox };
        world.runtime().remove_pod_sandbox(request).await.unwrap();
        removes.push(begin.elapsed());
    }
    show("run sandbox", sandboxes);
    show("create container", creates);
    show("start container", starts);
    show("create + start", both);
    show("exec true", execs);
    show("remove sandbox", removes);
    println!("supervisor KiB (private, private dirty, PSS): {:?}", private.last().unwrap());
}

//! The runtime is killed at random moments of a busy life, and the next one finds nothing lost or left over.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod docker_registry;
mod image_fixtures;
mod world;

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader, Cursor, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::*;
use ferrite_runtime::Runtime;
use ferrite_runtime::image::{Auth, Platform, RegistryConfig};
use image_fixtures::{TestImage, quiet, store, tar};
use rand::RngExt;
use world::{Images, World, configuration, shell, traces};

/// Where the victim works; its presence makes this process the victim.
const DIRECTORY: &str = "FERRITE_CRASH_DIRECTORY";
const GROUP: &str = "FERRITE_CRASH_GROUP";
/// Where images are pulled from.
const REGISTRY: &str = "FERRITE_CRASH_REGISTRY";
const ROUNDS: usize = 12;

/// Prints a line of the victim, after which the parent may kill it.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

fn victim(test: &str, directory: &Path, group: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(DIRECTORY, directory).env(GROUP, group);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// Lets a victim live for a random while, kills it, and returns its output.
fn kill_at_random(mut command: Command, longest: Duration) -> Vec<String> {
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    // Its life is measured from its first word, which the test harness leaves at the end of a line.
    let mut said: Vec<String> = lines.by_ref().find(|line| line.ends_with("ready")).into_iter().collect();
    let life = rand::rng().random_range(Duration::ZERO..longest);
    let killer = std::thread::spawn(move || {
        #[allow(clippy::disallowed_methods, reason = "the moment is random on purpose")]
        std::thread::sleep(life);
        child.kill().unwrap();
        child.wait().unwrap();
    });
    said.extend(lines);
    killer.join().unwrap();
    assert!(!said.is_empty(), "the victim never started");
    said
}

/// Pods come and go until somebody ends this process.
async fn live(directory: &Path, group: String) {
    let config = configuration(directory, group, Images::busybox(&directory.join("image")));
    let world = std::mem::ManuallyDrop::new(World {
        directory: tempfile::tempdir_in(directory).unwrap(),
        runtime: Some(Runtime::open(config.clone()).await.unwrap()),
        config,
    });
    say("ready");
    for attempt in rand::rng().random_range(1..1_000_000)..u32::MAX {
        let mut pod = world.sandbox_config();
        pod.metadata.as_mut().unwrap().attempt = attempt;
        let sandbox = world.run_sandbox(pod).await;
        let id = world.start(&sandbox, shell("a", "trap 'exit 3' TERM; while :; do sleep 0.1; done")).await;
        say(&format!("started {id} {}", world.pid(&id).await));
        if attempt % 2 == 0 {
            continue;
        }
        say(&format!("stopping {id}"));
        world.stop(&id, 5).await;
        let request = RemoveContainerRequest { container_id: id.clone() };
        world.runtime().remove_container(request).await.unwrap();
        say(&format!("removed {id}"));
        let request = StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
        world.runtime().stop_pod_sandbox(request).await.unwrap();
        let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox };
        world.runtime().remove_pod_sandbox(request).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_lost_and_none_left_over() {
    if let (Ok(directory), Ok(group)) = (std::env::var(DIRECTORY), std::env::var(GROUP)) {
        return live(Path::new(&directory), group).await;
    }
    let mut world = World::new().await;
    world.close().await;
    let mut running: BTreeMap<String, i32> = BTreeMap::new();
    for round in 0..ROUNDS {
        let command =
            victim("no_pod_is_lost_and_none_left_over", world.directory.path(), &world.config.cgroup_parent);
        let said = tokio::task::spawn_blocking(|| kill_at_random(command, Duration::from_millis(400)));
        for line in said.await.unwrap() {
            match line.split(' ').collect::<Vec<_>>().as_slice() {
                ["started", id, pid] => drop(running.insert((*id).to_owned(), pid.parse().unwrap())),
                ["stopping", id] => drop(running.remove(*id)),
                _ => {}
            }
        }
        world.reopen().await;
        for (id, pid) in &running {
            let state = world.status(id).await.state();
            assert_eq!(state, ContainerState::ContainerRunning, "round {round}: {id} was lost");
            assert_eq!(world.pid(id).await, *pid, "round {round}: {id} is another process");
        }
        let listed = world.runtime().list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap().items;
        let known: HashSet<String> = listed.into_iter().map(|sandbox| sandbox.id).collect();
        for entry in std::fs::read_dir(world.config.run.join("sandboxes")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            assert!(known.contains(&name), "round {round}: {name} is left over and nobody knows it");
        }
        world.close().await;
    }
    ferrite_runtime::destroy(world.config.clone()).await.unwrap();
    assert_eq!(traces(&world.config), Vec::<String>::new());
}

/// Two images that share a layer, so that a layer unpacked for one is used for the other.
fn images() -> [TestImage; 2] {
    let shared: Vec<(String, Vec<u8>)> = (0..200).map(|n| (format!("shared/{n}"), vec![7; 4096])).collect();
    let shared: Vec<(&str, &[u8])> = shared.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect();
    [b"1", b"2"].map(|version| TestImage::plain(vec![tar(&shared), tar(&[("version", version)])]))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_image_is_half_there() {
    let images = images();
    if let Ok(directory) = std::env::var(DIRECTORY) {
        let store = store(Path::new(&directory));
        say("ready");
        for round in 0.. {
            let number = round % images.len();
            let name = format!("app-{number}");
            say(&format!("removing {name}"));
            let _ = store.remove(&name, &HashSet::new());
            store.collect(&HashSet::new()).unwrap();
            store.import(Cursor::new(images[number].docker_save(&[&name])), quiet()).await.unwrap();
            say(&format!("imported {name}"));
        }
    }
    let root = tempfile::tempdir().unwrap();
    let mut present: HashSet<String> = HashSet::new();
    for round in 0..ROUNDS {
        let command = victim("no_image_is_half_there", root.path(), "");
        let said = tokio::task::spawn_blocking(|| kill_at_random(command, Duration::from_millis(200)));
        for line in said.await.unwrap() {
            match line.split_once(' ') {
                Some(("imported", name)) => drop(present.insert(name.to_owned())),
                Some(("removing", name)) => drop(present.remove(name)),
                _ => {}
            }
        }
        let store = store(root.path());
        for name in &present {
            assert!(store.image(name).is_some(), "round {round}: {name} was lost");
        }
        for record in store.list().unwrap() {
            for directory in store.lower_dirs(&record.id.to_string()) {
                let whole = directory.join("version").exists()
                    || std::fs::read_dir(directory.join("shared")).is_ok_and(|files| files.count() == 200);
                assert!(whole, "round {round}: {} is half a layer", directory.display());
            }
        }
        assert_eq!(image_fixtures::count(root.path().join("images/ingest")), 0, "round {round}");
    }
}

/// Large enough for a pull to be under way when it is killed.
fn pulled_images() -> [TestImage; 2] {
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    })
    .take(4 << 20)
    .collect();
    let shared: Vec<(String, &[u8])> = (0..4).map(|n| (format!("shared/{n}"), &noise[n << 20..])).collect();
    let shared: Vec<(&str, &[u8])> = shared.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
    [b"1", b"2"]
        .map(|version| TestImage::new(vec![tar(&shared), tar(&[("version", version)])], image_fixtures::gzip))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pull_leaves_anything_behind() {
    let pull = async |store: &std::sync::Arc<ferrite_runtime::image::ImageStore>, name: &str| {
        let reference = name.parse().unwrap();
        store.pull(&reference, Auth::Anonymous, &Platform::host(), &RegistryConfig::default(), quiet()).await
    };
    if let (Ok(directory), Ok(registry)) = (std::env::var(DIRECTORY), std::env::var(REGISTRY)) {
        let store = store(Path::new(&directory));
        say("ready");
        for round in 0.. {
            let name = format!("{registry}/app:{}", round % 2);
            let _ = store.remove(&name, &HashSet::new());
            store.collect(&HashSet::new()).unwrap();
            pull(&store, &name).await.unwrap();
            say(&format!("pulled {name}"));
        }
    }
    let registry = docker_registry::Registry::start(false);
    let images = pulled_images();
    for (tag, image) in images.iter().enumerate() {
        registry.push("app", image, &tag.to_string());
    }
    let root = tempfile::tempdir().unwrap();
    for round in 0..ROUNDS * 2 {
        let mut command = victim("no_pull_leaves_anything_behind", root.path(), "");
        command.env(REGISTRY, registry.address.to_string());
        tokio::task::spawn_blocking(|| kill_at_random(command, Duration::from_millis(400))).await.unwrap();

        let store = store(root.path());
        for (tag, image) in images.iter().enumerate() {
            let record = pull(&store, &format!("{}/app:{tag}", registry.address)).await.unwrap();
            assert_eq!(record.id, image.id(), "round {round}");
            let layers = store.lower_dirs(&record.id.to_string());
            assert_eq!(std::fs::read_dir(layers[1].join("shared")).unwrap().count(), 4, "round {round}");
        }
        store.collect(&HashSet::new()).unwrap();
        let count = |name: &str| image_fixtures::count(root.path().join("images").join(name));
        assert_eq!(count("layers"), 3, "round {round}: two of their own and one they share");
        assert_eq!(count("blobs/sha256"), 4, "round {round}: a manifest and a configuration each");
        assert_eq!(count("ingest"), 0, "round {round}");
    }
}

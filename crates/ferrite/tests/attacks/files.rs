//! Attacks from inside a container: files that it writes where a root process reads, follows or removes.

#[path = "files/claims.rs"]
mod claims;
#[path = "files/clean_up.rs"]
mod clean_up;
#[path = "files/docker.rs"]
mod docker;
#[path = "files/special.rs"]
mod special;
#[path = "files/users.rs"]
mod users;
#[path = "files/volumes.rs"]
mod volumes;

use crate::archive;
use crate::world::World;
use ferrite_json::Value;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// An image with a shell.
const SHELL: &str = "example.com/shell:v1";

/// A cluster that has [`SHELL`].
fn world_with_shell() -> World {
    let world = World::start();
    import_shell(&world);
    world
}

fn import_shell(world: &World) {
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
}

/// Runs a script in a pod; the output with errors, whatever comes of it.
fn sh(world: &World, pod: &str, script: &str) -> String {
    let output = world.try_kubectl(&["exec", pod, "--", "/bin/busybox", "sh", "-c", script]);
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// The kubelet's directory of a pod.
fn pod_dir(world: &World, pod: &Value) -> PathBuf {
    world.data().join("kubelet/pods").join(uid(pod))
}

/// A directory of a container, by one of its processes.
fn inside(pid: i32, name: &str) -> OwnedFd {
    open(Path::new(&format!("/proc/{pid}/root/{name}")))
}

fn open(path: &Path) -> OwnedFd {
    std::fs::File::open(path).unwrap().into()
}

/// Makes `levels` directories, one in the other. A path to the last one would be too long for any program.
fn nest(root: OwnedFd, levels: usize) {
    let mut at = ferrite_hostfs::Dir::from(root);
    for _ in 0..levels {
        at = at.create_dir("d", 0o777).unwrap();
    }
}

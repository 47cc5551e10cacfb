//! runc by hand, without anybody above it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::GROUP;
use crate::images::busybox;

/// A bundle and a place for runc's state.
pub struct Runc {
    dir: PathBuf,
}

impl Runc {
    /// `None` where runc is not installed.
    pub fn new(dir: &Path) -> Option<Self> {
        let dir = dir.join("runc");
        let bin = dir.join("bundle/rootfs/bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::write(bin.join("busybox"), busybox()).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(bin.join("busybox"), mode).unwrap();
        for name in ["sleep", "true"] {
            std::fs::hard_link(bin.join("busybox"), bin.join(name)).unwrap();
        }
        let made = Command::new("runc").arg("spec").arg("--bundle").arg(dir.join("bundle")).status();
        if !made.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED: runc is not installed (package runc)");
            return None;
        }
        let path = dir.join("bundle/config.json");
        let mut spec: ferrite_json::Value = ferrite_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        spec["process"]["terminal"] = false.into();
        spec["process"]["args"] = ferrite_json::json!(["/bin/sleep", "1000"]);
        spec["linux"]["cgroupsPath"] = format!("{GROUP}/runc").into();
        // The network of the host, as the pods of the comparison have it.
        let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "network");
        std::fs::write(&path, spec.to_string()).unwrap();
        Some(Self { dir })
    }

    fn call(&self, arguments: &[&str]) -> Duration {
        let begin = Instant::now();
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.dir.join("state")).args(arguments);
        command.current_dir(self.dir.join("bundle")).stdin(std::process::Stdio::null());
        // Its container keeps inherited descriptors: an answer is taken from a file, not from a pipe.
        let said = self.dir.join("said");
        command.stdout(std::process::Stdio::null()).stderr(std::fs::File::create(&said).unwrap());
        let status = command.status().unwrap();
        assert!(status.success(), "{}", std::fs::read_to_string(said).unwrap_or_default());
        begin.elapsed()
    }

    /// Creates and starts a container.
    pub fn run(&self) -> Duration {
        self.call(&["run", "--detach", "bench"])
    }

    pub fn exec(&self) -> Duration {
        self.call(&["exec", "bench", "/bin/true"])
    }

    pub fn delete(&self) {
        self.call(&["delete", "--force", "bench"]);
    }
}

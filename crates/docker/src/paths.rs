//! Where the engine keeps its things.

use std::path::{Path, PathBuf};

/// Without `--data-dir` everything persistent is below this directory.
pub const DEFAULT_DATA: &str = "/var/lib/ferrite";

/// The directories of one engine. Another data directory is another engine: they share nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    data_dir: PathBuf,
    root: PathBuf,
    run: PathBuf,
    /// Short and unique on this machine; empty for the default directory.
    suffix: String,
}

impl Paths {
    pub fn new(data_dir: &Path) -> Self {
        if data_dir == Path::new(DEFAULT_DATA) {
            return Self {
                data_dir: data_dir.to_owned(),
                root: data_dir.join("docker"),
                run: "/run/ferrite/docker".into(),
                suffix: String::new(),
            };
        }
        let data_dir = std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned());
        // FNV-1a: the same for every version of the program, which the standard hasher is not.
        let hash = data_dir
            .as_os_str()
            .as_encoded_bytes()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        Self {
            root: data_dir.join("docker"),
            run: data_dir.join("run/docker"),
            suffix: format!("-{:06x}", hash & 0xff_ffff),
            data_dir,
        }
    }

    /// The value of `--data-dir`.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    pub fn container(&self, id: &str) -> PathBuf {
        self.containers().join(id)
    }

    /// Sockets and pinned namespaces of a container; gone after a reboot.
    pub fn container_run(&self, id: &str) -> PathBuf {
        self.run.join(id)
    }

    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    pub fn network(&self) -> PathBuf {
        self.root.join("network")
    }

    /// The networks people make.
    pub fn networks(&self) -> PathBuf {
        self.root.join("networks")
    }

    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    /// The control group below which all containers are.
    pub fn cgroup(&self) -> String {
        format!("/ferrite-docker{}", self.suffix)
    }

    /// The bridge's name, at most 15 bytes.
    pub fn bridge(&self) -> String {
        if self.suffix.is_empty() { "fdocker0".into() } else { format!("fd{}", self.suffix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_do_not_share_names() {
        let (a, b) = (Paths::new(Path::new("/tmp/a")), Paths::new(Path::new("/tmp/b")));
        assert_ne!(a.cgroup(), b.cgroup());
        assert_ne!(a.bridge(), b.bridge());
        assert!(a.bridge().len() <= 15);
        let default = Paths::new(Path::new(DEFAULT_DATA));
        assert_eq!(default.root(), Path::new("/var/lib/ferrite/docker"));
        assert_eq!(default.cgroup(), "/ferrite-docker");
    }
}

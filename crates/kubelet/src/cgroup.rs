//! Pod cgroups: `<root>/kubepods[/burstable|/besteffort]/pod<uid>`, on cgroup v1 and v2.

use crate::container::resources::{self, PodResources};
use crate::pod::model::QosClass;
use std::io;
use std::path::{Path, PathBuf};

/// Controllers of v1 whose hierarchy gets a directory per pod.
const V1_CONTROLLERS: [&str; 8] =
    ["cpu", "cpuacct", "cpuset", "memory", "pids", "hugetlb", "blkio", "freezer"];

/// Pods that ask for nothing get what is left over: the least the kernel knows, for them and their class.
const BEST_EFFORT_SHARES: i64 = 2;

/// The cgroup file system of this machine, and where pods live in it.
#[derive(Debug, Clone)]
pub(crate) struct Cgroups {
    layout: Layout,
    /// Without a leading slash.
    root: String,
}

#[derive(Debug, Clone)]
enum Layout {
    V2(PathBuf),
    /// One directory per mounted controller.
    V1(Vec<(String, PathBuf)>),
}

impl Cgroups {
    /// Looks at what is mounted below `mount` (`/sys/fs/cgroup`).
    pub(crate) fn discover(mount: &Path, root: &str) -> Self {
        let layout = if mount.join("cgroup.controllers").exists() {
            Layout::V2(mount.to_path_buf())
        } else {
            let mounted = V1_CONTROLLERS
                .iter()
                .map(|c| (c.to_string(), mount.join(c)))
                .filter(|(_, path)| path.is_dir())
                .collect();
            Layout::V1(mounted)
        };
        Self { layout, root: root.trim_matches('/').to_string() }
    }

    /// The path a sandbox names as its parent.
    pub(crate) fn pod_path(&self, qos: QosClass, uid: &str) -> String {
        let class = match qos {
            QosClass::Guaranteed => "",
            QosClass::Burstable => "burstable/",
            QosClass::BestEffort => "besteffort/",
        };
        let root = if self.root.is_empty() { String::new() } else { format!("/{}", self.root) };
        format!("{root}/kubepods/{class}pod{uid}")
    }

    /// Makes the pod's cgroup with the limits of the pod as a whole. What exists is brought up to date.
    pub(crate) fn ensure_pod(&self, qos: QosClass, uid: &str, total: &PodResources) -> io::Result<()> {
        let path = self.pod_path(qos, uid);
        let relative = path.trim_start_matches('/');
        let shares = match qos {
            QosClass::BestEffort => BEST_EFFORT_SHARES,
            _ => resources::cpu_shares(total.cpu_request),
        };
        let quota = total.cpu_limit.map(resources::cpu_quota).filter(|q| *q > 0);
        match &self.layout {
            Layout::V2(mount) => {
                make_v2(mount, relative)?;
                let dir = mount.join(relative);
                if let Some(class) = dir.parent().filter(|_| qos == QosClass::BestEffort) {
                    set(class, "cpu.weight", &resources::cpu_weight(BEST_EFFORT_SHARES).to_string())?;
                }
                set(&dir, "cpu.weight", &resources::cpu_weight(shares).to_string())?;
                let quota = quota.map_or("max".to_string(), |q| q.to_string());
                set(&dir, "cpu.max", &format!("{quota} {}", resources::QUOTA_PERIOD))?;
                set(&dir, "memory.max", &total.memory_limit.map_or("max".to_string(), |m| m.to_string()))
            }
            Layout::V1(controllers) => {
                for (name, mount) in controllers {
                    let dir = mount.join(relative);
                    std::fs::create_dir_all(&dir)?;
                    match name.as_str() {
                        "cpu" => {
                            if let Some(class) = dir.parent().filter(|_| qos == QosClass::BestEffort) {
                                set(class, "cpu.shares", &BEST_EFFORT_SHARES.to_string())?;
                            }
                            set(&dir, "cpu.shares", &shares.to_string())?;
                            set(&dir, "cpu.cfs_period_us", &resources::QUOTA_PERIOD.to_string())?;
                            set(&dir, "cpu.cfs_quota_us", &quota.unwrap_or(-1).to_string())?;
                        }
                        "memory" => {
                            let limit = total.memory_limit.unwrap_or(-1);
                            set(&dir, "memory.limit_in_bytes", &limit.to_string())?;
                        }
                        // A cpuset without CPUs takes no processes: each level inherits from its parent.
                        "cpuset" => inherit_cpuset(mount, relative)?,
                        _ => {}
                    }
                }
                Ok(())
            }
        }
    }

    /// Removes the pod's cgroup with what is below it. Processes in it were ended before.
    pub(crate) fn remove_pod(&self, uid: &str) -> io::Result<()> {
        for qos in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let path = self.pod_path(qos, uid);
            let relative = path.trim_start_matches('/');
            match &self.layout {
                Layout::V2(mount) => remove_tree(&mount.join(relative), 0)?,
                Layout::V1(controllers) => {
                    for (_, mount) in controllers {
                        remove_tree(&mount.join(relative), 0)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// A controller the kernel was built without has no such file; the limit is then simply not enforced.
fn set(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    match std::fs::write(dir.join(file), value) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn make_v2(mount: &Path, relative: &str) -> io::Result<()> {
    let mut dir = mount.to_path_buf();
    for part in relative.split('/') {
        let available = std::fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
        for controller in available.split_whitespace() {
            // A controller in use by threads of this level cannot be passed down; the others still can.
            let _ = std::fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        dir.push(part);
        match std::fs::create_dir(&dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn inherit_cpuset(mount: &Path, relative: &str) -> io::Result<()> {
    let mut dir = mount.to_path_buf();
    for part in relative.split('/') {
        let parent = dir.clone();
        dir.push(part);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let own = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
            if own.trim().is_empty() {
                let inherited = std::fs::read_to_string(parent.join(file)).unwrap_or_default();
                if !inherited.trim().is_empty() {
                    set(&dir, file, inherited.trim())?;
                }
            }
        }
    }
    Ok(())
}

fn remove_tree(dir: &Path, depth: usize) -> io::Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    if depth < 16 {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                remove_tree(&entry.path(), depth + 1)?;
            }
        }
    }
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_live_below_their_class() {
        let cgroups = Cgroups::discover(Path::new("/nonexistent"), "/ferrite");
        for (qos, expected) in [
            (QosClass::Guaranteed, "/ferrite/kubepods/podu"),
            (QosClass::Burstable, "/ferrite/kubepods/burstable/podu"),
            (QosClass::BestEffort, "/ferrite/kubepods/besteffort/podu"),
        ] {
            assert_eq!(cgroups.pod_path(qos, "u"), expected);
        }
        assert_eq!(
            Cgroups::discover(Path::new("/x"), "/").pod_path(QosClass::Guaranteed, "u"),
            "/kubepods/podu"
        );
    }

    #[test]
    fn a_real_cgroup_is_made_with_its_limits_and_removed() {
        let name = format!("ferrite-kubelet-test-{}", std::process::id());
        let cgroups = Cgroups::discover(Path::new("/sys/fs/cgroup"), &name);
        struct Guard(Cgroups, String);
        impl Drop for Guard {
            fn drop(&mut self) {
                let dirs: Vec<PathBuf> = match &self.0.layout {
                    Layout::V2(m) => vec![m.join(&self.1)],
                    Layout::V1(c) => c.iter().map(|(_, m)| m.join(&self.1)).collect(),
                };
                for dir in dirs {
                    let _ = remove_tree(&dir, 0);
                }
            }
        }
        let guard = Guard(cgroups.clone(), name.clone());
        let total = PodResources {
            cpu_request: 500,
            memory_request: 0,
            cpu_limit: Some(1000),
            memory_limit: Some(64 << 20),
            ephemeral_request: 0,
        };
        if cgroups.ensure_pod(QosClass::Burstable, "u", &total).is_err() {
            return; // cgroup file systems are read-only here
        }
        let relative = format!("{name}/kubepods/burstable/podu");
        let (file, expected) = match &cgroups.layout {
            Layout::V2(m) => (m.join(&relative).join("memory.max"), "67108864"),
            Layout::V1(c) => {
                let Some((_, m)) = c.iter().find(|(n, _)| n == "memory") else { return };
                (m.join(&relative).join("memory.limit_in_bytes"), "67108864")
            }
        };
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), expected);
        cgroups.remove_pod("u").unwrap();
        assert!(!file.exists());
        drop(guard);
    }
}

//! Pod cgroups: `<root>/kubepods[/burstable|/besteffort]/pod<uid>`, on cgroup v1 and v2.
//!
//! Where systemd owns the control groups, each of them is a slice that systemd is asked for:
//! `<root>-kubepods-burstable-pod<uid>.slice`.

pub(crate) mod enforcement;

pub use enforcement::{Enforcement, GroupLimits, ReservedGroup};

use crate::container::resources::{self, CpuQuota, PodResources};
use crate::pod::model::QosClass;
use ferrite_cri::v1::CgroupDriver;
use ferrite_systemd::{Hierarchy, Limits, Manager, Slice};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

/// Controllers of v1 whose hierarchy gets a directory per pod.
const V1_CONTROLLERS: [&str; 8] =
    ["cpu", "cpuacct", "cpuset", "memory", "pids", "hugetlb", "blkio", "freezer"];

/// Shares of pods without requests: the least that the kernel allows, for them and their class.
const BEST_EFFORT_SHARES: i64 = 2;

/// The cgroup file system of this machine, and where pods live in it.
#[derive(Debug, Clone)]
pub(crate) struct Cgroups {
    layout: Layout,
    /// Without a leading slash.
    root: String,
    driver: CgroupDriver,
    /// Processes that a pod may have.
    pids_limit: Option<i64>,
    quota: CpuQuota,
    /// The request of all Burstable pods that was last written.
    burstable: Arc<AtomicI64>,
}

#[derive(Debug, Clone)]
enum Layout {
    V2(PathBuf),
    /// One directory per mounted controller.
    V1(Vec<(String, PathBuf)>),
}

impl Cgroups {
    /// Detects the hierarchies mounted below `mount` (`/sys/fs/cgroup`).
    pub(crate) fn discover(mount: &Path, root: &str) -> Self {
        let layout = if mount.join("cgroup.controllers").exists() {
            Layout::V2(mount.to_path_buf())
        } else {
            let mounted = V1_CONTROLLERS
                .iter()
                .map(|c| (c.to_string(), mount.join(c)))
                // An empty directory may stand where a controller could have been mounted.
                .filter(|(_, path)| path.join("cgroup.procs").exists())
                .collect();
            Layout::V1(mounted)
        };
        Self {
            layout,
            root: root.trim_matches('/').to_string(),
            driver: CgroupDriver::Cgroupfs,
            pids_limit: None,
            quota: CpuQuota::default(),
            burstable: Arc::new(AtomicI64::new(-1)),
        }
    }

    /// The same, with another enforcement of CPU limits.
    pub(crate) fn with_quota(self, quota: CpuQuota) -> Self {
        Self { quota, ..self }
    }

    /// The same, with a limit of each pod's processes.
    pub(crate) fn with_pids_limit(self, pids_limit: Option<i64>) -> Self {
        Self { pids_limit, ..self }
    }

    /// True if the kernel can limit the swap of one group (upstream's check: its own group has the file).
    pub(crate) fn limits_swap(&self) -> bool {
        let Layout::V2(mount) = &self.layout else { return false };
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        mount.join(own.trim_start_matches('/')).join("memory.swap.max").exists()
    }

    pub(crate) fn is_v2(&self) -> bool {
        matches!(self.layout, Layout::V2(_))
    }

    pub(crate) fn driver(&self) -> CgroupDriver {
        self.driver
    }

    /// The same, made by another driver.
    pub(crate) fn with_driver(self, driver: CgroupDriver) -> Self {
        Self { driver, ..self }
    }

    /// The cgroup parent of a sandbox: a path, or a slice.
    pub(crate) fn pod_path(&self, qos: QosClass, uid: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => self.directory(qos, uid),
            CgroupDriver::Systemd => self.slice(qos, uid).to_string(),
        }
    }

    fn parts(&self, qos: QosClass, uid: &str) -> Vec<String> {
        let class = match qos {
            QosClass::Guaranteed => "",
            QosClass::Burstable => "burstable",
            QosClass::BestEffort => "besteffort",
        };
        let parts = self.root.split('/').chain(["kubepods", class]).filter(|part| !part.is_empty());
        parts.map(str::to_owned).chain([format!("pod{uid}")]).collect()
    }

    fn slice(&self, qos: QosClass, uid: &str) -> Slice {
        Slice::of(self.parts(qos, uid).iter().map(String::as_str))
    }

    /// Where the pod's cgroup is.
    fn directory(&self, qos: QosClass, uid: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => format!("/{}", self.parts(qos, uid).join("/")),
            CgroupDriver::Systemd => self.slice(qos, uid).path(),
        }
    }

    /// As [`Cgroups::ensure_pod`], for a task: systemd takes its time.
    pub(crate) async fn ensure(&self, qos: QosClass, uid: &str, total: &PodResources) -> io::Result<()> {
        if self.driver == CgroupDriver::Cgroupfs {
            return self.ensure_pod(qos, uid, total);
        }
        let (cgroups, uid, total) = (self.clone(), uid.to_owned(), *total);
        tokio::task::spawn_blocking(move || cgroups.ensure_pod(qos, &uid, &total)).await?
    }

    /// As [`Cgroups::remove_pod`], for a task.
    pub(crate) async fn remove(&self, uid: &str) -> io::Result<()> {
        if self.driver == CgroupDriver::Cgroupfs {
            return self.remove_pod(uid);
        }
        let (cgroups, uid) = (self.clone(), uid.to_owned());
        tokio::task::spawn_blocking(move || cgroups.remove_pod(&uid)).await?
    }

    /// Memory of all pods together that cannot be given back easily. Nothing where systemd names the groups.
    pub(crate) fn pods_working_set(&self) -> Option<i64> {
        if self.driver == CgroupDriver::Systemd {
            return None;
        }
        let (directory, usage, inactive) = match &self.layout {
            Layout::V2(mount) => (mount, "memory.current", "inactive_file "),
            Layout::V1(mounted) => {
                let (_, memory) = mounted.iter().find(|(name, _)| name == "memory")?;
                (memory, "memory.usage_in_bytes", "total_inactive_file ")
            }
        };
        let group = directory.join(&self.root).join("kubepods");
        let used: i64 = std::fs::read_to_string(group.join(usage)).ok()?.trim().parse().ok()?;
        let stat = std::fs::read_to_string(group.join("memory.stat")).ok()?;
        let inactive = stat.lines().find_map(|line| line.strip_prefix(inactive)?.trim().parse::<i64>().ok());
        Some(used.saturating_sub(inactive.unwrap_or(0)).max(0))
    }

    fn systemd(&self) -> io::Result<Manager> {
        let hierarchy = match self.layout {
            Layout::V1(_) => Hierarchy::V1,
            Layout::V2(_) => Hierarchy::Unified,
        };
        Ok(Manager::connect(hierarchy)?)
    }

    /// Has systemd make the pod's slice with the limits it knows.
    fn ensure_slice(&self, qos: QosClass, uid: &str, shares: i64, total: &PodResources) -> io::Result<()> {
        let mut manager = self.systemd()?;
        let share = |shares: i64| Limits {
            cpu_shares: u64::try_from(shares).ok(),
            cpu_weight: u64::try_from(resources::cpu_weight(shares)).ok(),
            ..Limits::default()
        };
        let slice = self.slice(qos, uid);
        if let Some(class) = slice.parent().filter(|_| qos == QosClass::BestEffort) {
            manager.ensure_slice(&class, &share(BEST_EFFORT_SHARES))?;
        }
        let limits = Limits {
            memory: Some(total.memory_limit.unwrap_or(-1)),
            cpu_quota: Some(total.cpu_limit.map(|l| self.quota.of(l)).filter(|q| *q > 0).unwrap_or(-1)),
            cpu_period: u64::try_from(self.quota.period).ok(),
            tasks: self.pids_limit,
            ..share(shares)
        };
        Ok(manager.ensure_slice(&slice, &limits)?)
    }

    /// Makes the pod's cgroup with the limits of the pod as a whole, or updates an existing one.
    pub(crate) fn ensure_pod(&self, qos: QosClass, uid: &str, total: &PodResources) -> io::Result<()> {
        let path = self.directory(qos, uid);
        let relative = path.trim_start_matches('/');
        let shares = match qos {
            QosClass::BestEffort => BEST_EFFORT_SHARES,
            _ => resources::cpu_shares(total.cpu_request),
        };
        let quota = total.cpu_limit.map(|limit| self.quota.of(limit)).filter(|q| *q > 0);
        if self.driver == CgroupDriver::Systemd {
            self.ensure_slice(qos, uid, shares, total)?;
        }
        match &self.layout {
            // systemd has done all there is to do on a hierarchy that is its alone.
            Layout::V2(_) if self.driver == CgroupDriver::Systemd => Ok(()),
            Layout::V2(mount) => {
                make_v2(mount, relative)?;
                let dir = mount.join(relative);
                if let Some(class) = dir.parent().filter(|_| qos == QosClass::BestEffort) {
                    set(class, "cpu.weight", &resources::cpu_weight(BEST_EFFORT_SHARES).to_string())?;
                }
                if let Some(limit) = self.pids_limit {
                    set(&dir, "pids.max", &limit.to_string())?;
                }
                set(&dir, "cpu.weight", &resources::cpu_weight(shares).to_string())?;
                let quota = quota.map_or("max".to_string(), |q| q.to_string());
                set(&dir, "cpu.max", &format!("{quota} {}", self.quota.period))?;
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
                            set(&dir, "cpu.cfs_period_us", &self.quota.period.to_string())?;
                            set(&dir, "cpu.cfs_quota_us", &quota.unwrap_or(-1).to_string())?;
                        }
                        "memory" => {
                            let limit = total.memory_limit.unwrap_or(-1);
                            set(&dir, "memory.limit_in_bytes", &limit.to_string())?;
                        }
                        "pids" => {
                            if let Some(limit) = self.pids_limit {
                                set(&dir, "pids.max", &limit.to_string())?;
                            }
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

    /// Removes the pod's cgroup with all groups below it. Processes in it were ended before.
    pub(crate) fn remove_pod(&self, uid: &str) -> io::Result<()> {
        for qos in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let path = self.directory(qos, uid);
            let relative = path.trim_start_matches('/');
            if self.driver == CgroupDriver::Systemd && self.exists(relative) {
                self.systemd()?.stop(&self.slice(qos, uid).to_string())?;
            }
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

impl Cgroups {
    fn exists(&self, relative: &str) -> bool {
        match &self.layout {
            Layout::V2(mount) => mount.join(relative).exists(),
            Layout::V1(controllers) => controllers.iter().any(|(_, mount)| mount.join(relative).exists()),
        }
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
        cgroups
            .ensure_pod(QosClass::Burstable, "u", &total)
            .expect("cgroups can be made: the tests need root");
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

    #[test]
    fn pods_are_slices_where_systemd_is() {
        use ferrite_systemd::testing::Machine;
        if !Machine::is_inside() {
            let machine = Machine::start(Hierarchy::V1);
            return machine.run_again("cgroup::tests::pods_are_slices_where_systemd_is");
        }
        let mount = Path::new("/sys/fs/cgroup");
        let cgroups = Cgroups::discover(mount, "").with_driver(CgroupDriver::Systemd);
        let total = |memory| PodResources {
            cpu_request: 500,
            memory_request: 0,
            cpu_limit: Some(1000),
            memory_limit: Some(memory),
            ephemeral_request: 0,
        };
        assert_eq!(cgroups.pod_path(QosClass::Burstable, "1-2"), "kubepods-burstable-pod1_2.slice");
        let slice = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice";
        let read = |file: &str| std::fs::read_to_string(mount.join(file)).unwrap().trim().to_owned();
        for memory in [64 << 20, 96 << 20] {
            cgroups.ensure_pod(QosClass::Burstable, "1-2", &total(memory)).unwrap();
            assert_eq!(read(&format!("memory/{slice}/memory.limit_in_bytes")), memory.to_string());
            let mut manager = cgroups.systemd().unwrap();
            let unit = "kubepods-burstable-pod1_2.slice";
            let told = manager.property(unit, "org.freedesktop.systemd1.Slice", "MemoryLimit").unwrap();
            assert_eq!(told, Some(ferrite_systemd::Value::U64(memory as u64)), "systemd knows it, too");
        }
        assert_eq!(read(&format!("cpu/{slice}/cpu.shares")), "512");
        assert_eq!(read(&format!("cpu/{slice}/cpu.cfs_quota_us")), "100000");
        cgroups.ensure_pod(QosClass::BestEffort, "3", &total(1 << 20)).unwrap();
        assert_eq!(read("cpu/kubepods.slice/kubepods-besteffort.slice/cpu.shares"), "2");
        for uid in ["1-2", "3", "unknown"] {
            cgroups.remove_pod(uid).unwrap();
        }
        for controller in ["memory", "cpuset", "systemd", "freezer"] {
            assert!(!mount.join(controller).join(slice).exists(), "{controller}");
        }
    }
}

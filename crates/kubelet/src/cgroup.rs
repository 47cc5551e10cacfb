//! Pod cgroups: `<root>/kubepods[/burstable|/besteffort]/pod<uid>`, on cgroup v1 and v2.
//!
//! Where systemd owns the control groups, each of them is a slice that systemd is asked for:
//! `<root>-kubepods-burstable-pod<uid>.slice`.

pub(crate) mod enforcement;

pub use enforcement::{Enforcement, GroupLimits, ReservedGroup};

use crate::container::resources::{self, CpuQuota, PodResources};
use crate::pod::model::QosClass;
use ferrite_cgroup::{HugePages, Layout, Limits, cpu_weight};
use ferrite_cri::v1::CgroupDriver;
use ferrite_systemd::{Manager, Slice};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

/// Shares of pods without requests: the least that the kernel allows, for them and their class.
const BEST_EFFORT_SHARES: u64 = 2;

/// The control groups of this machine, and where pods live in them.
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

impl Cgroups {
    /// Pods below `root`.
    pub(crate) fn new(layout: Layout, root: &str) -> Self {
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

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
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
    pub(crate) async fn ensure(
        &self,
        qos: QosClass,
        uid: &str,
        total: &PodResources,
        huge_pages: Vec<HugePages>,
    ) -> io::Result<()> {
        if self.driver == CgroupDriver::Cgroupfs {
            return self.ensure_pod(qos, uid, total, huge_pages);
        }
        let (cgroups, uid, total) = (self.clone(), uid.to_owned(), *total);
        tokio::task::spawn_blocking(move || cgroups.ensure_pod(qos, &uid, &total, huge_pages)).await?
    }

    /// As [`Cgroups::remove_pod`], for a task: the kernel needs a moment after the last process has ended.
    pub(crate) async fn remove(&self, uid: &str) -> io::Result<()> {
        let (cgroups, uid) = (self.clone(), uid.to_owned());
        tokio::task::spawn_blocking(move || cgroups.remove_pod(&uid)).await?
    }

    /// Memory of all pods together that cannot be given back easily. Nothing where systemd names the groups.
    pub(crate) fn pods_working_set(&self) -> Option<i64> {
        if self.driver == CgroupDriver::Systemd {
            return None;
        }
        let memory = self.layout.memory(&format!("{}/kubepods", self.root))?;
        i64::try_from(memory.working_set).ok()
    }

    fn systemd(&self) -> io::Result<Manager> {
        Ok(Manager::connect(self.layout.version())?)
    }

    /// The limits of a pod as a whole.
    fn pod_limits(&self, qos: QosClass, total: &PodResources) -> Limits {
        let quota = total.cpu_limit.map(|limit| self.quota.of(limit)).filter(|quota| *quota > 0);
        Limits {
            memory: Some(total.memory_limit.unwrap_or(-1)),
            cpu_shares: Some(match qos {
                QosClass::BestEffort => BEST_EFFORT_SHARES,
                _ => resources::cpu_shares(total.cpu_request).cast_unsigned(),
            }),
            cpu_quota: Some(quota.unwrap_or(-1)),
            cpu_period: u64::try_from(self.quota.period).ok(),
            pids: self.pids_limit,
            ..Limits::default()
        }
    }

    /// Makes the pod's cgroup with the limits of the pod as a whole, or updates an existing one.
    pub(crate) fn ensure_pod(
        &self,
        qos: QosClass,
        uid: &str,
        total: &PodResources,
        huge_pages: Vec<HugePages>,
    ) -> io::Result<()> {
        let limits = Limits { huge_pages, ..self.pod_limits(qos, total) };
        let of_class = Limits { cpu_shares: Some(BEST_EFFORT_SHARES), ..Limits::default() };
        let is_best_effort = qos == QosClass::BestEffort;
        if self.driver == CgroupDriver::Systemd {
            let (mut manager, slice) = (self.systemd()?, self.slice(qos, uid));
            if let Some(class) = slice.parent().filter(|_| is_best_effort) {
                manager.ensure_slice(&class, &of_class)?;
            }
            manager.ensure_slice(&slice, &limits)?;
            if self.layout.is_v2() {
                // systemd has done all there is to do on a hierarchy that is its alone, but it knows no huge pages.
                let rest = Limits { huge_pages: limits.huge_pages, ..Limits::default() };
                return Ok(self.layout.apply_available(&self.directory(qos, uid), &rest)?);
            }
        }
        let path = self.directory(qos, uid);
        self.layout.create(&path)?;
        if let Some((class, _)) = path.rsplit_once('/').filter(|_| is_best_effort) {
            self.layout.apply_available(class, &of_class)?;
        }
        Ok(self.layout.apply_available(&path, &limits)?)
    }

    /// The resources that the pod's cgroup has; none without a group. Those that are as `goal` says, as far as the
    /// kernel's numbers tell, are as `goal` says.
    pub(crate) fn present(&self, qos: QosClass, uid: &str, goal: &PodResources) -> Option<PodResources> {
        let path = self.directory(qos, uid);
        if !self.layout.exists(&path) {
            return None;
        }
        let has = self.layout.limits(&path);
        Some(present(&has, &self.pod_limits(qos, goal), goal, self.layout.is_v2()))
    }

    /// Memory that the pod uses now.
    pub(crate) fn memory_usage(&self, qos: QosClass, uid: &str) -> Option<u64> {
        self.layout.memory(&self.directory(qos, uid)).map(|memory| memory.usage)
    }

    /// Removes the pod's cgroup with all groups below it. Processes in it were ended before.
    pub(crate) fn remove_pod(&self, uid: &str) -> io::Result<()> {
        for qos in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let path = self.directory(qos, uid);
            if self.driver == CgroupDriver::Systemd && self.layout.exists(&path) {
                self.systemd()?.stop(&self.slice(qos, uid).to_string())?;
            }
            self.layout.remove(&path)?;
        }
        Ok(())
    }
}

/// The least unit in which the kernel limits memory.
const PAGE: i64 = 4096;

/// The resources of a group that has the limits `has`, where `wants` would be those for `goal`.
fn present(has: &Limits, wants: &Limits, goal: &PodResources, by_weight: bool) -> PodResources {
    let weight = |shares: u64| if by_weight { cpu_weight(shares) } else { shares };
    let other_shares = has.cpu_shares.filter(|has| wants.cpu_shares.map(weight) != Some(weight(*has)));
    let pages = |limit: i64| if limit < 0 { -1 } else { limit / PAGE };
    let other_memory = has.memory.filter(|has| wants.memory.map(pages) != Some(pages(*has)));
    let other_quota = has.cpu_quota.filter(|has| wants.cpu_quota != Some(*has));
    let period = has.cpu_period.and_then(|period| i64::try_from(period).ok()).unwrap_or(0).max(1);
    let limit = |limit: i64| Some(limit).filter(|limit| *limit >= 0);
    PodResources {
        cpu_request: other_shares.map_or(goal.cpu_request, resources::milli_of_shares),
        memory_limit: other_memory.map_or(goal.memory_limit, limit),
        cpu_limit: other_quota
            .map_or(goal.cpu_limit, |quota| limit(quota).map(|quota| quota.saturating_mul(1000) / period)),
        ..*goal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_read_in_the_words_of_its_pod() {
        let cgroups = Cgroups::new(Layout::v1(Vec::new()), "/");
        let goal = PodResources {
            cpu_request: 100,
            memory_request: 5,
            cpu_limit: Some(500),
            // The kernel rounds it to whole pages.
            memory_limit: Some((64 << 20) + 1),
            ephemeral_request: 7,
        };
        let limits = |cpu, quota, memory| {
            let total = PodResources { cpu_request: cpu, cpu_limit: quota, memory_limit: memory, ..goal };
            (cgroups.pod_limits(QosClass::Burstable, &total), total)
        };
        let (wants, _) = limits(goal.cpu_request, goal.cpu_limit, goal.memory_limit);
        for (what, (has, expected)) in [
            ("as it should be", limits(100, Some(500), Some(64 << 20))),
            ("other shares", limits(2000, Some(500), Some(64 << 20))),
            ("another quota", limits(100, Some(1500), Some(64 << 20))),
            ("another limit of memory", limits(100, Some(500), Some(128 << 20))),
            ("no limits", limits(100, None, None)),
        ] {
            for by_weight in [false, true] {
                let found = present(&has, &wants, &goal, by_weight);
                let memory_limit = match expected.memory_limit {
                    Some(limit) if limit == 64 << 20 => goal.memory_limit,
                    other => other,
                };
                assert_eq!(found, PodResources { memory_limit, ..expected }, "{what}");
            }
        }
        assert_eq!(present(&Limits::default(), &wants, &goal, false), goal, "a kernel without limits");
    }

    #[test]
    fn pods_live_below_their_class() {
        let cgroups = Cgroups::new(Layout::v1(Vec::new()), "/ferrite");
        for (qos, expected) in [
            (QosClass::Guaranteed, "/ferrite/kubepods/podu"),
            (QosClass::Burstable, "/ferrite/kubepods/burstable/podu"),
            (QosClass::BestEffort, "/ferrite/kubepods/besteffort/podu"),
        ] {
            assert_eq!(cgroups.pod_path(qos, "u"), expected);
        }
        assert_eq!(
            Cgroups::new(Layout::v1(Vec::new()), "/").pod_path(QosClass::Guaranteed, "u"),
            "/kubepods/podu"
        );
    }

    #[test]
    fn a_real_cgroup_is_made_with_its_limits_and_removed() {
        let name = format!("ferrite-kubelet-test-{}", std::process::id());
        let cgroups = Cgroups::new(Layout::detect().unwrap(), &name);
        struct Guard(Cgroups, String);
        impl Drop for Guard {
            fn drop(&mut self) {
                let _ = self.0.layout.remove(&self.1);
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
            .ensure_pod(QosClass::Burstable, "u", &total, vec![HugePages { size: "2MB".into(), limit: 0 }])
            .expect("cgroups can be made: the tests need root");
        let relative = format!("{name}/kubepods/burstable/podu");
        let name = if cgroups.layout.is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
        let Some(directory) = cgroups.layout.directory("memory", &relative) else { return };
        let file = directory.join(name);
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), "67108864");
        let pages = cgroups.layout.directory("hugetlb", &relative);
        let pages = pages.map(|group| match cgroups.layout.is_v2() {
            true => group.join("hugetlb.2MB.max"),
            false => group.join("hugetlb.2MB.limit_in_bytes"),
        });
        if let Some(file) = pages.filter(|file| file.exists()) {
            assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), "0");
        }
        let other = PodResources { cpu_request: 2000, cpu_limit: None, memory_limit: None, ..total };
        for goal in [total, other] {
            assert_eq!(cgroups.present(QosClass::Burstable, "u", &goal), Some(total), "{goal:?}");
        }
        assert_eq!(cgroups.present(QosClass::Burstable, "v", &total), None);
        assert!(cgroups.memory_usage(QosClass::Burstable, "u").is_some());
        cgroups.remove_pod("u").unwrap();
        assert!(!file.exists());
        drop(guard);
    }

    #[test]
    fn pods_are_slices_where_systemd_is() {
        use ferrite_systemd::testing::Machine;
        if !Machine::is_inside() {
            let machine = Machine::start(ferrite_cgroup::Version::V1);
            return machine.run_again("cgroup::tests::pods_are_slices_where_systemd_is");
        }
        let mount = std::path::Path::new("/sys/fs/cgroup");
        let cgroups = Cgroups::new(Layout::detect().unwrap(), "").with_driver(CgroupDriver::Systemd);
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
            cgroups.ensure_pod(QosClass::Burstable, "1-2", &total(memory), Vec::new()).unwrap();
            assert_eq!(read(&format!("memory/{slice}/memory.limit_in_bytes")), memory.to_string());
            let mut manager = cgroups.systemd().unwrap();
            let unit = "kubepods-burstable-pod1_2.slice";
            let told = manager.property(unit, "org.freedesktop.systemd1.Slice", "MemoryLimit").unwrap();
            assert_eq!(told, Some(ferrite_systemd::Value::U64(memory as u64)), "systemd knows it, too");
        }
        assert_eq!(read(&format!("cpu/{slice}/cpu.shares")), "512");
        assert_eq!(read(&format!("cpu/{slice}/cpu.cfs_quota_us")), "100000");
        cgroups.ensure_pod(QosClass::BestEffort, "3", &total(1 << 20), Vec::new()).unwrap();
        assert_eq!(read("cpu/kubepods.slice/kubepods-besteffort.slice/cpu.shares"), "2");
        for uid in ["1-2", "3", "unknown"] {
            cgroups.remove_pod(uid).unwrap();
        }
        for controller in ["memory", "cpuset", "systemd", "freezer"] {
            assert!(!mount.join(controller).join(slice).exists(), "{controller}");
        }
    }
}

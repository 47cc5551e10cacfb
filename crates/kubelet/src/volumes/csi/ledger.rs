//! The volumes that this node has, and the pods that use them: the reason to unstage a volume, and the
//! content of `volumesInUse`.

use super::data::{self, Data};
use super::paths::Paths;
use ferrite_client::csi::unique_name;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// A volume of a driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct VolumeId {
    pub driver: String,
    pub handle: String,
}

impl VolumeId {
    pub(super) fn new(driver: &str, handle: &str) -> Self {
        Self { driver: driver.to_owned(), handle: handle.to_owned() }
    }
}

/// Where a volume is staged, or may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stage {
    pub path: PathBuf,
    /// The directory of its data file.
    pub data: PathBuf,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    /// UIDs of pods that use it or are about to.
    users: BTreeSet<String>,
    stage: Option<Stage>,
    /// A controller attaches it.
    attach: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ledger {
    entries: BTreeMap<VolumeId, Entry>,
}

impl Ledger {
    /// The pod uses the volume from now on.
    pub(super) fn claim(&mut self, id: &VolumeId, uid: &str, attach: bool) {
        let entry = self.entries.entry(id.clone()).or_default();
        entry.users.insert(uid.to_owned());
        entry.attach = attach;
    }

    /// The volume is staged, or is about to be.
    pub(super) fn stage(&mut self, id: &VolumeId, stage: Stage) {
        self.entries.entry(id.clone()).or_default().stage = Some(stage);
    }

    /// The pod is gone. Returns the volumes that nobody uses any more.
    pub(super) fn drop_pod(&mut self, uid: &str) -> Vec<VolumeId> {
        for entry in self.entries.values_mut() {
            entry.users.remove(uid);
        }
        self.unused()
    }

    /// Volumes that nobody uses.
    pub(super) fn unused(&self) -> Vec<VolumeId> {
        self.entries.iter().filter(|(_, e)| e.users.is_empty()).map(|(id, _)| id.clone()).collect()
    }

    pub(super) fn is_used(&self, id: &VolumeId) -> bool {
        self.entries.get(id).is_some_and(|entry| !entry.users.is_empty())
    }

    pub(super) fn stage_of(&self, id: &VolumeId) -> Option<Stage> {
        self.entries.get(id)?.stage.clone()
    }

    /// Nothing of the volume is left on this node. A volume that a pod wants meanwhile stays.
    pub(super) fn forget(&mut self, id: &VolumeId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.stage = None;
            if entry.users.is_empty() {
                self.entries.remove(id);
            }
        }
    }

    /// The unique names of the volumes that a controller must not detach.
    pub(super) fn in_use(&self) -> BTreeSet<String> {
        let attached = self.entries.iter().filter(|(_, entry)| entry.attach);
        attached.map(|(id, _)| unique_name(&id.driver, &id.handle)).collect()
    }

    /// The volumes that an earlier kubelet left on this node. A volume whose data cannot be read is left out and logged:
    /// the clean-up of its pod reports it.
    pub(super) fn read(paths: &Paths) -> Self {
        let mut ledger = Self::default();
        for uid in names(&paths.pods()) {
            for spec_name in names(&paths.pod_volumes(&uid)) {
                ledger.note(&paths.pod_volume(&uid, &spec_name), Some(&uid), None);
            }
            for spec_name in names(&paths.pod_devices(&uid)) {
                ledger.note(&paths.block_data(&spec_name), Some(&uid), None);
            }
        }
        let drivers = names(&paths.staged()).into_iter().filter(|name| name != "volumeDevices");
        for driver in drivers {
            let dir = paths.staged().join(driver);
            for name in names(&dir) {
                let data = dir.join(name);
                let stage = Stage { path: data.join("globalmount"), data: data.clone() };
                ledger.note(&data, None, Some(stage));
            }
        }
        for spec_name in names(&paths.blocks()) {
            let data = paths.block_data(&spec_name);
            let stage = Stage { path: paths.block_staging(&spec_name), data: data.clone() };
            ledger.note(&data, None, Some(stage));
        }
        ledger
    }

    fn note(&mut self, dir: &Path, uid: Option<&str>, stage: Option<Stage>) {
        let data: Data = match data::read(dir) {
            Ok(Some(data)) => data,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "could not read the data of a CSI volume");
                return;
            }
        };
        // A volume that is written into a pod is never staged nor attached, and goes with its pod.
        if data.lifecycle == "Ephemeral" {
            return;
        }
        let entry = self.entries.entry(VolumeId::new(&data.driver, &data.handle)).or_default();
        // Until its pod is set up again nobody knows whether it is attached: reported, so that it is not detached.
        entry.attach = true;
        entry.users.extend(uid.map(str::to_owned));
        if stage.is_some() {
            entry.stage = stage;
        }
    }
}

/// The entries of a directory of ours; none when it is missing.
pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            tracing::warn!(path = %dir.display(), %error, "could not list a directory of volumes");
            return Vec::new();
        }
    };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_unused_when_its_last_pod_is_gone() {
        let mut ledger = Ledger::default();
        let (one, two) = (VolumeId::new("d", "1"), VolumeId::new("d", "2"));
        ledger.claim(&one, "a", true);
        ledger.claim(&one, "b", true);
        ledger.claim(&two, "b", false);
        ledger.stage(&one, Stage { path: "/s".into(), data: "/".into() });
        assert_eq!(ledger.in_use(), BTreeSet::from(["kubernetes.io/csi/d^1".to_owned()]));
        assert_eq!(ledger.drop_pod("a"), []);
        assert_eq!(ledger.drop_pod("b"), [one.clone(), two.clone()]);
        assert!(!ledger.in_use().is_empty(), "until it is unstaged");
        ledger.claim(&one, "c", true);
        ledger.forget(&one);
        assert!(ledger.is_used(&one) && ledger.stage_of(&one).is_none(), "a new pod wants it");
        ledger.drop_pod("c");
        ledger.forget(&one);
        ledger.forget(&two);
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn an_earlier_kubelets_volumes_are_found() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(root.path());
        let data = |handle: &str, lifecycle: &str| Data {
            handle: handle.into(),
            driver: "d".into(),
            lifecycle: lifecycle.into(),
            ..Data::default()
        };
        data::write(&paths.pod_volume("u", "pv"), &data("h", "Persistent")).unwrap();
        data::write(&paths.pod_volume("u", "inline"), &data("i", "Ephemeral")).unwrap();
        data::write(&paths.stage_directory("d", "h"), &data("h", "")).unwrap();
        data::write(&paths.stage_directory("d", "old"), &data("old", "")).unwrap();
        data::write(&paths.block_data("raw"), &data("b", "")).unwrap();
        std::fs::create_dir_all(paths.pod_devices("v")).unwrap();
        std::os::unix::fs::symlink("/dev/null", paths.pod_devices("v").join("raw")).unwrap();
        let ledger = Ledger::read(&paths);
        let id = |handle: &str| VolumeId::new("d", handle);
        assert_eq!(ledger.unused(), [id("old")]);
        assert!(ledger.is_used(&id("h")) && ledger.is_used(&id("b")) && !ledger.is_used(&id("i")));
        assert_eq!(ledger.stage_of(&id("h")).unwrap().path, paths.global_mount("d", "h"));
        assert_eq!(ledger.stage_of(&id("b")).unwrap().path, paths.block_staging("raw"));
    }
}

//! Where upstream's kubelet keeps CSI volumes: drivers and administrators know these paths.

use super::CsiError;
use ferrite_client::csi::sha256_hex;
use std::path::{Path, PathBuf};

/// The directory of CSI volumes below a pod's `volumes` and `volumeDevices`.
pub(super) const POD_DIRECTORY: &str = "kubernetes.io~csi";
const GLOBAL_MOUNT: &str = "globalmount";
const BLOCK: &str = "volumeDevices";

#[derive(Debug, Clone)]
pub(super) struct Paths {
    root: PathBuf,
}

impl Paths {
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(super) fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// CSI volumes of a pod; each has a directory with its data file and its mount.
    pub(super) fn pod_volumes(&self, uid: &str) -> PathBuf {
        self.pods().join(uid).join("volumes").join(POD_DIRECTORY)
    }

    pub(super) fn pod_volume(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.pod_volumes(uid).join(spec_name)
    }

    /// The target of a publication as a file system.
    pub(super) fn target(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.pod_volume(uid, spec_name).join("mount")
    }

    /// CSI devices of a pod: links to the published device files.
    pub(super) fn pod_devices(&self, uid: &str) -> PathBuf {
        self.pods().join(uid).join(BLOCK).join(POD_DIRECTORY)
    }

    pub(super) fn staged(&self) -> PathBuf {
        self.root.join("plugins/kubernetes.io/csi")
    }

    /// The directory of a staged file system; its mount is [`Paths::global_mount`].
    pub(super) fn stage_directory(&self, driver: &str, handle: &str) -> PathBuf {
        self.staged().join(driver).join(sha256_hex(&[handle]))
    }

    pub(super) fn global_mount(&self, driver: &str, handle: &str) -> PathBuf {
        self.stage_directory(driver, handle).join(GLOBAL_MOUNT)
    }

    pub(super) fn blocks(&self) -> PathBuf {
        self.staged().join(BLOCK)
    }

    pub(super) fn block_data(&self, spec_name: &str) -> PathBuf {
        self.blocks().join(spec_name).join("data")
    }

    pub(super) fn block_staging(&self, spec_name: &str) -> PathBuf {
        self.blocks().join("staging").join(spec_name)
    }

    /// The target of a publication as a device.
    pub(super) fn block_target(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.blocks().join("publish").join(spec_name).join(uid)
    }
}

/// Fails when a name that comes from an object is no single part of a path.
pub(super) fn check_name(name: &str) -> Result<(), CsiError> {
    let plain = !name.is_empty()
        && name.len() <= 253
        && !matches!(name, "." | "..")
        && !name.contains(['/', '\0'])
        && !matches!(name, BLOCK);
    if plain { Ok(()) } else { Err(CsiError::Name(name.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_upstreams() {
        let paths = Paths::new(Path::new("/k"));
        let sha = sha256_hex(&["h"]);
        for (path, expected) in [
            (paths.target("u", "pv"), "/k/pods/u/volumes/kubernetes.io~csi/pv/mount".to_owned()),
            (paths.global_mount("d", "h"), format!("/k/plugins/kubernetes.io/csi/d/{sha}/globalmount")),
            (paths.block_staging("pv"), "/k/plugins/kubernetes.io/csi/volumeDevices/staging/pv".to_owned()),
            (
                paths.block_target("u", "pv"),
                "/k/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u".to_owned(),
            ),
            (paths.block_data("pv"), "/k/plugins/kubernetes.io/csi/volumeDevices/pv/data".to_owned()),
            (paths.pod_devices("u"), "/k/pods/u/volumeDevices/kubernetes.io~csi".to_owned()),
        ] {
            assert_eq!(path, Path::new(&expected));
        }
    }

    #[test]
    fn names_never_lead_elsewhere() {
        for name in ["", ".", "..", "a/b", "/a", "volumeDevices", "a\0b"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name("hostpath.csi.example.com").is_ok());
    }
}

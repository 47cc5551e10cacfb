//! `vol_data.json`: the data with which a later kubelet undoes a stage or a publication. Upstream's keys,
//! and one of ours.

use ferrite_hostfs::Dir;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FILE: &str = "vol_data.json";
const FRESH: &str = ".vol_data.json.new";
const LIMIT: u64 = 64 * 1024;

/// The result of a publication. Absent: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// The volume is ready for containers.
    Published,
    /// The driver refused, and nothing is mounted.
    Failed,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Data {
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub spec_name: String,
    #[serde(rename = "volumeHandle")]
    pub handle: String,
    #[serde(rename = "driverName")]
    pub driver: String,
    #[serde(rename = "nodeName", skip_serializing_if = "String::is_empty")]
    pub node: String,
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub attachment: String,
    #[serde(rename = "volumeLifecycleMode", skip_serializing_if = "String::is_empty")]
    pub lifecycle: String,
    #[serde(rename = "ferrite.io/state", skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
}

/// Reads the data of the volume at `dir`, which only root writes. Nothing when there is none.
pub(super) fn read(dir: &Path) -> io::Result<Option<Data>> {
    let text = match Dir::open(dir).and_then(|dir| dir.read(FILE, LIMIT)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    ferrite_json::from_slice(&text)
        .map(Some)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {e}", dir.join(FILE).display())))
}

/// Writes the data whole: a reader finds the old or the new one.
pub(super) fn write(dir: &Path, data: &Data) -> io::Result<()> {
    use std::io::Write;
    std::fs::create_dir_all(dir)?;
    let text = ferrite_json::to_vec(data).map_err(io::Error::other)?;
    let dir = Dir::open(dir)?;
    dir.remove_tree(FRESH)?;
    let mut file = dir.create_file(FRESH)?;
    file.write_all(&text)?;
    // A machine that fails must not come back with an empty file beside a mount that the driver still has.
    file.sync_all()?;
    dir.rename(FRESH, FILE)
}

/// Removes the data and its directory, which must be empty otherwise.
pub(super) fn remove(dir: &Path) -> io::Result<()> {
    let missing = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    let opened = match Dir::open(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    missing(opened.remove_file(FRESH))?;
    missing(opened.remove_file(FILE))?;
    missing(std::fs::remove_dir(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_as_upstream_and_read_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("pv");
        assert_eq!(read(&dir).unwrap(), None);
        let mut data = Data {
            spec_name: "pv".into(),
            handle: "h".into(),
            driver: "d".into(),
            lifecycle: "Persistent".into(),
            ..Data::default()
        };
        write(&dir, &data).unwrap();
        let text = std::fs::read_to_string(dir.join(FILE)).unwrap();
        assert_eq!(
            text,
            r#"{"specVolID":"pv","volumeHandle":"h","driverName":"d","volumeLifecycleMode":"Persistent"}"#
        );
        data.state = Some(State::Published);
        write(&dir, &data).unwrap();
        assert_eq!(read(&dir).unwrap(), Some(data));
        // Another kubelet's keys are left alone.
        std::fs::write(dir.join(FILE), r#"{"driverName":"d","volumeHandle":"h","seLinuxMountContext":"x"}"#)
            .unwrap();
        assert_eq!(read(&dir).unwrap().unwrap().handle, "h");
        std::fs::write(dir.join(FILE), "half").unwrap();
        assert!(read(&dir).is_err());
        remove(&dir).unwrap();
        assert!(!dir.exists());
        remove(&dir).unwrap();
    }
}

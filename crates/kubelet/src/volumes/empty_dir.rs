//! emptyDir volumes.

use super::kernel::{self, Tmpfs};
use super::plugins::{SetUp, VolumePlugin};
use super::stats::Measure;
use super::{ReadyVolume, SourceError, blocking};
use crate::container::resources::pod_resources;
use crate::pod::model;
use crate::quantity;
use ferrite_hostfs::Dir;
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.empty_dir.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.empty_dir.as_ref().ok_or(SourceError::Unsupported)?;
    let path = request.dir("empty-dir");
    let limit = source.size_limit.as_ref().and_then(quantity::value).filter(|l| *l > 0);
    let (target, group) = (path.clone(), request.group);
    let medium = source.medium.as_deref().unwrap_or_default();
    if let Some(pages) = huge_pages(medium, request.pod)? {
        let options = format!("pagesize={pages},mode=0777");
        blocking(&path, move || kernel::ensure_huge_pages(&target, &options, group)).await?;
    } else {
        let memory = medium == "Memory";
        let size = memory.then(|| memory_size(limit, request.pod, request.volumes.limits.memory)).flatten();
        blocking(&path, move || ensure(&target, memory, size, group)).await?;
    }
    Ok(ReadyVolume { measure: Some(Measure::Count), ..ReadyVolume::writable(path) })
}

/// The size of a volume in memory, in bytes: the least of its own limit, the pod's limit and the memory that all pods
/// may use. The kernel's default is half of the machine's memory for each volume.
fn memory_size(own: Option<i64>, pod: &Pod, allocatable: i64) -> Option<i64> {
    let limits = [own, pod_resources(pod).memory_limit, Some(allocatable)];
    limits.into_iter().flatten().filter(|limit| *limit > 0).min()
}

/// Why a volume of huge pages cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum MediumError {
    #[error("unknown storage medium {0:?}")]
    Unknown(String),
    #[error("medium {0:?}: the pod's containers ask for no huge pages")]
    NoPages(String),
    #[error(
        "medium {medium:?}: the pod's containers ask for pages of several sizes ({sizes}); name one of them"
    )]
    Several { medium: String, sizes: String },
}

const HUGE: &str = "HugePages";
const RESOURCE: &str = "hugepages-";

/// The size in bytes of the pages of a medium; nothing for a medium without huge pages. As upstream, the containers must
/// ask for pages of that size, and `HugePages` alone means the only size that they ask for.
fn huge_pages(medium: &str, pod: &Pod) -> Result<Option<i64>, MediumError> {
    let wanted = match medium {
        "" | "Memory" => return Ok(None),
        HUGE => None,
        _ => {
            let unknown = || MediumError::Unknown(medium.to_owned());
            let size = medium.strip_prefix(HUGE).and_then(|rest| rest.strip_prefix('-'));
            Some(size.and_then(bytes).ok_or_else(unknown)?)
        }
    };
    let asked: BTreeSet<i64> = model::containers(pod)
        .iter()
        .filter_map(|container| container.spec.resources.as_ref()?.requests.as_ref())
        .flat_map(|requests| requests.keys())
        .filter_map(|name| name.strip_prefix(RESOURCE).and_then(bytes))
        .collect();
    let several = || asked.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match wanted {
        Some(size) if asked.contains(&size) => Ok(Some(size)),
        None if asked.len() > 1 => Err(MediumError::Several { medium: medium.to_owned(), sizes: several() }),
        None if asked.len() == 1 => Ok(asked.first().copied()),
        _ => Err(MediumError::NoPages(medium.to_owned())),
    }
}

fn bytes(text: &str) -> Option<i64> {
    quantity::value(&Quantity(text.to_owned())).filter(|size| *size > 0)
}

/// Makes an empty directory that every user of the pod may write. One that is there stays as the containers made
/// it: its mode and its owner are theirs to change, as upstream.
pub(crate) fn ensure(path: &Path, memory: bool, size: Option<i64>, group: Option<u32>) -> io::Result<()> {
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    if memory {
        return kernel::ensure_tmpfs(path, Tmpfs { mode, group, size });
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    std::fs::create_dir_all(parent)?;
    let parent = Dir::open(parent)?;
    match parent.is_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Ok(true) => return Ok(()),
        Ok(false) => return Err(io::ErrorKind::NotADirectory.into()),
        Err(e) => return Err(e),
    }
    // Made complete under another name, so that one that is found is never half made.
    let mut fresh = OsString::from(".new-");
    fresh.push(name);
    parent.remove_tree(&fresh)?;
    let made = parent.create_dir(&fresh, 0o700)?;
    made.set_owner(None, group)?;
    made.set_mode(mode)?;
    parent.rename(&fresh, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn huge_pages_are_those_that_the_containers_ask_for() {
        let mebi = 1 << 20;
        let none = |medium: &str| Err(MediumError::NoPages(medium.to_owned()));
        for (medium, asked, expected) in [
            ("", vec!["2Mi"], Ok(None)),
            ("Memory", vec![], Ok(None)),
            ("HugePages", vec!["2Mi"], Ok(Some(2 * mebi))),
            ("HugePages", vec![], none("HugePages")),
            (
                "HugePages",
                vec!["2Mi", "1Gi"],
                Err(MediumError::Several { medium: "HugePages".into(), sizes: "2097152, 1073741824".into() }),
            ),
            ("HugePages-1Gi", vec!["2Mi", "1Gi"], Ok(Some(1024 * mebi))),
            ("HugePages-1Gi", vec!["2Mi"], none("HugePages-1Gi")),
            ("HugePages-x", vec!["2Mi"], Err(MediumError::Unknown("HugePages-x".into()))),
            ("Tape", vec![], Err(MediumError::Unknown("Tape".into()))),
        ] {
            let requests: std::collections::BTreeMap<String, &str> =
                asked.iter().map(|size| (format!("{RESOURCE}{size}"), "64Mi")).collect();
            let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {"containers": [
                {"name": "c", "resources": {"requests": requests}}]}}))
            .unwrap();
            assert_eq!(huge_pages(medium, &pod), expected, "{medium} {asked:?}");
        }
    }

    #[test]
    fn made_once_and_then_the_containers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("volumes/v");
        ensure(&path, false, None, Some(1234)).expect("this test needs root");
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o7777), (1234, 0o2777));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(path.join("f"), "x").unwrap();
        fs::create_dir(dir.path().join("volumes/.new-v")).unwrap();
        ensure(&path, false, None, Some(1234)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o700);
        assert!(path.join("f").exists());
    }

    #[test]
    fn memory_is_limited_by_the_volume_the_pod_and_the_node() {
        let pod = |limits: &[Option<&str>]| -> Pod {
            let containers: Vec<_> = limits
                .iter()
                .map(|limit| match limit {
                    Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
                    None => json!({"name": "c"}),
                })
                .collect();
            ferrite_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
        };
        for (own, limits, allocatable, expected) in [
            (None, vec![None], 1000, Some(1000)),
            (None, vec![Some("100"), Some("200")], 1000, Some(300)),
            (None, vec![Some("100"), None], 1000, Some(1000)),
            (None, vec![Some("2000")], 1000, Some(1000)),
            (Some(50), vec![Some("100")], 1000, Some(50)),
            (Some(500), vec![Some("100")], 1000, Some(100)),
            (None, vec![None], 0, None),
        ] {
            assert_eq!(memory_size(own, &pod(&limits), allocatable), expected, "{own:?} {limits:?}");
        }
    }
}

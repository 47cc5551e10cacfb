//! Which identities of the node the users of a pod are: one range for each pod with `hostUsers: false`.
//!
//! A range is written to the pod's directory before a sandbox uses it, so that a kubelet that starts anew knows the
//! ranges of everything that runs. No two pods share a range: a process that leaves its container is nobody in
//! another one.

use ferrite_cri::v1::{IdMapping, NamespaceMode, UserNamespace};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first slot is the node's own users.
const FIRST_SLOT: u32 = 1;
/// The file below the pod's directory, named and written as upstream's.
const FILE: &str = "userns";
/// A file of ours is smaller.
const MAX_FILE: u64 = 4096;

#[derive(Debug, thiserror::Error)]
pub(crate) enum UsernsError {
    #[error("can't set `spec.hostUsers: false`, runtime does not support user namespaces")]
    Runtime,
    #[error("can't set `spec.hostUsers: false`, RuntimeClass handler {0:?} does not support user namespaces")]
    Handler(String),
    #[error("could not find an empty slot to allocate a user namespace")]
    Exhausted,
    #[error("user namespace mappings {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("user namespace mappings {}: {problem}", path.display())]
    Content { path: PathBuf, problem: &'static str },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Range {
    host_id: u32,
    container_id: u32,
    length: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mappings {
    uid_mappings: Vec<Range>,
    gid_mappings: Vec<Range>,
}

/// The slots in use, by pod.
#[derive(Debug)]
struct Slots {
    last: u32,
    of: BTreeMap<String, u32>,
    used: BTreeSet<u32>,
}

impl Slots {
    fn new(last: u32) -> Self {
        Self { last, of: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// A free slot, looked for from `start` on.
    fn allocate(&mut self, uid: &str, start: u32) -> Option<u32> {
        let count = (self.last + 1).saturating_sub(FIRST_SLOT);
        if count == 0 {
            return None;
        }
        let slot = (0..count)
            .map(|step| FIRST_SLOT + (start % count + step) % count)
            .find(|slot| !self.used.contains(slot))?;
        self.take(uid, slot);
        Some(slot)
    }

    fn take(&mut self, uid: &str, slot: u32) {
        self.used.insert(slot);
        self.of.insert(uid.to_string(), slot);
    }

    fn release(&mut self, uid: &str) {
        if let Some(slot) = self.of.remove(uid) {
            self.used.remove(&slot);
        }
    }
}

pub(crate) struct UserNamespaces {
    /// One directory for each pod, named by its UID.
    pods: PathBuf,
    /// Identities of one pod.
    length: u32,
    slots: Mutex<Slots>,
}

/// The last slot is never given away: the kernel refuses the identity "none", which it holds.
fn last_slot(length: u32) -> u32 {
    u32::try_from((1u64 << 32) / u64::from(length.max(1)) - 2).unwrap_or(u32::MAX)
}

impl UserNamespaces {
    /// Reads which ranges the pods on disk have. A range that cannot be read might be given away twice, so that is
    /// an error, as upstream.
    pub(crate) fn open(pods: PathBuf, length: u32) -> Result<Self, UsernsError> {
        let mut slots = Slots::new(last_slot(length));
        let entries = std::fs::read_dir(&pods).into_iter().flatten().flatten();
        for uid in entries.filter_map(|e| e.file_name().into_string().ok()) {
            let path = pods.join(&uid).join(FILE);
            let Some(slot) = read(&path, length)? else { continue };
            if slots.used.contains(&slot) {
                return Err(UsernsError::Content { path, problem: "another pod has the same range" });
            }
            slots.take(&uid, slot);
        }
        Ok(Self { pods, length, slots: Mutex::new(slots) })
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod's range; a pod without one is given one, on disk before anybody uses it.
    pub(crate) fn mappings(&self, uid: &str) -> Result<UserNamespace, UsernsError> {
        let mut slots = self.lock();
        if let Some(slot) = slots.of.get(uid) {
            return Ok(namespace(*slot, self.length));
        }
        // A range that was just given back is not the next to be given away.
        let slot = slots.allocate(uid, rand::random()).ok_or(UsernsError::Exhausted)?;
        let path = self.pods.join(uid).join(FILE);
        if let Err(source) = write(&path, slot, self.length) {
            slots.release(uid);
            return Err(UsernsError::File { path, source });
        }
        Ok(namespace(slot, self.length))
    }

    /// Gives the pod's range back. Nothing of the pod runs any more.
    pub(crate) fn release(&self, uid: &str) {
        let mut slots = self.lock();
        let _ = std::fs::remove_file(self.pods.join(uid).join(FILE));
        slots.release(uid);
    }
}

/// A pod that uses the node's users.
pub(crate) fn of_node() -> UserNamespace {
    UserNamespace { mode: NamespaceMode::Node.into(), ..UserNamespace::default() }
}

fn namespace(slot: u32, length: u32) -> UserNamespace {
    let range = IdMapping { host_id: slot * length, container_id: 0, length };
    UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![range], gids: vec![range] }
}

/// The slot a file names; nothing when there is no file.
fn read(path: &Path, length: u32) -> Result<Option<u32>, UsernsError> {
    use std::io::Read;
    let file = |source| UsernsError::File { path: path.to_owned(), source };
    let wrong = |problem| UsernsError::Content { path: path.to_owned(), problem };
    let mut text = Vec::new();
    match std::fs::File::open(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        opened => opened.and_then(|f| f.take(MAX_FILE).read_to_end(&mut text)).map_err(file)?,
    };
    let mappings: Mappings = ferrite_json::from_slice(&text).map_err(|_| wrong("not what we write"))?;
    let [range] = mappings.uid_mappings.as_slice() else { return Err(wrong("not exactly one range")) };
    if mappings.gid_mappings.as_slice() != [*range] {
        return Err(wrong("the ranges of users and groups differ"));
    }
    let slot = range.host_id / length;
    let ours = range.container_id == 0 && range.length == length && range.host_id % length == 0;
    if !ours || !(FIRST_SLOT..=last_slot(length)).contains(&slot) {
        return Err(wrong("not a range for a pod"));
    }
    Ok(Some(slot))
}

/// Writes the file whole or not at all; it outlives a loss of power once this returns.
fn write(path: &Path, slot: u32, length: u32) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let range = Range { host_id: slot * length, container_id: 0, length };
    let mappings = Mappings { uid_mappings: vec![range], gid_mappings: vec![range] };
    let text = ferrite_json::to_vec(&mappings).map_err(io::Error::other)?;
    let new = path.with_extension("new");
    let mut file =
        std::fs::OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&text)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    std::fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u32 = 65_536;

    fn host(namespace: &UserNamespace) -> u32 {
        assert_eq!((namespace.mode(), &namespace.uids), (NamespaceMode::Pod, &namespace.gids));
        assert_eq!((namespace.uids[0].container_id, namespace.uids[0].length), (0, LENGTH));
        namespace.uids[0].host_id
    }

    #[test]
    fn every_pod_has_its_own_range_and_keeps_it_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let open = || UserNamespaces::open(dir.path().to_owned(), LENGTH).unwrap();
        let first = open();
        let ranges: BTreeSet<u32> =
            (0..200).map(|n| host(&first.mappings(&format!("u{n}")).unwrap())).collect();
        assert_eq!(ranges.len(), 200);
        assert!(ranges.iter().all(|id| *id >= LENGTH && id % LENGTH == 0));
        let kept = host(&first.mappings("u7").unwrap());
        let again = open();
        assert_eq!(host(&again.mappings("u7").unwrap()), kept);
        assert_eq!(again.lock().used.len(), 200);
        again.release("u7");
        assert!(!dir.path().join("u7").join(FILE).exists());
        assert_eq!(open().lock().used.len(), 199);
    }

    #[test]
    fn ranges_of_another_length() {
        let dir = tempfile::tempdir().unwrap();
        let wide = UserNamespaces::open(dir.path().to_owned(), 4 * LENGTH).unwrap();
        let range = wide.mappings("u").unwrap().uids[0];
        assert_eq!((range.length, range.host_id % (4 * LENGTH)), (4 * LENGTH, 0));
        assert!(range.host_id.checked_add(range.length).is_some(), "it ends before the identity none");
        assert_eq!((last_slot(LENGTH), last_slot(1 << 31)), (65_534, 0));
        assert!(
            UserNamespaces::open(dir.path().to_owned(), LENGTH).is_err(),
            "pods have ranges of another length"
        );
    }

    #[test]
    fn slots_run_out_and_come_back() {
        let mut slots = Slots::new(3);
        assert_eq!(slots.allocate("a", u32::MAX), Some(1));
        assert_eq!(slots.allocate("b", 2), Some(3));
        assert_eq!(slots.allocate("c", 2), Some(2));
        assert_eq!(slots.allocate("d", 0), None);
        slots.release("c");
        slots.release("nobody");
        assert_eq!(slots.allocate("d", 0), Some(2));
    }

    #[test]
    fn files_that_we_did_not_write_stop_the_start() {
        let range = |host: u32, inside: u32, length: u32| {
            format!(r#"{{"hostId":{host},"containerId":{inside},"length":{length}}}"#)
        };
        let good = range(131_072, 0, 65_536);
        let file = |uids: &str, gids: &str| format!(r#"{{"uidMappings":[{uids}],"gidMappings":[{gids}]}}"#);
        for (text, accepted) in [
            (file(&good, &good), true),
            (file(&good, &range(196_608, 0, 65_536)), false),
            (file(&range(0, 0, 65_536), &range(0, 0, 65_536)), false),
            (file(&range(131_073, 0, 65_536), &range(131_073, 0, 65_536)), false),
            (file(&range(131_072, 1, 65_536), &range(131_072, 1, 65_536)), false),
            (file(&range(4_294_901_760, 0, 65_536), &range(4_294_901_760, 0, 65_536)), false),
            (file(&format!("{good},{good}"), &format!("{good},{good}")), false),
            ("{".to_string(), false),
            (String::new(), false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir(dir.path().join("u")).unwrap();
            std::fs::write(dir.path().join("u").join(FILE), &text).unwrap();
            assert_eq!(UserNamespaces::open(dir.path().to_owned(), LENGTH).is_ok(), accepted, "{text}");
        }
        let dir = tempfile::tempdir().unwrap();
        for uid in ["a", "b"] {
            std::fs::create_dir(dir.path().join(uid)).unwrap();
            std::fs::write(dir.path().join(uid).join(FILE), file(&good, &good)).unwrap();
        }
        assert!(UserNamespaces::open(dir.path().to_owned(), LENGTH).is_err(), "two pods with one range");
    }
}

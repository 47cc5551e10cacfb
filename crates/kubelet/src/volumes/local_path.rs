//! The node's half of the local-path provisioner: it makes the directories of volumes when they are mounted, and removes
//! them when the provisioner asks. Decision 0018 has the reasons.
//!
//! Containers write into these directories as root. So nothing here resolves a name below a volume: directories are made
//! and removed by their one name beneath the root, which only root can enter.

use super::plugins::PersistentSetUp;
use crate::pod::context::Context;
use ferrite_client::local_path::{
    DIRECTORY, PROVISIONER, REMOVE, REMOVED, annotation, is_volume_name, list, names,
};
use ferrite_client::{Api, Backoff, Change, ObjectKey, message_of};
use ferrite_hostfs::Dir;
use ferrite_json::json;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The place of a volume that our provisioner made on this node: the root and the name beneath it.
pub(super) fn directory_of(root: Option<&Path>, request: &PersistentSetUp<'_>) -> Option<(PathBuf, String)> {
    let root = root?;
    let annotations = request.volume.metadata.annotations.as_ref()?;
    let ours = annotations.get(PROVISIONED_BY).is_some_and(|by| by == PROVISIONER);
    let path = Path::new(&request.spec.local.as_ref()?.path);
    let here = is_volume_name(request.name) && path == root.join(request.name);
    (ours && here).then(|| (root.to_owned(), request.name.to_owned()))
}

/// Opens the volume's directory, making it when it is missing. Every user of a pod may write it, as upstream's
/// provisioners make it; nobody else can reach it.
pub(super) fn ensure(root: &Path, name: &str) -> io::Result<OwnedFd> {
    ferrite_hostfs::private_dir(root)?;
    let root = Dir::open(root)?;
    match root.is_dir(name) {
        Ok(true) => return Ok(root.open_dir(name)?.into()),
        Ok(false) => return Err(io::ErrorKind::NotADirectory.into()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    // Made complete under another name, so that one that is found is never half made. No volume has such a name.
    let mut fresh = OsString::from(".new-");
    fresh.push(name);
    root.remove_tree(&fresh)?;
    root.create_dir(&fresh, 0o777)?;
    root.rename(&fresh, name)?;
    Ok(root.open_dir(name)?.into())
}

/// Removes the listed volumes; those that are gone already count as removed. A volume that cannot be
/// removed is left out of the result and reported.
fn remove(root: &Path, volumes: &BTreeSet<String>) -> (BTreeSet<String>, Option<io::Error>) {
    let dir = match Dir::open(root) {
        Ok(dir) => dir,
        // This node never had a volume.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return (volumes.clone(), None),
        Err(e) => return (BTreeSet::new(), Some(e)),
    };
    let (mut removed, mut failed) = (BTreeSet::new(), None);
    for volume in volumes.iter().filter(|volume| is_volume_name(volume)) {
        match dir.remove_tree(volume) {
            Ok(()) => drop(removed.insert(volume.clone())),
            Err(e) => failed = Some(io::Error::new(e.kind(), format!("{volume}: {e}"))),
        }
    }
    (removed, failed)
}

/// The annotations by which a node says where its local volumes are.
pub(crate) fn published(root: Option<&Path>) -> Option<(String, String)> {
    Some((DIRECTORY.to_owned(), root?.to_str()?.to_owned()))
}

/// Removes volumes as the node's annotation asks, until the scope ends.
pub(crate) async fn run(context: Arc<Context>, root: PathBuf) {
    let changed = Arc::new(Notify::new());
    let told = changed.clone();
    context.node.subscribe(move |_: &Change<Node>| told.notify_one());
    context.node.synced().await;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(60), 0.2);
    loop {
        match sync(&context, &root).await {
            Ok(()) => {
                backoff.reset();
                changed.notified().await;
            }
            Err(error) => {
                tracing::warn!(%error, "could not remove local volumes; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

/// Why volumes that should be gone are not, or why nobody knows.
#[derive(Debug, thiserror::Error)]
enum RemovalError {
    #[error("{0}")]
    Remove(#[from] io::Error),
    #[error("cannot write the node: {}", message_of(.0))]
    Report(#[from] kube::Error),
}

async fn sync(context: &Context, root: &Path) -> Result<(), RemovalError> {
    let Some(node) = context.node.get(&ObjectKey::cluster(context.node_name.as_str())) else { return Ok(()) };
    let (asked, told) = (names(&node, REMOVE), names(&node, REMOVED));
    if asked.is_empty() && annotation(&node, REMOVED).is_none() {
        return Ok(());
    }
    let (root, wanted) = (root.to_owned(), asked.clone());
    let done = tokio::task::spawn_blocking(move || remove(&root, &wanted)).await;
    let (removed, failed) = done.map_err(io::Error::other)?;
    if removed != told {
        let patch = json!({"metadata": {"annotations": {REMOVED: list(&removed)}}});
        let api = Api::<Node>::all(context.client.clone());
        api.patch(&context.node_name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    }
    failed.map_or(Ok(()), |e| Err(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn made_once_for_everybody_in_a_place_for_nobody() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path().join("volumes");
        ensure(&root, "pvc-1").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&root), mode(&root.join("pvc-1"))), (0o700, 0o777));
        fs::write(root.join("pvc-1/data"), "x").unwrap();
        fs::set_permissions(root.join("pvc-1"), fs::Permissions::from_mode(0o750)).unwrap();
        ensure(&root, "pvc-1").unwrap();
        assert_eq!(mode(&root.join("pvc-1")), 0o750, "it is the pod's");
        assert!(root.join("pvc-1/data").exists());
        symlink("/etc", root.join("pvc-2")).unwrap();
        assert!(ensure(&root, "pvc-2").is_err());
    }

    #[test]
    fn removal_touches_nothing_else() {
        let tree = tempfile::tempdir().unwrap();
        let (root, outside) = (tree.path().join("volumes"), tree.path().join("outside"));
        ensure(&root, "pvc-1").unwrap();
        ensure(&root, "pvc-2").unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        symlink(&outside, root.join("pvc-1/link")).unwrap();
        symlink("../pvc-2", root.join("pvc-1/neighbour")).unwrap();
        symlink(&outside, root.join("pvc-3")).unwrap();
        let volumes = ["pvc-1", "pvc-3", "pvc-9", "..", "../outside"].map(str::to_owned).into();
        let (removed, failed) = remove(&root, &volumes);
        assert!(failed.is_none(), "{failed:?}");
        assert_eq!(removed, ["pvc-1", "pvc-3", "pvc-9"].map(str::to_owned).into());
        assert!(!root.join("pvc-1").exists() && root.join("pvc-2").is_dir());
        assert!(outside.join("kept").exists() && fs::symlink_metadata(root.join("pvc-3")).is_err());
    }
}

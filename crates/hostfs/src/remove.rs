//! Removal of a tree of any depth and width.

use crate::Dir;
use nix::dir::{OwningIter, Type};
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Directories held open at a time. A directory that is deeper is moved up to the root of the removal, so every
/// tree is removed with this many descriptors (two for each level).
const LEVELS: usize = 16;

/// Removes `path` and everything below it. A missing path is not an error.
///
/// `path` itself is trusted up to its last part; nothing below it is. Links are removed, not followed. A mount
/// point is left alone and is an error, as is a file that cannot be removed; the rest is removed all the same,
/// and the first error is returned.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        let text = format!("{} has no parent to be removed from", path.display());
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let parent = match Dir::open(parent) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    parent.remove_tree(name)
}

impl Dir {
    /// Removes `name` and everything below it, as [`remove_tree`] does.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let name = name.as_ref();
        match self.is_dir(name) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
            Ok(false) => return self.remove_file(name),
            Ok(true) => {}
        }
        let mut removal = Removal { root: self.open_dir(name)?, hoisted: 0, removed: 0, failure: None };
        // Hoisted directories appear in the root while it is read; a further pass finds them. A pass that removes
        // nothing is the last one.
        loop {
            let before = removal.removed;
            removal.pass()?;
            if self.remove_dir(name).is_ok() {
                return Ok(());
            }
            if removal.removed == before {
                return Err(match removal.failure {
                    Some(failure) => failure,
                    None => self.remove_dir(name).err().unwrap_or_else(|| io::Error::other("still there")),
                });
            }
            removal.failure = None;
        }
    }
}

struct Removal {
    root: Dir,
    /// Directories moved to the root so far: makes their names unique.
    hoisted: u64,
    /// Entries removed or hoisted so far.
    removed: u64,
    failure: Option<io::Error>,
}

/// A directory whose entries are being removed.
struct Level {
    dir: Dir,
    /// The name of `dir` in the level above; unused for the root.
    name: OsString,
    entries: OwningIter,
}

impl Level {
    fn new(dir: Dir, name: OsString) -> io::Result<Self> {
        let entries = dir.entries()?.into_iter();
        Ok(Self { dir, name, entries })
    }
}

impl Removal {
    /// Removes as much as possible below the root, depth first.
    fn pass(&mut self) -> io::Result<()> {
        let top = Dir::from_descriptor(&self.root)?;
        let mut levels = vec![Level::new(top, OsString::new())?];
        while let Some(level) = levels.last_mut() {
            let Some(entry) = level.entries.next() else {
                let Some(done) = levels.pop() else { break };
                if let Some(above) = levels.last() {
                    let removed = above.dir.remove_dir(&done.name);
                    self.note(&done.name, removed);
                }
                continue;
            };
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let name = OsStr::from_bytes(name).to_owned();
            let is_directory = match entry.file_type() {
                Some(kind) => kind == Type::Directory,
                None => level.dir.is_dir(&name).unwrap_or(false),
            };
            if !is_directory {
                let removed = level.dir.remove_file(&name);
                self.note(&name, removed);
            } else if level.dir.remove_dir(&name).is_ok() {
                self.removed += 1;
            } else {
                self.descend(&mut levels, name);
            }
        }
        Ok(())
    }

    fn descend(&mut self, levels: &mut Vec<Level>, name: OsString) {
        let depth = levels.len();
        let Some(level) = levels.last() else { return };
        if depth == LEVELS {
            let hoisted = self.hoist(&level.dir, &name);
            return self.note(&name, hoisted);
        }
        // A mount point fails here: it is on another mount.
        match level.dir.open_dir(&name).and_then(|dir| Level::new(dir, name.clone())) {
            Ok(below) => levels.push(below),
            Err(e) => self.note(&name, Err(e)),
        }
    }

    /// Moves a directory to the root under a name of its own.
    fn hoist(&mut self, from: &Dir, name: &OsStr) -> io::Result<()> {
        loop {
            self.hoisted += 1;
            let to = OsString::from_vec(format!(".removing-{}", self.hoisted).into_bytes());
            match from.move_to(name, &self.root, &to) {
                // The tree's author chose this name, too.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                other => return other,
            }
        }
    }

    fn note(&mut self, name: &OsStr, result: io::Result<()>) {
        match result {
            Ok(()) => self.removed += 1,
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => {
                let named = || io::Error::new(e.kind(), format!("cannot remove {name:?}: {e}"));
                self.failure.get_or_insert_with(named);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use std::fs;

    fn nest(root: &Path, levels: usize) {
        let mut at = Dir::open(root).unwrap();
        for _ in 0..levels {
            at = at.create_dir("d", 0o755).unwrap();
        }
        at.create_file("leaf").unwrap();
    }

    #[test]
    fn depth_costs_neither_stack_nor_descriptors() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("t");
        fs::create_dir(&tree).unwrap();
        nest(&tree, 15_000);
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let small = std::thread::Builder::new().stack_size(64 * 1024);
        setrlimit(Resource::RLIMIT_NOFILE, 128, hard).unwrap();
        small
            .spawn({
                let tree = tree.clone();
                move || remove_tree(&tree).unwrap()
            })
            .unwrap()
            .join()
            .unwrap();
        assert!(!tree.exists());
    }

    #[test]
    fn wide_and_mixed_trees_go() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("t");
        for i in 0..3000 {
            fs::create_dir_all(tree.join(format!("{}/{i}/x", i % 7))).unwrap();
            fs::write(tree.join(format!("{}/{i}/f", i % 7)), "").unwrap();
        }
        // Names that the removal itself would choose.
        fs::create_dir_all(tree.join(".removing-1/a")).unwrap();
        nest(&tree.join("0"), 100);
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        remove_tree(&tree).unwrap();
        remove_tree(&root.path().join("no/such/parent")).unwrap();
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let (tree, other) = (root.path().join("t"), root.path().join("other"));
        fs::create_dir_all(&tree).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("kept"), "").unwrap();
        std::os::unix::fs::symlink(&other, tree.join("link")).unwrap();
        std::os::unix::fs::symlink(&other, root.path().join("top")).unwrap();
        remove_tree(&tree).unwrap();
        remove_tree(&root.path().join("top")).unwrap();
        assert!(other.join("kept").exists() && !tree.exists());
    }

    #[test]
    fn a_mount_below_is_left_alone_and_reported() {
        let root = tempfile::tempdir().unwrap();
        let (tree, host) = (root.path().join("t"), root.path().join("host"));
        fs::create_dir_all(tree.join("a/point")).unwrap();
        fs::create_dir_all(&host).unwrap();
        fs::write(host.join("kept"), "").unwrap();
        fs::write(tree.join("a/gone"), "").unwrap();
        mount(Some(&host), &tree.join("a/point"), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let refused = remove_tree(&tree).unwrap_err().to_string();
        assert!(refused.contains("point"), "{refused}");
        assert!(host.join("kept").exists() && !tree.join("a/gone").exists());
        umount2(&tree.join("a/point"), MntFlags::MNT_DETACH).unwrap();
        remove_tree(&tree).unwrap();
    }
}

//! The directory of a cluster: a mark that it is ours, and a lock of the process that uses it.
//!
//! `down` runs as root and removes files. It must never remove a directory because somebody named it: the
//! mark is made when a cluster is first started there, only in a directory that holds nothing of anybody else.

use crate::paths::Paths;
use ferrite_hostfs::Dir;
use nix::fcntl::{Flock, FlockArg};
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Marks a directory as ours. It is locked by the process that uses the directory.
const MARK: &str = ".ferrite";
const TEXT: &str = "The data of a Ferrite cluster. `ferrite down` removes it.\n";
/// The mark is text and a process number: more is not read.
const MARK_LIMIT: u64 = 4096;

/// The docker view's directory below ours. Its containers belong to no cluster and outlive every cluster.
const DOCKER: &str = "docker";

/// Names that a cluster makes in its data directory. With `--data-dir`, sockets and configuration are there too.
const DATA_NAMES: &[&str] = &[
    "store",
    "pki",
    "images",
    "runtime",
    "kubelet",
    "volumes",
    "logs",
    "network",
    "nodes",
    "snapshots",
    "cluster.json",
    "cluster.tmp",
    "server-id",
    "servers.json",
    "servers.tmp",
    "ferrite.log",
    "etcd",
    "control-plane.json",
    "control-plane.tmp",
    "run",
    "config",
];
/// Names that begin like this are ours, too: stores that were replaced, logs that were rotated.
const DATA_PREFIXES: &[&str] = &["store.replaced-", "ferrite.log."];
const RUN_NAMES: &[&str] = &["runtime", "control.sock", "cri.sock", "etcd.sock"];
/// Not `registries.yaml`: the user wrote that.
const CONFIG_NAMES: &[&str] = &["admin.kubeconfig"];

/// Nobody makes more entries than this in our directories.
const MOST_NAMES: usize = 10_000;

#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error(
        "{} holds {name:?}, which is not Ferrite's: nothing was done; give a cluster an empty directory with --data-dir", .dir.display()
    )]
    Foreign { dir: PathBuf, name: OsString },
    #[error("{} belongs to another user: choose a directory of root's with --data-dir", .dir.display())]
    NotRoots { dir: PathBuf },
    #[error(
        "{} is in use by {}: stop that first, or choose another directory with --data-dir", .dir.display(), who(*.pid)
    )]
    InUse { dir: PathBuf, pid: Option<i32> },
    #[error("cannot use {}", .dir.display())]
    Io {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot remove {}; see what uses it with `fuser -vm {}`", .path.display(), .path.display())]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn who(pid: Option<i32>) -> String {
    match pid {
        Some(pid) => format!("process {pid}"),
        None => "another process".into(),
    }
}

/// A data directory that a cluster of ours was started in. Another process may use it.
#[derive(Debug)]
pub struct Found {
    dir: Dir,
    path: PathBuf,
}

/// A data directory of ours that no other process uses for as long as this lives.
#[derive(Debug)]
pub struct DataDirectory {
    dir: Dir,
    path: PathBuf,
    _lock: Flock<File>,
}

impl Found {
    /// None when there is no directory, or nothing of a cluster in it.
    pub fn find(paths: &Paths) -> Result<Option<Self>, DataDirError> {
        let path = paths.data.clone();
        let io = |source| DataDirError::Io { dir: path.clone(), source };
        let dir = match open_dir(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io)?,
        };
        let names = dir.names(MOST_NAMES).map_err(io)?;
        if names.iter().any(|name| name == MARK) {
            refuse_other_owner(&dir, MARK, &path)?;
        } else if names.iter().any(|name| is_ours(name) && name != "run") {
            // Made before there were marks.
            refuse_foreign(names, &path)?;
            refuse_other_owner(&dir, ".", &path)?;
        } else {
            return Ok(None);
        }
        Ok(Some(Self { dir, path }))
    }

    /// Locks the directory. Fails at once when another process uses it.
    pub fn lock(self) -> Result<DataDirectory, DataDirError> {
        let Self { dir, path } = self;
        let io = |source| DataDirError::Io { dir: path.clone(), source };
        match dir.create_file(MARK) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io(e)),
            _ => {}
        }
        let mark = dir.open_file(MARK).map_err(io)?;
        let lock = Flock::lock(mark, FlockArg::LockExclusiveNonblock)
            .map_err(|(mark, _)| DataDirError::InUse { dir: path.clone(), pid: holder(mark) })?;
        dir.write_file(MARK, format!("{TEXT}{}\n", std::process::id()).as_bytes()).map_err(io)?;
        Ok(DataDirectory { dir, path, _lock: lock })
    }
}

impl DataDirectory {
    /// Makes the cluster's directory, or finds it, and locks it.
    pub fn claim(paths: &Paths) -> Result<Self, DataDirError> {
        let path = paths.data.clone();
        let io = |source| DataDirError::Io { dir: path.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(io)?;
        let dir = open_dir(&path).map_err(io)?;
        let names = dir.names(MOST_NAMES).map_err(io)?;
        if !names.iter().any(|name| name == MARK) {
            refuse_foreign(names, &path)?;
        }
        refuse_other_owner(&dir, ".", &path)?;
        // Keys, secrets and the files of images are below it. An earlier version may have left it open to others.
        dir.set_mode(0o700).map_err(io)?;
        Found { dir, path }.lock()
    }

    /// Removes the things that a cluster made: data, sockets and configuration. Everything else stays, and
    /// so do directories that hold something else.
    pub fn remove(self, paths: &Paths) -> Result<(), DataDirError> {
        remove_known(&paths.run, RUN_NAMES)?;
        remove_known(&paths.config, CONFIG_NAMES)?;
        for name in cluster_names(&self.dir, &self.path)? {
            // Sockets of the docker view may be below it: our own files there are gone.
            if !(name == "run" || name == "config") {
                self.remove_entry(&name)?;
            }
        }
        self.remove_entry(OsStr::new(MARK))?;
        // The directory stays when something else is in it, or when it is a mount point.
        let _ = std::fs::remove_dir(&self.path);
        Ok(())
    }

    /// Removes the sockets and the kubelet's files; objects, certificates, images and local volumes stay.
    pub fn remove_volatile(&self, paths: &Paths) -> Result<(), DataDirError> {
        remove_known(&paths.run, RUN_NAMES)?;
        self.remove_entry(OsStr::new("kubelet"))
    }

    fn remove_entry(&self, name: &OsStr) -> Result<(), DataDirError> {
        remove_entry(&self.dir, &self.path, name)
    }
}

/// Opens a directory that root's own path may reach through a link, as `/var/lib/ferrite` may be one to a larger disk.
fn open_dir(path: &Path) -> io::Result<Dir> {
    Dir::open(&std::fs::canonicalize(path)?)
}

fn is_ours(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    DATA_NAMES.contains(&name) || DATA_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn cluster_names(dir: &Dir, path: &Path) -> Result<Vec<OsString>, DataDirError> {
    let names = dir.names(MOST_NAMES).map_err(|source| DataDirError::Io { dir: path.to_owned(), source })?;
    Ok(names.into_iter().filter(|name| is_ours(name)).collect())
}

/// A directory without a mark is ours only when nothing of anybody else is in it.
fn refuse_foreign(names: Vec<OsString>, path: &Path) -> Result<(), DataDirError> {
    // A file system of its own has `lost+found` from the start.
    let known = |name: &OsString| is_ours(name) || name == DOCKER || name == "lost+found";
    match names.into_iter().find(|name| !known(name)) {
        None => Ok(()),
        Some(name) => Err(DataDirError::Foreign { dir: path.to_owned(), name }),
    }
}

/// Refuses a directory of another user: root must not act on files that the user controls.
fn refuse_other_owner(dir: &Dir, name: &str, path: &Path) -> Result<(), DataDirError> {
    let described = if name == "." { dir.stat_self() } else { dir.stat(name) };
    let owner = described.map_err(|source| DataDirError::Io { dir: path.to_owned(), source })?.st_uid;
    match owner == nix::unistd::geteuid().as_raw() {
        true => Ok(()),
        false => Err(DataDirError::NotRoots { dir: path.to_owned() }),
    }
}

/// Removes these names from a directory, and the directory when nothing else is in it.
fn remove_known(path: &Path, names: &[&str]) -> Result<(), DataDirError> {
    let dir = match open_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|source| DataDirError::Io { dir: path.to_owned(), source })?,
    };
    for name in names {
        remove_entry(&dir, path, OsStr::new(name))?;
    }
    let _ = std::fs::remove_dir(path);
    Ok(())
}

fn remove_entry(dir: &Dir, path: &Path, name: &OsStr) -> Result<(), DataDirError> {
    let removed =
        ferrite_hostfs::mounts::unmount_below(&path.join(name)).and_then(|()| dir.remove_tree(name));
    removed.map_err(|source| DataDirError::Remove { path: path.join(name), source })
}

/// The process that said in the mark that it uses the directory.
fn holder(mut mark: File) -> Option<i32> {
    let mut text = String::new();
    mark.rewind().ok()?;
    mark.take(MARK_LIMIT).read_to_string(&mut text).ok()?;
    text.lines().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn paths(root: &Path) -> Paths {
        Paths::new(&root.join("d"))
    }

    #[test]
    fn a_directory_of_somebody_else_is_neither_used_nor_removed() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(root.path());
        fs::create_dir(&paths.data).unwrap();
        fs::write(paths.data.join("thesis.tex"), "").unwrap();
        assert!(Found::find(&paths).unwrap().is_none(), "nothing of a cluster is in it");
        let refused = DataDirectory::claim(&paths).unwrap_err().to_string();
        assert!(refused.contains("thesis.tex"), "{refused}");
        // A name like one of ours does not make it ours.
        fs::create_dir(paths.data.join("images")).unwrap();
        assert!(matches!(Found::find(&paths), Err(DataDirError::Foreign { .. })));
    }

    #[test]
    fn only_our_names_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(root.path());
        let held = DataDirectory::claim(&paths).unwrap();
        for name in ["store/x", "store.replaced-1", "run/runtime", "run/docker", "config", "mine", "docker"] {
            fs::create_dir_all(paths.data.join(name)).unwrap();
        }
        for name in ["cluster.json", "config/registries.yaml", "config/admin.kubeconfig", "ferrite.log"] {
            fs::write(paths.data.join(name), "").unwrap();
        }
        held.remove(&paths).unwrap();
        let mut left: Vec<String> = fs::read_dir(&paths.data)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["config", "docker", "mine", "run"]);
        assert!(paths.data.join("config/registries.yaml").exists() && paths.data.join("run/docker").exists());
        assert!(
            !paths.data.join("config/admin.kubeconfig").exists() && !paths.data.join("run/runtime").exists()
        );
    }

    #[test]
    fn one_process_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(root.path());
        let held = DataDirectory::claim(&paths).unwrap();
        let refused = Found::find(&paths).unwrap().unwrap().lock().unwrap_err();
        assert!(
            matches!(refused, DataDirError::InUse { pid: Some(pid), .. } if pid == std::process::id() as i32)
        );
        drop(held);
        DataDirectory::claim(&paths).unwrap().remove(&paths).unwrap();
        assert!(!paths.data.exists());
    }

    #[test]
    fn the_mark_is_a_file_of_roots() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(root.path());
        fs::create_dir(&paths.data).unwrap();
        fs::write(paths.data.join(MARK), TEXT).unwrap();
        std::os::unix::fs::chown(paths.data.join(MARK), Some(1000), None).unwrap();
        assert!(matches!(Found::find(&paths), Err(DataDirError::NotRoots { .. })));
        fs::remove_file(paths.data.join(MARK)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", paths.data.join(MARK)).unwrap();
        assert!(DataDirectory::claim(&paths).is_err());
    }
}

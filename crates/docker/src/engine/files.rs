//! A container's files: copied, compared, exported.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use ferrite_hostfs::Dir;
use ferrite_runtime::standalone;
use nix::sys::stat::FileStat;

use super::start::LAYER;
use super::{Engine, EngineError, Result, View};
use crate::record::Container;

/// Most entries of a tree that are compared or counted.
const MAX_ENTRIES: u64 = 4 << 20;
/// Longest path that is compared: nobody can name a longer one.
const MAX_PATH: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Changed,
    Deleted,
}

/// A path that is not as in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub kind: ChangeKind,
    pub path: String,
}

impl Engine {
    /// The container's file system, running or not.
    fn root(&self, view: &View) -> Result<OwnedFd> {
        match &view.state.task {
            Some(task) if view.state.status.runs() => Ok(task.root()?),
            _ => standalone::open_layers(
                &view.container.lowers,
                &self.directory(&view.container.id).join(LAYER),
            )
            .map_err(EngineError::io("open the container's layers")),
        }
    }

    /// Writes an archive of `path` of the container: an entry of its own name, and all that is below.
    pub fn copy_out(&self, name: &str, path: &str, out: impl Write + Send + 'static) -> Result<()> {
        let view = self.find(name)?;
        let (root, path) = (self.root(&view)?, absolute(path));
        let shown = path.display().to_string();
        standalone::in_root(root, move || write_tree(&path, out)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => EngineError::Invalid(format!(
                "Could not find the file {shown} in container {}",
                view.container.name
            )),
            _ => EngineError::io(format!("copy {shown}"))(error),
        })
    }

    /// The type of a path in the container: `true` for a directory, `None` if it does not exist.
    pub fn stat(&self, name: &str, path: &str) -> Result<Option<bool>> {
        let view = self.find(name)?;
        let (root, path) = (self.root(&view)?, absolute(path));
        standalone::in_root(root, move || match fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.is_dir())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        })
        .map_err(EngineError::io("look into the container"))
    }

    /// Unpacks an archive into a directory of the container.
    pub fn copy_in(&self, name: &str, directory: &str, archive: impl Read + Send + 'static) -> Result<()> {
        let view = self.find(name)?;
        let (root, path) = (self.root(&view)?, absolute(directory));
        standalone::in_root(root, move || {
            if !fs::metadata(&path)?.is_dir() {
                return Err(io::ErrorKind::NotADirectory.into());
            }
            unpack(archive, &path)
        })
        .map_err(EngineError::io(format!("copy to {directory}")))
    }

    /// Writes an archive of everything the container has.
    pub fn export(&self, name: &str, out: impl Write + Send + 'static) -> Result<()> {
        let view = self.find(name)?;
        let root = self.root(&view)?;
        standalone::in_root(root, move || {
            let mut archive = builder(out);
            archive.append_dir_all(".", "/")?;
            archive.into_inner()?.flush()
        })
        .map_err(EngineError::io("export container"))
    }

    /// The container's changes compared with its image.
    pub fn changes(&self, name: &str) -> Result<Vec<Change>> {
        let view = self.find(name)?;
        let upper = self.directory(&view.container.id).join(LAYER).join("upper");
        compare(&upper, &view.container.lowers).map_err(EngineError::io("compare the container's files"))
    }

    /// Bytes that the container has written.
    pub fn written(&self, id: &str) -> u64 {
        let upper = self.directory(id).join(LAYER).join("upper");
        ferrite_hostfs::usage(&upper, MAX_ENTRIES).unwrap_or_default().content
    }

    /// A new volume begins with the image's files at its path.
    pub(super) fn seed_volume(&self, container: &Container, path: &str, volume: &Path) -> Result<()> {
        let fail = || EngineError::io(format!("copy {path} of the image into a volume"));
        let empty = self.paths.root().join("empty");
        let root = standalone::open_layers(&container.lowers, &empty).map_err(fail())?;
        let from = absolute(path);
        let (reader, writer) = io::pipe().map_err(fail())?;
        let to: OwnedFd = Dir::open(volume).and_then(|to| to.as_fd().try_clone_to_owned()).map_err(fail())?;
        // Another container may have the volume already: with the volume as root no link in it leads out.
        let unpacking =
            std::thread::spawn(move || standalone::in_root(to, move || unpack(reader, Path::new("/"))));
        let packed = standalone::in_root(root, move || {
            if !fs::metadata(&from).is_ok_and(|metadata| metadata.is_dir()) {
                return builder(writer).into_inner().map(drop);
            }
            let mut archive = builder(writer);
            archive.append_dir_all(".", &from)?;
            archive.into_inner()?.flush()
        });
        let unpacked = unpacking.join().unwrap_or_else(|_| Err(io::Error::other("unpacking ended badly")));
        packed.and(unpacked).map_err(fail())
    }
}

fn absolute(path: &str) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            _ => {}
        }
    }
    out
}

fn builder<W: Write>(out: W) -> tar::Builder<W> {
    let mut archive = tar::Builder::new(out);
    archive.follow_symlinks(false);
    archive
}

/// An archive of one file or directory under its own name.
pub fn write_tree(path: &Path, out: impl Write) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    let mut archive = builder(out);
    let name = path.file_name().map_or_else(|| PathBuf::from("."), PathBuf::from);
    if metadata.is_dir() {
        archive.append_dir_all(&name, path)?;
    } else {
        archive.append_path_with_name(path, &name)?;
    }
    archive.into_inner()?.flush()
}

/// Unpacks with owners and modes; nothing leaves the directory.
pub fn unpack(archive: impl Read, directory: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_overwrite(true);
    archive.unpack(directory)
}

/// An entry of the writable layer.
struct Written {
    path: PathBuf,
    is_dir: bool,
    whiteout: bool,
}

fn is_whiteout(stat: &FileStat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFCHR && stat.st_rdev == 0
}

/// The changes that a writable layer makes to the layers below it, by path.
fn compare(upper: &Path, lowers: &[PathBuf]) -> io::Result<Vec<Change>> {
    let root = match Dir::open(upper) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let lowers: Vec<Dir> = lowers.iter().map(|lower| Dir::open(lower)).collect::<io::Result<_>>()?;
    let mut written = Vec::new();
    ferrite_hostfs::walk(root, MAX_ENTRIES, |entry| {
        if entry.path.as_os_str().len() <= MAX_PATH {
            let (is_dir, whiteout) = (entry.is_dir(), is_whiteout(&entry.stat));
            written.push(Written { path: entry.path.to_owned(), is_dir, whiteout });
        }
        Ok(())
    })?;
    let mut changes = Vec::new();
    let mut touched: HashSet<PathBuf> = HashSet::new();
    // A directory comes before its entries; seen from the end it is known if anything in it changed.
    for Written { path, is_dir, whiteout } in written.into_iter().rev() {
        let shown = format!("/{}", path.display());
        let in_image = exists_in(&lowers, &path);
        let kind = if whiteout {
            ChangeKind::Deleted
        } else if INJECTED.contains(&shown.as_str()) && !in_image {
            // Ours, not the container's.
            continue;
        } else if is_dir {
            let below = touched.contains(&path);
            match (in_image, below) {
                (false, true) => ChangeKind::Added,
                (false, false) if !MOUNT_POINTS.contains(&shown.as_str()) => ChangeKind::Added,
                (true, true) => ChangeKind::Changed,
                _ => continue,
            }
        } else if in_image {
            ChangeKind::Changed
        } else {
            ChangeKind::Added
        };
        touched.extend(path.parent().map(Path::to_owned));
        changes.push(Change { kind, path: shown });
    }
    changes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(changes)
}

/// Files and mount points every container gets.
const INJECTED: &[&str] = &["/.dockerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
const MOUNT_POINTS: &[&str] = &["/proc", "/sys", "/dev", "/etc"];

/// Returns true if the topmost layer that knows a path has something there.
fn exists_in(lowers: &[Dir], path: &Path) -> bool {
    lowers.iter().find_map(|lower| lower.stat_path(path).ok()).is_some_and(|stat| !is_whiteout(&stat))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        for (path, want) in [("a/b", "/a/b"), ("/../../etc", "/etc"), ("", "/"), ("/a/./b/..", "/a")] {
            assert_eq!(absolute(path), Path::new(want), "{path}");
        }
    }

    #[test]
    fn a_layer_is_compared_with_those_below() {
        let dir = tempfile::tempdir().unwrap();
        let (upper, lower) = (dir.path().join("upper"), dir.path().join("lower"));
        for path in ["etc", "var/log", "same/deep"] {
            fs::create_dir_all(lower.join(path)).unwrap();
        }
        fs::write(lower.join("etc/passwd"), "").unwrap();
        for path in ["etc", "var/log", "new/dir", "same/deep", "proc"] {
            fs::create_dir_all(upper.join(path)).unwrap();
        }
        for path in ["etc/passwd", "etc/hosts", "new/file"] {
            fs::write(upper.join(path), "").unwrap();
        }
        let (kind, mode) = (nix::sys::stat::SFlag::S_IFCHR, nix::sys::stat::Mode::empty());
        nix::sys::stat::mknod(&upper.join("var/log/gone"), kind, mode, 0).expect("this test needs root");
        // A link to a directory of the host is a file like others.
        std::os::unix::fs::symlink("/etc", upper.join("new/link")).unwrap();
        let shown: Vec<String> = compare(&upper, &[lower])
            .unwrap()
            .into_iter()
            .map(|change| format!("{:?} {}", change.kind, change.path))
            .collect();
        assert_eq!(
            shown,
            [
                "Changed /etc",
                "Changed /etc/passwd",
                "Added /new",
                "Added /new/dir",
                "Added /new/file",
                "Added /new/link",
                "Changed /var",
                "Changed /var/log",
                "Deleted /var/log/gone",
            ]
        );
        assert!(compare(&dir.path().join("none"), &[]).unwrap().is_empty());
    }
}

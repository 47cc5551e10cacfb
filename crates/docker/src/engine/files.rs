//! A container's files: copied, compared, exported.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use ferrite_runtime::standalone;

use super::start::LAYER;
use super::{Engine, EngineError, Result, View};
use crate::record::Container;

/// How many directories deep a tree is looked at.
const MAX_DEPTH: usize = 256;

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

    /// What a path of the container is: a directory, something else, or nothing.
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

    /// What the container has written, compared with its image.
    pub fn changes(&self, name: &str) -> Result<Vec<Change>> {
        let view = self.find(name)?;
        let upper = self.directory(&view.container.id).join(LAYER).join("upper");
        let mut changes = Vec::new();
        collect(&upper, Path::new("/"), &view.container, 0, &mut changes)
            .map_err(EngineError::io("compare the container's files"))?;
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(changes)
    }

    /// What the container has written, in bytes.
    pub fn written(&self, id: &str) -> u64 {
        size_of_tree(&self.directory(id).join(LAYER).join("upper"), 0)
    }

    /// A new volume begins with what the image has in its place.
    pub(super) fn seed_volume(&self, container: &Container, path: &str, volume: &Path) -> Result<()> {
        let fail = || EngineError::io(format!("copy {path} of the image into a volume"));
        let empty = self.paths.root().join("empty");
        let root = standalone::open_layers(&container.lowers, &empty).map_err(fail())?;
        let from = absolute(path);
        let (reader, writer) = io::pipe().map_err(fail())?;
        let to = volume.to_owned();
        let unpacking = std::thread::spawn(move || unpack(reader, &to));
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

fn collect(
    upper: &Path,
    path: &Path,
    container: &Container,
    depth: usize,
    changes: &mut Vec<Change>,
) -> io::Result<bool> {
    let mut any = false;
    if depth > MAX_DEPTH {
        return Ok(false);
    }
    let entries = match fs::read_dir(upper) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let inside = path.join(entry.file_name());
        let shown = inside.display().to_string();
        let metadata = entry.path().symlink_metadata()?;
        let in_image = exists_in_image(container, &inside);
        if metadata.file_type().is_char_device() && metadata.rdev() == 0 {
            changes.push(Change { kind: ChangeKind::Deleted, path: shown });
        } else if INJECTED.contains(&shown.as_str()) && !in_image {
            // Ours, not the container's.
            continue;
        } else if metadata.is_dir() {
            let below = collect(&entry.path(), &inside, container, depth + 1, changes)?;
            if !in_image && (below || !MOUNT_POINTS.contains(&shown.as_str())) {
                changes.push(Change { kind: ChangeKind::Added, path: shown });
            } else if in_image && below {
                changes.push(Change { kind: ChangeKind::Changed, path: shown });
            } else {
                continue;
            }
        } else {
            let kind = if in_image { ChangeKind::Changed } else { ChangeKind::Added };
            changes.push(Change { kind, path: shown });
        }
        any = true;
    }
    Ok(any)
}

/// Files and mount points every container gets.
const INJECTED: &[&str] = &["/.dockerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
const MOUNT_POINTS: &[&str] = &["/proc", "/sys", "/dev", "/etc"];

fn exists_in_image(container: &Container, path: &Path) -> bool {
    let relative = path.strip_prefix("/").unwrap_or(path);
    for lower in &container.lowers {
        if let Ok(metadata) = lower.join(relative).symlink_metadata() {
            return !(metadata.file_type().is_char_device() && metadata.rdev() == 0);
        }
    }
    false
}

fn size_of_tree(path: &Path, depth: usize) -> u64 {
    if depth > MAX_DEPTH {
        return 0;
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let metadata = entry.path().symlink_metadata().ok()?;
            Some(if metadata.is_dir() { size_of_tree(&entry.path(), depth + 1) } else { metadata.len() })
        })
        .sum()
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
}

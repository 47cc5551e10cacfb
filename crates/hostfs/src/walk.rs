//! Visits a tree of any depth and width.

use crate::Dir;
use nix::errno::Errno;
use nix::sys::stat::{FileStat, fstat};
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Something below the root of a walk.
pub struct Visit<'a> {
    /// The directory that holds it.
    pub dir: &'a Dir,
    pub name: &'a OsStr,
    /// Its path below the root.
    pub path: &'a Path,
    /// The file's status; of a link itself, not of its target.
    pub stat: FileStat,
}

impl Visit<'_> {
    pub fn is_dir(&self) -> bool {
        self.stat.st_mode & libc_type::TYPE == libc_type::DIRECTORY
    }
}

mod libc_type {
    use nix::sys::stat::SFlag;
    pub const TYPE: u32 = SFlag::S_IFMT.bits();
    pub const DIRECTORY: u32 = SFlag::S_IFDIR.bits();
}

/// Space and files below a directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the blocks that are allocated.
    pub bytes: u64,
    pub inodes: u64,
    /// Bytes of the content of everything but directories.
    pub content: u64,
    /// True if everything was counted. Otherwise there is more than these figures say.
    pub is_whole: bool,
}

/// Visits at most `limit` entries below `root`, a directory before its entries. Returns true if the tree
/// ended before the limit.
///
/// The walk needs four descriptors and, for each level, the names of the directories that are still to be
/// visited. Links are not followed, other mounts are not entered. The tree may change meanwhile: an entry
/// that vanishes is skipped, and a directory that is moved away from under the walk is an error.
pub fn walk(root: Dir, limit: u64, visit: impl FnMut(Visit<'_>) -> io::Result<()>) -> io::Result<bool> {
    traverse(root, limit, visit, Moved::IsAnError)
}

/// The meaning of a directory that was moved while the walk was below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    IsAnError,
    /// The walk goes on with the directories above that are where they were.
    IsLeft,
}

fn traverse(
    root: Dir,
    limit: u64,
    mut visit: impl FnMut(Visit<'_>) -> io::Result<()>,
    moved: Moved,
) -> io::Result<bool> {
    let mut left = limit;
    let mut levels: Vec<Level> = Vec::new();
    let mut path = PathBuf::new();
    let mut current = root.try_clone()?;
    let mut entered = Some((OsString::new(), identity(&current)?));
    loop {
        if let Some((name, identity)) = entered.take() {
            let mut directories = Vec::new();
            let complete = look(&current, &mut path, &mut left, &mut directories, &mut visit)?;
            levels.push(Level { name, identity, directories });
            if !complete {
                return Ok(false);
            }
        }
        let Some(level) = levels.last_mut() else { return Ok(true) };
        if let Some(name) = level.directories.pop() {
            // A directory that is gone, is a link now or is another mount's is not part of the tree.
            if let Ok(below) = current.open_dir(&name) {
                path.push(&name);
                entered = Some((name, identity(&below)?));
                current = below;
            }
            continue;
        }
        levels.pop();
        path.pop();
        let Some(above) = levels.last() else { return Ok(true) };
        // A moved directory would abuse going up by name: the directory above must be the one that was
        // left.
        let parent = current.parent();
        if let Ok(parent) = parent
            && identity(&parent)? == above.identity
        {
            current = parent;
            continue;
        }
        if moved == Moved::IsAnError {
            return Err(io::Error::new(
                ErrorKind::Interrupted,
                "a directory was moved while its tree was read",
            ));
        }
        // The way back is paid for: whoever moves directories could make it as long as they like.
        let Some(rest) = left.checked_sub(levels.len() as u64) else { return Ok(false) };
        left = rest;
        let kept;
        (current, kept) = descend(&root, &levels)?;
        levels.truncate(kept);
        path = levels.iter().skip(1).map(|level| &level.name).collect();
    }
}

/// Goes down from the root as far as the directories are where they were. Returns the last one, and the number of levels
/// up to it.
fn descend(root: &Dir, levels: &[Level]) -> io::Result<(Dir, usize)> {
    let mut at = root.try_clone()?;
    for (depth, level) in levels.iter().enumerate().skip(1) {
        match at.open_dir(&level.name) {
            Ok(below) if identity(&below)? == level.identity => at = below,
            _ => return Ok((at, depth)),
        }
    }
    Ok((at, levels.len()))
}

/// Adds up the usage below `root`, at most `limit` entries of it. The author of the tree can use up the limit: with many
/// files, or by moving directories while they are counted.
pub fn usage(root: &Path, limit: u64) -> io::Result<Usage> {
    let mut total = Usage::default();
    let root = match Dir::open(root) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Usage { is_whole: true, ..total }),
        other => other?,
    };
    let count = |entry: Visit<'_>| {
        total.inodes += 1;
        total.bytes += u64::try_from(entry.stat.st_blocks).unwrap_or_default() * 512;
        if !entry.is_dir() {
            total.content += u64::try_from(entry.stat.st_size).unwrap_or_default();
        }
        Ok(())
    };
    // Figures of a tree that changes are rough, but its author must not hide files by moving directories.
    let is_whole = traverse(root, limit, count, Moved::IsLeft)?;
    Ok(Usage { is_whole, ..total })
}

/// A directory on the way to the current one.
struct Level {
    name: OsString,
    identity: (u64, u64),
    /// Directories in it that are still to be visited.
    directories: Vec<OsString>,
}

fn identity(dir: &Dir) -> io::Result<(u64, u64)> {
    let stat = fstat(dir.as_fd())?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Visits the entries of one directory. Returns false when the limit was reached.
fn look(
    dir: &Dir,
    path: &mut PathBuf,
    left: &mut u64,
    directories: &mut Vec<OsString>,
    visit: &mut impl FnMut(Visit<'_>) -> io::Result<()>,
) -> io::Result<bool> {
    for entry in dir.entries()?.iter() {
        let entry = entry?;
        let bytes = entry.file_name().to_bytes();
        if matches!(bytes, b"." | b"..") {
            continue;
        }
        let name: &OsStr = std::os::unix::ffi::OsStrExt::from_bytes(bytes);
        let stat = match dir.stat(name) {
            Err(e) if e.raw_os_error() == Some(Errno::ENOENT as i32) => continue,
            other => other?,
        };
        let Some(rest) = left.checked_sub(1) else { return Ok(false) };
        *left = rest;
        path.push(name);
        let seen = Visit { dir, name, path, stat };
        let is_dir = seen.is_dir();
        let visited = visit(seen);
        path.pop();
        visited?;
        if is_dir {
            directories.push(name.to_owned());
        }
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]
mod tests {
    use super::*;
    use std::fs;

    fn open(path: &Path) -> Dir {
        Dir::open(path).unwrap()
    }

    #[test]
    fn everything_is_visited_once_and_links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        for path in ["a/b/c", "a/d", "e"] {
            fs::create_dir_all(root.path().join(path)).unwrap();
        }
        fs::write(root.path().join("a/b/f"), "12345").unwrap();
        std::os::unix::fs::symlink("/", root.path().join("e/link")).unwrap();
        let mut seen = Vec::new();
        let whole = walk(open(root.path()), 100, |entry| {
            seen.push(entry.path.display().to_string());
            Ok(())
        });
        assert!(whole.unwrap());
        seen.sort();
        assert_eq!(seen, ["a", "a/b", "a/b/c", "a/b/f", "a/d", "e", "e/link"]);
        for (limit, inodes, is_whole) in [(100, 7, true), (7, 7, true), (3, 3, false)] {
            let counted = usage(root.path(), limit).unwrap();
            assert_eq!((counted.inodes, counted.is_whole), (inodes, is_whole), "{limit}");
        }
        let nothing = Usage { is_whole: true, ..Usage::default() };
        assert_eq!(usage(&root.path().join("none"), 3).unwrap(), nothing);
    }

    #[test]
    fn depth_costs_neither_stack_nor_descriptors() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("t");
        fs::create_dir(&tree).unwrap();
        let mut at = open(&tree);
        for _ in 0..15_000 {
            at.create_file("f").unwrap();
            at = at.create_dir("d", 0o755).unwrap();
        }
        let small = std::thread::Builder::new().stack_size(64 * 1024);
        let walked = tree.clone();
        let counted = small.spawn(move || usage(&walked, u64::MAX).unwrap().inodes).unwrap().join().unwrap();
        assert_eq!(counted, 30_000);
        crate::remove_tree(&tree).unwrap();
    }

    #[test]
    fn files_are_counted_though_directories_move() {
        let root = tempfile::tempdir().unwrap();
        let (tree, other) = (root.path().join("t"), root.path().join("other"));
        let names = ["a", "b", "c", "d"];
        for name in names {
            fs::create_dir_all(tree.join(name).join("x/y/z")).unwrap();
        }
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("secret"), "").unwrap();
        let mut seen = Vec::new();
        let walked = traverse(
            open(&tree),
            1000,
            |entry| {
                assert_ne!(entry.name, "secret");
                seen.push(entry.path.to_owned());
                // While the walk is in y, x goes elsewhere, and something else takes its place.
                if entry.name == "z" {
                    let of = entry.path.iter().next().unwrap();
                    fs::rename(tree.join(of).join("x"), other.join(of)).unwrap();
                    fs::create_dir(tree.join(of).join("x")).unwrap();
                }
                Ok(())
            },
            Moved::IsLeft,
        );
        assert!(walked.unwrap());
        for name in names {
            for below in ["", "x", "x/y", "x/y/z"] {
                let path: PathBuf = Path::new(name).join(below).components().collect();
                assert_eq!(seen.iter().filter(|p| **p == path).count(), 1, "{path:?} in {seen:?}");
            }
        }
    }

    #[test]
    fn ways_back_are_limited() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("t");
        fs::create_dir_all(tree.join("a/b/c/d")).unwrap();
        let move_away = |entry: Visit<'_>| {
            if entry.name == "d" {
                fs::rename(tree.join("a/b/c"), root.path().join("c")).unwrap();
            }
            Ok(())
        };
        assert!(!traverse(open(&tree), 5, move_away, Moved::IsLeft).unwrap());
    }

    #[test]
    fn a_directory_moved_out_of_the_tree_ends_the_walk() {
        let root = tempfile::tempdir().unwrap();
        let (tree, other) = (root.path().join("t"), root.path().join("other"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("secret"), "").unwrap();
        let walked = walk(open(&tree), 100, |entry| {
            assert_ne!(entry.name, "secret");
            if entry.name == "b" {
                fs::rename(tree.join("a"), other.join("a")).unwrap();
            }
            Ok(())
        });
        assert_eq!(walked.unwrap_err().kind(), ErrorKind::Interrupted);
    }
}

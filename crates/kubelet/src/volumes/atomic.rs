//! Writes a set of files so that readers see all of the old or all of the new: files live in a time-stamped
//! directory, `..data` points at the current one, and visible names point through `..data`.
//!
//! A container may have had the directory writable under an earlier version, or may reach it through a hostPath
//! volume. Everything is therefore done on descriptors, no link is followed, and the text of `..data` is accepted
//! only as the plain name of a directory that a write could have made.

use super::payload::{File, Payload};
use ferrite_hostfs::{Dir, walk};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::Path;

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";
/// Most entries a volume is read with. A payload is limited by the size of an object, far below this.
const MAX_ENTRIES: usize = 1 << 20;

/// Brings `target` to `payload`. Returns true if the files changed.
///
/// A write that was interrupted leaves a directory or a link that nothing points at; the next write removes it.
pub(crate) fn write(target: &Path, payload: &Payload, group: Option<u32>) -> io::Result<bool> {
    std::fs::create_dir_all(target)?;
    let target = Dir::open(target)?;
    // The mount is read-only in containers; root on the node is the only one to write here.
    target.set_owner(None, group)?;
    target.set_mode(directory_mode(group))?;
    let current = current(&target);
    if let Some(name) = &current
        && is_same(&target, name, payload, group)
    {
        link_visible(&target, payload)?;
        remove_leftovers(&target, name, payload)?;
        return Ok(false);
    }
    let stamp = OsString::from(format!(
        "..{}_{:016x}",
        jiff::Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S"),
        rand::random::<u64>()
    ));
    if let Err(e) = fill(&target, &stamp, payload, group) {
        let _ = target.remove_tree(&stamp);
        return Err(e);
    }
    target.remove_tree(NEW_DATA)?;
    target.symlink(Path::new(&stamp), NEW_DATA)?;
    if target.is_dir(DATA).unwrap_or(false) {
        target.remove_tree(DATA)?;
    }
    target.rename(NEW_DATA, DATA)?;
    link_visible(&target, payload)?;
    remove_leftovers(&target, &stamp, payload)?;
    Ok(true)
}

/// The directory `..data` points at, if a write can have made both.
fn current(target: &Dir) -> Option<OsString> {
    let name = target.read_link(DATA).ok()?.into_os_string();
    (is_stamp(&name) && target.is_dir(&name).unwrap_or(false)).then_some(name)
}

/// Returns true if `name` is one that time-stamped directories have: `..2026_01_02_…`.
fn is_stamp(name: &OsStr) -> bool {
    let known = |b: &u8| b.is_ascii_hexdigit() || matches!(b, b'_' | b'.');
    name.as_bytes().strip_prefix(b"..2").is_some_and(|rest| rest.len() < 64 && rest.iter().all(known))
}

fn visible(payload: &Payload) -> BTreeSet<&OsStr> {
    payload.keys().filter_map(|path| path.split('/').next()).map(OsStr::new).collect()
}

fn link_visible(target: &Dir, payload: &Payload) -> io::Result<()> {
    for name in visible(payload) {
        let wanted = Path::new(DATA).join(name);
        match target.read_link(name) {
            Ok(found) if found == wanted => continue,
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            _ => target.remove_tree(name)?,
        }
        target.symlink(&wanted, name)?;
    }
    Ok(())
}

/// Removes everything but `..data`, the directory it points at, and the visible names.
fn remove_leftovers(target: &Dir, current: &OsStr, payload: &Payload) -> io::Result<()> {
    let wanted = visible(payload);
    for name in target.names(MAX_ENTRIES)? {
        if name != DATA && name != current && !wanted.contains(name.as_os_str()) {
            target.remove_tree(&name)?;
        }
    }
    Ok(())
}

fn fill(target: &Dir, stamp: &OsStr, payload: &Payload, group: Option<u32>) -> io::Result<()> {
    let root = make_directory(target, stamp, group)?;
    for (path, file) in payload {
        let (parents, name) = path.rsplit_once('/').map_or((None, path.as_str()), |(p, n)| (Some(p), n));
        match parents {
            None => put(&root, name, file, group)?,
            Some(parents) => put(&make_parents(&root, parents, group)?, name, file, group)?,
        }
    }
    Ok(())
}

fn put(dir: &Dir, name: &str, file: &File, group: Option<u32>) -> io::Result<()> {
    let mut out = dir.create_file(name)?;
    out.write_all(&file.data)?;
    fchown(&out, file.user, group)?;
    out.set_permissions(Permissions::from_mode(file_mode(file.mode, group)))
}

fn make_directory(dir: &Dir, name: &OsStr, group: Option<u32>) -> io::Result<Dir> {
    let made = dir.create_dir(name, 0o700)?;
    made.set_owner(None, group)?;
    made.set_mode(directory_mode(group))?;
    Ok(made)
}

fn make_parents(root: &Dir, parents: &str, group: Option<u32>) -> io::Result<Dir> {
    let mut at: Option<Dir> = None;
    for name in parents.split('/').map(OsStr::new) {
        let above = at.as_ref().unwrap_or(root);
        let below = match above.open_dir(name) {
            Err(e) if e.kind() == ErrorKind::NotFound => make_directory(above, name, group)?,
            other => other?,
        };
        at = Some(below);
    }
    at.ok_or_else(|| ErrorKind::InvalidInput.into())
}

fn directory_mode(group: Option<u32>) -> u32 {
    if group.is_some() { 0o2755 } else { 0o755 }
}

fn file_mode(mode: u32, group: Option<u32>) -> u32 {
    // The group that owns the volume reads it whatever the mode says.
    if group.is_some() { mode | 0o440 } else { mode }
}

fn is_same(target: &Dir, name: &OsStr, payload: &Payload, group: Option<u32>) -> bool {
    let compare = || -> io::Result<bool> {
        let mut files = 0;
        let whole = walk(target.open_dir(name)?, MAX_ENTRIES as u64, |entry| {
            files += usize::from(!entry.is_dir());
            Ok(())
        })?;
        if !whole || files != payload.len() {
            return Ok(false);
        }
        let dir = target.open_dir(name)?;
        for (path, file) in payload {
            let stat = dir.stat_path(path)?;
            let owned =
                group.is_none_or(|group| stat.st_gid == group) && file.user.unwrap_or(0) == stat.st_uid;
            // One byte more than expected shows a file that is too long.
            let same = owned
                && stat.st_mode & 0o777 == file_mode(file.mode, group)
                && dir.read(path, file.data.len() as u64 + 1)? == file.data;
            if !same {
                return Ok(false);
            }
        }
        Ok(true)
    };
    compare().unwrap_or(false)
}

#[cfg(test)]
#[path = "atomic_tests.rs"]
mod tests;

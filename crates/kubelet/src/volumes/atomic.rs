//! Writes a set of files so that readers see all of the old or all of the new: files live in a time-stamped
//! directory, `..data` points at the current one, and visible names point through `..data`.

use super::payload::Payload;
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";

/// Brings `target` to `payload`. Answers whether anything changed.
pub(crate) fn write(target: &Path, payload: &Payload, group: Option<u32>) -> io::Result<bool> {
    fs::create_dir_all(target)?;
    let current = fs::read_link(target.join(DATA)).ok().map(|name| target.join(name));
    if let Some(current) = &current
        && is_same(current, payload, group)
    {
        return Ok(false);
    }
    let stamp =
        format!("..{}_{:016x}", jiff::Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S"), rand::random::<u64>());
    let fresh = target.join(&stamp);
    if let Err(e) = fill(&fresh, payload, group) {
        let _ = fs::remove_dir_all(&fresh);
        return Err(e);
    }
    let temporary = target.join(NEW_DATA);
    let _ = fs::remove_file(&temporary);
    symlink(&stamp, &temporary)?;
    fs::rename(&temporary, target.join(DATA))?;
    link_visible(target, payload)?;
    if let Some(old) = current {
        fs::remove_dir_all(old)?;
    }
    Ok(true)
}

fn visible(payload: &Payload) -> BTreeSet<&str> {
    payload.keys().filter_map(|path| path.split('/').next()).collect()
}

fn link_visible(target: &Path, payload: &Payload) -> io::Result<()> {
    let wanted = visible(payload);
    for name in &wanted {
        let link = target.join(name);
        if fs::symlink_metadata(&link).is_err() {
            symlink(Path::new(DATA).join(name), &link)?;
        }
    }
    for entry in fs::read_dir(target)?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !name.starts_with("..") && !wanted.contains(name) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn fill(dir: &Path, payload: &Payload, group: Option<u32>) -> io::Result<()> {
    fs::create_dir(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(directory_mode(group)))?;
    chown(dir, None, group)?;
    for (path, file) in payload {
        let full = dir.join(path);
        if let Some(parent) = full.parent() {
            make_parents(dir, parent, group)?;
        }
        let mut out = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&full)?;
        out.write_all(&file.data)?;
        chown(&full, None, group)?;
        out.set_permissions(fs::Permissions::from_mode(file_mode(file.mode, group)))?;
    }
    Ok(())
}

fn make_parents(root: &Path, dir: &Path, group: Option<u32>) -> io::Result<()> {
    let mut missing: Vec<PathBuf> = Vec::new();
    let mut at = dir;
    while at != root && !at.exists() {
        missing.push(at.to_path_buf());
        let Some(parent) = at.parent() else { break };
        at = parent;
    }
    for dir in missing.into_iter().rev() {
        fs::create_dir(&dir)?;
        chown(&dir, None, group)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(directory_mode(group)))?;
    }
    Ok(())
}

fn directory_mode(group: Option<u32>) -> u32 {
    if group.is_some() { 0o2775 } else { 0o755 }
}

fn file_mode(mode: u32, group: Option<u32>) -> u32 {
    // The group that owns the volume reads it whatever the mode says.
    if group.is_some() { mode | 0o440 } else { mode }
}

fn is_same(dir: &Path, payload: &Payload, group: Option<u32>) -> bool {
    let mut count = 0;
    if !count_files(dir, &mut count, 0) || count != payload.len() {
        return false;
    }
    payload.iter().all(|(path, file)| {
        let full = dir.join(path);
        let Ok(meta) = fs::metadata(&full) else { return false };
        meta.len() == file.data.len() as u64
            && meta.permissions().mode() & 0o777 == file_mode(file.mode, group)
            && fs::read(&full).is_ok_and(|data| data == file.data)
    })
}

fn count_files(dir: &Path, count: &mut usize, depth: usize) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if depth > 64 || !count_files(&entry.path(), count, depth + 1) {
                return false;
            }
        } else {
            *count += 1;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::payload::File;
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        files
            .iter()
            .map(|(p, d)| (p.to_string(), File { data: d.as_bytes().to_vec(), mode: 0o644 }))
            .collect()
    }

    #[test]
    fn files_appear_change_and_disappear_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("v");
        assert!(write(&target, &payload(&[("a", "1"), ("d/b", "2")]), None).unwrap());
        assert_eq!(fs::read_to_string(target.join("d/b")).unwrap(), "2");
        assert_eq!(fs::read_link(target.join("a")).unwrap(), Path::new("..data/a"));
        assert!(!write(&target, &payload(&[("a", "1"), ("d/b", "2")]), None).unwrap(), "unchanged");
        let before = fs::read_link(target.join(DATA)).unwrap();
        assert!(write(&target, &payload(&[("a", "3")]), None).unwrap());
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "3");
        assert!(fs::symlink_metadata(target.join("d")).is_err());
        assert!(!target.join(before).exists(), "the old directory is gone");
        let names: BTreeSet<String> =
            fs::read_dir(&target).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }

    #[test]
    fn the_owning_group_can_read() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let mut files = payload(&[("a", "1")]);
        files.get_mut("a").unwrap().mode = 0o400;
        if write(dir.path(), &files, Some(1234)).is_err() {
            return; // not root
        }
        let meta = fs::metadata(dir.path().join("a")).unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o777), (1234, 0o440));
    }
}

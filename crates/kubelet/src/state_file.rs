//! Files in which the kubelet keeps decisions over a restart, in upstream's formats: JSON with a checksum.
//!
//! The checksum is FNV-1a over the text that Go's spew package prints of the data, so that either kubelet accepts the
//! other's files. Each format has its own function that writes that text.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A larger file is none of ours.
const MAX_FILE: u64 = 64 << 20;

/// The checksum of a text.
pub(crate) fn checksum(text: &str) -> u64 {
    let mut hash: u32 = 0x811c_9dc5;
    for byte in text.bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    u64::from(hash)
}

/// `[a b]`, as Go prints a list.
pub(crate) fn go_list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(" "))
}

/// `map[a:1 b:2]`, as Go prints a map with sorted keys.
pub(crate) fn go_map<K: ToString>(items: impl IntoIterator<Item = (K, String)>) -> String {
    let items: Vec<String> =
        items.into_iter().map(|(key, value)| format!("{}:{value}", key.to_string())).collect();
    format!("map[{}]", items.join(" "))
}

/// Reads a file; none if there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match ferrite_hostfs::read_head(path, MAX_FILE) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Replaces the file as a whole: a crash leaves the old or the new one.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut options = std::fs::OpenOptions::new();
    options.create(true).write(true).truncate(true).mode(0o600).custom_flags(nix::libc::O_NOFOLLOW);
    let mut file = options.open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        assert!(read(&path).unwrap().is_none());
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"two");
        let other = dir.path().join("other");
        std::fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, dir.path().join("state.new")).unwrap();
        assert!(write(&path, b"three").is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"kept");
    }
}

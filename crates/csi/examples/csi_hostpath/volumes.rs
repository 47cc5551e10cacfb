//! The volumes: a directory and a note of its size each.

use std::io;
use std::path::{Path, PathBuf};

use ferrite_hostfs::Dir;

pub struct Volumes {
    root: PathBuf,
}

impl Volumes {
    pub fn open(root: &Path) -> io::Result<Self> {
        // Pods write into the volumes: nobody but root may come near them.
        ferrite_hostfs::private_dir(root)?;
        let root = root.canonicalize()?;
        for name in ["volumes", "sizes", "grown"] {
            std::fs::create_dir_all(root.join(name))?;
        }
        Ok(Self { root })
    }

    fn dir(&self, name: &str) -> io::Result<Dir> {
        Dir::open(&self.root.join(name))
    }

    /// The directory of a volume. Identifiers come from others: one that is no plain name has none.
    pub fn path(&self, id: &str) -> Option<PathBuf> {
        let plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        plain.then(|| self.root.join("volumes").join(id))
    }

    pub fn exists(&self, id: &str) -> bool {
        self.path(id).is_some_and(|path| path.is_dir())
    }

    /// Makes a volume; one that is there stays.
    pub fn create(&self, id: &str, size: i64) -> io::Result<()> {
        if self.path(id).is_none() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !self.exists(id) {
            self.note("sizes", id, size)?;
            self.dir("volumes")?.ensure_dir(id, 0o777)?;
        }
        Ok(())
    }

    pub fn remove(&self, id: &str) -> io::Result<()> {
        if self.path(id).is_none() {
            return Ok(());
        }
        // Everything below was written by pods.
        self.dir("volumes")?.remove_tree(id)?;
        self.dir("sizes")?.remove_tree(id)?;
        self.dir("grown")?.remove_tree(id)
    }

    pub fn size(&self, id: &str) -> i64 {
        let text = self.dir("sizes").and_then(|dir| dir.read(id, 32)).unwrap_or_default();
        String::from_utf8_lossy(&text).trim().parse().unwrap_or(0)
    }

    /// The size that the volume is said to have.
    pub fn resize(&self, id: &str, size: i64) -> io::Result<()> {
        self.note("sizes", id, size)
    }

    /// The node has grown the volume to this size. A driver of disks grows a file system here.
    pub fn grown(&self, id: &str, size: i64) -> io::Result<()> {
        self.note("grown", id, size)
    }

    fn note(&self, dir: &str, id: &str, size: i64) -> io::Result<()> {
        use std::io::Write;
        let dir = self.dir(dir)?;
        let fresh = format!(".{id}");
        dir.remove_tree(&fresh)?;
        dir.create_file(&fresh)?.write_all(size.to_string().as_bytes())?;
        dir.rename(&fresh, id)
    }
}

//! Images made from the running program itself: nothing to download, on any machine.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::digest::Hasher;
use super::extract::Extracted;
use super::store::NewImage;
use super::{Digest, ImageError, ImageStore, Platform, Reference};

const PASSWD: &str = "root:x:0:0:root:/:/ferrite\nnobody:x:65534:65534:nobody:/:/ferrite\n";
const GROUP: &str = "root:x:0:\nnobody:x:65534:\n";

/// Inputs for making a built-in image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Builtin {
    /// Its name, under `ferrite.local`.
    pub name: Reference,
    /// A static executable; it becomes `/ferrite`.
    pub binary: PathBuf,
    /// The command that a container runs by default.
    pub entrypoint: Vec<String>,
    /// Names in `/bin`, each a link to the executable.
    pub links: Vec<String>,
}

/// The programs of the image `ferrite.local/tools`.
pub const TOOLS: &[&str] = &[
    "api", "cat", "dns", "eat", "echo", "env", "exit", "false", "get", "http", "sleep", "spin", "tick",
    "true",
];

impl Builtin {
    /// The image of small programs that every machine has: this program itself, under the names of its tools.
    pub fn tools() -> Result<Self, ImageError> {
        let binary =
            std::env::current_exe().map_err(ImageError::io("find", Path::new("the running program")))?;
        Ok(Self {
            name: "ferrite.local/tools:latest".parse()?,
            binary,
            entrypoint: vec!["/ferrite".into(), "tools".into()],
            links: TOOLS.iter().map(|name| (*name).to_owned()).collect(),
        })
    }
}

impl ImageStore {
    /// Makes or refreshes a built-in image and pins it. The binary is read only when it looks different
    /// (size, times, inode) from the one the present image was made from. Returns the image's id.
    pub fn add_builtin(self: &Arc<Self>, builtin: &Builtin) -> Result<Digest, ImageError> {
        let name = builtin.name.to_string();
        if !builtin.name.is_built_in() || builtin.name.tag().is_none() {
            return Err(ImageError::BadReference {
                reference: name,
                why: "a built-in image is ferrite.local/<name>:<tag>",
            });
        }
        let stamp = stamp(builtin)?;
        {
            let index = self.index();
            let same = |image: &super::index::StoredImage| {
                image.stamp.as_ref() == Some(&stamp) && image.pinned && image.repo_tags.contains(&name)
            };
            if let Some((id, _)) = index.images.iter().find(|(_, image)| same(image)) {
                return Ok(id.clone());
            }
        }
        let _hold = self.hold();
        let diff_id = diff_id(builtin)?;
        let config = config(builtin, &diff_id)?;
        let id = self.content.put(&config)?;
        if !self.layers.has(&diff_id) {
            let layer = self.layers.stage_with(&diff_id, |root| fill(root, builtin))?;
            self.layers.commit(vec![(diff_id.clone(), layer)])?;
        }
        self.record_image(NewImage {
            id: id.clone(),
            manifest: None,
            chain_ids: vec![diff_id],
            archives: Vec::new(),
            repo_tags: vec![name],
            repo_digests: Vec::new(),
            pinned: true,
            stamp: Some(stamp),
        })?;
        self.unpin_nameless()?;
        Ok(id)
    }

    /// Images of earlier versions of the program lost their name to the new one; they go when nothing
    /// uses them.
    fn unpin_nameless(&self) -> Result<(), ImageError> {
        let mut index = self.index();
        let mut next = index.clone();
        for image in
            next.images.values_mut().filter(|image| image.stamp.is_some() && image.repo_tags.is_empty())
        {
            image.pinned = false;
        }
        if next != *index {
            self.save_index(&next)?;
            *index = next;
        }
        Ok(())
    }
}

/// Tells one build of the program, and one way to run it, from another.
fn stamp(builtin: &Builtin) -> Result<String, ImageError> {
    let meta = fs::metadata(&builtin.binary).map_err(ImageError::io("stat", &builtin.binary))?;
    if !meta.is_file() {
        return Err(ImageError::invalid(builtin.binary.display().to_string(), "it is not a file"));
    }
    let words: Vec<&str> = builtin.entrypoint.iter().chain(&builtin.links).map(String::as_str).collect();
    let command = Digest::of(words.join("\0").as_bytes());
    Ok(format!("{}-{}-{}.{:09}-{command}", meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
}

/// The digest of the layer as an archive, which nobody needs to write down.
fn diff_id(builtin: &Builtin) -> Result<Digest, ImageError> {
    let binary = builtin.binary.as_path();
    struct Sink(Hasher);
    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let fail = || ImageError::io("read", binary);
    let mut file = File::open(binary).map_err(fail())?;
    let size = file.metadata().map_err(fail())?.len();
    let mut archive = tar::Builder::new(io::BufWriter::with_capacity(256 << 10, Sink(Hasher::default())));
    let header = |kind: tar::EntryType, mode: u32, size: u64| {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header
    };
    for name in &builtin.links {
        let mut link = header(tar::EntryType::Symlink, 0o777, 0);
        archive.append_link(&mut link, format!("bin/{name}"), EXECUTABLE).map_err(fail())?;
    }
    let mut add = |path: &str, mode: u32, size: u64, content: &mut dyn io::Read| {
        let kind = if path.ends_with('/') { tar::EntryType::Directory } else { tar::EntryType::Regular };
        archive.append_data(&mut header(kind, mode, size), path, content)
    };
    add("bin/", 0o755, 0, &mut io::empty()).map_err(fail())?;
    add("etc/", 0o755, 0, &mut io::empty()).map_err(fail())?;
    add("etc/group", 0o644, GROUP.len() as u64, &mut GROUP.as_bytes()).map_err(fail())?;
    add("etc/passwd", 0o644, PASSWD.len() as u64, &mut PASSWD.as_bytes()).map_err(fail())?;
    add("ferrite", 0o755, size, &mut file).map_err(fail())?;
    add("tmp/", 0o1777, 0, &mut io::empty()).map_err(fail())?;
    let sink = archive
        .into_inner()
        .and_then(|writer| writer.into_inner().map_err(|e| e.into_error()))
        .map_err(fail())?;
    Ok(sink.0.finish())
}

fn config(builtin: &Builtin, diff_id: &Digest) -> Result<Vec<u8>, ImageError> {
    let platform = Platform::host();
    let config = serde_json::json!({
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {
            "Entrypoint": builtin.entrypoint,
            "Env": ["PATH=/bin:/"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    });
    serde_json::to_vec(&config).map_err(|error| ImageError::invalid("image configuration", error))
}

/// Where the links lead.
const EXECUTABLE: &str = "/ferrite";

fn fill(root: &Path, builtin: &Builtin) -> Result<Extracted, ImageError> {
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(ImageError::io("set mode of", path))
    };
    for (name, bits) in [("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)] {
        let path = root.join(name);
        fs::create_dir(&path).map_err(ImageError::io("create", &path))?;
        mode(&path, bits)?;
    }
    for (name, text) in [("etc/passwd", PASSWD), ("etc/group", GROUP)] {
        let path = root.join(name);
        fs::write(&path, text).map_err(ImageError::io("write", &path))?;
        mode(&path, 0o644)?;
    }
    let target = root.join("ferrite");
    let bytes = place(&builtin.binary, &target)?;
    for name in &builtin.links {
        let link = root.join("bin").join(name);
        std::os::unix::fs::symlink(EXECUTABLE, &link).map_err(ImageError::io("create", &link))?;
    }
    let inodes = 7 + builtin.links.len() as u64;
    Ok(Extracted { bytes: bytes + (PASSWD.len() + GROUP.len()) as u64, inodes })
}

/// The binary in the layer, without a second copy of its bytes where the filesystem allows.
fn place(binary: &Path, target: &Path) -> Result<u64, ImageError> {
    let fail = |what| ImageError::io(what, target);
    let source = File::open(binary).map_err(ImageError::io("open", binary))?;
    let size = source.metadata().map_err(ImageError::io("stat", binary))?.len();
    let copy = File::create_new(target).map_err(fail("create"))?;
    // SAFETY: both descriptors are open for the duration of the call, which touches no memory of ours.
    let cloned = unsafe { libc::ioctl(copy.as_raw_fd(), libc::FICLONE, source.as_raw_fd()) } == 0;
    if !cloned {
        // A hard link shares the file's mode; only one that can be executed as it is will do.
        let executable = source.metadata().is_ok_and(|meta| meta.mode() & 0o7777 == 0o755 && meta.uid() == 0);
        if executable {
            fs::remove_file(target).map_err(fail("remove"))?;
            match fs::hard_link(binary, target) {
                Ok(()) => return Ok(0),
                Err(error) => tracing::debug!(%error, "the program is on another filesystem; it is copied"),
            }
        }
        fs::copy(binary, target).map_err(fail("copy the program to"))?;
    }
    fs::set_permissions(target, Permissions::from_mode(0o755)).map_err(fail("set mode of"))?;
    Ok(size)
}

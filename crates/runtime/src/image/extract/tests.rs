//! Layers as images bring them, and as attackers would.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use proptest::prelude::*;

use super::*;

/// A tar archive in the making; nothing stops it from being wrong.
#[derive(Default)]
struct Archive(Vec<u8>);

impl Archive {
    fn raw(
        mut self,
        kind: u8,
        path: &[u8],
        link: &[u8],
        content: &[u8],
        change: impl Fn(&mut tar::Header),
    ) -> Self {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.set_mtime(1_000_000);
        // The crate's own setters refuse the names that these tests need.
        header.as_old_mut().name[..path.len()].copy_from_slice(path);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        change(&mut header);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.raw(b'0', path.as_bytes(), b"", content.as_bytes(), |_| {})
    }

    fn directory(self, path: &str) -> Self {
        self.raw(b'5', path.as_bytes(), b"", b"", |header| header.set_mode(0o755))
    }

    fn link(self, kind: u8, path: &str, target: &str) -> Self {
        self.raw(kind, path.as_bytes(), target.as_bytes(), b"", |_| {})
    }

    fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut content = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            content.extend(format!("{length} {key}=").bytes());
            content.extend_from_slice(value);
            content.push(b'\n');
        }
        self.raw(b'x', b"pax", b"", &content, |_| {})
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }
}

struct Layer {
    /// Holds the layer and, beside it, files that no layer may touch.
    outer: tempfile::TempDir,
}

impl Layer {
    fn new() -> Self {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("fs")).unwrap();
        fs::write(outer.path().join("canary"), "alive").unwrap();
        Self { outer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.outer.path().join("fs").join(name)
    }

    fn extract(&self, archive: Archive) -> Result<Extracted, ImageError> {
        self.extract_bytes(&archive.end())
    }

    fn extract_bytes(&self, archive: &[u8]) -> Result<Extracted, ImageError> {
        let done = extract(archive, &self.path(""), &Limits::default());
        let mut outside: Vec<_> =
            fs::read_dir(self.outer.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        outside.sort();
        assert_eq!(outside, ["canary", "fs"], "the layer wrote outside of itself");
        assert_eq!(fs::read_to_string(self.outer.path().join("canary")).unwrap(), "alive");
        done
    }

    fn meta(&self, name: &str) -> fs::Metadata {
        fs::symlink_metadata(self.path(name)).unwrap()
    }

    fn is_whiteout(&self, name: &str) -> bool {
        self.meta(name).file_type().is_char_device() && self.meta(name).rdev() == 0
    }

    fn xattr(&self, name: &str, key: &str) -> Option<Vec<u8>> {
        let path = CString::new(self.path(name).as_os_str().as_bytes()).unwrap();
        let key = CString::new(key).unwrap();
        let mut value = vec![0; 256];
        // SAFETY: the buffer is as long as announced and both strings end with zero.
        let size =
            unsafe { libc::lgetxattr(path.as_ptr(), key.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        (size >= 0).then(|| value[..size as usize].to_vec())
    }

    fn is_opaque(&self, name: &str) -> bool {
        self.xattr(name, "trusted.overlay.opaque").as_deref() == Some(b"y")
    }
}

#[test]
fn ordinary_entries() {
    let layer = Layer::new();
    let archive = Archive::default()
        .raw(b'5', b"./", b"", b"", |h| h.set_mode(0o711))
        .raw(b'5', b"bin/", b"", b"", |h| {
            h.set_mode(0o755);
            h.set_mtime(1234);
        })
        .raw(b'0', b"bin/su", b"", b"#!", |h| {
            h.set_mode(0o4755);
            h.set_uid(0);
            h.set_gid(42);
            h.set_mtime(77);
        })
        .raw(b'1', b"bin/sudo", b"bin/su", b"", |_| {})
        .raw(b'2', b"bin/sh", b"/bin/busybox", b"", |h| h.set_uid(7))
        .raw(b'6', b"run/pipe", b"", b"", |h| h.set_mode(0o600))
        .raw(b'3', b"dev/null", b"", b"", |h| {
            h.set_mode(0o666);
            h.set_device_major(1).unwrap();
            h.set_device_minor(3).unwrap();
        })
        .file("a/deep/file", "text")
        .file("replaced", "old")
        .file("replaced", "new");
    let done = layer.extract(archive).unwrap();
    assert_eq!(layer.meta("").mode() & 0o7777, 0o711);
    let su = layer.meta("bin/su");
    assert_eq!((su.mode() & 0o7777, su.gid(), su.mtime(), su.nlink()), (0o4755, 42, 77, 2));
    assert_eq!(su.ino(), layer.meta("bin/sudo").ino());
    assert_eq!(fs::read_link(layer.path("bin/sh")).unwrap(), Path::new("/bin/busybox"));
    assert_eq!(layer.meta("bin/sh").uid(), 7);
    assert_eq!(layer.meta("bin").mtime(), 1234, "its time survives what was put into it");
    assert!(layer.meta("run/pipe").file_type().is_fifo());
    assert_eq!(layer.meta("run").mode() & 0o7777, 0o755, "missing parents are ordinary directories");
    assert_eq!(
        (layer.meta("dev/null").rdev(), layer.meta("dev/null").mode() & 0o777),
        (makedev(1, 3), 0o666)
    );
    assert_eq!(fs::read_to_string(layer.path("a/deep/file")).unwrap(), "text");
    assert_eq!(fs::read_to_string(layer.path("replaced")).unwrap(), "new");
    assert_eq!(done.bytes, 2 + 4 + 3 + 3);
}

#[test]
fn long_names_times_and_attributes() {
    let layer = Layer::new();
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(200));
    let capability = b"\x01\0\0\x02\n\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let archive = Archive::default()
        .raw(b'L', b"././@LongLink", b"", format!("{long}\0").as_bytes(), |_| {})
        .file("short", "gnu")
        .pax(&[
            ("path", "p/ä".as_bytes()),
            ("mtime", b"12.5"),
            ("uid", b"70000"),
            ("SCHILY.xattr.user.colour", b"red"),
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
            ("SCHILY.xattr.user.overlay.opaque", b"y"),
        ])
        .file("ignored", "pax")
        .raw(b'g', b"global", b"", b"52 comment=1234567890123456789012345678901234567890\n", |_| {});
    layer.extract(archive).unwrap();
    assert_eq!(fs::read_to_string(layer.path(&long)).unwrap(), "gnu");
    let meta = layer.meta("p/ä");
    assert_eq!((meta.mtime(), meta.mtime_nsec(), meta.uid()), (12, 500_000_000, 70_000));
    assert_eq!(layer.xattr("p/ä", "user.colour").unwrap(), b"red");
    assert_eq!(layer.xattr("p/ä", "security.capability").unwrap(), capability);
    assert_eq!(layer.xattr("p/ä", "trusted.overlay.redirect"), None, "layers do not talk to overlayfs");
    assert_eq!(layer.xattr("p/ä", "user.overlay.opaque"), None);
}

#[test]
fn whiteouts() {
    let layer = Layer::new();
    let archive = Archive::default()
        .file("etc/.wh.gone", "")
        .directory("opaque/")
        .file("opaque/.wh..wh..opq", "")
        .file("kept", "new")
        .file(".wh.kept", "")
        .file(".wh.remade", "")
        .directory("remade/")
        .file("remade/x", "")
        .directory("remade2/")
        .file(".wh.remade2", "")
        .file(".wh.file", "")
        .file("file", "again")
        .file(".wh..wh.plnk", "");
    layer.extract(archive).unwrap();
    assert!(layer.is_whiteout("etc/gone"));
    assert!(layer.is_opaque("opaque") && !layer.is_opaque("etc"));
    assert_eq!(fs::read_to_string(layer.path("kept")).unwrap(), "new", "a whiteout is about lower layers");
    assert!(layer.is_opaque("remade") && layer.path("remade/x").exists(), "removed and made anew");
    assert!(layer.is_opaque("remade2"), "in the other order too");
    assert_eq!(fs::read_to_string(layer.path("file")).unwrap(), "again");
    assert!(!layer.path(".wh..wh.plnk").exists() && !layer.path(".wh.gone").exists());
}

/// The kernel agrees: an overlay of two such layers shows the files that the image's maker saw.
#[test]
fn overlayfs_understands() {
    let (lower, upper) = (Layer::new(), Layer::new());
    lower
        .extract(
            Archive::default()
                .file("both", "lower")
                .file("gone", "x")
                .file("dir/old", "x")
                .file("merged/lower", "x"),
        )
        .unwrap();
    upper
        .extract(
            Archive::default()
                .file("both", "upper")
                .file(".wh.gone", "")
                .file("dir/.wh..wh..opq", "")
                .file("dir/new", "x")
                .file("merged/upper", "x"),
        )
        .unwrap();
    let target = tempfile::tempdir().unwrap();
    let target_path = target.path().to_owned();
    let options = format!("lowerdir={}:{}", upper.path("").display(), lower.path("").display());
    // A mount namespace of its own, so that the mount ends with the thread.
    let seen = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS | nix::sched::CloneFlags::CLONE_FS).unwrap();
        let private = nix::mount::MsFlags::MS_PRIVATE | nix::mount::MsFlags::MS_REC;
        nix::mount::mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("overlay"), &target_path, Some("overlay"), none, Some(options.as_str()))
            .unwrap();
        let mut seen = vec![fs::read_to_string(target_path.join("both")).unwrap()];
        for dir in ["", "dir", "merged"] {
            for entry in fs::read_dir(target_path.join(dir)).unwrap() {
                seen.push(format!("{dir}/{}", entry.unwrap().file_name().to_string_lossy()));
            }
        }
        seen.sort();
        seen
    });
    assert_eq!(
        seen.join().unwrap(),
        ["/both", "/dir", "/merged", "dir/new", "merged/lower", "merged/upper", "upper"]
    );
}

#[test]
fn hostile_entries_are_refused() {
    let escape = Archive::default().link(b'2', "out", "..");
    let rows: Vec<(&str, Archive)> = vec![
        ("absolute name", Archive::default().file("/canary", "dead")),
        ("parent in name", Archive::default().file("../canary", "dead")),
        ("parent in the middle", Archive::default().file("a/../../canary", "dead")),
        ("through a symlink", escape.file("out/canary", "dead")),
        ("through an absolute symlink", Archive::default().link(b'2', "t", "/tmp").file("t/x", "dead")),
        ("through a symlink to itself", Archive::default().link(b'2', "l", "l").file("l/x", "dead")),
        ("directory through a symlink", Archive::default().link(b'2', "out", "..").directory("out/evil/")),
        ("parents through a symlink", Archive::default().link(b'2', "out", "..").file("out/a/b/c", "dead")),
        ("hard link outside", Archive::default().link(b'1', "x", "../canary")),
        ("absolute hard link", Archive::default().link(b'1', "x", "/etc/passwd")),
        (
            "hard link through a symlink",
            Archive::default().link(b'2', "out", "..").link(b'1', "x", "out/canary"),
        ),
        ("hard link to a directory", Archive::default().directory("d/").link(b'1', "x", "d")),
        ("hard link to nothing", Archive::default().link(b'1', "x", "nothing")),
        ("whiteout of the parent", Archive::default().file("a/.wh...", "")),
        ("whiteout of itself", Archive::default().file("a/.wh..", "")),
        ("whiteout of nothing", Archive::default().file("a/.wh.", "")),
        ("content in a whiteout", Archive::default().file(".wh.a/b", "")),
        ("whiteout device", Archive::default().raw(b'3', b"x", b"", b"", |_| {})),
        ("empty symlink", Archive::default().link(b'2', "x", "")),
        ("file as the root", Archive::default().file(".", "x")),
        ("zero in a name", Archive::default().pax(&[("path", b"a\0b")]).file("x", "")),
        ("file as a directory", Archive::default().file("f", "").file("f/x", "")),
        (
            "opaque mark through a symlink",
            Archive::default().link(b'2', "out", "..").file("out/.wh..wh..opq", ""),
        ),
    ];
    for (name, archive) in rows {
        let error = Layer::new().extract(archive).expect_err(name);
        assert!(matches!(error, ImageError::Hostile { .. }), "{name}: {error}");
    }
}

#[test]
fn a_symlink_is_replaced_not_followed() {
    let layer = Layer::new();
    let archive = Archive::default()
        .link(b'2', "x", "../canary")
        .file("x", "inside")
        .link(b'2', "d", "..")
        .directory("d/")
        .file("d/canary", "inside");
    layer.extract(archive).unwrap();
    assert_eq!(fs::read_to_string(layer.path("x")).unwrap(), "inside");
    assert_eq!(fs::read_to_string(layer.path("d/canary")).unwrap(), "inside");
}

#[test]
fn unsupported_and_broken_archives() {
    let sparse = Archive::default().raw(b'S', b"x", b"", b"", |_| {});
    let pax_sparse = Archive::default().pax(&[("GNU.sparse.major", b"1")]).file("x", "");
    let size = Archive::default().pax(&[("size", b"9000000000")]).file("x", "abc");
    let odd = Archive::default().raw(b'Z', b"x", b"", b"", |_| {});
    for (name, archive) in [("sparse", sparse), ("pax sparse", pax_sparse), ("size", size), ("type", odd)] {
        let error = Layer::new().extract(archive).expect_err(name);
        assert!(matches!(error, ImageError::Unsupported(_)), "{name}: {error}");
    }
    let whole = Archive::default().file("file", &"x".repeat(2000)).end();
    for cut in [1, 511, 513, 1500, 2511] {
        let error = Layer::new().extract_bytes(&whole[..cut]).expect_err("cut");
        assert!(matches!(error, ImageError::Invalid { .. } | ImageError::Io { .. }), "{cut}: {error}");
    }
    let mut flipped = whole;
    flipped[3] ^= 1;
    assert!(matches!(Layer::new().extract_bytes(&flipped), Err(ImageError::Invalid { .. })));
    Layer::new().extract_bytes(&[]).unwrap();
    Layer::new().extract_bytes(&[0; 1024]).unwrap();
}

#[test]
fn limits() {
    let limits = Limits { bytes: 10_000, entries: 5 };
    let run = |archive: Archive| extract(archive.end().as_slice(), &Layer::new().path(""), &limits);
    let long = Archive::default().pax(&[("path", "x/".repeat(3000).as_bytes())]).file("x", "");
    let many = (0..6).fold(Archive::default(), |archive, n| archive.file(&n.to_string(), ""));
    let large = Archive::default().file("x", &"x".repeat(20_000));
    let header = Archive::default().raw(b'x', b"p", b"", b"", |h| h.set_size(1 << 40));
    let bomb = Archive::default().raw(b'0', b"x", b"", b"", |h| h.set_size(1 << 40));
    for (name, archive) in [("path", long), ("entries", many), ("bytes", large), ("header", header)] {
        let error = run(archive).expect_err(name);
        assert!(matches!(error, ImageError::Limit { .. }), "{name}: {error}");
    }
    assert!(run(bomb).is_err());
}

#[test]
fn a_small_file_does_not_unpack_to_a_full_disk() {
    // Zeros compress a thousandfold; the reader stops at the limit long before the announced end.
    struct Zeros(Vec<u8>);
    impl Read for Zeros {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                buffer.fill(0);
                return Ok(buffer.len());
            }
            let take = self.0.len().min(buffer.len());
            buffer[..take].copy_from_slice(&self.0[..take]);
            self.0.drain(..take);
            Ok(take)
        }
    }
    let header = Archive::default().raw(b'0', b"zeros", b"", b"", |h| h.set_size(1 << 40)).0;
    let layer = Layer::new();
    let error = extract(Zeros(header), &layer.path(""), &Limits { bytes: 1 << 20, entries: 10 }).unwrap_err();
    assert!(matches!(error, ImageError::Limit { .. }), "{error}");
    assert!(layer.meta("zeros").len() <= 1 << 20);
    // Endless padding after the end marker is no way around it.
    let layer = Layer::new();
    assert!(extract(Zeros(vec![]), &layer.path(""), &Limits { bytes: 1 << 20, entries: 10 }).is_err());
}

fn any_name() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("a"),
        Just("b"),
        Just("c"),
        Just(".."),
        Just("."),
        Just(""),
        Just(".wh.a"),
        Just(".wh..wh..opq"),
        Just("canary"),
        Just("fs"),
    ];
    proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever entries come in whatever order, nothing outside of the layer is touched.
    #[test]
    fn nothing_escapes(entries in proptest::collection::vec((any_name(), any_name(), 0..6_u8), 1..12)) {
        let layer = Layer::new();
        let archive = entries.iter().fold(Archive::default(), |archive, (path, link, kind)| match kind {
            0 => archive.file(path, "evil"),
            1 => archive.directory(path),
            2 => archive.link(b'2', path, link),
            3 => archive.link(b'1', path, link),
            4 => archive.link(b'2', path, ".."),
            _ => archive.raw(b'6', path.as_bytes(), b"", b"", |_| {}),
        });
        let _ = layer.extract(archive);
    }
}

/// The same few entries again and again, as a compressed archive has them for nearly nothing.
struct Repeated {
    entry: Vec<u8>,
    left: u64,
    at: usize,
}

impl Read for Repeated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Ok(0);
        }
        let count = (&self.entry[self.at..]).read(buffer)?;
        self.at += count;
        if self.at == self.entry.len() {
            (self.at, self.left) = (0, self.left - 1);
        }
        Ok(count)
    }
}

/// Bytes of this process in memory.
fn resident() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn directories_named_again_and_again_cost_no_memory() {
    let root = tempfile::tempdir().unwrap();
    let path = vec!["d".repeat(200); 19].join("/");
    let entry = Archive::default().pax(&[("path", path.as_bytes())]).directory("d").0;
    let before = resident();
    extract(Repeated { entry, left: 20_000, at: 0 }, root.path(), &Limits::default()).unwrap();
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes");
}

#[test]
fn the_last_time_of_a_directory_counts() {
    let root = tempfile::tempdir().unwrap();
    let archive = Archive::default()
        .directory("d")
        .file("d/f", "")
        .raw(b'5', b"d", b"", b"", |header| header.set_mtime(2_000_000))
        .end();
    extract(archive.as_slice(), root.path(), &Limits::default()).unwrap();
    assert_eq!(fs::metadata(root.path().join("d")).unwrap().mtime(), 2_000_000);
}

//! The image store through its public door: archives in, directories out.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod image_fixtures;

use std::collections::HashSet;
use std::fs;
use std::io::Cursor;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use ferrite_runtime::image::{
    Auth, Builtin, Digest, ImageError, ImageStore, Limits, Platform, RegistryConfig, chain_ids,
};
use image_fixtures::{TestImage, count, gzip, quiet, read, store, tar};
use serde_json::json;

fn two_layers() -> Vec<Vec<u8>> {
    vec![
        tar(&[("both", b"lower"), ("only-lower", b"x")]),
        tar(&[("both", b"upper"), (".wh.only-lower", b"")]),
    ]
}

#[tokio::test]
async fn docker_archives() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = TestImage::plain(two_layers());
    let names = store.import(Cursor::new(image.docker_save(&["app:v1", "registry.example/app:v1"])), quiet());
    assert_eq!(names.await.unwrap(), ["docker.io/library/app:v1", "registry.example/app:v1"]);

    let record = store.image("app:v1").unwrap();
    assert_eq!(record.id, image.id());
    assert_eq!(record.repo_tags, ["docker.io/library/app:v1", "registry.example/app:v1"]);
    let diff_ids: Vec<Digest> = image.layers.iter().map(|layer| Digest::of(layer)).collect();
    assert_eq!(record.chain_ids, chain_ids(&diff_ids));
    assert_eq!(record.config.config().as_ref().unwrap().entrypoint().as_ref().unwrap(), &["/bin/sh"]);
    for name in [record.id.to_string(), record.id.hex(), record.id.hex()[..12].to_owned()] {
        assert_eq!(store.image(&name).unwrap().id, record.id, "{name}");
    }

    let dirs = store.lower_dirs("app:v1");
    assert_eq!(dirs.len(), 2);
    assert_eq!(
        (read(&dirs[0], "both"), read(&dirs[1], "both")),
        ("upper".into(), "lower".into()),
        "top-most first"
    );
    assert!(store.lower_dirs("nothing").is_empty());
    assert_eq!(count(root.path().join("images/blobs/sha256")), 1, "only the configuration is kept packed");
    assert_eq!(count(root.path().join("images/ingest")), 0);
}

#[tokio::test]
async fn oci_archives_in_all_packings() {
    let root = tempfile::tempdir().unwrap();
    let zstd = |bytes: &[u8]| zstd::stream::encode_all(bytes, 1).unwrap();
    type Pack<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;
    let packings: [(&str, Pack<'_>); 3] = [("plain", &<[u8]>::to_vec), ("gzip", &gzip), ("zstd", &zstd)];
    for (name, pack) in packings {
        let store = store(&root.path().join(name));
        let image = TestImage::new(two_layers(), pack);
        let layout = image.oci_layout(json!({"org.opencontainers.image.ref.name": "example.com/app:1"}));
        let names = store.import(Cursor::new(pack(&layout)), quiet()).await.unwrap();
        assert_eq!(names, ["example.com/app:1"], "{name}");
        assert_eq!(read(&store.lower_dirs("example.com/app:1")[0], "both"), "upper", "{name}");
    }
    // Two gzip members one after the other are one stream.
    let store = store(root.path());
    let image = TestImage::new(two_layers(), |layer| [gzip(&layer[..700]), gzip(&layer[700..])].concat());
    store.import(Cursor::new(image.docker_save(&["members"])), quiet()).await.unwrap();
    // A bare tag names nothing; the image is known by its id.
    let other = TestImage::plain(vec![tar(&[("x", b"y")])]);
    let layout = other.oci_layout(json!({"org.opencontainers.image.ref.name": "latest"}));
    let names = store.import(Cursor::new(layout), quiet()).await.unwrap();
    assert_eq!(names, [other.id().to_string()]);
    assert!(store.image(&names[0]).is_some());
}

#[tokio::test]
async fn old_docker_archives_link_repeated_layers() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let layer = tar(&[("x", b"y")]);
    let image = TestImage::plain(vec![layer.clone(), layer.clone()]);
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(layer.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, "aaa/layer.tar", layer.as_slice()).unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    builder.append_link(&mut header, "bbb/layer.tar", "../aaa/layer.tar").unwrap();
    let manifest =
        json!([{"Config": "c.json", "RepoTags": ["linked:1"], "Layers": ["aaa/layer.tar", "bbb/layer.tar"]}]);
    for (name, bytes) in
        [("c.json", image.config.clone()), ("manifest.json", manifest.to_string().into_bytes())]
    {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, name, bytes.as_slice()).unwrap();
    }
    store.import(Cursor::new(builder.into_inner().unwrap()), quiet()).await.unwrap();
    assert_eq!(store.lower_dirs("linked:1").len(), 2);
}

#[tokio::test]
async fn broken_archives_leave_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let good = TestImage::plain(two_layers());
    let mut wrong_layer = TestImage::plain(two_layers());
    wrong_layer.packed[1] = tar(&[("not", b"it")]);
    let mut hostile = TestImage::plain(vec![tar(&[("x", b"y")])]);
    hostile.packed[0][..9].copy_from_slice(b"../escape");
    let mut fewer = TestImage::plain(two_layers());
    fewer.packed.pop();
    let mut config = TestImage::plain(two_layers());
    config.config = b"{}".to_vec();
    let mut layout = good.oci_layout(json!({}));
    let place = layout.windows(5).rposition(|w| w == b"upper").unwrap();
    layout[place] ^= 1;
    let rows: Vec<(&str, Vec<u8>, &str)> = vec![
        ("not an archive", b"hello".to_vec(), "header"),
        ("empty", Vec::new(), "neither manifest.json nor index.json"),
        ("layer of other content", wrong_layer.docker_save(&["a"]), "corrupt"),
        ("broken layer", hostile.docker_save(&["a"]), "check sum"),
        ("too few layers", fewer.docker_save(&["a"]), "1 layers in the archive, 2"),
        ("no configuration", config.docker_save(&["a"]), "configuration"),
        ("blob of other content", layout, "corrupt"),
        ("bad name", good.docker_save(&["UPPER"]), "invalid image reference"),
        ("missing file", tar(&[("manifest.json", b"[{\"Config\":\"no.json\",\"Layers\":[]}]")]), "missing"),
        ("manifest of another shape", tar(&[("manifest.json", b"{}")]), "manifest.json"),
        ("truncated gzip", gzip(&good.docker_save(&["a"]))[..200].to_vec(), "read the archive"),
    ];
    for (name, archive, want) in rows {
        let error = store.import(Cursor::new(archive), quiet()).await.expect_err(name);
        assert!(error.to_string().contains(want), "{name}: {error}");
        assert!(store.list().unwrap().is_empty(), "{name}");
        assert_eq!(count(root.path().join("images/layers")), 0, "{name}");
        assert_eq!(count(root.path().join("images/blobs/sha256")), 0, "{name}");
    }
}

#[tokio::test]
async fn a_bomb_stops_at_the_limit() {
    let root = tempfile::tempdir().unwrap();
    let limits = Limits { bytes: 1 << 20, entries: 100 };
    let store = ImageStore::open_with(root.path().to_owned(), limits).unwrap();
    let image = TestImage::new(vec![tar(&[("zeros", &vec![0; 8 << 20])])], gzip);
    assert!(image.packed[0].len() < 100 << 10);
    let error = store.import(Cursor::new(image.docker_save(&["bomb"])), quiet()).await.unwrap_err();
    assert!(matches!(error, ImageError::Limit { .. }), "{error}");
    assert_eq!(count(root.path().join("layers")), 0);
}

#[tokio::test]
async fn layers_are_shared_and_collected() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let base = tar(&[("base", b"b")]);
    let one = TestImage::plain(vec![base.clone(), tar(&[("one", b"1")])]);
    let two = TestImage::plain(vec![base, tar(&[("two", b"2")])]);
    for (image, name) in [(&one, "one"), (&two, "two")] {
        store.import(Cursor::new(image.docker_save(&[name])), quiet()).await.unwrap();
    }
    let layers = || count(root.path().join("images/layers"));
    assert_eq!(layers(), 3, "the base is there once");
    let usage = store.usage().unwrap();
    assert_eq!(usage.bytes, 3 + (one.config.len() + two.config.len()) as u64);

    let used = HashSet::from([two.id()]);
    assert!(matches!(store.remove("two", &used), Err(ImageError::InUse(_))));
    store.remove("one", &used).unwrap();
    store.remove("one", &used).unwrap();
    assert_eq!(layers(), 2);
    assert!(store.image("one").is_none() && store.lower_dirs("two")[1].join("base").exists());

    store.tag("two", &"other/name:1".parse().unwrap()).unwrap();
    store.remove("two", &HashSet::new()).unwrap();
    assert!(store.image("two").is_none() && store.image("other/name:1").is_some(), "one name of two");
    store.remove(&two.id().to_string(), &HashSet::new()).unwrap();
    assert_eq!((layers(), count(root.path().join("images/blobs/sha256"))), (0, 0));
}

#[tokio::test]
async fn survives_restart_and_crash() {
    let root = tempfile::tempdir().unwrap();
    let image = TestImage::plain(two_layers());
    let images = root.path().join("images");
    {
        let store = store(root.path());
        store.import(Cursor::new(image.docker_save(&["app"])), quiet()).await.unwrap();
    }
    // The remains of a crash: half a layer, half a blob, half an index.
    fs::create_dir_all(images.join("layers/tmp-1-0/fs")).unwrap();
    fs::create_dir_all(images.join("layers").join(Digest::of(b"no record").hex()).join("fs")).unwrap();
    fs::write(images.join("ingest/tmp-1-1"), "half").unwrap();
    fs::write(images.join("index.tmp"), "{").unwrap();
    let reopened = store(root.path());
    assert_eq!(reopened.image("app").unwrap().id, image.id());
    assert!(matches!(ImageStore::open(images.clone()), Err(ImageError::Locked(_))), "one process at a time");
    assert_eq!((count(images.join("layers")), count(images.join("ingest"))), (2, 0));
    drop(reopened);

    // A layer that went missing takes the image with it, and importing again repairs it.
    let lost = fs::read_dir(images.join("layers")).unwrap().next().unwrap().unwrap().path();
    fs::remove_dir_all(lost).unwrap();
    let reopened = store(root.path());
    assert!(reopened.image("app").is_none());
    reopened.import(Cursor::new(image.docker_save(&["app"])), quiet()).await.unwrap();
    assert_eq!(reopened.lower_dirs("app").len(), 2);
}

#[tokio::test]
async fn a_moved_name_leaves_the_old_image() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (old, new) =
        (TestImage::plain(vec![tar(&[("v", b"1")])]), TestImage::plain(vec![tar(&[("v", b"2")])]));
    for image in [&old, &new] {
        store.import(Cursor::new(image.docker_save(&["app"])), quiet()).await.unwrap();
    }
    assert_eq!(store.image("app").unwrap().id, new.id());
    assert_eq!(store.image(&old.id().to_string()).unwrap().repo_tags, Vec::<String>::new());
    store.collect(&HashSet::new()).unwrap();
    assert_eq!(store.list().unwrap().len(), 2, "images go only when somebody removes them");
}

#[tokio::test]
async fn built_in_image() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let binary = root.path().join("program");
    fs::copy("/bin/busybox", &binary).expect("busybox-static is installed");
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    let builtin = Builtin {
        name: "ferrite.local/tools:latest".parse().unwrap(),
        binary: binary.clone(),
        entrypoint: vec!["/ferrite".into(), "tools".into()],
        links: vec!["sleep".into()],
    };
    let pull = async |name: &str| {
        let reference = name.parse().unwrap();
        store.pull(&reference, Auth::Anonymous, &Platform::host(), &RegistryConfig::default(), quiet()).await
    };
    let absent = pull("ferrite.local/tools").await.unwrap_err();
    assert!(matches!(absent, ImageError::BuiltIn(_)), "{absent}");

    let id = store.add_builtin(&builtin).unwrap();
    assert_eq!(store.add_builtin(&builtin).unwrap(), id);
    assert_eq!(pull("ferrite.local/tools").await.unwrap().id, id, "present, so nothing to pull");
    let record = store.image("ferrite.local/tools").unwrap();
    assert!(record.pinned);
    assert_eq!(
        record.config.config().as_ref().unwrap().entrypoint().as_ref().unwrap(),
        &["/ferrite", "tools"]
    );
    let layer = store.lower_dirs("ferrite.local/tools").remove(0);
    assert_eq!(fs::metadata(layer.join("tmp")).unwrap().mode() & 0o7777, 0o1777);
    assert!(read(&layer, "etc/passwd").contains("nobody"));
    assert_eq!(fs::metadata(layer.join("ferrite")).unwrap().len(), fs::metadata(&binary).unwrap().len());
    let said = Command::new(layer.join("ferrite")).arg0("busybox").args(["echo", "hello"]).output().unwrap();
    assert_eq!(said.stdout, b"hello\n");

    assert!(matches!(store.remove("ferrite.local/tools", &HashSet::new()), Err(ImageError::Pinned(_))));
    let thief = TestImage::plain(vec![tar(&[("x", b"y")])]);
    let stolen = store.import(Cursor::new(thief.docker_save(&["ferrite.local/tools"])), quiet()).await;
    assert!(matches!(stolen, Err(ImageError::Pinned(_))), "archives cannot take a built-in name");

    // A new version of the program arrives as packages do: a new file in place of the old.
    let mut content = fs::read(&binary).unwrap();
    content.extend(b"new version");
    fs::remove_file(&binary).unwrap();
    fs::write(&binary, content).unwrap();
    let refreshed = store.add_builtin(&builtin).unwrap();
    assert_ne!(refreshed, id);
    assert_eq!(store.image("ferrite.local/tools").unwrap().id, refreshed);
    assert!(store.lower_dirs(&id.to_string())[0].join("ferrite").exists(), "containers of the old one go on");
    store.remove(&id.to_string(), &HashSet::new()).unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
}

use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

fn payload(files: &[(&str, &str)]) -> Payload {
    files.iter().map(|(path, data)| (path.to_string(), File::new(data.as_bytes().to_vec(), 0o644))).collect()
}

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn old_or_new_and_nothing_left_over() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("v");
    assert!(write(&target, &payload(&[("a", "1"), ("d/e/b", "2"), ("d/c", "3")]), None).unwrap());
    assert_eq!(fs::read_to_string(target.join("d/e/b")).unwrap(), "2");
    assert_eq!(fs::read_link(target.join("a")).unwrap(), Path::new("..data/a"));
    assert_eq!(fs::metadata(&target).unwrap().mode() & 0o7777, 0o755);
    assert!(
        !write(&target, &payload(&[("a", "1"), ("d/e/b", "2"), ("d/c", "3")]), None).unwrap(),
        "unchanged"
    );
    let before = fs::read_link(target.join(DATA)).unwrap();
    assert!(write(&target, &payload(&[("a", "3")]), None).unwrap());
    assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "3");
    assert!(fs::symlink_metadata(target.join("d")).is_err());
    assert!(!target.join(before).exists(), "the old directory is gone");
    assert_eq!(names(&target).len(), 3, "{:?}", names(&target));
}

#[test]
fn the_owning_group_can_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = payload(&[("a", "1")]);
    files.get_mut("a").unwrap().mode = 0o400;
    write(dir.path(), &files, Some(1234)).expect("this test needs root");
    let meta = fs::metadata(dir.path().join("a")).unwrap();
    assert_eq!((meta.gid(), meta.mode() & 0o777), (1234, 0o440));
    let root = fs::metadata(dir.path()).unwrap();
    assert_eq!((root.gid(), root.mode() & 0o7777), (1234, 0o2755));
}

#[test]
fn names_of_time_stamped_directories() {
    for (name, expected) in [
        ("..2026_01_02_03_04_05_0123456789abcdef", true),
        ("..2016_02_01_15_04_05.12345678", true),
        ("..2026/../../etc", false),
        ("/etc", false),
        ("..data", false),
        ("..", false),
        ("2026", false),
        ("", false),
    ] {
        assert_eq!(is_stamp(OsStr::new(name)), expected, "{name}");
    }
}

/// `..data` as a container with a writable volume would leave it: nothing outside is read, written or removed.
#[test]
fn a_target_that_leads_out_is_not_followed() {
    for absolute in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (target, victim) = (dir.path().join("v"), dir.path().join("victim"));
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("kept"), "x").unwrap();
        write(&target, &payload(&[("a", "1")]), None).unwrap();
        fs::remove_file(target.join(DATA)).unwrap();
        let leads_to = if absolute { victim.clone() } else { "../victim".into() };
        symlink(leads_to, target.join(DATA)).unwrap();
        assert!(write(&target, &payload(&[("a", "2")]), None).unwrap());
        assert_eq!(fs::read_to_string(victim.join("kept")).unwrap(), "x");
        assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "2");
        assert_eq!(names(&victim).len(), 1);
    }
}

#[test]
fn names_that_the_writer_wants_are_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let (target, victim) = (dir.path().join("v"), dir.path().join("victim"));
    fs::create_dir_all(target.join(NEW_DATA).join("x")).unwrap();
    fs::create_dir_all(target.join(DATA).join("x")).unwrap();
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("kept"), "x").unwrap();
    symlink(&victim, target.join("a")).unwrap();
    assert!(write(&target, &payload(&[("a", "1")]), None).unwrap());
    assert_eq!(fs::read_to_string(target.join("a")).unwrap(), "1");
    assert!(victim.join("kept").exists());
}

#[test]
fn an_interrupted_write_is_cleaned_up_and_finished() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path();
    let files = payload(&[("a", "1"), ("b", "2")]);
    write(target, &files, None).unwrap();
    // Stopped between the directory and the link, before the rename, and before the visible names.
    fs::create_dir(target.join("..2026_01_01_00_00_00_0000000000000000")).unwrap();
    symlink("..2026_01_01_00_00_00_0000000000000000", target.join(NEW_DATA)).unwrap();
    fs::remove_file(target.join("b")).unwrap();
    assert!(!write(target, &files, None).unwrap());
    assert_eq!(fs::read_to_string(target.join("b")).unwrap(), "2");
    assert_eq!(names(target).len(), 4, "{:?}", names(target));
    // Stopped right after the rename: the old directory is still there.
    fs::create_dir(target.join("..2026_01_01_00_00_00_0000000000000001")).unwrap();
    assert!(write(target, &payload(&[("a", "2")]), None).unwrap());
    assert_eq!(names(target).len(), 3, "{:?}", names(target));
}

#[test]
fn a_volume_an_earlier_version_made_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    write(dir.path(), &payload(&[("a", "1")]), None).unwrap();
    assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o7777, 0o755);
}

//! Names, places and records of machines.

use super::*;

#[test]
fn names_of_nodes() {
    for (name, good) in [
        ("node-2", true),
        ("a", true),
        ("a.b", true),
        ("", false),
        ("-a", false),
        ("a-", false),
        ("A", false),
        ("a/b", false),
        ("..", false),
        ("a..b", false),
        ("options", false),
        (&"a".repeat(64), false),
    ] {
        assert_eq!(check_name(name).is_ok(), good, "{name:?}");
    }
}

#[test]
fn places_are_given_again_only_when_free() {
    let dir = tempfile::tempdir().unwrap();
    let machines = Machines::lock(&Paths::new(&dir.path().join("d"))).unwrap();
    let range = "10.243.0.0/24".parse().unwrap();
    let a = machines.add("a", Role::Node, range).unwrap();
    let b = machines.add("b", Role::Node, range).unwrap();
    assert_eq!(
        (a.addresses.to_string(), b.addresses.to_string()),
        ("10.243.0.2".into(), "10.243.0.3".into())
    );
    assert!(machines.add("a", Role::Node, range).is_err() && machines.find("c").is_err());
    std::fs::remove_file(machines.record("a")).unwrap();
    assert_eq!(machines.add("c", Role::ControlPlane, range).unwrap().index, 2);
    let names: Vec<String> = Machines::list(&machines.paths).into_iter().map(|m| m.name).collect();
    assert_eq!(names, ["c", "b"]);
    let both = machines.add("both", Role::Node, "10.243.0.0/24,fd00:243::/112".parse().unwrap()).unwrap();
    assert_eq!(both.addresses.to_string(), "10.243.0.4,fd00:243::4");
    let tiny = "10.243.0.0/30".parse().unwrap();
    assert!(machines.add("d", Role::Node, tiny).is_err(), "no room");
}

#[test]
fn a_partition_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let machines = Machines::lock(&Paths::new(&dir.path().join("d"))).unwrap();
    let mut machine = machines.add("a", Role::Node, "10.243.0.0/24".parse().unwrap()).unwrap();
    machine.cut = true;
    machine.holder = i32::try_from(std::process::id()).ok();
    machine.started = machine.holder.and_then(status::start_time).unwrap();
    machines.save(&machine).unwrap();
    let kept = machines.find("a").unwrap();
    assert!(kept.cut);
    assert_eq!(Machines::condition(&machines.paths, &kept), Condition::NoAgent, "nothing runs there");
    assert!(matches!(machines.check_new("a"), Err(MachineError::Exists(_))));
    assert!(machines.check_new("b").is_ok());
    // Records of earlier versions do not say it.
    let text = std::fs::read_to_string(machines.record("a")).unwrap();
    let mut older: ferrite_json::Value = ferrite_json::from_str(&text).unwrap();
    older.as_object_mut().unwrap().remove("cut");
    std::fs::write(machines.record("a"), older.to_string()).unwrap();
    assert!(!machines.find("a").unwrap().cut);
}

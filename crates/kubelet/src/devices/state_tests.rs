use super::*;

const GPU: &str = "example.com/gpu";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn ids(list: &str) -> Ids {
    list.split_whitespace().map(str::to_owned).collect()
}

/// `a b! c@0 d@0,1`: `!` is unhealthy, `@` names NUMA nodes.
fn list(text: &str) -> BTreeMap<String, Device> {
    let device = |word: &str| {
        let (name, nodes) = word.split_once('@').unwrap_or((word, ""));
        let nodes = nodes.split(',').filter_map(|n| n.parse().ok()).collect();
        (name.trim_end_matches('!').to_owned(), Device { healthy: !name.ends_with('!'), nodes })
    };
    text.split_whitespace().map(device).collect()
}

fn state(devices: &str) -> DeviceState {
    let mut state = DeviceState::default();
    state.connected(GPU);
    state.update(GPU, list(devices));
    state
}

fn wish<'a>(pod: &'a str, required: usize, reusable: &'a Ids) -> Wish<'a> {
    Wish { pod, container: "c", resource: GPU, required, reusable, affinity: None, has_preference: false }
}

fn give(state: &mut DeviceState, pod: &str, devices: &str) {
    let none = Ids::new();
    let devices = ids(devices);
    state.give(&wish(pod, devices.len(), &none), &devices, ContainerAllocateResponse::default());
}

#[test]
fn capacity_follows_the_plugin() {
    let mut s = DeviceState::default();
    assert!(s.capacity().is_empty());
    s.connected(GPU);
    assert_eq!(s.capacity()[GPU], (0, 0), "it has listed nothing");
    s.update(GPU, list("a b c!"));
    assert_eq!(s.capacity()[GPU], (3, 2));
    s.update(GPU, list("a"));
    assert_eq!(s.capacity()[GPU], (1, 1), "devices that are not listed are gone");
    s.disconnected(GPU, at(0));
    assert_eq!(s.capacity()[GPU], (1, 0));
    assert!(!s.expire(at(299)));
    assert_eq!(s.next_expiry(), Some(at(300)));
    assert!(s.expire(at(300)));
    assert_eq!(s.capacity()[GPU], (0, 0), "shown as none, not left out");
    assert!(s.registered().is_empty());
    assert!(!s.is_device_resource(GPU));
    assert_eq!(s.next_expiry(), None);
    s.connected(GPU);
    s.update(GPU, list("x y"));
    assert_eq!(s.capacity()[GPU], (2, 2));
}

#[test]
fn after_a_restart_there_is_nothing_until_plugins_come() {
    let mut before = state("a b");
    give(&mut before, "p", "a");
    let mut s = DeviceState::restored(before.pods().clone(), [GPU.to_owned()], at(0));
    assert_eq!(s.capacity()[GPU], (0, 0));
    assert!(s.is_device_resource(GPU));
    let none = Ids::new();
    let asked = wish("p", 1, &none);
    assert_eq!(s.select(&asked, &Preferences::new()), Err(DeviceError::NoneHealthy(GPU.into())));
    s.connected(GPU);
    s.update(GPU, list("a b"));
    assert_eq!(s.select(&asked, &Preferences::new()), Ok(Selection::Nothing));
    s.update(GPU, list("a! b"));
    assert_eq!(s.select(&asked, &Preferences::new()), Err(DeviceError::NoLongerHealthy(GPU.into())));
}

#[test]
fn what_is_chosen() {
    let chosen = |text: &str| Ok(Selection::Devices(ids(text)));
    let unavailable =
        |needed, available| Err(DeviceError::Unavailable { resource: GPU.into(), needed, available });
    for (what, devices, used, required, reusable, affinity, expected) in [
        ("one", "a b", "", 1, "", None, chosen("a")),
        ("used ones are not", "a b", "a", 1, "", None, chosen("b")),
        ("unhealthy ones are not", "a! b", "", 1, "", None, chosen("b")),
        ("too few", "a b! c", "a", 2, "", None, unavailable(2, 1)),
        ("none healthy", "a!", "", 1, "", None, Err(DeviceError::NoneHealthy(GPU.into()))),
        ("those of init containers first", "a b c", "b", 2, "b", None, chosen("a b")),
        ("those alone", "a b c", "b", 1, "b", None, chosen("b")),
        ("near", "a@0 b@1 c@1", "", 1, "", Some(1), chosen("b")),
        ("near, then others", "a@0 b@1 c", "", 2, "", Some(1), chosen("a b")),
        ("others before those without a node", "a b@0 c@1", "", 2, "", Some(1), chosen("b c")),
        ("near to two", "a@0 b@0,1", "", 1, "", Some(1), chosen("b")),
        ("no device has a node", "a b", "", 1, "", Some(1), chosen("a")),
    ] {
        let mut s = state(devices);
        if !used.is_empty() {
            give(&mut s, "other", used);
        }
        let (reusable, affinity) = (ids(reusable), affinity.map(|node: i64| BTreeSet::from([node])));
        let asked = Wish { affinity: affinity.as_ref(), ..wish("p", required, &reusable) };
        assert_eq!(s.select(&asked, &Preferences::new()), expected, "{what}");
    }
}

#[test]
fn the_plugin_is_asked_which_it_prefers() {
    let none = Ids::new();
    let near = BTreeSet::from([1]);
    for (what, devices, affinity, available, must, answer, expected) in [
        ("any", "a b c", None, "a b c", "", "b c", "b c"),
        ("too few are made up for", "a b c", None, "a b c", "", "c", "a c"),
        ("lies are left out", "a b c!", None, "a b", "", "c x b", "a b"),
        ("more than asked", "a b c", None, "a b c", "", "a b c", "a b"),
        ("among the near ones", "a@1 b@1 c@1 d@0", Some(&near), "a b c", "", "b c d", "b c"),
        ("near ones are given anyway", "a@0 b@1 c@0", Some(&near), "a b c", "b", "b c", "b c"),
    ] {
        let s = state(devices);
        let asked = Wish { affinity, has_preference: true, ..wish("p", 2, &none) };
        let query =
            Query { resource: GPU.into(), available: ids(available), must_include: ids(must), size: 2 };
        assert_eq!(s.select(&asked, &Preferences::new()), Ok(Selection::Ask(query.clone())), "{what}");
        let preferences = Preferences::from([(query, ids(answer))]);
        assert_eq!(s.select(&asked, &preferences), Ok(Selection::Devices(ids(expected))), "{what}");
    }
}

#[test]
fn devices_are_kept_until_the_pod_ends() {
    let none = Ids::new();
    let mut s = state("a b");
    let asked = wish("p", 1, &none);
    s.reserve(&asked, &ids("a"));
    let other = s.select(&wish("q", 2, &none), &Preferences::new());
    assert!(matches!(other, Err(DeviceError::Unavailable { available: 1, .. })), "{other:?}");
    s.unreserve(&asked);
    assert_eq!(s.select(&wish("q", 2, &none), &Preferences::new()), Ok(Selection::Devices(ids("a b"))));
    give(&mut s, "p", "a");
    assert_eq!(s.in_use_counts()[GPU], 1);
    let changed = s.select(&wish("p", 2, &none), &Preferences::new());
    assert_eq!(
        changed.unwrap_err().to_string(),
        "pod \"p\" container \"c\" changed request for resource \"example.com/gpu\" from 1 to 2"
    );
    assert!(s.release("p") && !s.release("p"));
    give(&mut s, "p", "a");
    give(&mut s, "q", "b");
    assert!(s.retain(&BTreeSet::from(["q".to_owned()])));
    assert!(s.given("p", "c").is_none() && s.given("q", "c").is_some());
}

#[test]
fn pods_hear_of_the_health_of_their_devices() {
    let mut s = state("a b c");
    give(&mut s, "p", "a");
    give(&mut s, "q", "b");
    assert!(s.update(GPU, list("a b c!")).is_empty(), "nobody has it");
    assert_eq!(s.update(GPU, list("a! b c")), ids("p"));
    assert!(!s.is_healthy(GPU, "a") && s.is_healthy(GPU, "b"));
    s.update(GPU, list("b c"));
    assert!(s.is_healthy(GPU, "a"), "as upstream: a device that nobody lists counts as healthy");
    assert_eq!(s.update(GPU, list("a b c")), ids("p"), "it came back");
}

#[test]
fn numa_nodes_of_devices_are_kept() {
    let mut s = state("a@0,1 b");
    give(&mut s, "p", "a b");
    let given = &s.given("p", "c").unwrap()[GPU];
    let expected = PerNuma::from([(-1, vec!["b".into()]), (0, vec!["a".into()]), (1, vec!["a".into()])]);
    assert_eq!(given.devices, expected);
    assert_eq!(given.ids(), ids("a b"));
}

use super::*;
use crate::topology::machine::tests::machine;
use ferrite_json::json;

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

fn pod(name: &str, cpu: &str) -> Pod {
    let amounts = json!({"cpu": cpu, "memory": "1Mi"});
    ferrite_json::from_value(json!({"metadata": {"name": name, "uid": name},
        "spec": {"containers": [{"name": "c", "resources": {"requests": &amounts, "limits": &amounts}}]}}))
    .unwrap()
}

fn container(pod: &Pod) -> PodContainer {
    model::containers(pod).remove(0)
}

fn start(
    options: CpuOptions,
    topology: CpuTopology,
    reserved: &str,
    file: Option<&[u8]>,
) -> Result<CpuState, CpuStartError> {
    let reserved = set(reserved);
    let milli = (reserved.len().max(1) * 1000) as i64;
    CpuState::start(CpuPolicy::Static(options), topology, &reserved, milli, file)
}

fn allocate(state: &mut CpuState, pod: &Pod) -> Result<String, CpuError> {
    state.allocate(pod, &container(pod), None, &CpuSet::default())?;
    Ok(state.of(&PodId::of(pod).uid, "c").map(ToString::to_string).unwrap_or_default())
}

/// Checksums that upstream's code calculates for the same data.
#[test]
fn checksums_are_upstreams() {
    for (text, sum) in [
        (
            r#"{"policyName":"static","defaultCpuSet":"0,2-3","entries":{"u2":{"c":"1"},"u1":{"b":"4-5","a":"6"}},"checksum":0}"#,
            4026705630,
        ),
        (r#"{"policyName":"none","defaultCpuSet":"","checksum":0}"#, 1353318690),
    ] {
        let checkpoint: Checkpoint = ferrite_json::from_str(text).unwrap();
        assert_eq!(checkpoint.sum(), sum, "{text}");
    }
}

#[test]
fn whole_processors_of_guaranteed_pods_are_exclusive() {
    let mut state = start(CpuOptions::default(), machine(1, 1, 2, 2), "0", None).unwrap();
    assert_eq!(state.of("x", "c").unwrap().to_string(), "0-3", "shared by all");
    assert_eq!(allocate(&mut state, &pod("half", "500m")).unwrap(), "0-3");
    let mut burstable = pod("burstable", "1");
    burstable.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap().limits = None;
    assert_eq!(allocate(&mut state, &burstable).unwrap(), "0-3");
    assert_eq!(allocate(&mut state, &pod("a", "1")).unwrap(), "2", "half of the core that is in use already");
    assert_eq!(state.of("x", "c").unwrap().to_string(), "0-1,3");
    assert_eq!(allocate(&mut state, &pod("b", "2")).unwrap(), "1,3");
    let full = allocate(&mut state, &pod("c", "1")).unwrap_err();
    assert_eq!(
        (full.reason(), full.to_string().as_str()),
        (
            "UnexpectedAdmissionError",
            "not enough cpus available to satisfy request: requested=1, available=0"
        )
    );
    assert_eq!(allocate(&mut state, &pod("a", "1")).unwrap(), "2", "it keeps what it has");
    assert!(state.release("b") && !state.release("b"));
    assert_eq!(state.of("x", "c").unwrap().to_string(), "0-1,3");
    assert_eq!(state.allocatable().to_string(), "1-3");
    assert!(state.retain(&BTreeSet::new()));
    assert_eq!(state.of("a", "c").unwrap().to_string(), "0-3");
}

#[test]
fn whole_cores_only() {
    let options = CpuOptions { full_pcpus_only: true, ..CpuOptions::default() };
    let mut state = start(options, machine(1, 1, 2, 2), "0", None).unwrap();
    let odd = allocate(&mut state, &pod("odd", "1")).unwrap_err();
    assert_eq!(odd.reason(), "SMTAlignmentError");
    assert_eq!(odd.to_string(), "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2");
    assert_eq!(allocate(&mut state, &pod("core", "2")).unwrap(), "1,3");
    let none = allocate(&mut state, &pod("more", "2")).unwrap_err();
    assert!(none.to_string().contains("available physical CPUs = 0"), "{none}");
    assert_eq!(allocate(&mut state, &pod("core", "2")).unwrap(), "1,3");
}

#[test]
fn the_file_is_checked_against_the_machine() {
    let two = || machine(1, 1, 2, 1);
    let plain = CpuOptions::default();
    let mut state = start(plain, two(), "0", None).unwrap();
    allocate(&mut state, &pod("a", "1")).unwrap();
    let file = state.file();
    let text = String::from_utf8(file.clone()).unwrap();
    assert!(
        text.contains(r#""policyName":"static""#) && text.contains(r#""entries":{"a":{"c":"1"}}"#),
        "{text}"
    );
    let again = start(plain, two(), "0", Some(&file)).unwrap();
    assert_eq!(again.of("a", "c").unwrap().to_string(), "1");
    let strict = CpuOptions { strict_cpu_reservation: true, ..plain };
    let strictly = start(strict, two(), "0", None).unwrap();
    assert_eq!(strictly.of("x", "c").unwrap().to_string(), "1", "nobody runs on reserved ones");
    for (what, state) in [
        ("another machine", start(plain, machine(1, 1, 4, 1), "0", Some(&file))),
        ("another reservation", start(plain, two(), "1", Some(&file))),
        ("strict now", start(strict, two(), "0", Some(&file))),
        ("damaged", start(plain, two(), "0", Some(text.replace("\"1\"", "\"0\"").as_bytes()))),
        ("half", start(plain, two(), "0", Some(&file[..file.len() / 2]))),
        ("nothing reserved", CpuState::start(CpuPolicy::Static(plain), two(), &set(""), 0, None)),
        ("reserved is not there", start(plain, two(), "7", None)),
        ("another policy", CpuState::start(CpuPolicy::None, two(), &set(""), 0, Some(&file))),
    ] {
        assert!(state.is_err(), "{what}");
    }
    let none = CpuState::start(CpuPolicy::None, two(), &set(""), 0, None).unwrap();
    assert!(none.of("a", "c").is_none() && none.hints(1, None, &set("")).is_none());
    assert!(CpuState::start(CpuPolicy::None, two(), &set(""), 0, Some(&none.file())).is_ok());
}

/// Hints are all sets of nodes that have enough, and the smallest that could ever do are preferred.
#[test]
fn hints_agree_with_their_definition() {
    let topology = machine(2, 1, 2, 1);
    let mut state = start(CpuOptions::default(), topology.clone(), "0", None).unwrap();
    let shown = |state: &CpuState, count: usize, reusable: &str| -> Vec<String> {
        let hints = state.hints(count, None, &set(reusable)).unwrap_or_default();
        let mark = |h: &Hint| {
            let nodes: String = h.affinity.unwrap().nodes().map(|n| n.to_string()).collect();
            format!("{nodes}{}", if h.preferred { "!" } else { "" })
        };
        hints.iter().map(mark).collect()
    };
    assert_eq!(shown(&state, 1, ""), ["0!", "1!", "01"]);
    assert_eq!(shown(&state, 2, ""), ["1!", "01"], "one of node 0 is reserved");
    assert_eq!(shown(&state, 3, ""), ["01!"]);
    assert!(shown(&state, 4, "").is_empty());
    assert_eq!(shown(&state, 1, "1"), ["0!", "01"], "what can be used again is used");
    let near = Some(NumaMask::of([1]));
    let two = pod("two", "2");
    state.allocate(&two, &container(&two), near, &CpuSet::default()).unwrap();
    assert_eq!(state.of("two", "c").unwrap().to_string(), "2-3");
    let has = state.exclusive("two", "c").cloned();
    assert_eq!(state.hints(2, has.as_ref(), &set("")).unwrap().len(), 2, "node 1, and both");
    assert_eq!(state.hints(1, has.as_ref(), &set("")), Some(Vec::new()), "it asks for something else now");
}

#[test]
fn options_are_read_by_name() {
    let read = |options: &[(&str, &str)], alpha| CpuOptions::parse(options.iter().copied(), alpha, true);
    let some = read(&[("full-pcpus-only", "true"), ("strict-cpu-reservation", "0")], false).unwrap();
    assert_eq!(some, CpuOptions { full_pcpus_only: true, ..CpuOptions::default() });
    assert_eq!(CpuPolicy::Static(some).options().into_keys().collect::<Vec<_>>(), ["full-pcpus-only"]);
    assert!(read(&[("align-by-socket", "true")], true).is_ok());
    for (options, said) in [
        (vec![("full", "true")], "unknown CPU Manager Policy option: \"full\""),
        (
            vec![("align-by-socket", "true")],
            "CPU Manager Policy Alpha-level Options not enabled, but option \"align-by-socket\" provided",
        ),
        (
            vec![("full-pcpus-only", "yes")],
            "bad value for option \"full-pcpus-only\": \"yes\" is neither true nor false",
        ),
        (
            vec![("distribute-cpus-across-numa", "true"), ("prefer-align-cpus-by-uncorecache", "true")],
            "static policy options prefer-align-cpus-by-uncorecache and distribute-cpus-across-numa can not be used at the same time",
        ),
    ] {
        assert_eq!(read(&options, false).unwrap_err().to_string(), said);
    }
}

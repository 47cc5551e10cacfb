//! Memory of NUMA nodes: examples, and a comparison of hints with a search through all groups.

use super::*;
use ferrite_json::{Value, json};
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn machine(nodes: u32, gib: u64) -> NodeMemory {
    (0..nodes).map(|node| (node, BTreeMap::from([(MEMORY.to_owned(), gib * GIB)]))).collect()
}

fn reservation(node: u32, kind: &str, amount: u64) -> NumaReservation {
    NumaReservation { numa_node: node, limits: BTreeMap::from([(kind.to_owned(), amount as i64)]) }
}

/// A gibibyte of the first node is reserved.
fn started(nodes: u32, gib: u64) -> MemoryState {
    let reservations = [reservation(0, MEMORY, GIB)];
    MemoryState::start(MemoryPolicy::Static, &machine(nodes, gib), &reservations, GIB as i64, None).unwrap()
}

fn resources(gib: u64) -> Value {
    let amounts = json!({"cpu": "1", "memory": format!("{gib}Gi")});
    json!({"limits": &amounts, "requests": &amounts})
}

/// A Guaranteed pod; containers that end first are named `init`, then those that stay.
fn pod(uid: &str, init: &[u64], regular: &[u64]) -> Pod {
    let container = |name: String, gib: u64| json!({"name": name, "resources": resources(gib)});
    let list = |prefix: &str, sizes: &[u64]| -> Vec<Value> {
        sizes.iter().enumerate().map(|(n, gib)| container(format!("{prefix}{n}"), *gib)).collect()
    };
    ferrite_json::from_value(json!({"metadata": {"name": uid, "uid": uid}, "spec": {
        "initContainers": list("i", init), "containers": list("c", regular)}}))
    .unwrap()
}

const ANY: Hint = Hint { affinity: None, preferred: false };

fn admit(state: &mut MemoryState, pod: &Pod) -> Result<(), MemoryError> {
    state.begin(pod);
    for container in model::containers(pod) {
        state.allocate(pod, &container, ANY)?;
    }
    Ok(())
}

fn nodes_of(state: &MemoryState, pod: &str, container: &str) -> Vec<u32> {
    state.nodes_of(pod, container).into_iter().collect()
}

fn free(state: &MemoryState) -> Vec<u64> {
    state.nodes.values().map(|node| node.memory_map[MEMORY].free / GIB).collect()
}

#[test]
fn memory_comes_from_one_node_if_it_can() {
    let mut state = started(2, 10);
    assert_eq!(free(&state), [9, 10]);
    admit(&mut state, &pod("a", &[], &[4])).unwrap();
    assert_eq!((nodes_of(&state, "a", "c0"), free(&state)), (vec![0], vec![5, 10]));
    // Nine of the first node were taken in part: the second has room.
    admit(&mut state, &pod("b", &[], &[8])).unwrap();
    assert_eq!(nodes_of(&state, "b", "c0"), [1]);
    // Both nodes give memory alone: together they may not.
    assert_eq!(admit(&mut state, &pod("c", &[], &[7])), Err(MemoryError::NoNodes));
    assert!(state.release("a") && !state.release("a"));
    assert!(state.release("b"));
    assert_eq!(free(&state), [9, 10]);
    // More than a node has: both of them, and nobody has one alone then.
    admit(&mut state, &pod("d", &[], &[15])).unwrap();
    assert_eq!((nodes_of(&state, "d", "c0"), free(&state)), (vec![0, 1], vec![0, 4]));
    admit(&mut state, &pod("e", &[], &[2])).unwrap();
    assert_eq!(nodes_of(&state, "e", "c0"), [0, 1], "the group has room");
    assert_eq!(admit(&mut state, &pod("f", &[], &[3])), Err(MemoryError::NoNodes));
    state.release("d");
    state.release("e");
    assert!(state.nodes.values().all(|node| node.cells.len() == 1 && node.number_of_assignments == 0));
}

#[test]
fn memory_of_init_containers_is_used_again() {
    let mut state = started(1, 10);
    let p = pod("a", &[5, 3], &[4, 2]);
    admit(&mut state, &p).unwrap();
    // Five for the init containers; four of them and one more for the regular ones.
    assert_eq!(free(&state), [3]);
    let sizes = |name: &str| state.blocks("a", name).unwrap()[0].size / GIB;
    let all: u64 = ["i0", "i1", "c0", "c1"].iter().map(|name| sizes(name)).sum();
    assert_eq!(all, 6, "what the pod has is counted once");
    let request = state.wanted_by_pod(&p, &model::containers(&p));
    assert_eq!(request[MEMORY], 6 * GIB);
    state.release("a");
    assert_eq!(free(&state), [9]);
    assert_eq!(state.nodes[&0].memory_map[MEMORY].reserved, 0);
}

#[test]
fn hints_lead_to_nodes_and_are_extended() {
    let mut state = started(4, 10);
    let p = pod("a", &[], &[2]);
    let container = &model::containers(&p)[0];
    let hint =
        |nodes: &[u32], preferred| Hint { affinity: Some(NumaMask::of(nodes.iter().copied())), preferred };
    state.begin(&p);
    state.allocate(&p, container, hint(&[2], true)).unwrap();
    assert_eq!(nodes_of(&state, "a", "c0"), [2]);
    // It has its memory: the hint is the same again, and a second allocation changes nothing.
    let hints = state.hints(&p, container);
    assert_eq!(hints[MEMORY], Some(vec![hint(&[2], true)]));
    state.allocate(&p, container, hint(&[0], true)).unwrap();
    assert_eq!(nodes_of(&state, "a", "c0"), [2]);
    // A merge left one node, which has too little.
    let large = pod("b", &[], &[15]);
    let container = &model::containers(&large)[0];
    state.begin(&large);
    state.allocate(&large, container, hint(&[3], true)).unwrap();
    assert_eq!(nodes_of(&state, "b", "c0"), [0, 3]);
    let other = pod("c", &[], &[12]);
    let container = &model::containers(&other)[0];
    assert_eq!(state.allocate(&other, container, hint(&[1, 2], true)), Err(MemoryError::Violation));
}

#[test]
fn pods_that_have_no_memory_of_their_own() {
    let mut state = started(1, 10);
    let burstable: Pod = ferrite_json::from_value(json!({"metadata": {"uid": "b"}, "spec": {"containers": [
        {"name": "c", "resources": {"requests": {"memory": "1Gi"}}}]}}))
    .unwrap();
    let mut whole = pod("w", &[], &[1]);
    whole.spec.as_mut().unwrap().resources = ferrite_json::from_value(resources(2)).map(Some).unwrap();
    for pod in [burstable, whole] {
        admit(&mut state, &pod).unwrap();
        let containers = model::containers(&pod);
        assert!(
            state.hints(&pod, &containers[0]).is_empty() && state.pod_hints(&pod, &containers).is_empty()
        );
    }
    assert!(state.pods().is_empty());
    let mut none = MemoryState::start(MemoryPolicy::None, &machine(1, 1), &[], 0, None).unwrap();
    admit(&mut none, &pod("a", &[], &[1])).unwrap();
    assert!(none.pods().is_empty() && none.allocatable().is_empty());
}

#[test]
fn huge_pages_are_memory_of_their_own() {
    let mut machine = machine(2, 10);
    for kinds in machine.values_mut() {
        kinds.insert("hugepages-1Gi".into(), 2 * GIB);
    }
    let reservations = [reservation(0, MEMORY, GIB)];
    let mut state =
        MemoryState::start(MemoryPolicy::Static, &machine, &reservations, GIB as i64, None).unwrap();
    assert_eq!(free(&state), [7, 8], "pages are no plain memory");
    let amounts = json!({"cpu": "1", "memory": "1Gi", "hugepages-1Gi": "2Gi"});
    let asking = |uid: &str| -> Pod {
        ferrite_json::from_value(json!({"metadata": {"uid": uid}, "spec": {"containers": [
            {"name": "c", "resources": {"limits": &amounts, "requests": &amounts}}]}}))
        .unwrap()
    };
    admit(&mut state, &asking("a")).unwrap();
    admit(&mut state, &asking("b")).unwrap();
    assert_eq!((nodes_of(&state, "a", "c"), nodes_of(&state, "b", "c")), (vec![0], vec![1]));
    assert_eq!(admit(&mut state, &asking("d")), Err(MemoryError::NoNodes));
    assert_eq!(state.blocks("a", "c").unwrap().len(), 2);
    assert_eq!(state.allocatable().len(), 4);
}

#[test]
fn reservations_and_files_must_fit_the_machine() {
    let start = |reservations: &[NumaReservation], reserved: u64, file: Option<&[u8]>| {
        MemoryState::start(MemoryPolicy::Static, &machine(2, 4), reservations, reserved as i64, file)
    };
    let one = [reservation(0, MEMORY, GIB)];
    let error = |result: Result<MemoryState, MemoryStartError>| result.unwrap_err().to_string();
    assert!(error(start(&[], 0, None)).contains("you should specify the system reserved memory"));
    assert!(error(start(&one, 2 * GIB, None)).contains("is not equal to the value"));
    assert!(
        error(start(&[reservation(5, MEMORY, GIB)], GIB, None)).contains("NUMA node 5 that does not exist")
    );
    assert!(error(start(&[reservation(0, MEMORY, 5 * GIB)], 5 * GIB, None)).contains("less memory than"));
    let both = [reservation(0, MEMORY, GIB), reservation(1, "hugepages-2Mi", 1)];
    assert!(error(start(&both, GIB, None)).contains("hugepages-2Mi"));

    let mut state = start(&one, GIB, None).unwrap();
    admit(&mut state, &pod("a", &[1], &[2])).unwrap();
    admit(&mut state, &pod("b", &[], &[3])).unwrap();
    let file = state.file();
    let again = start(&one, GIB, Some(&file)).unwrap();
    assert_eq!((&again.nodes, &again.assigned), (&state.nodes, &state.assigned));
    // Another machine, other reservations, another policy.
    let other = MemoryState::start(MemoryPolicy::Static, &machine(2, 5), &one, GIB as i64, Some(&file));
    assert!(error(other).contains("different from the real one"));
    let two = [reservation(0, MEMORY, 2 * GIB)];
    assert!(error(start(&two, 2 * GIB, Some(&file))).contains("different from the real one"));
    let fewer = MemoryState::start(MemoryPolicy::Static, &machine(1, 4), &one, GIB as i64, Some(&file));
    assert!(error(fewer).contains("the NUMA that does not exist"));
    let none = MemoryState::start(MemoryPolicy::None, &machine(2, 4), &[], 0, Some(&file));
    assert!(error(none).contains("configured policy \"None\" differs"));
    assert!(error(start(&one, GIB, Some(b"{"))).contains("no JSON"));
}

#[test]
fn nodes_are_read_from_the_kernels_files() {
    let dir = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    put("node/online", "0-1\n");
    for node in 0..2 {
        put(
            &format!("node/node{node}/meminfo"),
            &format!("Node {node} MemTotal:       4096 kB\nNode {node} MemFree: 1 kB\n"),
        );
        put(&format!("node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"), "3\n");
    }
    let nodes = read_nodes(dir.path(), 7);
    assert_eq!(
        nodes[&1],
        BTreeMap::from([(MEMORY.to_owned(), 4096 << 10), ("hugepages-2Mi".to_owned(), 6 << 20)])
    );
    assert_eq!(read_nodes(&dir.path().join("none"), 7), machine_of(7));
    assert!(!read_nodes(Path::new("/sys/devices/system"), 1).is_empty());
}

fn machine_of(bytes: u64) -> NodeMemory {
    NodeMemory::from([(0, BTreeMap::from([(MEMORY.to_owned(), bytes)]))])
}

/// The groups that could give `size`, and if they are the smallest that ever could: by the words of the documentation,
/// node by node.
fn searched(state: &MemoryState, size: u64) -> Vec<(Vec<u32>, bool)> {
    let nodes: Vec<u32> = state.nodes.keys().copied().collect();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for bits in 1u32..1 << nodes.len() {
        groups.push(
            nodes.iter().enumerate().filter(|(n, _)| bits & (1 << n) != 0).map(|(_, node)| *node).collect(),
        );
    }
    let total = |group: &Vec<u32>, of: fn(&MemoryTable) -> u64| -> u64 {
        group.iter().map(|node| of(&state.nodes[node].memory_map[MEMORY])).sum()
    };
    let smallest =
        groups.iter().filter(|g| total(g, |t| t.allocatable) >= size).map(Vec::len).min().unwrap_or(0);
    // The groups that containers have memory of.
    let taken: Vec<Vec<u32>> = state
        .assigned
        .values()
        .flat_map(|all| all.values().flatten())
        .map(|b| b.numa_affinity.clone())
        .collect();
    let fits = |group: &&Vec<u32>| {
        let apart =
            taken.iter().all(|other| other == *group || !other.iter().any(|node| group.contains(node)));
        let single =
            group.len() == 1 && taken.iter().all(|other| other.len() == 1 || !other.contains(&group[0]));
        total(group, |t| t.free) >= size && (apart || single)
    };
    let mut found: Vec<(Vec<u32>, bool)> =
        groups.iter().filter(fits).map(|group| (group.clone(), group.len() == smallest)).collect();
    found.sort();
    found
}

proptest! {
    #[test]
    fn hints_are_those_that_a_search_finds(
        count in 1u32..5,
        steps in prop::collection::vec((0u8..4, 1u64..14, 0usize..6), 1..30),
    ) {
        let mut state = started(count, 6);
        let mut live: Vec<String> = Vec::new();
        for (index, (what, size, which)) in steps.into_iter().enumerate() {
            if what == 0 && !live.is_empty() {
                let uid = live.remove(which % live.len());
                prop_assert!(state.release(&uid));
            } else {
                let uid = format!("p{index}");
                let p = pod(&uid, &[], &[size]);
                let container = &model::containers(&p)[0];
                let shown = state.hints(&p, container).get(MEMORY).cloned().flatten().unwrap_or_default();
                let mut shown: Vec<(Vec<u32>, bool)> = shown
                    .iter()
                    .map(|hint| (hint.affinity.unwrap().nodes().collect(), hint.preferred))
                    .collect();
                shown.sort();
                prop_assert_eq!(&shown, &searched(&state, size * GIB));
                match admit(&mut state, &p) {
                    Ok(()) => {
                        // The best: preferred, then fewer nodes, then lower ones.
                        let key = |(group, preferred): &(Vec<u32>, bool)| {
                            (!*preferred, group.len(), group.iter().fold(0u64, |bits, node| bits | 1 << node))
                        };
                        let best = shown.iter().min_by_key(|hint| key(hint)).unwrap();
                        prop_assert_eq!(&nodes_of(&state, &uid, "c0"), &best.0);
                        live.push(uid);
                    }
                    Err(error) => {
                        prop_assert_eq!(error, MemoryError::NoNodes);
                        prop_assert!(shown.is_empty());
                    }
                }
            }
            let mut taken = 0;
            for node in state.nodes.values() {
                let table = node.memory_map[MEMORY];
                prop_assert_eq!(table.free + table.reserved, table.allocatable);
                taken += table.reserved;
            }
            let given: u64 = state.assigned.values().flat_map(|all| all.values().flatten()).map(|b| b.size).sum();
            prop_assert_eq!(taken, given);
            let again = MemoryState::start(
                MemoryPolicy::Static, &machine(count, 6), &[reservation(0, MEMORY, GIB)], GIB as i64, Some(&state.file()));
            prop_assert!(again.is_ok(), "{:?}", again.err());
        }
        for uid in live {
            state.release(&uid);
        }
        prop_assert_eq!(&state.nodes, &started(count, 6).nodes);
    }
}

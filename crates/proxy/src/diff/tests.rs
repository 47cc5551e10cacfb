use super::*;
use crate::layout::{LocalTraffic, Origin, Pick, Rank, Via};
use crate::model::{IpFamily, Protocol, Seniority};

fn config() -> LayoutConfig {
    LayoutConfig {
        family: IpFamily::V4,
        masquerade_mark: 1 << 14,
        masquerade_all: false,
        local_traffic: LocalTraffic::Unknown,
        node_ip: None,
        node_port_addresses: NodePortAddresses::All,
        untracked_bridge: None,
        service_cidrs: Vec::new(),
    }
}

fn name(service: &str) -> Arc<ServicePortName> {
    Arc::new(ServicePortName {
        namespace: "ns".into(),
        service: service.into(),
        port: String::new(),
        protocol: Protocol::Tcp,
    })
}

fn endpoints(octets: &[u8]) -> Arc<[EndpointAddress]> {
    octets.iter().map(|octet| EndpointAddress { ip: [10, 0, 0, *octet].into(), port: 80 }).collect()
}

fn pick(count: u32) -> Class {
    Class::Internal(Pick { via: Via::Address, policy: Policy::Cluster, count, affinity: None })
}

/// A service port at `address` with these endpoints.
fn port(address: u8, octets: &[u8]) -> DesiredPort {
    let key = Key::service([10, 96, 0, address].into(), Protocol::Tcp, 80);
    let frontends = vec![Frontend { key: key.clone(), rank: rank(Origin::Allocated, 0) }];
    let claim = match u32::try_from(octets.len()).unwrap() {
        0 => Claim { set: SetName::RejectServices, key, value: ClaimValue::Member },
        count => Claim { set: SetName::ServiceIps, key, value: ClaimValue::Class(pick(count)) },
    };
    DesiredPort { claims: vec![claim], frontends, cluster: endpoints(octets), ..DesiredPort::default() }
}

fn rank(origin: Origin, created: i64) -> Rank {
    Rank { origin, seniority: Arc::new(Seniority { created, uid: String::new() }) }
}

/// The same with another claim to the address.
fn ranked(octets: &[u8], origin: Origin, created: i64) -> DesiredPort {
    let mut wanted = port(1, octets);
    wanted.frontends[0].rank = rank(origin, created);
    wanted
}

/// Programmed with the first transaction already taken.
fn programmed() -> Programmed {
    let mut programmed = Programmed::new(config());
    let first = programmed.rebuild();
    assert!(first.rebuild && !first.chains.is_empty() && first.add.is_empty());
    programmed
}

fn count(elements: &[Element], set: SetName) -> usize {
    elements.iter().filter(|element| element.set == set).count()
}

#[test]
fn endpoints_keep_their_slots() {
    type Row<'a> = (&'a str, &'a [u8], &'a [u8], &'a [u8]);
    let rows: [Row; 7] = [
        ("new", &[], &[1, 2], &[1, 2]),
        ("one more goes to the end", &[2, 3], &[1, 2, 3], &[2, 3, 1]),
        ("the last takes the place of one that goes", &[1, 2, 3], &[2, 3], &[3, 2]),
        ("the last one goes", &[1, 2, 3], &[1, 2], &[1, 2]),
        ("one takes the place of another", &[1, 2, 3], &[2, 3, 4], &[4, 2, 3]),
        ("all go", &[1, 2], &[], &[]),
        ("several holes at the end", &[1, 2, 3, 4], &[1], &[1]),
    ];
    for (name, old, want, slots) in rows {
        assert_eq!(reslot(&endpoints(old), &endpoints(want)), endpoints(slots), "{name}");
    }
}

#[test]
fn a_transaction_has_what_changed() {
    let mut programmed = programmed();
    programmed.update(&name("a"), Some(port(1, &(1..=100).collect::<Vec<_>>())));
    programmed.update(&name("b"), Some(port(2, &[1, 2])));
    let first = programmed.take_changes();
    assert_eq!(
        (first.delete.len(), count(&first.add, SetName::Endpoints), count(&first.add, SetName::ServiceIps)),
        (0, 102, 2)
    );
    assert_eq!(first.chains.len(), 2);
    assert!(programmed.take_changes().is_empty());

    // One endpoint of a hundred is replaced: one index.
    let mut octets: Vec<u8> = (1..=100).collect();
    octets[50] = 200;
    programmed.update(&name("a"), Some(port(1, &octets)));
    let replaced = programmed.take_changes();
    assert_eq!((replaced.delete.len(), replaced.add.len(), replaced.chains.len()), (1, 1, 0));

    // One goes: its index, the index of the one that takes its place, and the Service's class.
    octets.remove(10);
    programmed.update(&name("a"), Some(port(1, &octets)));
    let removed = programmed.take_changes();
    assert_eq!(count(&removed.delete, SetName::Endpoints), 2);
    assert_eq!(count(&removed.add, SetName::Endpoints), 1);
    assert_eq!(
        (count(&removed.delete, SetName::ServiceIps), count(&removed.add, SetName::ServiceIps)),
        (1, 1)
    );
    assert_eq!(removed.chains.len(), 1, "nobody had 99 endpoints before");

    // The same as before is nothing.
    programmed.update(&name("a"), Some(port(1, &octets)));
    programmed.update(&name("b"), None);
    programmed.update(&name("b"), Some(port(2, &[1, 2])));
    assert!(programmed.take_changes().is_empty());
}

#[test]
fn services_with_equal_counts_share_a_chain() {
    let mut programmed = programmed();
    for service in 1..=50 {
        programmed.update(&name(&format!("s{service}")), Some(port(service, &[1, 2, 3])));
    }
    let first = programmed.take_changes();
    assert_eq!((first.chains.len(), count(&first.add, SetName::Classes)), (1, 1));
}

#[test]
fn an_address_goes_to_the_next_claimant_with_its_owner() {
    let mut programmed = programmed();
    programmed.update(&name("a"), Some(ranked(&[1], Origin::External, 1)));
    programmed.take_changes();
    programmed.update(&name("b"), Some(ranked(&[2], Origin::External, 2)));
    let second = programmed.take_changes();
    assert_eq!(count(&second.add, SetName::ServiceIps), 0);
    programmed.update(&name("a"), None);
    let handed_over = programmed.take_changes();
    assert_eq!(
        (count(&handed_over.delete, SetName::ServiceIps), count(&handed_over.add, SetName::ServiceIps)),
        (1, 1)
    );
    assert_eq!(handed_over.add[0].comment.as_deref(), Some("ns/b/tcp"));
    programmed.update(&name("b"), None);
    let gone = programmed.take_changes();
    assert_eq!((count(&gone.delete, SetName::ServiceIps), gone.add.len()), (1, 0));
}

#[test]
fn rank_decides_about_an_address_and_not_the_order_of_arrival() {
    use Origin::{Allocated, External};
    type Claim = (Origin, i64);
    let rows: [(&str, Claim, Claim); 3] = [
        ("a ClusterIP before an external address", (Allocated, 9), (External, 1)),
        ("the older of two external addresses", (External, 1), (External, 2)),
        ("the older of two ClusterIPs", (Allocated, 1), (Allocated, 2)),
    ];
    let address = std::net::IpAddr::from([10, 96, 0, 1]);
    for (row, better, worse) in rows {
        for better_is_first in [true, false] {
            let mut programmed = programmed();
            let mut kernel = BTreeMap::new();
            let good = |octets: &[u8]| Some(ranked(octets, better.0, better.1));
            let bad = |octets: &[u8]| Some(ranked(octets, worse.0, worse.1));
            match better_is_first {
                true => programmed.update(&name("good"), good(&[1])),
                false => programmed.update(&name("bad"), bad(&[2])),
            }
            play(&mut programmed, &mut kernel);
            match better_is_first {
                true => programmed.update(&name("bad"), bad(&[2])),
                false => programmed.update(&name("good"), good(&[1])),
            }
            play(&mut programmed, &mut kernel);
            // The owner scales up and down to nothing; the other one does, too.
            for octets in [&[1][..], &[1, 2], &[], &[3]] {
                programmed.update(&name("good"), good(octets));
                programmed.update(&name("bad"), bad(if octets.len() == 1 { &[] } else { &[7, 8, 9] }));
                play(&mut programmed, &mut kernel);
                assert!(programmed.has_frontend(&name("good"), address, 80), "{row} {octets:?}");
                assert!(!programmed.has_frontend(&name("bad"), address, 80), "{row} {octets:?}");
                let has = |set| kernel.keys().filter(|(of, _)| *of == set).count();
                let want = if octets.is_empty() { (0, 1) } else { (1, 0) };
                let elements = (has(SetName::ServiceIps), has(SetName::RejectServices));
                assert_eq!(elements, want, "{row} {octets:?}");
            }
        }
    }
}

#[test]
fn a_service_that_is_made_again_with_the_same_name_is_a_new_one() {
    let mut programmed = programmed();
    let mut kernel = BTreeMap::new();
    programmed.update(&name("a"), Some(ranked(&[1], Origin::External, 1)));
    programmed.update(&name("b"), Some(ranked(&[2], Origin::External, 2)));
    play(&mut programmed, &mut kernel);
    programmed.update(&name("a"), Some(ranked(&[1], Origin::External, 3)));
    play(&mut programmed, &mut kernel);
    assert!(programmed.has_frontend(&name("b"), [10, 96, 0, 1].into(), 80));
}

/// Applies the next transaction to a table, as the kernel does.
fn play(programmed: &mut Programmed, kernel: &mut BTreeMap<(SetName, Key), Value>) {
    let transaction = programmed.take_changes();
    for element in transaction.delete {
        let gone = kernel.remove(&(element.set, element.key));
        assert_eq!(gone, Some(element.value), "only what is there is deleted");
    }
    for element in transaction.add {
        let there = kernel.insert((element.set, element.key), element.value);
        assert_eq!(there, None, "nothing is added twice");
    }
}

#[test]
fn a_rebuilt_table_has_everything_that_transactions_made() {
    let mut programmed = programmed();
    let mut kernel: BTreeMap<(SetName, Key), Value> = BTreeMap::new();
    // A walk over services that come, go and change, from a fixed seed.
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..400 {
        let service = u8::try_from(random(6)).unwrap();
        let wanted = match random(5) {
            0 => None,
            _ => {
                let octets: Vec<u8> = (1..=9).filter(|_| random(2) == 0).collect();
                // Some share an address.
                let mut wanted = port(service / 2, &octets);
                wanted.affinity = random(3) == 0;
                Some(wanted)
            }
        };
        programmed.update(&name(&service.to_string()), wanted);
        if random(3) == 0 {
            play(&mut programmed, &mut kernel);
        }
    }
    play(&mut programmed, &mut kernel);
    let listed = programmed.rebuild().add;
    let mut all = listed.clone();
    programmed.each_element(&mut |element| all.push(element));
    assert_eq!(all.len(), listed.len() + programmed.element_count());
    let changes_of_set = all.windows(2).filter(|pair| pair[0].set != pair[1].set).count();
    let sets: BTreeSet<SetName> = all.iter().map(|element| element.set).collect();
    assert_eq!(changes_of_set + 1, sets.len(), "elements of one set are neighbours");
    let rebuilt: BTreeMap<_, _> =
        all.into_iter().map(|element| ((element.set, element.key), element.value)).collect();
    // Classes that nobody uses stay for a while, but a rebuilt table does not have them.
    let used = |kernel: BTreeMap<(SetName, Key), Value>| -> BTreeMap<(SetName, Key), Value> {
        kernel
            .into_iter()
            .filter(|((set, key), _)| *set != SetName::Classes || rebuilt.contains_key(&(*set, key.clone())))
            .collect()
    };
    assert_eq!(used(kernel), rebuilt);
}

#[test]
fn an_address_that_a_service_names_twice_is_one_element() {
    let mut programmed = programmed();
    let mut twice = port(1, &[1]);
    twice.claims.push(twice.claims[0].clone());
    programmed.update(&name("a"), Some(twice.clone()));
    assert_eq!(count(&programmed.take_changes().add, SetName::ServiceIps), 1);
    programmed.update(&name("a"), Some(port(1, &[1])));
    programmed.update(&name("a"), Some(twice));
    assert!(programmed.take_changes().is_empty());
    programmed.update(&name("a"), None);
    assert_eq!(count(&programmed.take_changes().delete, SetName::ServiceIps), 1);
    assert_eq!(programmed.element_count(), 0);
}

#[test]
fn endpoint_lists_are_shared_while_the_order_is_the_same() {
    let mut programmed = programmed();
    let mut update = |octets: &[u8]| {
        let wanted = port(1, octets);
        let list = Arc::clone(&wanted.cluster);
        programmed.update(&name("a"), Some(wanted));
        Arc::ptr_eq(&list, &programmed.ports[&name("a")].cluster)
    };
    assert!(update(&[1, 2, 3]), "new");
    assert!(update(&[1, 2, 3]), "the same");
    assert!(update(&[1, 2, 3, 4]), "one more at the end");
    assert!(!update(&[2, 3, 4]), "the last one took a slot");
}

#[test]
fn idle_classes_are_removed_once_they_are_many() {
    let mut programmed = programmed();
    let octets: Vec<u8> = (1..=200).collect();
    for many in 1..=200 {
        programmed.update(&name("a"), Some(port(1, &octets[..many])));
        programmed.take_changes();
    }
    assert!(programmed.classes.len() <= IDLE_CLASSES + 3, "{}", programmed.classes.len());
    let retired = programmed.retired_chains();
    assert!(!retired.is_empty());
    // A chain that is still there is not made again.
    let again = retired.iter().find_map(|chain| chain.strip_prefix("pick-")?.parse::<usize>().ok()).unwrap();
    programmed.update(&name("b"), Some(port(2, &octets[..again])));
    assert_eq!(programmed.take_changes().chains, []);
    assert!(!programmed.retired_chains().contains(&format!("pick-{again}")));
}

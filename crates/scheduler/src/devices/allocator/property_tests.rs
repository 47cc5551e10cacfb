//! The search against a plain one, which makes whole assignments and judges each of them anew.

use ferrite_client::resource_claims::results;
use ferrite_json::{Value, json};
use proptest::prelude::*;

use super::tests::{allocate, inventory};
use super::*;

const DEVICES: usize = 5;
const COUNTERS: i64 = 3;
const SLOTS: i64 = 2;

#[derive(Debug, Clone)]
struct Thing {
    colour: i64,
    size: Option<i64>,
    /// Counters that it takes from the pool.
    takes: i64,
    is_tainted: bool,
    is_shared: bool,
    is_allocated: bool,
}

#[derive(Debug, Clone)]
struct Ask {
    count: usize,
    /// Only devices of this colour.
    colour: Option<i64>,
    tolerates: bool,
    slots: i64,
}

#[derive(Debug, Clone)]
struct Request {
    alternatives: Vec<Ask>,
    is_list: bool,
}

#[derive(Debug, Clone)]
struct Claim {
    requests: Vec<Request>,
    /// The constraint's kind, attribute and request.
    constraint: Option<(bool, bool, Option<usize>)>,
}

fn things() -> impl Strategy<Value = Vec<Thing>> {
    let thing = (0..3i64, proptest::option::of(0..2i64), 0..3i64, any::<u8>(), any::<bool>(), any::<u8>())
        .prop_map(|(colour, size, takes, taint, is_shared, allocated)| Thing {
            colour,
            size,
            takes,
            is_tainted: taint % 4 == 0,
            is_shared,
            is_allocated: allocated % 5 == 0,
        });
    proptest::collection::vec(thing, 1..=DEVICES)
}

fn ask() -> impl Strategy<Value = Ask> {
    (1..=2usize, proptest::option::of(0..3i64), any::<bool>(), 1..=SLOTS)
        .prop_map(|(count, colour, tolerates, slots)| Ask { count, colour, tolerates, slots })
}

fn claims() -> impl Strategy<Value = Vec<Claim>> {
    let request = prop_oneof![
        3 => ask().prop_map(|ask| Request { alternatives: vec![ask], is_list: false }),
        2 => proptest::collection::vec(ask(), 1..=2).prop_map(|alternatives| Request { alternatives, is_list: true }),
    ];
    let constraint = proptest::option::of((any::<bool>(), any::<bool>(), proptest::option::of(0..2usize)));
    let claim = (proptest::collection::vec(request, 1..=2), constraint)
        .prop_map(|(requests, constraint)| Claim { requests, constraint });
    proptest::collection::vec(claim, 1..=2)
}

fn slices(things: &[Thing]) -> [Value; 2] {
    let pool = json!({"name": "p", "generation": 1, "resourceSliceCount": 2});
    let device = |(index, thing): (usize, &Thing)| {
        let mut device = json!({"name": format!("d{index}"), "attributes": {"colour": {"int": thing.colour}},
            "allowMultipleAllocations": thing.is_shared,
            "capacity": {"slots": {"value": SLOTS.to_string(), "requestPolicy": {"default": "1", "validRange": {"min": "1"}}}}});
        if let Some(size) = thing.size {
            device["attributes"]["d.example/size"] = json!({"int": size});
        }
        if thing.takes > 0 {
            device["consumesCounters"] =
                json!([{"counterSet": "c", "counters": {"n": {"value": thing.takes.to_string()}}}]);
        }
        if thing.is_tainted {
            device["taints"] = json!([{"key": "t", "effect": "NoSchedule"}]);
        }
        device
    };
    let devices: Vec<Value> = things.iter().enumerate().map(device).collect();
    [
        json!({"driver": "d.example", "nodeName": "n", "pool": pool,
            "sharedCounters": [{"name": "c", "counters": {"n": {"value": COUNTERS.to_string()}}}]}),
        json!({"driver": "d.example", "nodeName": "n", "pool": pool, "devices": devices}),
    ]
}

fn objects(claims: &[Claim]) -> Vec<ResourceClaim> {
    let asked = |ask: &Ask| {
        let mut value = json!({"deviceClassName": "any", "allocationMode": "ExactCount", "count": ask.count,
            "capacity": {"requests": {"slots": ask.slots.to_string()}}});
        if let Some(colour) = ask.colour {
            let expression = format!("device.attributes['d.example'].colour == {colour}");
            value["selectors"] = json!([{"cel": {"expression": expression}}]);
        }
        if ask.tolerates {
            value["tolerations"] = json!([{"operator": "Exists"}]);
        }
        value
    };
    let object = |claim: &Claim| {
        let requests: Vec<Value> = claim
            .requests
            .iter()
            .enumerate()
            .map(|(index, request)| {
                if !request.is_list {
                    return json!({"name": format!("r{index}"), "exactly": asked(&request.alternatives[0])});
                }
                let list = request.alternatives.iter().enumerate().map(|(at, ask)| {
                    let mut value = asked(ask);
                    value["name"] = json!(format!("s{at}"));
                    value
                });
                json!({"name": format!("r{index}"), "firstAvailable": list.collect::<Vec<_>>()})
            })
            .collect();
        let constraints: Vec<Value> = claim
            .constraint
            .iter()
            .map(|(is_distinct, is_size, request)| {
                let attribute = if *is_size { "d.example/size" } else { "d.example/colour" };
                let kind = if *is_distinct { "distinctAttribute" } else { "matchAttribute" };
                let requests: Vec<String> = request.iter().map(|index| format!("r{index}")).collect();
                json!({(kind): attribute, "requests": requests})
            })
            .collect();
        ferrite_json::from_value(json!({"metadata": {"name": "c", "namespace": "ns"},
            "spec": {"devices": {"requests": requests, "constraints": constraints}}}))
        .unwrap()
    };
    claims.iter().map(object).collect()
}

/// A device for a request of a claim.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Given {
    claim: usize,
    request: usize,
    device: usize,
    slots: i64,
    colour: Option<i64>,
    tolerates: bool,
}

/// Judges a whole assignment.
fn is_valid(things: &[Thing], claims: &[Claim], given: &[Given]) -> bool {
    let alone = given.iter().all(|one| {
        let thing = &things[one.device];
        (thing.is_shared || !thing.is_allocated)
            && one.colour.is_none_or(|colour| colour == thing.colour)
            && (one.tolerates || !thing.is_tainted)
    });
    let mut counters = 0;
    let together = things.iter().enumerate().all(|(index, thing)| {
        let of: Vec<&Given> = given.iter().filter(|one| one.device == index).collect();
        if thing.is_allocated || !of.is_empty() {
            counters += thing.takes;
        }
        let distinct_requests = of
            .iter()
            .enumerate()
            .all(|(at, one)| !of[..at].iter().any(|o| (o.claim, o.request) == (one.claim, one.request)));
        if !thing.is_shared {
            return of.len() <= 1 && of.iter().all(|one| one.slots <= SLOTS);
        }
        // The share that is there already takes one slot.
        let held = i64::from(thing.is_allocated);
        let taken = of.iter().map(|one| one.slots).sum::<i64>() + held;
        distinct_requests && (of.is_empty() || taken <= SLOTS)
    });
    let needs_counters = given.iter().any(|one| {
        let thing = &things[one.device];
        thing.takes > 0 && !(thing.is_shared && thing.is_allocated)
    });
    let constrained = claims.iter().enumerate().all(|(position, claim)| {
        let Some((is_distinct, is_size, request)) = claim.constraint else { return true };
        let of = given.iter().filter(|one| one.claim == position && request.is_none_or(|r| r == one.request));
        let values: Vec<Option<i64>> = of
            .map(|one| {
                let thing = &things[one.device];
                if is_size { thing.size } else { Some(thing.colour) }
            })
            .collect();
        values.iter().all(Option::is_some)
            && values.iter().enumerate().all(|(at, value)| {
                values[..at].iter().all(|other| if is_distinct { other != value } else { other == value })
            })
    });
    alone && together && constrained && (!needs_counters || counters <= COUNTERS)
}

/// Every choice of `count` of the devices, in the order in which the search tries them: by the first device, then by the
/// second.
fn choices(devices: usize, count: usize) -> Vec<Vec<usize>> {
    let mut choices: Vec<Vec<usize>> = (0..1usize << devices)
        .filter(|set| set.count_ones() as usize == count)
        .map(|set| (0..devices).filter(|device| set >> device & 1 == 1).collect())
        .collect();
    choices.sort();
    choices
}

/// A request with the number of its claim and its own.
type Numbered<'a> = (usize, usize, &'a Request);

/// The alternatives of each request in the first assignment that is valid. As upstream: the devices of a request are
/// chosen before the alternative of the next one.
fn plainly(things: &[Thing], claims: &[Claim]) -> Option<Vec<usize>> {
    let requests: Vec<Numbered<'_>> = claims
        .iter()
        .enumerate()
        .flat_map(|(claim, of)| of.requests.iter().enumerate().map(move |(index, r)| (claim, index, r)))
        .collect();
    first_valid(things, claims, &requests, &[], &[])
}

fn first_valid(
    things: &[Thing],
    claims: &[Claim],
    left: &[Numbered<'_>],
    alternatives: &[usize],
    given: &[Given],
) -> Option<Vec<usize>> {
    // Nothing that is added makes an invalid assignment valid.
    if !is_valid(things, claims, given) {
        return None;
    }
    let Some(((claim, index, request), left)) = left.split_first() else {
        return Some(alternatives.to_vec());
    };
    request.alternatives.iter().enumerate().find_map(|(at, ask)| {
        let give = |device: &usize| Given {
            claim: *claim,
            request: *index,
            device: *device,
            slots: ask.slots,
            colour: ask.colour,
            tolerates: ask.tolerates,
        };
        choices(things.len(), ask.count).iter().find_map(|set| {
            let given: Vec<Given> = given.iter().copied().chain(set.iter().map(give)).collect();
            first_valid(things, claims, left, &[alternatives, &[at]].concat(), &given)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn the_search_finds_what_a_plain_one_finds(things in things(), claims in claims()) {
        let mut allocated = Allocated::default();
        for (index, thing) in things.iter().enumerate().filter(|(_, thing)| thing.is_allocated) {
            let id = DeviceId::new("d.example", "p", &format!("d{index}"));
            if thing.is_shared {
                let one = Quantity::parse("1").unwrap();
                allocated.shared.insert(id, Amounts::from([("slots".to_owned(), one)]));
            } else {
                allocated.devices.insert(id);
            }
        }
        let objects = objects(&claims);
        let found = allocate(&inventory(&slices(&things)), &allocated, &objects).unwrap();
        let plain = plainly(&things, &claims);
        prop_assert_eq!(found.is_some(), plain.is_some(), "{:?}", found);
        let (Some(found), Some(plain)) = (found, plain) else { return Ok(()) };
        let mut given = Vec::new();
        let mut alternatives = Vec::new();
        for (position, (claim, allocation)) in claims.iter().zip(&found).enumerate() {
            for (index, request) in claim.requests.iter().enumerate() {
                let name = format!("r{index}");
                let of: Vec<_> = results(allocation)
                    .iter()
                    .filter(|result| result.request.split('/').next() == Some(&name))
                    .collect();
                let at = of[0].request.split_once("/s").map_or(0, |(_, at)| at.parse().unwrap());
                let ask = &request.alternatives[at];
                prop_assert_eq!(of.len(), ask.count);
                alternatives.push(at);
                given.extend(of.iter().map(|result| Given {
                    claim: position, request: index, device: result.device[1..].parse().unwrap(),
                    slots: ask.slots, colour: ask.colour, tolerates: ask.tolerates,
                }));
            }
        }
        prop_assert!(is_valid(&things, &claims, &given), "{:?}", given);
        prop_assert_eq!(alternatives, plain);
    }
}

use std::cell::Cell;
use std::collections::BTreeMap;

use ferrite_json::{Value, json};
use k8s_openapi::api::resource::v1::ResourceSlice;

use super::*;
use crate::devices::selectors::CompiledSelectors;

pub(super) fn node(name: &str) -> Node {
    let node = json!({"metadata": {"name": name, "labels": {"zone": "a"}}});
    ferrite_json::from_value(node).unwrap()
}

pub(super) fn inventory(slices: &[Value]) -> Inventory {
    let mut inventory = Inventory::default();
    for (index, spec) in slices.iter().enumerate() {
        let slice: ResourceSlice =
            ferrite_json::from_value(json!({"metadata": {"name": format!("slice-{index}")}, "spec": spec}))
                .unwrap();
        inventory.insert(Slice::new(Arc::new(slice)));
    }
    inventory
}

/// A slice of node `n`, alone in its pool.
fn slice(devices: Value) -> Value {
    json!({"driver": "d.example", "nodeName": "n", "devices": devices,
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}})
}

fn claim(name: &str, devices: Value) -> ResourceClaim {
    ferrite_json::from_value(
        json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"devices": devices}}),
    )
    .unwrap()
}

fn exactly(name: &str, more: Value) -> Value {
    let mut exactly = json!({"deviceClassName": "any", "allocationMode": "ExactCount", "count": 1});
    for (key, value) in more.as_object().unwrap().iter() {
        exactly[key.as_str()] = value.clone();
    }
    json!({"name": name, "exactly": exactly})
}

pub(super) fn class(name: &str) -> Option<Arc<DeviceClass>> {
    let spec = match name {
        "any" => json!({}),
        "large" => json!({
            "selectors": [{"cel": {"expression": "device.attributes['d.example'].size == 'large'"}}],
            "config": [{"opaque": {"driver": "d.example", "parameters": {"of": "class"}}}],
        }),
        "broken" => json!({"selectors": [{"cel": {"expression": "device.attributes['d.example'].nothing"}}]}),
        _ => return None,
    };
    Some(Arc::new(ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()))
}

pub(super) fn allocate(
    inventory: &Inventory,
    allocated: &Allocated,
    claims: &[ResourceClaim],
) -> Result<Option<Vec<AllocationResult>>, AllocationError> {
    let shares = Cell::new(0);
    let allocator = Allocator {
        inventory,
        allocated,
        classes: &class,
        selectors: &CompiledSelectors::default(),
        is_over: &|| false,
        new_share_id: &|| {
            shares.set(shares.get() + 1);
            format!("share-{}", shares.get())
        },
    };
    allocator.allocate(&node("n"), &claims.iter().collect::<Vec<_>>())
}

/// The devices that claims get, as `request=device`; `none`, or the error.
fn outcome(slices: &[Value], allocated: &Allocated, claims: &[ResourceClaim]) -> String {
    match allocate(&inventory(slices), allocated, claims) {
        Ok(None) => "none".to_owned(),
        Err(error) => error.to_string(),
        Ok(Some(all)) => {
            let one = |result: &AllocationResult| {
                let devices = ferrite_client::resource_claims::results(result).iter();
                devices.map(|of| format!("{}={}", of.request, of.device)).collect::<Vec<_>>().join(" ")
            };
            all.iter().map(one).collect::<Vec<_>>().join("; ")
        }
    }
}

fn plain(count: usize) -> Value {
    let device = |index: usize| {
        json!({"name": format!("dev-{index}"), "attributes": {
            "size": {"string": if index.is_multiple_of(2) { "small" } else { "large" }},
            "numa": {"int": index / 2},
            "model": {"string": format!("m{}", index % 3)},
        }})
    };
    (0..count).map(device).collect::<Vec<_>>().into()
}

#[test]
fn requests_get_devices() {
    let all = || json!({"allocationMode": "All", "count": null});
    let select = |expression: &str| json!([{"cel": {"expression": expression}}]);
    let rows: Vec<(&str, Value, &str)> = vec![
        ("one", json!({"requests": [exactly("r", json!({}))]}), "r=dev-0"),
        ("two", json!({"requests": [exactly("r", json!({"count": 2}))]}), "r=dev-0 r=dev-1"),
        ("too many", json!({"requests": [exactly("r", json!({"count": 5}))]}), "none"),
        (
            "selector of the class",
            json!({"requests": [exactly("r", json!({"deviceClassName": "large"}))]}),
            "r=dev-1",
        ),
        (
            "selector of the request",
            json!({"requests": [exactly("r", json!({"selectors": select("device.attributes['d.example'].numa == 1")}))]}),
            "r=dev-2",
        ),
        ("all devices", json!({"requests": [exactly("r", all())]}), "r=dev-0 r=dev-1 r=dev-2 r=dev-3"),
        (
            "all of none",
            json!({"requests": [exactly("r", json!({"allocationMode": "All", "selectors": select("false")}))]}),
            "none",
        ),
        (
            "the search goes back",
            // The first request could have dev-1, which the second needs.
            json!({"requests": [
                exactly("a", json!({"selectors": select("device.attributes['d.example'].numa == 0"), "count": 1})),
                exactly("b", json!({"selectors": select("device.attributes['d.example'].size == 'small' && device.attributes['d.example'].numa == 0")})),
            ]}),
            "a=dev-1 b=dev-0",
        ),
        (
            "match attribute",
            json!({"requests": [exactly("r", json!({"count": 2, "selectors": select("device.attributes['d.example'].numa > 0")}))],
                   "constraints": [{"matchAttribute": "d.example/numa"}]}),
            "r=dev-2 r=dev-3",
        ),
        (
            "match attribute that differs",
            json!({"requests": [exactly("r", json!({"count": 3}))], "constraints": [{"matchAttribute": "d.example/numa"}]}),
            "none",
        ),
        (
            "distinct attribute",
            json!({"requests": [exactly("r", json!({"count": 2}))], "constraints": [{"distinctAttribute": "d.example/numa"}]}),
            "r=dev-0 r=dev-2",
        ),
        (
            "distinct attribute of three devices of one request",
            json!({"requests": [exactly("r", json!({"count": 4}))], "constraints": [{"distinctAttribute": "d.example/model"}]}),
            "none",
        ),
        (
            "a constraint on other requests",
            json!({"requests": [exactly("a", json!({})), exactly("b", json!({}))],
                   "constraints": [{"requests": ["b"], "matchAttribute": "d.example/absent"}]}),
            "none",
        ),
        (
            "the first subrequest that works",
            json!({"requests": [{"name": "r", "firstAvailable": [
                {"name": "many", "deviceClassName": "any", "count": 5, "allocationMode": "ExactCount"},
                {"name": "large", "deviceClassName": "large", "count": 1, "allocationMode": "ExactCount"},
                {"name": "any", "deviceClassName": "any", "count": 1, "allocationMode": "ExactCount"},
            ]}]}),
            "r/large=dev-1",
        ),
        (
            "no such class",
            json!({"requests": [exactly("r", json!({"deviceClassName": "absent"}))]}),
            "claim ns/c, request r: could not retrieve device class absent: deviceclass.resource.k8s.io \"absent\" not found",
        ),
        (
            "a selector that fails",
            json!({"requests": [exactly("r", json!({"deviceClassName": "broken"}))]}),
            "class broken: selector #0: CEL runtime error: no such key: nothing",
        ),
        (
            "more than a claim can have",
            json!({"requests": [exactly("r", json!({"count": 33}))]}),
            "claim ns/c: number of requested devices 33 exceeds the claim limit of 32",
        ),
        (
            "all devices against a constraint",
            json!({"requests": [exactly("r", all())], "constraints": [{"matchAttribute": "d.example/numa"}]}),
            "claim ns/c, request r: cannot add device d.example/p/dev-2 because a claim constraint would not be satisfied",
        ),
    ];
    for (what, devices, expected) in rows {
        let found = outcome(&[slice(plain(4))], &Allocated::default(), &[claim("c", devices)]);
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn devices_of_others_are_not_given_again() {
    let mut allocated = Allocated::default();
    let results = |more: Value| {
        let mut result = json!({"request": "r", "driver": "d.example", "pool": "p", "device": "dev-0"});
        for (key, value) in more.as_object().unwrap().iter() {
            result[key.as_str()] = value.clone();
        }
        ferrite_json::from_value::<AllocationResult>(json!({"devices": {"results": [result]}})).unwrap()
    };
    allocated.add(&results(json!({"adminAccess": true})));
    let one = || claim("c", json!({"requests": [exactly("r", json!({}))]}));
    assert_eq!(outcome(&[slice(plain(2))], &allocated, &[one()]), "r=dev-0", "access for administration");
    allocated.add(&results(json!({})));
    assert_eq!(outcome(&[slice(plain(2))], &allocated, &[one()]), "r=dev-1");
    assert_eq!(outcome(&[slice(plain(2))], &allocated, &[one(), one()]), "none");
    let admin = claim("c", json!({"requests": [exactly("r", json!({"adminAccess": true, "count": 2}))]}));
    assert_eq!(
        outcome(&[slice(plain(2))], &allocated, &[admin.clone(), admin]),
        "r=dev-0 r=dev-1; r=dev-0 r=dev-1"
    );
}

#[test]
fn only_complete_pools_are_used() {
    let of = |generation: i64, count: i64, node: &str, name: &str| {
        json!({"driver": "d.example", "nodeName": node, "devices": [{"name": name}],
            "pool": {"name": "p", "generation": generation, "resourceSliceCount": count}})
    };
    let all = json!({"requests": [exactly("r", json!({"allocationMode": "All"}))]});
    let one = json!({"requests": [exactly("r", json!({}))]});
    let rows = [
        ("complete", vec![of(1, 1, "n", "a")], &one, "r=a"),
        ("incomplete", vec![of(1, 2, "n", "a")], &one, "none"),
        (
            "all of an incomplete pool",
            vec![of(1, 2, "n", "a")],
            &all,
            "claim ns/c, request r: asks for all devices, but resource pool d.example/p is currently being updated",
        ),
        ("the other slice is for another node", vec![of(1, 2, "n", "a"), of(1, 2, "m", "b")], &all, "r=a"),
        ("the newest generation", vec![of(1, 1, "n", "old"), of(2, 1, "n", "new")], &one, "r=new"),
        ("replaced elsewhere", vec![of(1, 2, "n", "old"), of(2, 1, "m", "new")], &one, "none"),
        ("another node", vec![of(1, 1, "m", "a")], &one, "none"),
        (
            "one name twice",
            vec![of(1, 2, "n", "a"), of(1, 2, "n", "a")],
            &one,
            "invalid resource pools were encountered",
        ),
    ];
    for (what, slices, devices, expected) in rows {
        let found = outcome(&slices, &Allocated::default(), &[claim("c", devices.clone())]);
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn taints_keep_claims_away() {
    let tainted = json!([
        {"name": "a", "taints": [{"key": "broken", "value": "x", "effect": "NoExecute"}]},
        {"name": "b", "taints": [{"key": "odd", "effect": "None"}]},
    ]);
    let with = |tolerations: Value| {
        claim("c", json!({"requests": [exactly("r", json!({"tolerations": tolerations}))]}))
    };
    let rows = [
        (json!([]), "r=b"),
        (json!([{"key": "broken", "operator": "Equal", "value": "y"}]), "r=b"),
        (json!([{"key": "broken", "operator": "Equal", "value": "x"}]), "r=a"),
        (json!([{"operator": "Exists", "effect": "NoSchedule"}]), "r=b"),
        (json!([{"operator": "Exists"}]), "r=a"),
    ];
    for (tolerations, expected) in rows {
        let found = outcome(&[slice(tainted.clone())], &Allocated::default(), &[with(tolerations.clone())]);
        assert_eq!(found, expected, "{tolerations}");
    }
}

#[test]
fn partitions_share_counters() {
    let partition = |name: &str, memory: &str| json!({"name": name, "consumesCounters": [{"counterSet": "gpu", "counters": {"memory": {"value": memory}}}]});
    let pool = json!({"name": "p", "generation": 1, "resourceSliceCount": 2});
    let slices = [
        json!({"driver": "d.example", "nodeName": "n", "pool": pool,
            "sharedCounters": [{"name": "gpu", "counters": {"memory": {"value": "40Gi"}}}]}),
        json!({"driver": "d.example", "nodeName": "n", "pool": pool, "devices": [
            partition("whole", "40Gi"), partition("half-0", "20Gi"), partition("half-1", "20Gi"),
            partition("quarter", "10Gi")]}),
    ];
    let some = |count: i64| claim("c", json!({"requests": [exactly("r", json!({"count": count}))]}));
    let mut allocated = Allocated::default();
    assert_eq!(outcome(&slices, &allocated, &[some(1)]), "r=whole");
    assert_eq!(outcome(&slices, &allocated, &[some(2)]), "r=half-0 r=half-1");
    assert_eq!(outcome(&slices, &allocated, &[some(3)]), "none");
    allocated.devices.insert(DeviceId::new("d.example", "p", "half-1"));
    assert_eq!(outcome(&slices, &allocated, &[some(1)]), "r=half-0");
    assert_eq!(outcome(&slices, &allocated, &[some(1), some(1)]), "none");
    // A counter that nobody declares makes the pool invalid.
    let mut odd = slices.clone();
    odd[1]["devices"][0]["consumesCounters"][0]["counterSet"] = json!("other");
    assert_eq!(outcome(&odd, &allocated, &[some(1)]), "invalid resource pools were encountered");
}

#[test]
fn capacity_is_consumed() {
    let device = json!([{"name": "nic", "allowMultipleAllocations": true, "capacity": {
        "bandwidth": {"value": "10G", "requestPolicy": {"default": "1G", "validRange": {"min": "1G", "max": "8G", "step": "1G"}}},
        "queues": {"value": "8", "requestPolicy": {"default": "2", "validValues": ["2", "4", "8"]}},
    }}]);
    let want = |requests: Value| {
        claim("c", json!({"requests": [exactly("r", json!({"capacity": {"requests": requests}}))]}))
    };
    let consumed = |requests: Value, allocated: &Allocated| {
        let found = allocate(&inventory(&[slice(device.clone())]), allocated, &[want(requests)]);
        let found = found.unwrap()?;
        let result = &ferrite_client::resource_claims::results(&found[0])[0];
        assert_eq!(result.share_id.as_deref(), Some("share-1"));
        let text = |(name, amount): (&String, &k8s_openapi::apimachinery::pkg::api::resource::Quantity)| {
            format!("{name}={}", amount.0)
        };
        Some(result.consumed_capacity.as_ref().unwrap().iter().map(text).collect::<Vec<_>>().join(" "))
    };
    let none = Allocated::default();
    // Rounded amounts are written with binary suffixes, as upstream's are.
    let rows = [
        (json!({}), Some("bandwidth=1G queues=2")),
        (json!({"bandwidth": "1500M"}), Some("bandwidth=1953125Ki queues=2")),
        (json!({"bandwidth": "1"}), Some("bandwidth=1G queues=2")),
        (json!({"bandwidth": "9G"}), None),
        (json!({"queues": "3"}), Some("bandwidth=1G queues=4")),
        (json!({"queues": "9"}), None),
        (json!({"absent": "1"}), None),
    ];
    for (requests, expected) in rows {
        assert_eq!(consumed(requests.clone(), &none).as_deref(), expected, "{requests}");
    }
    let mut allocated = Allocated::default();
    let held: Amounts = BTreeMap::from([("queues".to_owned(), Quantity::parse("6").unwrap())]);
    allocated.shared.insert(DeviceId::new("d.example", "p", "nic"), held);
    assert!(consumed(json!({}), &allocated).is_some());
    assert!(consumed(json!({"queues": "4"}), &allocated).is_none());
    let two = [want(json!({"queues": "4"})), want(json!({"queues": "4"}))];
    assert_eq!(outcome(&[slice(device.clone())], &none, &two), "r=nic; r=nic");
    let three = [want(json!({"queues": "4"})), want(json!({"queues": "4"})), want(json!({}))];
    assert_eq!(outcome(&[slice(device.clone())], &none, &three), "none");
}

#[test]
fn the_result_says_where_and_how() {
    let mut large = slice(plain(2));
    large["nodeName"] = json!(null);
    large["nodeSelector"] = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]});
    large["devices"][1]["bindingConditions"] = json!(["Attached"]);
    let devices = json!({
        "requests": [exactly("r", json!({"deviceClassName": "large"})), exactly("s", json!({}))],
        "config": [
            {"requests": ["s"], "opaque": {"driver": "d.example", "parameters": {"of": "s"}}},
            {"opaque": {"driver": "d.example", "parameters": {"of": "all"}}},
            {"requests": ["t"], "opaque": {"driver": "d.example", "parameters": {"of": "t"}}},
        ],
    });
    let found = allocate(&inventory(&[large.clone()]), &Allocated::default(), &[claim("c", devices)]);
    let found = ferrite_json::to_value(&found.unwrap().unwrap()[0]).unwrap();
    let config = |source: &str, requests: Value, of: &str| {
        let mut config =
            json!({"source": source, "opaque": {"driver": "d.example", "parameters": {"of": of}}});
        if !requests.is_null() {
            config["requests"] = requests;
        }
        config
    };
    assert_eq!(
        found,
        json!({
            "devices": {
                "results": [
                    {"request": "r", "driver": "d.example", "pool": "p", "device": "dev-1", "bindingConditions": ["Attached"]},
                    {"request": "s", "driver": "d.example", "pool": "p", "device": "dev-0"},
                ],
                "config": [
                    config("FromClass", json!(["r"]), "class"),
                    config("FromClaim", json!(["s"]), "s"),
                    config("FromClaim", json!(null), "all"),
                ],
            },
            "nodeSelector": large["nodeSelector"],
        })
    );
}

#[test]
fn a_search_without_end_is_ended() {
    // Devices that differ in nothing, and a constraint that the last request cannot satisfy.
    let devices: Vec<Value> = (0..64)
        .map(|index| json!({"name": format!("d{index}"), "attributes": {"a": {"int": index % 32}}}))
        .collect();
    let requests: Vec<Value> =
        (0..16).map(|index| exactly(&format!("r{index}"), json!({"count": 2}))).collect();
    let hopeless = claim(
        "c",
        json!({"requests": requests, "constraints": [
        {"distinctAttribute": "d.example/a"}, {"requests": ["r15"], "matchAttribute": "d.example/absent"}]}),
    );
    let asked = Cell::new(0);
    let (inventory, allocated) = (inventory(&[slice(devices.into())]), Allocated::default());
    let allocator = Allocator {
        inventory: &inventory,
        allocated: &allocated,
        classes: &class,
        selectors: &CompiledSelectors::default(),
        is_over: &|| {
            asked.set(asked.get() + 1);
            asked.get() > 5000
        },
        new_share_id: &String::new,
    };
    assert_eq!(allocator.allocate(&node("n"), &[&hopeless]), Err(AllocationError::OutOfTime));
}

#[test]
fn many_claims_need_no_deep_stack() {
    let devices: Vec<Value> = (0..128)
        .map(|index| json!({"name": format!("d{index}"), "allowMultipleAllocations": true}))
        .collect();
    let claims: Vec<ResourceClaim> =
        (0..2000).map(|_| claim("c", json!({"requests": [exactly("r", json!({"count": 32}))]}))).collect();
    let found =
        allocate(&inventory(&[slice(devices.into())]), &Allocated::default(), &claims).unwrap().unwrap();
    assert_eq!(found.len(), 2000);
}

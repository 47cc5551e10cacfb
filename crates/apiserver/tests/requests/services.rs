//! Addresses of Services: families, ranges, and the objects that record them.

use crate::world::{Reply, World};
use ferrite_json::{Value, json};

const SERVICES: &str = "/api/v1/namespaces/default/services";
const ADDRESSES: &str = "/apis/networking.k8s.io/v1/ipaddresses";
const RANGES: &str = "/apis/networking.k8s.io/v1/servicecidrs";

fn service(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    if spec["ports"].is_null() && spec["type"] != "ExternalName" {
        spec["ports"] = json!([{"port": 80}]);
    }
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
}

fn range(name: &str, cidrs: Value) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": name}, "spec": {"cidrs": cidrs}})
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn addresses(reply: &Reply) -> Vec<String> {
    texts(&reply.at("/spec/clusterIPs"))
}

/// Waits until a watch reports an added object.
async fn next_added(world: &World, watch: &str) {
    let mut events = http_body_util::BodyExt::into_data_stream(world.open(watch).await.into_body());
    let mut seen = String::new();
    while !seen.contains("\"ADDED\"") {
        let piece =
            futures_util::StreamExt::next(&mut events).await.expect("it comes back").expect("a piece");
        seen.push_str(&String::from_utf8_lossy(&piece));
    }
}

async fn recorded(world: &World) -> Vec<String> {
    let list = world.get(ADDRESSES).await.at("/items");
    let names = list.as_array().into_iter().flatten().map(|item| item["metadata"]["name"].clone());
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn a_service_gains_and_loses_its_second_family() {
    let world = World::start_ranges(&["10.0.0.0/16", "fd00::/108"]).await;
    let own = world.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(
        (addresses(&own), own.at("/spec/ipFamilyPolicy")),
        (vec!["10.0.0.1".to_owned()], json!("SingleStack"))
    );
    assert_eq!(
        world.get(&format!("{RANGES}/kubernetes")).await.at("/spec/cidrs"),
        json!(["10.0.0.0/16", "fd00::/108"])
    );

    let path = format!("{SERVICES}/a");
    let one = world.post(SERVICES, &service("a", json!({}))).await;
    assert_eq!(one.at("/spec/ipFamilies"), json!(["IPv4"]));
    let first = addresses(&one);
    assert_eq!(first.len(), 1);

    let two = world.patch("merge", &path, &json!({"spec": {"ipFamilyPolicy": "RequireDualStack"}})).await;
    assert_eq!((two.code, two.at("/spec/ipFamilies")), (200, json!(["IPv4", "IPv6"])));
    let both = addresses(&two);
    assert_eq!(both[0], first[0]);
    assert!(both[1].starts_with("fd00::"), "{both:?}");
    assert!(both.iter().all(|_| true) && recorded(&world).await.contains(&both[1]));
    let record = world.get(&format!("{ADDRESSES}/{}", both[1])).await;
    assert_eq!(record.at("/metadata/labels/ipaddress.kubernetes.io~1ip-family"), json!("IPv6"));

    // Only a request for a single family removes the second.
    let refused = world.patch("merge", &path, &json!({"spec": {"ipFamilies": ["IPv4"]}})).await;
    assert_eq!(refused.code, 422);
    assert_eq!(
        refused.at("/message"),
        "Service \"a\" is invalid: spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": must be 'SingleStack' to release the secondary IP family"
    );
    let changed = world.patch("merge", &path, &json!({"spec": {"clusterIPs": [&both[0], "fd00::77"]}})).await;
    assert_eq!(changed.code, 422);
    assert!(
        changed
            .at("/message")
            .as_str()
            .is_some_and(|m| m.contains("spec.clusterIPs[1]") && m.ends_with("may not change once set")),
        "{}",
        changed.json()
    );
    let narrowed = world.patch("merge", &path, &json!({"spec": {"ipFamilyPolicy": "SingleStack"}})).await;
    assert_eq!((addresses(&narrowed), narrowed.at("/spec/ipFamilies")), (first.clone(), json!(["IPv4"])));
    assert!(!recorded(&world).await.contains(&both[1]));

    // A client that knows nothing of all this changes nothing about it.
    world.patch("merge", &path, &json!({"spec": {"ipFamilyPolicy": "PreferDualStack"}})).await;
    let put = world.put(&path, &service("a", json!({"sessionAffinity": "ClientIP"}))).await;
    assert_eq!(
        (put.code, addresses(&put).len(), put.at("/spec/ipFamilyPolicy")),
        (200, 2, json!("PreferDualStack"))
    );

    // Without addresses nothing is held; they come back when they are needed.
    let external = json!({"spec": {"type": "ExternalName", "externalName": "x.test", "clusterIP": null, "clusterIPs": null}});
    let gone = world.patch("merge", &path, &external).await;
    assert_eq!(
        (gone.code, gone.at("/spec/clusterIPs"), gone.at("/spec/ipFamilies")),
        (200, Value::Null, Value::Null),
        "{}",
        gone.json()
    );
    assert_eq!(recorded(&world).await, ["10.0.0.1"]);
    let back =
        world.patch("merge", &path, &json!({"spec": {"type": "ClusterIP", "externalName": null}})).await;
    assert_eq!((back.code, addresses(&back).len()), (200, 1), "{}", back.json());
}

#[tokio::test]
async fn either_family_may_be_the_primary_one() {
    let world = World::start_ranges(&["fd00:1::/112"]).await;
    let own = world.get(&format!("{SERVICES}/kubernetes")).await;
    assert_eq!(
        (addresses(&own), own.at("/spec/ipFamilies")),
        (vec!["fd00:1::1".to_owned()], json!(["IPv6"]))
    );
    let plain = world.post(SERVICES, &service("a", json!({"ipFamilyPolicy": "PreferDualStack"}))).await;
    assert_eq!((plain.code, plain.at("/spec/ipFamilies")), (201, json!(["IPv6"])));
    let asked = world.post(SERVICES, &service("b", json!({"clusterIP": "fd00:1:0::0042"}))).await;
    assert_eq!((asked.code, addresses(&asked)), (201, vec!["fd00:1:0::0042".to_owned()]));
    assert!(recorded(&world).await.contains(&"fd00:1::42".to_owned()));
    let twice = world.post(SERVICES, &service("c", json!({"clusterIP": "fd00:1::42"}))).await;
    assert_eq!(
        twice.at("/details/causes/0/message"),
        "Invalid value: [\"fd00:1::42\"]: failed to allocate IP fd00:1::42: provided IP is already allocated"
    );
    for (spec, code) in [
        (json!({"clusterIP": "10.0.0.9"}), 422),
        (json!({"clusterIP": "fd00:2::1"}), 422),
        (json!({"ipFamilies": ["IPv4"]}), 422),
        (json!({"clusterIP": "None", "ipFamilies": ["IPv4"]}), 201),
    ] {
        assert_eq!(world.post(SERVICES, &service("d", spec.clone())).await.code, code, "{spec}");
    }
}

#[tokio::test]
async fn addresses_come_from_any_range_that_is_ready() {
    let world = World::start_ranges(&["10.0.0.0/30"]).await;
    // One address is the server's own: one is left.
    assert_eq!(addresses(&world.post(SERVICES, &service("a", json!({}))).await), ["10.0.0.2"]);
    let full = world.post(SERVICES, &service("b", json!({}))).await;
    assert_eq!(
        (full.code, full.at("/details/causes/0/message")),
        (422, json!("Invalid value: [\"\"]: failed to allocate IP: range is full"))
    );
    let more = world.post(RANGES, &range("more", json!(["10.9.0.0/24"]))).await;
    assert_eq!(more.code, 201);
    let got = addresses(&world.post(SERVICES, &service("b", json!({}))).await);
    assert!(got[0].starts_with("10.9.0."), "{got:?}");
    assert_eq!(world.post(SERVICES, &service("c", json!({"clusterIP": "10.9.0.7"}))).await.code, 201);

    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Terminating",
        "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    assert_eq!(world.patch("merge", &format!("{RANGES}/more/status"), &unready).await.code, 200);
    assert_eq!(world.post(SERVICES, &service("d", json!({"clusterIP": "10.9.0.8"}))).await.code, 422);
    assert_eq!(world.post(SERVICES, &service("d", json!({}))).await.code, 422);
    // A returned address may be allocated again.
    assert_eq!(world.delete(&format!("{SERVICES}/a")).await.code, 200);
    assert_eq!(addresses(&world.post(SERVICES, &service("d", json!({}))).await), ["10.0.0.2"]);
}

#[tokio::test]
async fn the_servers_own_objects_come_back() {
    let world = World::start_ranges(&["10.0.0.0/24"]).await;
    for path in [format!("{SERVICES}/kubernetes"), format!("{RANGES}/kubernetes")] {
        let watch = format!(
            "{}?watch=true&resourceVersion={}&timeoutSeconds=20",
            path.rsplit_once('/').expect("a list").0,
            world.version().await
        );
        let before = world.get(&path).await.at("/metadata/uid");
        assert_eq!(world.delete(&path).await.code, 200);
        next_added(&world, &watch).await;
        let after = world.get(&path).await;
        assert_eq!(after.code, 200);
        assert_ne!(after.at("/metadata/uid"), before);
    }
}

#[tokio::test]
async fn an_address_that_is_held_stays_recorded() {
    let world = World::start_ranges(&["10.0.0.0/24"]).await;
    assert_eq!(world.post(SERVICES, &service("a", json!({"clusterIP": "10.0.0.7"}))).await.code, 201);
    let version = world.version().await;
    assert_eq!(world.delete(&format!("{ADDRESSES}/10.0.0.7")).await.code, 200);
    next_added(&world, &format!("{ADDRESSES}?watch=true&resourceVersion={version}&timeoutSeconds=20")).await;
    let record = world.get(&format!("{ADDRESSES}/10.0.0.7")).await;
    assert_eq!((record.code, record.at("/spec/parentRef/name")), (200, json!("a")));
}

#[tokio::test]
async fn a_dry_run_holds_nothing() {
    let world = World::start_ranges(&["10.0.0.0/30"]).await;
    let wanted = service("a", json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30007}]}));
    for _ in 0..2 {
        let tried = world.post(&format!("{SERVICES}?dryRun=All"), &wanted).await;
        assert_eq!((tried.code, tried.at("/spec/ports/0/nodePort")), (201, json!(30007)));
    }
    assert_eq!(world.post(SERVICES, &wanted).await.code, 201);
}

#[tokio::test]
async fn a_port_on_the_nodes_is_one_services() {
    let world = World::start_ranges(&["10.0.0.0/24"]).await;
    let node = |name: &str, ports: Value| service(name, json!({"type": "NodePort", "ports": ports}));
    let both =
        json!([{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53, "protocol": "TCP"}]);
    let first = world.post(SERVICES, &node("a", both)).await;
    let port = first.at("/spec/ports/0/nodePort");
    assert_eq!((first.code, &first.at("/spec/ports/1/nodePort")), (201, &port));
    let wanted = || json!([{"port": 80, "nodePort": port}]);
    let refused = world.post(SERVICES, &node("b", wanted())).await;
    assert_eq!(
        refused.at("/details/causes/0/message"),
        format!("Invalid value: {port}: provided port is already allocated")
    );

    // The port is free again when its Service does not need it any more.
    let plain = json!({"spec": {"type": "ClusterIP"}});
    let path = format!("{SERVICES}/a");
    let changed = world.patch("merge", &path, &plain).await;
    assert_eq!((changed.code, changed.at("/spec/ports/0/nodePort")), (200, Value::Null));
    assert_eq!(world.post(SERVICES, &node("b", wanted())).await.code, 201);
    assert_eq!(world.delete(&format!("{SERVICES}/b")).await.code, 200);

    let local = json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port}});
    let balanced = world.patch("merge", &path, &local).await;
    assert_eq!(
        (balanced.code, &balanced.at("/spec/healthCheckNodePort")),
        (200, &port),
        "{}",
        balanced.json()
    );
    assert_eq!(world.post(SERVICES, &node("b", wanted())).await.code, 422);
    let cluster = json!({"spec": {"externalTrafficPolicy": "Cluster"}});
    let dropped = world.patch("merge", &path, &cluster).await;
    assert_eq!((dropped.code, dropped.at("/spec/healthCheckNodePort")), (200, Value::Null));
    assert_eq!(world.post(SERVICES, &node("b", wanted())).await.code, 201);
}

#[tokio::test]
async fn what_is_held_is_known_to_another_server_of_the_store() {
    let store = std::sync::Arc::new(ferrite_store::Store::memory());
    let (one, two) = (World::share(&store).await, World::share(&store).await);
    let asked = service(
        "a",
        json!({"type": "NodePort", "clusterIP": "10.0.0.9", "ports": [{"port": 80, "nodePort": 30001}]}),
    );
    assert_eq!(one.post(SERVICES, &asked).await.code, 201);
    let other = service("b", json!({"clusterIP": "10.0.0.9"}));
    assert_eq!(two.post(SERVICES, &other).await.code, 422);
    let same_port = service("b", json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30001}]}));
    assert_eq!(two.post(SERVICES, &same_port).await.code, 422);
    assert_eq!(one.delete(&format!("{SERVICES}/a")).await.code, 200);
    let again = service(
        "b",
        json!({"type": "NodePort", "clusterIP": "10.0.0.9", "ports": [{"port": 80, "nodePort": 30001}]}),
    );
    assert_eq!(two.post(SERVICES, &again).await.code, 201);
}

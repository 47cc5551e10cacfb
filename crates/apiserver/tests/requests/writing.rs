use crate::world::*;
use ferrite_json::{Value, json};

#[tokio::test]
async fn an_object_is_created_once() {
    let world = World::start().await;
    let map = config_map("a", json!({"k": "v"}));
    let created = world.post(MAPS, &map).await;
    assert_eq!(created.code, 201);
    assert_eq!(created.at("/metadata/managedFields/0/manager"), "tester");
    let again = world.post(MAPS, &map).await;
    assert_eq!((again.code, again.at("/message")), (409, json!(r#"configmaps "a" already exists"#)));
    let nameless = json!({"metadata": {"generateName": "g-"}});
    let generated = world.post(MAPS, &nameless).await;
    assert_eq!(generated.at("/metadata/name").as_str().map(str::len), Some(7));
    let elsewhere = world.post("/api/v1/namespaces/absent/configmaps", &map).await;
    assert_eq!((elsewhere.code, elsewhere.at("/message")), (404, json!(r#"namespaces "absent" not found"#)));
}

#[tokio::test]
async fn what_cannot_be_read_is_told() {
    let world = World::start().await;
    let rows: [(&str, &str, u16, &str); 5] = [
        ("application/json", "[]", 400, "the object provided is unrecognized (must be of type ConfigMap)"),
        (
            "application/json",
            r#"{"data": 1}"#,
            400,
            "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: json: cannot unmarshal number into Go struct field ConfigMap.data of type map[string]string",
        ),
        (
            "application/json",
            r#"{"kind": "Secret", "apiVersion": "v1"}"#,
            400,
            "Secret in version \"v1\" cannot be handled as a ConfigMap: converting (v1.Secret) to (core.ConfigMap): unknown conversion",
        ),
        ("text/plain", "{}", 415, "the body of the request was in an unknown format"),
        (
            "application/vnd.kubernetes.protobuf",
            "xx",
            400,
            "the object provided is unrecognized (must be of type ConfigMap): provided data does not appear to be a protobuf message, expected prefix [107 56 115 0] (7878)",
        ),
    ];
    for (content_type, body, code, message) in rows {
        let reply = world.send("POST", MAPS, &[("content-type", content_type)], body.as_bytes()).await;
        let told = reply.at("/message");
        let told = told.as_str().unwrap_or_default();
        assert!(reply.code == code && told.starts_with(message), "{body}: {} {told}", reply.code);
    }
}

#[tokio::test]
async fn unknown_fields_are_ignored_warned_of_or_refused() {
    let world = World::start().await;
    let mut map = config_map("a", json!({}));
    map["bogus"] = 1.into();
    for (query, code, warning) in
        [("Strict", 400, ""), ("Ignore", 201, ""), ("Warn", 409, r#"299 - "unknown field \"bogus\"""#)]
    {
        let reply = world.post(&format!("{MAPS}?fieldValidation={query}"), &map).await;
        assert_eq!((reply.code, reply.header("warning")), (code, warning), "{query}");
    }
}

#[tokio::test]
async fn an_update_names_the_version_it_is_based_on() {
    let world = World::start().await;
    let created = world.post(MAPS, &config_map("a", json!({"k": "1"}))).await.json();
    let path = format!("{MAPS}/a");
    let mut changed = created.clone();
    changed["data"]["k"] = "2".into();
    assert_eq!(world.put(&path, &changed).await.code, 200);
    let late = world.put(&path, &changed).await;
    assert_eq!((late.code, late.at("/reason")), (409, json!("Conflict")));
    changed["metadata"]["resourceVersion"] = "".into();
    let same = world.put(&path, &changed).await;
    let stored = world.get(&path).await.at("/metadata/resourceVersion");
    assert_eq!(same.at("/metadata/resourceVersion"), stored, "nothing changed, so nothing was written");
    changed["metadata"]["name"] = "b".into();
    assert_eq!(world.put(&path, &changed).await.code, 400);
    changed["metadata"] = json!({"name": "absent"});
    assert_eq!(world.put(&format!("{MAPS}/absent"), &changed).await.code, 404);
}

#[tokio::test]
async fn patches_of_every_kind() {
    let world = World::start().await;
    world.post(MAPS, &config_map("a", json!({"x": "1", "y": "2"}))).await;
    let path = format!("{MAPS}/a");
    let merged = world.patch("merge", &path, &json!({"data": {"x": null, "z": "3"}})).await;
    assert_eq!(merged.at("/data"), json!({"y": "2", "z": "3"}));
    let json_patched =
        world.patch("json", &path, &json!([{"op": "replace", "path": "/data/y", "value": "4"}])).await;
    assert_eq!(json_patched.at("/data/y"), "4");
    let failed = world.patch("json", &path, &json!([{"op": "test", "path": "/data/y", "value": "5"}])).await;
    assert_eq!((failed.code, failed.at("/reason")), (422, json!("Invalid")));
    let strategic = world.patch("strategic-merge", &path, &json!({"data": {"y": "6"}})).await;
    assert_eq!(strategic.at("/data/y"), "6");
    let wrong = world.patch("merge", &path, &json!({"data": {"y": 7}})).await;
    let message = wrong.at("/message");
    assert!(
        message.as_str().is_some_and(|m| m
            .ends_with("json: cannot unmarshal number into Go struct field ConfigMap.data of type string")),
        "{message}"
    );
    let unknown = world.send("PATCH", &path, &[("content-type", "application/json")], b"{}").await;
    assert_eq!((unknown.code, unknown.at("/message")), (415, json!("415: Unsupported Media Type")));
}

#[tokio::test]
async fn applies_own_fields_and_conflict() {
    let world = World::start().await;
    let path = format!("{MAPS}/a");
    let applied = |value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": value}});
    assert_eq!(world.patch("apply", &path, &applied("1")).await.code, 422, "no manager was named");
    assert_eq!(world.patch("apply", &format!("{path}?fieldManager=one"), &applied("1")).await.code, 201);
    let conflict = world.patch("apply", &format!("{path}?fieldManager=two"), &applied("2")).await;
    assert_eq!((conflict.code, conflict.at("/details/causes/0/field")), (409, json!(".data.k")));
    let forced = world.patch("apply", &format!("{path}?fieldManager=two&force=true"), &applied("2")).await;
    assert_eq!((forced.code, forced.at("/data/k")), (200, json!("2")));
    let empty = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    let released = world.patch("apply", &format!("{path}?fieldManager=two"), &empty).await;
    assert_eq!(released.at("/data"), json!(null), "what nobody owns any more goes");
}

#[tokio::test]
async fn dry_runs_leave_nothing() {
    let world = World::start().await;
    let map = config_map("a", json!({}));
    assert_eq!(world.post(&format!("{MAPS}?dryRun=All"), &map).await.code, 201);
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 404);
    let wrong = world.post(&format!("{MAPS}?dryRun=all"), &map).await;
    assert_eq!((wrong.code, wrong.at("/details/kind")), (422, json!("CreateOptions")));
}

#[tokio::test]
async fn services_get_addresses_and_ports() {
    let world = World::start().await;
    let services = "/api/v1/namespaces/default/services";
    let service = |name: &str, spec| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec});
    let plain = world.post(services, &service("a", json!({"ports": [{"port": 80}]}))).await;
    assert!(
        plain.at("/spec/clusterIP").as_str().is_some_and(|ip| ip.starts_with("10.0.")),
        "{}",
        plain.json()
    );
    let node =
        world.post(services, &service("b", json!({"type": "NodePort", "ports": [{"port": 80}]}))).await;
    let port = node.at("/spec/ports/0/nodePort");
    assert!(port.as_u64().is_some_and(|p| p >= 30000));
    let wanted = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
    assert_eq!(world.post(services, &service("c", wanted.clone())).await.code, 422, "the port is taken");
    assert_eq!(world.delete(&format!("{services}/b")).await.at("/kind"), "Service");
    assert_eq!(world.post(services, &service("c", wanted)).await.code, 201, "and free again");
    let v6 =
        world.post(services, &service("d", json!({"ports": [{"port": 80}], "clusterIP": "fd00::1"}))).await;
    assert_eq!(
        v6.at("/details/causes/0/message"),
        r#"Invalid value: ["fd00::1"]: IPv6 is not configured on this cluster"#
    );
}

#[tokio::test]
async fn an_empty_list_of_managers_forgets_them() {
    let world = World::start().await;
    assert_eq!(world.post(MAPS, &config_map("m", json!({"k": "v"}))).await.code, 201);
    let path = format!("{MAPS}/m");
    let managed = |reply: &Reply| reply.at("/metadata/managedFields");
    assert!(managed(&world.get(&path).await).is_array());
    let kept = world.patch("merge", &path, &json!({"metadata": {"managedFields": null}})).await;
    assert!(managed(&kept).is_array(), "a client that does not know them deletes none");
    let forgotten = world.patch("merge", &path, &json!({"metadata": {"managedFields": []}})).await;
    assert_eq!((forgotten.code, managed(&forgotten)), (200, Value::Null));
    assert_eq!(managed(&world.get(&path).await), Value::Null);
}

//! From a client of the API: bodies, headers and roles that should not get through.

use crate::world::*;
use ferrite_json::{Value, json};

/// A user with these rules in the whole cluster.
fn user(world: &World, name: &str, rules: &Value) {
    let group = "rbac.authorization.k8s.io";
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {"apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": name}]},
    ]});
    world.create(&objects.to_string());
}

fn is_well(world: &World) {
    assert_eq!(world.kubectl(&["get", "--raw", "/readyz"]), "ok");
}

#[test]
fn a_patch_that_doubles_the_depth_does_not_end_the_process() {
    let world = World::start();
    world.create(
        r#"{"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": "bomb"}, "revision": 1,
            "data": {"a": {"a": 1}}}"#,
    );
    let mut operations = Vec::new();
    let mut depth = 2;
    for _ in 0..13 {
        let path = format!("/data{}", "/a".repeat(depth));
        operations.push(json!({"op": "copy", "from": "/data/a", "path": path}));
        depth = 2 * depth - 1;
    }
    let patch = Value::Array(operations).to_string();
    let file = world.write("patch.json", &patch);
    let patch =
        ["patch", "controllerrevision", "bomb", "--type=json", "--patch-file", file.to_str().unwrap()];
    let complaint = world.kubectl_fails(&patch);
    assert!(complaint.contains("exceeded max depth"), "{complaint}");
    is_well(&world);
}

#[test]
fn who_writes_roles_does_not_become_an_administrator() {
    let world = World::start();
    let roles = json!([{"verbs": ["get", "create", "update", "patch"],
        "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"]}]);
    user(&world, "mallory", &roles);
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "mallory"}, "rules": roles,
        "aggregationRule": {"clusterRoleSelectors": [{"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}]}});
    let file = world.write("role.json", &role.to_string());
    let complaint = world.kubectl_fails(&["--as=mallory", "replace", "-f", file.to_str().unwrap()]);
    assert!(
        complaint.contains("must have cluster-admin privileges to use the aggregationRule"),
        "{complaint}"
    );
    let label = [
        "--as=mallory",
        "label",
        "clusterrole",
        "cluster-admin",
        "rbac.authorization.k8s.io/aggregate-to-view=true",
    ];
    let complaint = world.kubectl_fails(&label);
    assert!(complaint.contains("is attempting to grant RBAC permissions not currently held"), "{complaint}");
    assert!(!world.try_kubectl(&["--as=mallory", "get", "secrets", "-A"]).status.success());
}

#[test]
fn a_name_that_is_not_ascii_is_nobody_else() {
    let world = World::start();
    let complaint = world.kubectl_fails(&["--as=björn", "get", "secrets", "-A"]);
    assert!(complaint.contains("User \"björn\" cannot list resource \"secrets\""), "{complaint}");
}

#[test]
fn who_may_only_read_streams_gets_into_no_container() {
    let world = World::start();
    let resources = ["pods", "pods/exec", "pods/attach", "pods/portforward"];
    user(&world, "reader", &json!([{"verbs": ["get", "list"], "apiGroups": [""], "resources": resources}]));
    world.create(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  terminationGracePeriodSeconds: 0\n  containers: [{{name: c, image: {TOOLS}, args: [http]}}]\n"
    ));
    world.wait_ready("web");
    // kubectl begins with a GET that becomes a WebSocket.
    let complaint = world.kubectl_fails(&["--as=reader", "exec", "web", "--", "/ferrite", "version"]);
    assert!(complaint.contains("forbidden"), "{complaint}");
    world.kubectl(&["exec", "web", "--", "/ferrite", "version"]);
}

#[test]
fn a_node_that_says_it_is_the_server_is_not_spoken_to() {
    let world = World::start();
    let own = world.get(&["node", "node"]);
    let addresses = own["status"]["addresses"].as_array().unwrap();
    let address = addresses.iter().find(|a| a["type"] == "InternalIP").unwrap()["address"].as_str().unwrap();
    let service = world.get(&["service", "kubernetes"])["spec"]["clusterIP"].as_str().unwrap().to_owned();
    for (name, address, port) in [
        ("same", address, 6443),
        ("service", &*service, 443),
        ("loopback", "127.0.0.1", 6443),
        ("metadata", "169.254.169.254", 6443),
    ] {
        world.create(&format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n"));
        let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
        let status = status.to_string();
        world.kubectl(&["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status]);
        let path = format!("/api/v1/nodes/{name}/proxy/api/v1/namespaces/kube-system/secrets");
        let complaint = world.kubectl_fails(&["get", "--raw", &path]);
        assert!(complaint.contains("address not allowed"), "{complaint}");
    }
    // The certificate that kubelets are shown is nobody's here.
    let pki = world.data().join("pki");
    let file = |end: &str| pki.join(format!("apiserver-kubelet-client.{end}")).display().to_string();
    let mut config: Value =
        ferrite_json::from_str(&world.kubectl(&["config", "view", "--raw", "-o", "json"])).unwrap();
    config["users"][0]["user"] = json!({"client-certificate": file("crt"), "client-key": file("key")});
    let config = world.write("kubelet-client.kubeconfig", &config.to_string());
    let config = format!("--kubeconfig={}", config.display());
    let complaint = world.kubectl_fails(&[&config, "get", "secrets", "-A"]);
    assert!(complaint.contains("User \"kube-apiserver-kubelet-client\" cannot list"), "{complaint}");
}

#[test]
fn a_token_lives_no_longer_than_asked_for() {
    let world = World::start();
    let token = world.kubectl(&["create", "token", "default", "--duration=3607s"]);
    let claims = token.split('.').nth(1).unwrap();
    let claims = base64_url(claims);
    let claims: Value = ferrite_json::from_slice(&claims).unwrap();
    let lives = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
    assert_eq!(lives, 3607);
}

/// Base64 with the alphabet of URLs and no padding.
fn base64_url(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => u32::from(c - b'A'),
        b'a'..=b'z' => u32::from(c - b'a') + 26,
        b'0'..=b'9' => u32::from(c - b'0') + 52,
        b'-' => 62,
        _ => 63,
    };
    let whole = |chunk: &[u8]| {
        let bits = chunk.iter().fold(0, |bits, c| bits << 6 | value(*c)) << (6 * (4 - chunk.len()));
        bits.to_be_bytes()[1..chunk.len()].to_vec()
    };
    text.as_bytes().chunks(4).flat_map(whole).collect()
}

#[test]
fn a_kind_on_which_nothing_acts_says_so() {
    let world = World::start();
    let backend = "{service: {name: x, port: {number: 80}}}";
    let ingress = world.write(
        "ingress.yaml",
        &format!(
            "apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {{name: none}}\nspec: {{defaultBackend: {backend}}}\n"
        ),
    );
    let output = world.try_kubectl(&["create", "-f", ingress.to_str().unwrap()]);
    assert!(output.status.success());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.contains("Warning: Ingress is stored, but nothing acts on it yet: no traffic is routed"),
        "{told}"
    );
}

//! Registries with a lock: pull secrets and the kubelet's credential provider plugins.

use crate::archive::web_image;
use crate::registry::Registry;
use crate::world::*;
use ferrite_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A plugin that records its requests and answers with the registry's credentials.
fn plugin(world: &World, name: &str, check: &str) {
    let path = world.path("plugins").join(name);
    let asked = world.path(&format!("{name}.asked"));
    let text = format!(
        "#!/bin/sh\nread -r question\necho \"$question\" >>'{}'\n{check}\necho '{{\"kind\":\"CredentialProviderResponse\",\
         \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"Image\",\
         \"auth\":{{\"127.0.0.*:'$PORT'\":{{\"username\":\"user\",\"password\":\"secret\"}}}}}}'\n",
        asked.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

fn asked(world: &World, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(world.path(&format!("{name}.asked"))).unwrap_or_default();
    text.lines().map(|line| ferrite_json::from_str(line).unwrap()).collect()
}

fn run(world: &World, name: &str, image: &str, more: &Value) -> Value {
    let mut spec =
        json!({"containers": [{"name": "main", "image": image}], "terminationGracePeriodSeconds": 0});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    world.create(
        &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string(),
    );
    world.wait_ready(name)
}

fn claims(token: &str) -> Value {
    use base64::Engine;
    let payload = token.split('.').nth(1).unwrap();
    ferrite_json::from_slice(&base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(payload).unwrap())
        .unwrap()
}

#[test]
fn plugins_open_registries() {
    let mut world = World::prepare(&[]);
    let registry = Registry::start(&world.netns, &world.path("registry"), true);
    let archive = world.path("web.tar");
    web_image(&archive, "web:latest", "hello");
    for repository in ["open/web", "secret/web", "account/web"] {
        registry.push(&world.netns, repository, &archive);
    }
    let (address, port) = (registry.address, registry.address.port().to_string());
    std::fs::create_dir(world.path("plugins")).unwrap();
    plugin(&world, "simple", "");
    plugin(&world, "broken", "exit 1");
    plugin(&world, "account", "case $question in *serviceAccountToken*) ;; *) exit 1;; esac");
    let provider = |name: &str, images: Value, token: Option<Value>| {
        let mut provider = json!({
            "name": name,
            "matchImages": images,
            "defaultCacheDuration": "1h",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "env": [{"name": "PORT", "value": port}],
        });
        if let Some(token) = token {
            provider["tokenAttributes"] = token;
        }
        provider
    };
    let token = json!({
        "serviceAccountTokenAudience": "registry",
        "cacheType": "ServiceAccount",
        "requireServiceAccount": true,
        "requiredServiceAccountAnnotationKeys": ["example.com/robot"],
    });
    let config = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig", "providers": [
        provider("broken", json!([format!("{address}/open")]), None),
        provider("simple", json!([format!("*.0.0.1:{port}/open"), format!("{address}/secret")]), None),
        provider("account", json!([format!("{address}/account")]), Some(token)),
    ]});
    let (config, plugins) = (world.write("providers.json", &config.to_string()), world.path("plugins"));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    world.start_in(&[
        "--image-credential-provider-config",
        &text(&config),
        "--image-credential-provider-bin-dir",
        &text(&plugins),
    ]);

    // Nodes get tokens for the audiences of pods' volumes, and for others where they are allowed to ask.
    world.create(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: registry-tokens}
rules: [{apiGroups: [''], resources: [registry], verbs: [request-serviceaccounts-token-audience]}]
",
    );
    let binding = ["create", "clusterrolebinding", "registry-tokens", "--clusterrole=registry-tokens"];
    world.kubectl(&[&binding[..], &["--group=system:nodes"]].concat());

    // A plugin that fails is in nobody's way, and an answer is asked for once.
    let image = format!("{address}/open/web");
    let always = |name: &str| json!([{"name": "main", "image": name, "imagePullPolicy": "Always"}]);
    run(&world, "open", &image, &json!({}));
    run(&world, "again", &image, &json!({"containers": always(&image)}));
    let simple = json!({
        "kind": "CredentialProviderRequest",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "image": image,
    });
    assert_eq!(asked(&world, "simple"), [simple]);
    assert!(!asked(&world, "broken").is_empty());
    assert!(world.log().contains("error execing credential provider plugin broken"), "{}", world.log());

    // A secret that does not open it comes first, and the plugin still helps.
    let server = format!("--docker-server={address}");
    world.kubectl(&[
        "create",
        "secret",
        "docker-registry",
        "stale",
        &server,
        "--docker-username=user",
        "--docker-password=old",
    ]);
    run(
        &world,
        "secret",
        &format!("{address}/secret/web"),
        &json!({"imagePullSecrets": [{"name": "stale"}]}),
    );

    // One that works for service accounts which ask for it.
    world.kubectl(&["create", "serviceaccount", "robot"]);
    world.kubectl(&["annotate", "serviceaccount", "robot", "example.com/robot=r2"]);
    let image = format!("{address}/account/web");
    let pod = run(&world, "account", &image, &json!({"serviceAccountName": "robot"}));
    let requests = asked(&world, "account");
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0]["serviceAccountAnnotations"], json!({"example.com/robot": "r2"}));
    let claims = claims(requests[0]["serviceAccountToken"].as_str().unwrap());
    assert_eq!(claims["aud"], json!(["registry"]));
    let bound = &claims["kubernetes.io"];
    assert_eq!(
        (&bound["pod"]["uid"], &bound["serviceaccount"]["name"]),
        (&pod["metadata"]["uid"], &json!("robot"))
    );
    // The others do without, and say so. That the node has the image does not help them.
    let here = |policy: &str| json!([{"name": "main", "image": image, "imagePullPolicy": policy}]);
    let other = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": {"containers": here("IfNotPresent")}});
    world.create(&other.to_string());
    let waiting = world.watch(&["pod", "other"], |pod| {
        let reason = &container_status(pod)["state"]["waiting"]["reason"];
        reason == "ErrImagePull" || reason == "ImagePullBackOff"
    });
    assert!(waiting["status"].to_string().contains("pull access denied"), "{waiting}");
    run(&world, "same", &image, &json!({"serviceAccountName": "robot", "containers": here("Never")}));
    assert_eq!(asked(&world, "account").len(), 1);
    let log = world.log();
    assert!(
        !log.contains("\"password\"") && !log.contains(requests[0]["serviceAccountToken"].as_str().unwrap())
    );
}

#[test]
fn plugins_that_cannot_work_are_refused() {
    let world = World::prepare(&[]);
    let plugins = world.path("plugins");
    std::fs::create_dir(&plugins).unwrap();
    let config = world.write(
        "providers.yaml",
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders: [{name: a/b}]\n",
    );
    let config = config.to_str().unwrap();
    let up = |more: &[&str]| {
        let output = world.ferrite(&[&["up"], more].concat()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let alone = up(&["--image-credential-provider-config", config]);
    assert!(alone.contains("--image-credential-provider-bin-dir"), "{alone}");
    let both = ["--image-credential-provider-config", config, "--image-credential-provider-bin-dir"];
    let refused = up(&[&both[..], &[plugins.to_str().unwrap()]].concat());
    assert!(refused.contains("provider name cannot contain '/'"), "{refused}");
}

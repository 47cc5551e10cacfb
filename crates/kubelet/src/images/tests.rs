use super::PullLimits;
use crate::testing::Harness;
use base64::Engine;
use ferrite_json::{Value, json};

fn secret(h: &Harness, name: &str, password: &str) {
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let config = json!({"auths": {"r.example.com": {"username": "u", "password": password}}});
    h.api.put(
        "secrets",
        json!({"metadata": {"namespace": "default", "name": name, "uid": format!("uid-{name}")},
               "type": "kubernetes.io/dockerconfigjson",
               "data": {".dockerconfigjson": encode(&config.to_string())}}),
    );
}

fn spec(policy: &str, secret: Option<&str>) -> Value {
    let secrets: Vec<Value> = secret.iter().map(|name| json!({"name": name})).collect();
    json!({"imagePullSecrets": secrets,
           "containers": [{"name": "c", "image": "r.example.com/private:1", "imagePullPolicy": policy}]})
}

fn pulls(h: &Harness) -> usize {
    h.runtime.calls().iter().filter(|call| call.starts_with("pull:")).count()
}

async fn until_waiting(h: &Harness, pod: &str, reason: &str) {
    let waits = |p: &Value| p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == *reason;
    h.until(pod, &format!("{pod} waits with {reason}"), waits).await;
}

#[test]
fn failures_have_upstreams_reasons() {
    for (error, reason, message) in [
        ("no such host", "ErrImagePull", "no such host"),
        (
            "RegistryUnavailable: timeout",
            "RegistryUnavailable",
            "image pull failed for x:1 because the registry is unavailable: timeout",
        ),
        (
            "SignatureValidationFailed",
            "SignatureValidationFailed",
            "image pull failed for x:1 because the signature validation failed",
        ),
    ] {
        assert_eq!(super::pull_failure("x:1", error), (reason, message.to_owned()));
    }
}

#[tokio::test(start_paused = true)]
async fn pulls_wait_for_one_another_and_have_a_rate() {
    let limits = PullLimits { parallel: Some(1), qps: Some(1), burst: 2 };
    let h = Harness::start_pulling(limits).await;
    let spec = |image: &str| json!({"containers": [{"name": "c", "image": image}]});
    for (pod, image) in [("a", "x:1"), ("b", "y:1"), ("c", "z:1")] {
        h.create(pod, spec(image));
    }
    // One takes a second of the paused clock, so three that wait for one another have a token each.
    for pod in ["a", "b", "c"] {
        h.until_phase(pod, "Running").await;
    }
    let mut waits = Vec::new();
    for image in ["x:1", "y:1", "z:1"] {
        let said = h.until_event("Pulled", &format!("Successfully pulled image \"{image}\"")).await;
        assert!(said.contains(" in 1s ("), "{said}");
        waits.push(said.split(" in 1s (").nth(1).unwrap().split(' ').next().unwrap().to_owned());
    }
    waits.sort();
    assert_eq!(waits, ["1s", "2s", "3s"]);

    let h = Harness::start_pulling(PullLimits { parallel: None, ..limits }).await;
    for (pod, image) in [("a", "x:1"), ("b", "y:1"), ("c", "z:1")] {
        h.create(pod, spec(image));
    }
    h.until_event("Failed", "pull QPS exceeded").await;
    for pod in ["a", "b", "c"] {
        h.until_phase(pod, "Running").await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_of_another_pods_secret_is_not_there_for_everybody() {
    let h = Harness::start().await;
    secret(&h, "mine", "open");
    secret(&h, "wrong", "guess");
    secret(&h, "same", "open");
    h.create("first", spec("IfNotPresent", Some("mine")));
    h.until_phase("first", "Running").await;
    assert_eq!(pulls(&h), 1);
    h.create("stranger", spec("IfNotPresent", None));
    until_waiting(&h, "stranger", "ErrImagePull").await;
    h.create("guesser", spec("IfNotPresent", Some("wrong")));
    until_waiting(&h, "guesser", "ErrImagePull").await;
    for pod in ["stranger", "guesser"] {
        h.delete(pod, 0);
        h.until_gone(pod).await;
    }
    // Nobody learns that the node has it.
    h.create("never", spec("Never", None));
    until_waiting(&h, "never", "ErrImageNeverPull").await;
    h.until_event("ErrImageNeverPull", "is not present with pull policy of Never").await;
    h.delete("never", 0);
    h.until_gone("never").await;

    // The kubelet dies; the records are on disk.
    let h = h.restart().await;
    let before = pulls(&h);
    h.create("again", spec("Never", Some("mine")));
    h.until_phase("again", "Running").await;
    h.create("equal", spec("IfNotPresent", Some("same")));
    h.until_phase("equal", "Running").await;
    assert_eq!(pulls(&h), before, "the registry is not asked");
    h.until_event("Pulled", "already present on machine and can be accessed by the pod").await;
}

#[tokio::test(start_paused = true)]
async fn the_image_of_a_volume_backs_off() {
    let h = Harness::start().await;
    let mounts = json!([{"name": "v", "mountPath": "/v"}]);
    let c = json!({"name": "c", "image": "busybox:1", "volumeMounts": mounts});
    h.create(
        "p",
        json!({"containers": [c], "volumes": [{"name": "v", "image": {"reference": "missing:1"}}]}),
    );
    until_waiting(&h, "p", "ImagePullBackOff").await;
    let before = h.context.clock.now();
    let pulls = || h.runtime.calls().iter().filter(|call| *call == "pull:missing:1").count();
    h.until("p", "tried again", |_| pulls() == 3).await;
    assert!(crate::clock::since(before, h.context.clock.now()).as_secs() >= 20);
}

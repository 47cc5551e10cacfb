//! Deployments: scaling, rolling updates without downtime, going back.

use crate::archive::web_image;
use crate::world::*;
use std::collections::BTreeSet;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn create_scale_and_delete() {
    let world = World::start();
    world.kubectl(&[
        "create",
        "deployment",
        "web",
        "--image",
        TOOLS,
        "--replicas=3",
        "--",
        "/ferrite",
        "tools",
        "http",
    ]);
    world.wait_rolled_out("web", 3);
    let sets = world.get(&["replicasets", "-l", "app=web"]);
    let set = &sets["items"][0];
    assert_eq!(sets["items"].as_array().unwrap().len(), 1);
    assert_eq!(set["metadata"]["annotations"]["deployment.kubernetes.io/revision"], "1");
    assert_eq!(set["metadata"]["ownerReferences"][0]["kind"], "Deployment");
    let pods = world.pods("app=web");
    assert!(pods.iter().all(|p| p["metadata"]["ownerReferences"][0]["uid"] == set["metadata"]["uid"]));
    let addresses: BTreeSet<_> = pods.iter().map(pod_ip).collect();
    assert_eq!(addresses.len(), 3);
    shows_the_life_of(&world, pods[0]["metadata"]["name"].as_str().unwrap());

    world.kubectl(&["scale", "deployment/web", "--replicas=5"]);
    world.wait_rolled_out("web", 5);
    world.kubectl(&["scale", "deployment/web", "--replicas=2"]);
    world.wait_rolled_out("web", 2);

    // A deleted pod is replaced.
    let victim = world.living_pods("app=web")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    world.kubectl(&["delete", "pod", &victim]);
    world.wait_rolled_out("web", 2);
    assert!(world.living_pods("app=web").iter().all(|p| p["metadata"]["name"] != *victim));

    world.kubectl(&["delete", "deployment", "web"]);
    eventually("the garbage collector removes pods and replica sets", || {
        (world.pods("app=web").is_empty()
            && world.get(&["replicasets"])["items"].as_array().unwrap().is_empty())
        .then_some(())
    });
}

/// The timeline of a pod reaches from the request for its Deployment to its process, and is for administrators.
fn shows_the_life_of(world: &World, pod: &str) {
    let timeline = world.command(ferrite().to_str().unwrap(), &["timeline", &format!("pod/{pod}")]).output();
    let text = String::from_utf8(timeline.unwrap().stdout).unwrap();
    let mut lines = text.lines();
    for (component, step, object) in [
        ("apiserver", "create", "deployment/web"),
        ("replicaset-controller", "reconcile", "replicaset/web"),
        ("apiserver", "create", "pod/web"),
        ("scheduler", "schedule", "pod/web"),
        ("apiserver", "bind", "pod/web"),
        ("kubelet", "sandbox", "pod/web"),
        ("kubelet", "start container", "pod/web"),
    ] {
        let found = lines.any(|line| [component, step, object].iter().all(|word| line.contains(word)));
        assert!(found, "{component} {step} {object} is missing, or not in order:\n{text}");
    }
    let refusal = world.kubectl_fails(&["get", "--raw", "/debug/steps", "--as=nobody"]);
    assert!(refusal.contains("forbidden"), "{refusal}");
}

/// Asks every ready endpoint of the service, over and over, until the test ends it.
fn ask_until(world: &World, done: &Arc<AtomicBool>) -> std::thread::JoinHandle<(usize, Vec<String>)> {
    let netns = world.netns.clone();
    let done = Arc::clone(done);
    let mut watch = world.kubectl_command(&["get", "endpoints", "web", "-w", "-o", "json"]);
    let mut child = watch.stdout(Stdio::piped()).spawn().unwrap();
    let current = Arc::new(std::sync::Mutex::new(Vec::<std::net::IpAddr>::new()));
    let seen = Arc::clone(&current);
    let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        for document in ferrite_json::Deserializer::from_reader(stdout).into_iter::<ferrite_json::Value>() {
            let Ok(endpoints) = document else { return };
            let addresses = endpoints["subsets"][0]["addresses"].as_array().cloned().unwrap_or_default();
            *seen.lock().unwrap() =
                addresses.iter().map(|a| a["ip"].as_str().unwrap().parse().unwrap()).collect();
        }
    });
    std::thread::spawn(move || {
        let (answered, failures) = netns.run(move || {
            let mut answered = 0;
            let mut failures = Vec::new();
            while !done.load(Ordering::Acquire) {
                let addresses = current.lock().unwrap().clone();
                for address in addresses {
                    match http_get((address, 8080).into(), "/") {
                        Ok(_) => answered += 1,
                        Err(problem) => failures.push(problem),
                    }
                }
            }
            (answered, failures)
        });
        let _ = child.kill();
        let _ = child.wait();
        (answered, failures)
    })
}

#[test]
fn a_rolling_update_loses_no_request() {
    let world = World::start();
    for version in ["v1", "v2"] {
        let archive = world.path(&format!("{version}.tar"));
        web_image(&archive, &format!("example.com/web:{version}"), &format!("page {version}\n"));
        world.import(&archive);
    }
    // The pause before the end gives everybody time to notice that the pod is leaving.
    world.create(
        r#"
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  strategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 5
      containers:
      - name: web
        image: example.com/web:v1
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
        lifecycle: {preStop: {exec: {command: [sleep, "1"]}}}
"#,
    );
    world.wait_rolled_out("web", 3);
    let done = Arc::new(AtomicBool::new(false));
    let asking = ask_until(&world, &done);
    world.kubectl(&["set", "image", "deployment/web", "web=example.com/web:v2"]);
    world.kubectl(&["rollout", "status", "deployment/web", "--timeout=60s"]);
    done.store(true, Ordering::Release);
    let (answered, failures) = asking.join().unwrap();
    assert!(answered > 0 && failures.is_empty(), "{answered} answered, failed: {failures:?}");
    for pod in &world.living_pods("app=web") {
        assert_eq!(world.page(pod), "page v2\n");
    }

    let history = world.kubectl(&["rollout", "history", "deployment/web"]);
    assert!(history.lines().any(|l| l.starts_with('2')), "{history}");
    world.kubectl(&["rollout", "undo", "deployment/web"]);
    world.kubectl(&["rollout", "status", "deployment/web", "--timeout=60s"]);
    let images: BTreeSet<String> = world
        .living_pods("app=web")
        .iter()
        .map(|p| p["spec"]["containers"][0]["image"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(images.into_iter().collect::<Vec<_>>(), ["example.com/web:v1"]);
}

#[test]
fn a_rollout_survives_kill_9_in_the_middle() {
    let mut world = World::start();
    world.kubectl(&[
        "create",
        "deployment",
        "web",
        "--image",
        TOOLS,
        "--replicas=4",
        "--",
        "/ferrite",
        "tools",
        "http",
    ]);
    world.wait_rolled_out("web", 4);
    world.kubectl(&["run", "bystander", "--image", TOOLS, "--", "http"]);
    let bystander = world.wait_ready("bystander");
    let pid = container_pid(&bystander);
    world.kubectl(&["create", "configmap", "kept", "--from-literal=a=b"]);

    world.kubectl(&["set", "env", "deployment/web", "ROUND=2"]);
    // In the middle: the new set has a pod, the old one still has some.
    world.watch(&["deployment", "web"], |d| {
        let updated = d["status"]["updatedReplicas"].as_i64().unwrap_or(0);
        (1..4).contains(&updated)
    });
    world.kill();
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists(), "containers outlive the process");
    world.up();
    world.wait_rolled_out("web", 4);
    assert_eq!(world.get(&["configmap", "kept"])["data"]["a"], "b");
    let after = world.wait_ready("bystander");
    assert_eq!(container_pid(&after), pid);
    assert_eq!(pod_ip(&after), pod_ip(&bystander));
    assert_eq!(container_status(&after)["restartCount"], 0);
    let addresses: BTreeSet<_> = world.living_pods("app=web").iter().map(pod_ip).collect();
    assert_eq!(addresses.len(), 4);
}

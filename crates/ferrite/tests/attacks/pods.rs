//! From the author of a pod: fields that ask for more than the policy allows.

use crate::archive;
use crate::world::*;
use ferrite_json::Value;
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

const IMAGE: &str = "ferrite.test/box:v1";
const CORE_PATTERN: &str = "/proc/sys/kernel/core_pattern";

fn with_shell(extra: &[&str]) -> World {
    let world = World::start_with(extra);
    let path = world.path("box.tar");
    archive::image(&path, IMAGE, "", &["/bin/sleep", "100000"]);
    world.import(&path);
    world
}

fn exec(world: &World, namespace: &str, pod: &str, script: &str) -> String {
    world.kubectl(&["exec", "-n", namespace, pod, "--", "sh", "-c", script])
}

/// The first identity of the node that the users of a process are.
fn first_id(pid: i32) -> u32 {
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap();
    let numbers: Vec<u32> = map.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert_eq!((numbers[0], numbers[2]), (0, 65_536), "{map}");
    let groups = std::fs::read_to_string(format!("/proc/{pid}/gid_map")).unwrap();
    assert_eq!(map, groups);
    numbers[1]
}

fn own_users(name: &str, namespace: &str, context: &str, pod_context: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  hostUsers: false
  terminationGracePeriodSeconds: 0
  securityContext: {pod_context}
  volumes:
  - {{name: data, emptyDir: {{}}}}
  - {{name: memory, emptyDir: {{medium: Memory}}}}
  - {{name: secret, secret: {{secretName: s}}}}
  - {{name: config, configMap: {{name: c}}}}
  containers:
  - name: c
    image: {IMAGE}
    securityContext: {context}
    readinessProbe: {{exec: {{command: [sh, -c, "cat /secret/key"]}}, periodSeconds: 1}}
    command: [sh, -c, "echo started; echo last words >/dev/termination-log; exec sleep 100000"]
    volumeMounts:
    - {{name: data, mountPath: /data}}
    - {{name: data, mountPath: /sub, subPath: below}}
    - {{name: memory, mountPath: /memory}}
    - {{name: secret, mountPath: /secret}}
    - {{name: config, mountPath: /config}}
"#
    )
}

/// `hostUsers: false` makes PodSecurity allow an unmasked /proc and root: it must be meant.
#[test]
fn users_of_a_pod_are_nobody_on_the_node() {
    let mut world = with_shell(&[]);
    let before = std::fs::read_to_string(CORE_PATTERN).unwrap();
    for level in ["baseline", "restricted"] {
        world.kubectl(&["create", "namespace", level]);
        let label = format!("pod-security.kubernetes.io/enforce={level}");
        world.kubectl(&["label", "namespace", level, &label]);
        world.kubectl(&["create", "secret", "generic", "s", "-n", level, "--from-literal=key=value"]);
        world.kubectl(&["create", "configmap", "c", "-n", level, "--from-literal=key=value"]);
    }
    let strict = "{allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}";
    world.create(&own_users("open", "baseline", "{procMount: Unmasked}", "{}"));
    world.create(&own_users(
        "root",
        "restricted",
        strict,
        "{runAsUser: 0, fsGroup: 2000, seccompProfile: {type: RuntimeDefault}}",
    ));
    let pods = [("baseline", "open"), ("restricted", "root")];
    let look = |world: &World| -> Vec<(Value, i32, u32)> {
        pods.iter()
            .map(|(namespace, name)| {
                let pod = world.watch(&["-n", namespace, "pod", name], is_ready);
                let pid = container_pid(&pod);
                let first = first_id(pid);
                assert!(first >= 65_536);
                assert_eq!(std::fs::metadata(format!("/proc/{pid}")).unwrap().uid(), first, "{name}");
                (pod, pid, first)
            })
            .collect()
    };
    let seen = look(&world);
    assert_ne!(seen[0].2, seen[1].2, "each pod has a range of its own");
    for (namespace, name) in pods {
        assert_eq!(exec(&world, namespace, name, "id -u"), "0\n");
        let tried = exec(
            &world,
            namespace,
            name,
            "echo '|/tmp/x' >/proc/sys/kernel/core_pattern && echo written; \
             echo b >/proc/sysrq-trigger && echo written; true",
        );
        assert!(!tried.contains("written"), "{tried}");
        let owners = exec(
            &world,
            namespace,
            name,
            "for f in /data /memory /sub /secret/..data/key /config/..data/key /etc/hosts /etc/resolv.conf \
             /etc/hostname /dev/termination-log /var/run/secrets/kubernetes.io/serviceaccount/..data/token; \
             do busybox stat -L -c '%u %n' $f; done | busybox grep -v '^0 '; true",
        );
        assert_eq!(owners, "", "everything belongs to the pod's root");
        let files = exec(
            &world,
            namespace,
            name,
            "cat /secret/key /config/key; for d in /data /memory /sub /tmp /dev/shm; do echo x >$d/new || echo $d; done; \
             cat /data/below/new; cat /var/run/secrets/kubernetes.io/serviceaccount/token | busybox wc -c",
        );
        assert!(files.starts_with("valuevaluex\n") && !files.trim_end().ends_with("\n0"), "{files}");
        assert_eq!(world.kubectl(&["logs", "-n", namespace, name]), "started\n");
    }
    assert_eq!(std::fs::read_to_string(CORE_PATTERN).unwrap(), before);

    // A kubelet that starts anew finds the pods as they were, and restarts their containers in the same range.
    world.kill();
    world.up();
    let again = look(&world);
    assert_eq!(
        seen.iter().map(|s| (s.1, s.2)).collect::<Vec<_>>(),
        again.iter().map(|s| (s.1, s.2)).collect::<Vec<_>>()
    );
    assert_eq!(exec(&world, "baseline", "open", "cat /data/new"), "x\n");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(seen[0].1), nix::sys::signal::Signal::SIGKILL).unwrap();
    let restarted = world.watch(&["-n", "baseline", "pod", "open"], |p| {
        is_ready(p) && container_status(p)["restartCount"] == 1
    });
    assert_eq!(container_status(&restarted)["lastState"]["terminated"]["message"], "last words\n");
    assert_eq!(first_id(container_pid(&restarted)), seen[0].2);
    assert_eq!(exec(&world, "baseline", "open", "cat /data/new"), "x\n");
    let uid = restarted["metadata"]["uid"].as_str().unwrap();
    let file = world.data().join("kubelet/pods").join(uid).join("userns");
    assert!(file.exists());
    world.kubectl(&["delete", "pod", "-n", "baseline", "open"]);
    eventually("the range is given back", || (!file.exists()).then_some(()));
}

/// A device of the node stays the node's, whoever is root in the pod.
#[test]
fn devices_of_the_node_are_not_given_to_the_root_of_a_pod() {
    let world = with_shell(&[]);
    for name in ["s", "c"] {
        let kind = if name == "s" { &["secret", "generic"][..] } else { &["configmap"] };
        world.kubectl(&[&["create"], kind, &[name, "--from-literal=key=value"]].concat());
    }
    world.create(&own_users("all", "default", "{privileged: true}", "{}"));
    world.wait_ready("all");
    let opened = exec(
        &world,
        "default",
        "all",
        "for d in $(busybox find /dev -type b) /dev/mem /dev/kmsg; do [ -e $d ] && busybox head -c 1 $d >/dev/null 2>&1 && echo $d; done; true",
    );
    assert_eq!(opened, "", "readable inside");
    assert_eq!(
        exec(&world, "default", "all", "echo x >/dev/null && busybox head -c 1 /dev/zero | busybox wc -c"),
        "1\n"
    );
}

fn pod(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  nodeName: node\n  {spec}\n  containers:\n  - {{name: c, image: {TOOLS}, args: [sleep]}}\n"
    )
}

/// Nothing a pod asks for is left out in silence.
#[test]
fn what_the_node_cannot_do_is_refused() {
    let world = World::start();
    let mut rejected = vec![
        ("sysctl", "securityContext: {sysctls: [{name: kernel.msgmax, value: '1'}]}", "SysctlForbidden"),
        (
            "host",
            "hostNetwork: true\n  securityContext: {sysctls: [{name: net.ipv4.tcp_syncookies, value: '1'}]}",
            "SysctlForbidden",
        ),
        ("os", "os: {name: windows}", "PodOSNotSupported"),
    ];
    let apparmor = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    if !apparmor.is_ok_and(|text| text.starts_with('Y')) {
        rejected.push(("apparmor", "securityContext: {appArmorProfile: {type: RuntimeDefault}}", "AppArmor"));
    }
    for (name, spec, reason) in rejected {
        let path = world.write("pod.yaml", &pod(name, spec));
        let made = world.try_kubectl(&["create", "-f", path.to_str().unwrap()]);
        // The API may refuse it before the node does.
        if made.status.success() {
            let failed = world.watch(&["pod", name], |p| p["status"]["phase"] == "Failed");
            assert_eq!(failed["status"]["reason"], reason, "{name}");
            assert!(failed["status"]["containerStatuses"].is_null(), "{name}");
        } else {
            assert_eq!(name, "host", "{}", String::from_utf8_lossy(&made.stderr));
        }
    }
    world
        .create("apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: other}\nhandler: nosuch\n");
    world.create(&pod("class", "runtimeClassName: other"));
    world.create(&pod("claim", "volumes: [{name: v, csi: {driver: none.example.org}}]"));
    for (name, reason) in [("class", "FailedCreatePodSandBox"), ("claim", "FailedMount")] {
        let about = format!("involvedObject.name={name},reason={reason}");
        eventually(&format!("{name} is told why"), || {
            let events = world.get(&["events", "--field-selector", &about]);
            (!events["items"].as_array()?.is_empty()).then_some(())
        });
        let waiting = world.get(&["pod", name]);
        assert_eq!(waiting["status"]["phase"], "Pending", "{name}");
    }
}

/// Connections that say nothing, or only that they are nobody, take no places from those that may call.
#[test]
fn idle_connections_to_the_kubelet_keep_nobody_out() {
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, 8192, 8192);
    let world = with_shell(&[]);
    world.kubectl(&["run", "p", "--image", IMAGE, "--", "sh", "-c", "echo hello; exec sleep 100000"]);
    world.wait_ready("p");
    let ca = std::fs::read_to_string(world.data().join("pki/ca.crt")).unwrap();
    let tls = Arc::new(ferrite_pki::client_config(&ca, None).unwrap());
    let idle = world.netns.run(move || {
        let address = ([10, 244, 0, 1], 10250).into();
        let open = |_| {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
            let mut session = rustls::ClientConnection::new(tls.clone(), "node".try_into().unwrap()).unwrap();
            // A connection that lost its place does not finish the handshake.
            let _ = session.complete_io(&mut stream);
            Some((session, stream))
        };
        (0..1100).filter_map(open).collect::<Vec<_>>()
    });
    assert_eq!(idle.len(), 1100);
    assert!(idle.iter().any(|(session, _)| !session.is_handshaking()), "strangers get as far as a session");
    let started = Instant::now();
    for _ in 0..3 {
        assert_eq!(world.kubectl(&["logs", "p"]), "hello\n");
        assert_eq!(exec(&world, "default", "p", "echo inside"), "inside\n");
    }
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    drop(idle);
}

/// An image whose `/proc` leads elsewhere, and a volume that hides the way: the masks must not go with it.
#[test]
fn masks_do_not_depend_on_an_images_links() {
    let world = World::start();
    let archive = world.path("odd.tar");
    let odd = archive::Oddities {
        directories: &["l/", "realproc/"],
        links: &[("proc", "/l/p"), ("l/p", "/realproc")],
        ..Default::default()
    };
    archive::odd_image(&archive, "odd:latest", "", &["/bin/busybox", "sleep", "100000"], &odd);
    world.import(&archive);
    world.create(
        r#"
apiVersion: v1
kind: Pod
metadata: {name: odd}
spec:
  containers:
  - name: c
    image: odd:latest
    imagePullPolicy: Never
    volumeMounts: [{name: l, mountPath: /l}]
  volumes: [{name: l, emptyDir: {}}]
"#,
    );
    let refused = "/proc must be a directory of the image";
    let pod = world
        .watch(&["pod", "odd"], |pod| container_status(pod).to_string().contains(refused) || is_ready(pod));
    assert!(!is_ready(&pod), "a container whose /proc is elsewhere must not run");
}

/// Numbers that no user can have: they must be neither root's nor anybody's.
#[test]
fn an_image_cannot_hide_that_it_runs_as_root() {
    let world = World::start();
    world.kubectl(&["label", "namespace", "default", "pod-security.kubernetes.io/enforce=restricted"]);
    for (name, user) in [("least", "4294967295"), ("wide", "4294967296"), ("negative", "-1")] {
        let archive = world.path("odd.tar");
        let users = format!("{user}:x:0:0::/:/bin/sh\n");
        let odd = archive::Oddities { user, users: &users, ..Default::default() };
        archive::odd_image(
            &archive,
            &format!("{name}:latest"),
            "",
            &["/bin/busybox", "sleep", "100000"],
            &odd,
        );
        world.import(&archive);
        world.create(&format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: c
    image: {name}:latest
    imagePullPolicy: Never
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"#
        ));
        let pod = world.watch(&["pod", name], |pod| {
            !container_status(pod)["state"]["waiting"]["message"].is_null() || is_ready(pod)
        });
        let told = container_status(&pod)["state"]["waiting"]["message"].as_str().unwrap_or("it runs");
        assert!(told.contains("cannot verify user is non-root"), "{name}: {told}");
    }
}

/// A process that was brought into a pod must not keep the pod, or the cluster, from ending.
#[test]
fn a_cluster_goes_while_somebody_is_inside_a_pod() {
    let mut world = with_shell(&[]);
    world.kubectl(&["run", "p", "--image", IMAGE, "--", "sleep", "100000"]);
    world.wait_ready("p");
    let loop_ = ["exec", "p", "--", "sh", "-c", "while true; do sleep 1; done"];
    let mut inside = world.kubectl_command(&loop_).stdout(std::process::Stdio::null()).spawn().unwrap();
    eventually("the loop runs", || {
        exec(&world, "default", "p", "cat /proc/[0-9]*/cmdline").contains("while true").then_some(())
    });
    let down = world.down(&[]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    let _ = inside.kill();
    let _ = inside.wait();
}

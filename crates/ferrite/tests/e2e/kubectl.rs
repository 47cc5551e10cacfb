//! kubectl, verb by verb, as a person uses it.

use crate::archive::web_image;
use crate::world::*;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

/// A command line, split at spaces (`_` stands for a space inside a word), and a part of its output.
type Row = (&'static str, &'static str);

/// Runs the rows one after another.
fn run(world: &World, rows: &[Row]) {
    check(world, rows, true, 1);
}

/// Runs rows that do not depend on each other, several at a time.
fn run_any(world: &World, rows: &[Row]) {
    check(world, rows, true, 4);
}

/// Rows that must fail, with kubectl's error.
fn fail(world: &World, rows: &[Row]) {
    check(world, rows, false, 4);
}

/// All rows are tried, so that one look shows everything that is wrong.
fn check(world: &World, rows: &[Row], succeeds: bool, at_a_time: usize) {
    let surprise = |(line, expected): &Row| {
        let words: Vec<String> = line.split(' ').map(|word| word.replace('_', " ")).collect();
        let output = world.try_kubectl(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let as_expected = if succeeds { &out } else { &err }.contains(expected);
        (output.status.success() != succeeds || !as_expected)
            .then(|| format!("kubectl {line}: {}, no {expected:?} in\n{out}{err}", output.status))
    };
    let surprises: Vec<String> = std::thread::scope(|scope| {
        let share = rows.len().div_ceil(at_a_time).max(1);
        let threads: Vec<_> = rows
            .chunks(share)
            .map(|rows| scope.spawn(move || rows.iter().filter_map(surprise).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(surprises.is_empty(), "{}", surprises.join("\n"));
}

/// The rows speak the language of a kubectl not older than this minor version of 1; Debian's is 1.20.
const SPOKEN: u32 = 30;

/// Refuses a kubectl that lacks verbs and flags that the rows use.
fn require_kubectl() {
    let version = Command::new("kubectl").args(["version", "--client", "-o", "json"]).output().unwrap();
    let version: ferrite_json::Value = ferrite_json::from_slice(&version.stdout).unwrap();
    let minor =
        version["clientVersion"]["minor"].as_str().unwrap().trim_end_matches('+').parse::<u32>().unwrap();
    assert!(
        minor >= SPOKEN,
        "kubectl is 1.{minor}, and these tests need 1.{SPOKEN}: put a newer one first in PATH"
    );
}

#[test]
fn verbs_on_objects() {
    require_kubectl();
    let world = World::start();
    generators(&world);
    outputs(&world);
    changes(&world);
    applies(&world);
    access(&world);
    certificates(&world);
    describes(&world);
    proxies(&world);
}

#[test]
fn verbs_on_pods() {
    require_kubectl();
    let world = World::start();
    rollouts(&world);
    into_pods(&world);
    onto_nodes(&world);
    drains(&world);
}

fn generators(world: &World) {
    run(world, &[("create namespace shop", "namespace/shop created")]);
    run_any(
        world,
        &[
            (
                "create deployment idle --image=ferrite.local/tools --replicas=0",
                "deployment.apps/idle created",
            ),
            ("create service clusterip s1 --tcp=80:8080", "service/s1 created"),
            ("create service nodeport s2 --tcp=80", "service/s2 created"),
            ("create service loadbalancer s3 --tcp=80", "service/s3 created"),
            ("create service externalname s4 --external-name=example.com", "service/s4 created"),
            ("create configmap cm --from-literal=a=b", "configmap/cm created"),
            ("create secret generic sec --from-literal=a=b", "secret/sec created"),
            (
                "create secret docker-registry reg --docker-server=r.example --docker-username=u --docker-password=p",
                "secret/reg created",
            ),
            (
                "create role reader --verb=get,list --resource=pods",
                "role.rbac.authorization.k8s.io/reader created",
            ),
            ("create rolebinding readers --role=reader --serviceaccount=default:default", "readers created"),
            ("create clusterrole nodes --verb=get --resource=nodes", "nodes created"),
            ("create clusterrole health --verb=get --non-resource-url=/healthz", "health created"),
            ("create clusterrolebinding nodes --clusterrole=nodes --user=jane", "nodes created"),
            ("create serviceaccount robot", "serviceaccount/robot created"),
            ("create quota few --hard=pods=10,cpu=4 -n shop", "resourcequota/few created"),
            ("create poddisruptionbudget keep --selector=app=web --min-available=100%", "keep created"),
            ("create priorityclass high --value=100 --description=high", "high created"),
            (
                "create job once --image=ferrite.local/tools -- /ferrite tools echo hi",
                "job.batch/once created",
            ),
            (
                "create cronjob often --image=ferrite.local/tools --schedule=*/5_*_*_*_* -- /ferrite",
                "often created",
            ),
            (
                "create ingress front --rule=a.example/p*=s1:80,tls=sec",
                "ingress.networking.k8s.io/front created",
            ),
            ("autoscale deployment idle --min=1 --max=3 --cpu-percent=50", "idle autoscaled"),
            ("expose deployment idle --port=80 --target-port=8080", "service/idle exposed"),
            ("create configmap dry --dry-run=server -o name", "configmap/dry"),
        ],
    );
    assert_eq!(world.kubectl(&["create", "token", "robot", "--duration=20m"]).matches('.').count(), 2);
    fail(
        world,
        &[
            ("create configmap cm", "configmaps \"cm\" already exists"),
            ("get configmap dry", "configmaps \"dry\" not found"),
            ("create namespace shop", "namespaces \"shop\" already exists"),
            ("create token nobody", "serviceaccounts \"nobody\" not found"),
        ],
    );
    run(
        world,
        &[("create token robot --bound-object-kind=Secret --bound-object-name=sec", "."), ("get ns", "shop")],
    );
}

fn outputs(world: &World) {
    run_any(
        world,
        &[
            ("get deployment idle -o wide", "SELECTOR\nidle   0/0     0            0"),
            ("get deployment idle -o yaml", "kind: Deployment"),
            ("get deployment idle -o json", "\"kind\": \"Deployment\""),
            ("get deployment,service -o name", "deployment.apps/idle\nservice/idle\n"),
            (
                "get deployment idle -o jsonpath={.spec.template.spec.containers[*].image}",
                "ferrite.local/tools",
            ),
            ("get deployment -o custom-columns=N:.metadata.name,R:.spec.replicas", "N      R\nidle   0\n"),
            (
                "get service -o go-template={{range_.items}}{{.metadata.name}},{{end}}",
                "idle,kubernetes,s1,s2,s3,s4,",
            ),
            ("get services --sort-by=.spec.type -o name", "service/s4\nservice/s3\nservice/s2\n"),
            ("get service -l app=idle --no-headers --show-labels", "app=idle"),
            ("get secret sec -L missing", "MISSING"),
            ("get secrets --field-selector=type=Opaque -o name", "secret/sec\n"),
            ("get all", "service/s2"),
            ("get configmaps -A --show-kind --chunk-size=2", "kube-root-ca.crt"),
            ("get --raw /apis/apps/v1", "\"APIResourceList\""),
            ("get ingress", "front   <none>   a.example             80, 443"),
            ("get cronjob", "often   */5 * * * *"),
            ("explain pod", "Containers that run together on one node"),
            ("explain pod.spec.containers.image", "FIELD: image <string>"),
            ("explain pod.spec.restartPolicy", "ENUM:\n    Always\n    Never\n    OnFailure\n"),
            ("explain pod.spec.containers", "  name\t<string> -required-\n    Name, unique within the pod"),
            (
                "explain deployment.spec.strategy",
                "  enum: Recreate, RollingUpdate\n    RollingUpdate (default)",
            ),
            ("explain deployment --recursive", "    maxSurge\t<IntOrString>"),
            ("explain horizontalpodautoscaler --api-version=autoscaling/v1", "VERSION:    v1"),
            ("api-resources", "deployments                         deploy       apps/v1"),
            ("api-resources --verbs=list --namespaced -o name", "deployments.apps"),
            ("api-versions", "apps/v1\n"),
            ("cluster-info", "Kubernetes control plane is running at"),
            ("version", "Server Version: v1.36."),
            ("events", "Starting kubelet."),
            ("top nodes", "CPU(cores)"),
            ("get events --field-selector=reason=Starting", "node/node"),
            ("config view --minify -o jsonpath={.clusters[0].cluster.server}", "https://"),
        ],
    );
    fail(
        world,
        &[
            ("get nonsense", "the server doesn't have a resource type \"nonsense\""),
            ("get pods --field-selector=spec.nothing=a", "field label not supported: spec.nothing"),
            ("explain pod.spec.nothing", "field \"nothing\" does not exist"),
        ],
    );
    let dump = world.kubectl(&["cluster-info", "dump", "--namespaces", "default", "-o", "json"]);
    assert!(dump.contains("\"NodeList\"") && dump.contains("\"ReplicaSetList\""));
}

fn changes(world: &World) {
    run(
        world,
        &[
            ("label configmap cm tier=one", "configmap/cm labeled"),
            ("label configmap cm tier=two --overwrite", "configmap/cm labeled"),
            ("label configmap cm tier-", "configmap/cm unlabeled"),
            ("annotate configmap cm note=yes", "configmap/cm annotated"),
            ("patch configmap cm --type=merge -p {\"data\":{\"b\":\"x\"}}", "configmap/cm patched"),
            (
                "patch configmap cm --type=json -p [{\"op\":\"replace\",\"path\":\"/data/b\",\"value\":\"old\"}]",
                "configmap/cm patched",
            ),
            ("get configmap cm -o jsonpath={.data}", r#"{"a":"b","b":"old"}"#),
            (
                "patch deployment idle -p {\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"name\":\"tools\",\"tty\":true}]}}}}",
                "deployment.apps/idle patched",
            ),
            (
                "get deployment idle -o jsonpath={.spec.template.spec.containers[0].image}",
                "ferrite.local/tools",
            ),
            (
                "patch deployment idle --subresource=scale --type=merge -p {\"spec\":{\"replicas\":0}}",
                "patched",
            ),
            ("set image deployment/idle tools=ferrite.local/tools:latest", "image updated"),
            ("set env deployment/idle COLOUR=blue", "env updated"),
            ("set env deployment/idle --list", "COLOUR=blue"),
            ("set resources deployment/idle --limits=cpu=200m,memory=64Mi", "resource requirements updated"),
            ("set serviceaccount deployment/idle robot", "serviceaccount updated"),
            ("set selector service s1 app=web", "selector updated"),
            ("set subject rolebinding readers --user=jo", "subjects updated"),
            ("taint node node k=v:NoSchedule", "node/node tainted"),
            ("taint node node k=v:NoSchedule-", "node/node untainted"),
            ("wait --for=jsonpath={.status.phase}=Active namespace/shop", "condition met"),
            ("wait --for=create configmap/cm", "condition met"),
        ],
    );
    fail(
        world,
        &[
            ("label configmap cm a=b=c", "invalid label spec: a=b=c"),
            ("taint node node k=v:Nonsense", "invalid taint effect"),
            ("scale deployment/idle --replicas=2 --current-replicas=9", "Expected replicas to be 9, was 0"),
            ("wait --for=condition=Ready configmap/cm --timeout=1s", "timed out waiting"),
            (
                "patch configmap cm --type=json -p [{\"op\":\"remove\",\"path\":\"/data/none\"}]",
                "the server rejected",
            ),
        ],
    );
    let mut edit = world.kubectl_command(&["edit", "configmap", "cm"]);
    let edited = edit.env("KUBE_EDITOR", "sed -i s/old/new/").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&edited.stdout), "configmap/cm edited\n", "{edited:?}");
    run(world, &[("get configmap cm -o jsonpath={.data.b}", "new")]);
}

fn applies(world: &World) {
    let map = |name: &str, value: &str| {
        format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, labels: {{set: one}}}}\ndata: {{k: \"{value}\"}}\n"
        )
    };
    let first = world.write("first.yaml", &format!("{}---\n{}", map("m1", "1"), map("m2", "1")));
    let second = world.write("second.yaml", &map("m1", "2"));
    let (first, second) = (first.to_str().unwrap(), second.to_str().unwrap());
    let kubectl = |arguments: &[&str]| world.kubectl(arguments);
    assert_eq!(kubectl(&["apply", "-f", first]), "configmap/m1 created\nconfigmap/m2 created\n");
    assert_eq!(kubectl(&["apply", "-f", first]), "configmap/m1 unchanged\nconfigmap/m2 unchanged\n");
    let differs = world.try_kubectl(&["diff", "-f", second]);
    assert_eq!(differs.status.code(), Some(1));
    let shown = String::from_utf8_lossy(&differs.stdout);
    assert!(shown.contains("-  k: \"1\"\n+  k: \"2\"\n"), "{shown}");
    let prune = ["apply", "-f", second, "--prune", "-l", "set=one", "--prune-allowlist=core/v1/ConfigMap"];
    assert_eq!(kubectl(&prune), "configmap/m1 configured\nconfigmap/m2 pruned\n");
    assert!(kubectl(&["apply", "view-last-applied", "configmap", "m1"]).contains("k: \"2\""));
    assert_eq!(kubectl(&["apply", "--server-side", "-f", second]), "configmap/m1 serverside-applied\n");
    kubectl(&["patch", "configmap", "m1", "--type=merge", "-p", r#"{"data":{"k":"3"}}"#]);
    let conflict = world.kubectl_fails(&["apply", "--server-side", "-f", second]);
    assert!(conflict.contains("Apply failed with 1 conflict: conflict with \"kubectl-patch\""), "{conflict}");
    kubectl(&["apply", "--server-side", "--force-conflicts", "-f", second]);
    assert_eq!(kubectl(&["replace", "-f", second]), "configmap/m1 replaced\n");
    assert!(kubectl(&["replace", "--force", "-f", second]).ends_with("configmap/m1 replaced\n"));
    assert_eq!(kubectl(&["delete", "-f", second]), "configmap \"m1\" deleted\n");
    assert!(world.kubectl_fails(&["replace", "-f", second]).contains("configmaps \"m1\" not found"));
    assert_eq!(kubectl(&["delete", "-f", first, "--ignore-not-found"]), "");
}

fn access(world: &World) {
    let role = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {name: reader, namespace: default}\nrules: [{apiGroups: [''], resources: [configmaps], verbs: [get]}]\n";
    let role = world.write("role.yaml", role);
    let reconciled = world.kubectl(&["auth", "reconcile", "-f", role.to_str().unwrap()]);
    assert!(reconciled.contains("reader reconciled"), "{reconciled}");
    run(
        world,
        &[
            ("auth can-i create pods", "yes"),
            ("auth can-i get configmaps --as=jo", "yes"),
            ("auth can-i --list --as=jo", "configmaps "),
            ("auth whoami", "kubernetes-admin"),
            ("auth whoami --as=jo --as-group=dev -o jsonpath={.status.userInfo.groups}", "dev"),
        ],
    );
    let refused = world.try_kubectl(&["auth", "can-i", "list", "secrets", "--as=jane"]);
    assert_eq!((refused.status.code(), refused.stdout.as_slice()), (Some(1), b"no\n".as_slice()));
    fail(
        world,
        &[("get secrets --as=jane", "User \"jane\" cannot list resource \"secrets\" in API group \"\"")],
    );
}

fn certificates(world: &World) {
    let key = world.path("key.pem");
    let mut openssl = world.command("openssl", &["req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout"]);
    let made = openssl.arg(&key).args(["-subj", "/CN=jane/O=dev"]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    use base64::Engine;
    let request = base64::engine::general_purpose::STANDARD.encode(&made.stdout);
    for name in ["good", "bad"] {
        world.create(&format!(
            "apiVersion: certificates.k8s.io/v1\nkind: CertificateSigningRequest\nmetadata: {{name: {name}}}\nspec: {{request: {request}, signerName: kubernetes.io/kube-apiserver-client, usages: [client auth]}}\n"
        ));
    }
    run(
        world,
        &[
            ("certificate approve good", "good approved"),
            ("certificate deny bad", "bad denied"),
            ("get csr bad", "Denied"),
            ("describe csr good", "Common Name:    jane"),
        ],
    );
    let issued = world.watch(&["csr", "good"], |csr| csr["status"]["certificate"].is_string());
    assert_eq!(issued["spec"]["username"], "kubernetes-admin");
    run(world, &[("get csr good", "Approved,Issued")]);
}

fn describes(world: &World) {
    run_any(
        world,
        &[
            ("describe deployment idle", "Replicas:               0 desired"),
            ("describe service s1", "Selector:                 app=web"),
            ("describe configmap cm", "BinaryData"),
            ("describe secret sec", "a:  1 bytes"),
            ("describe role reader", "configmaps"),
            ("describe rolebinding readers", "User            jo"),
            ("describe clusterrole nodes", "nodes"),
            ("describe clusterrolebinding nodes", "jane"),
            ("describe serviceaccount robot", "robot"),
            ("describe namespace shop", "Resource Quotas"),
            ("describe quota few -n shop", "pods        0     10"),
            ("describe pdb keep", "Min available:  100%"),
            ("describe priorityclass high", "Value:"),
            ("describe job once", "Completions:"),
            ("describe cronjob often", "*/5 * * * *"),
            ("describe ingress front", "s1:80"),
            ("describe hpa idle", "Min replicas:"),
            ("describe node node", "Allocated resources:"),
            ("describe endpointslices", "AddressType:"),
        ],
    );
}

fn proxies(world: &World) {
    let mut proxy = world.kubectl_command(&["proxy", "--port=18001", "--accept-hosts=^test$"]);
    let mut child = proxy.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "Starting to serve on 127.0.0.1:18001\n");
    let address = "127.0.0.1:18001".parse().unwrap();
    let listed = world.netns.http_get(address, "/api/v1/namespaces/default/configmaps?limit=1");
    let node = world.netns.http_get(address, "/api/v1/nodes/node/proxy/healthz");
    let _ = child.kill();
    let _ = child.wait();
    assert!(listed.as_ref().is_ok_and(|l| l.contains("\"ConfigMapList\"")), "{listed:?}");
    assert_eq!(node.as_deref(), Ok("ok"));
}

fn rollouts(world: &World) {
    let image = format!("--image={TOOLS}");
    world.kubectl(&[
        "create",
        "deployment",
        "web",
        &image,
        "--replicas=2",
        "--",
        "/ferrite",
        "tools",
        "http",
    ]);
    let fast = r#"{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":0}}}}"#;
    world.kubectl(&["patch", "deployment", "web", "-p", fast]);
    run(
        world,
        &[
            ("rollout status deployment/web", "successfully rolled out"),
            ("set env deployment/web STEP=two", "env updated"),
            ("rollout status deployment/web", "successfully rolled out"),
            ("rollout history deployment/web", "3         <none>"),
            ("rollout history deployment/web --revision=3", "STEP:\ttwo"),
            ("rollout undo deployment/web --to-revision=2", "rolled back"),
            ("rollout status deployment/web", "successfully rolled out"),
            ("rollout history deployment/web", "4         <none>"),
            ("rollout pause deployment/web", "paused"),
            ("rollout resume deployment/web", "resumed"),
            ("rollout restart deployment/web", "restarted"),
            ("rollout status deployment/web", "successfully rolled out"),
            ("rollout history deployment/web", "5         <none>"),
            ("wait --for=condition=Available deployment/web --timeout=30s", "condition met"),
            ("scale deployment/web --replicas=1 --current-replicas=2", "scaled"),
            ("events --for deployment/web", "ScalingReplicaSet"),
            ("get endpoints", "kubernetes"),
            ("logs deployment/web", "serving on port 8080"),
        ],
    );
    let env = world.kubectl(&[
        "get",
        "deployment",
        "web",
        "-o",
        "jsonpath={.spec.template.spec.containers[0].env}",
    ]);
    assert_eq!(env, "", "the rollback took the variable away");
}

fn into_pods(world: &World) {
    let archive = world.path("box.tar");
    web_image(&archive, "ferrite.test/box:v1", "page");
    world.import(&archive);
    world.create(
        r#"
apiVersion: v1
kind: Pod
metadata: {name: box}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: "ferrite.test/box:v1", stdin: true, command: [sh, -c, "while read line; do echo got $line; done"]}
"#,
    );
    world.wait_ready("box");
    let file = world.write("file.txt", "copied\n");
    world.kubectl(&["cp", file.to_str().unwrap(), "box:/tmp/file.txt"]);
    assert_eq!(world.kubectl(&["exec", "box", "--", "cat", "/tmp/file.txt"]), "copied\n");
    let back = world.path("back.txt");
    world.kubectl(&["cp", "box:/tmp/file.txt", back.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(back).unwrap(), "copied\n");

    let mut attach = world.kubectl_command(&["attach", "-q", "-i", "box"]);
    let mut child = attach.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"a line\n").unwrap();
    let mut said = [0; 11];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(&said, b"got a line\n");

    let debug = [
        "debug",
        "box",
        "-q",
        "--profile=general",
        "--image=ferrite.test/box:v1",
        "-c",
        "look",
        "--target=c",
    ];
    world.kubectl(&[&debug, ["--", "sh", "-c", "echo looked"].as_slice()].concat());
    world.watch(&["pod", "box"], |pod| {
        pod["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    });
    assert_eq!(world.kubectl(&["logs", "box", "-c", "look"]), "looked\n");
    let copy = ["debug", "box", "-q", "--profile=general", "--image=ferrite.test/box:v1", "--copy-to=copy"];
    world.kubectl(&[&copy, ["-c", "look", "--", "sleep", "1000"].as_slice()].concat());
    world.wait_ready("copy");
    run(world, &[("describe pod box", "Ephemeral Containers:"), ("describe pod copy", "look:")]);
    world.kubectl(&["delete", "pod", "box", "copy", "--now"]);
}

/// A pod in the node's own namespaces, with the node's root at hand.
fn onto_nodes(world: &World) {
    let file = world.write("on-the-node.txt", "seen from the pod\n");
    let seen = format!("/host{}", file.display());
    let debug = ["debug", "node/node", "-q", "--profile=general", "--image=ferrite.test/box:v1"];
    world.kubectl(&[&debug, ["--", "cat", &seen].as_slice()].concat());
    let pods = world.kubectl(&["get", "pods", "-o", "name"]);
    let name = pods.lines().find_map(|l| l.strip_prefix("pod/").filter(|n| n.starts_with("node-debugger-")));
    let name = name.unwrap_or_else(|| panic!("no debugger in {pods}"));
    world.watch(&["pod", name], |pod| pod["status"]["phase"] == "Succeeded");
    assert_eq!(world.kubectl(&["logs", name]), "seen from the pod\n");
    world.kubectl(&["delete", "pod", name, "--now"]);
    world.kubectl(&["wait", "--for=delete", &format!("pod/{name}"), "--timeout=30s"]);
}

/// Eviction asks the budget; without one, the remaining pods go.
fn drains(world: &World) {
    run(world, &[("create pdb keep --selector=app=web --min-available=100%", "keep created")]);
    run(world, &[("cordon node", "node/node cordoned"), ("get nodes", "Ready,SchedulingDisabled")]);
    world.watch(&["pdb", "keep"], |pdb| pdb["status"]["currentHealthy"] == 1);
    let drain = ["drain", "node", "--ignore-daemonsets", "--force", "--timeout=1s"];
    let refused = world.try_kubectl(&drain);
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("Cannot evict pod as it would violate the pod's disruption budget."), "{said}");
    world.kubectl(&["delete", "pdb", "keep"]);
    run(
        world,
        &[
            ("drain node --ignore-daemonsets --force --timeout=30s", "node/node drained"),
            ("get pods", "Pending"),
            ("uncordon node", "node/node uncordoned"),
            ("rollout status deployment/web", "successfully rolled out"),
            ("delete deployment,service --all", "deployment.apps \"web\" deleted"),
        ],
    );
}

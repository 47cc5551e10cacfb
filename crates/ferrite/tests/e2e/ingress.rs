//! The ingress controller: hosts, paths, certificates and WebSockets to real pods, and malicious authors.

use crate::world::*;
use futures_util::{SinkExt, StreamExt};
use std::process::Stdio;

/// A pod that answers with its text, with a Service of the same name.
fn server(world: &World, namespace: &str, name: &str) {
    let namespace = ["-n", namespace];
    let text = format!("--text={name}");
    let run = ["run", name, "--image", TOOLS, "--", "http", &text];
    world.kubectl(&[&namespace[..], &run].concat());
    let expose = ["expose", "pod", name, "--port=80", "--target-port=8080"];
    world.kubectl(&[&namespace[..], &expose].concat());
}

/// The output of curl, with the status on a line of its own.
fn curl(world: &World, arguments: &[&str]) -> String {
    let common = ["-s", "--max-time", "10", "-w", "\n%{http_code} %{http_version}"];
    let output =
        world.command("curl", &[&common[..], arguments].concat()).stdin(Stdio::null()).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asks until the answer is as wanted: the controller learns of a change a moment after the API does.
fn curl_until(world: &World, arguments: &[&str], want: &str) -> String {
    let mut last = String::new();
    let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        eventually("the answer", || {
            last = curl(world, arguments);
            last.contains(want).then(|| last.clone())
        })
    }));
    found.unwrap_or_else(|_| panic!("{arguments:?} never had {want:?}; the last answer was {last}"))
}

fn certificate(world: &World, name: &str, secret: &str, namespace: &str) {
    let (key, cert) = (world.path("tls.key"), world.path("tls.crt"));
    let subject = format!("/CN={name}");
    let names = format!("subjectAltName=DNS:{name}");
    let mut openssl = world.command(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
        ],
    );
    openssl.args(["-subj", &subject, "-addext", &names, "-keyout"]).arg(&key).arg("-out").arg(&cert);
    assert!(openssl.output().unwrap().status.success());
    let (key, cert) = (format!("--key={}", key.display()), format!("--cert={}", cert.display()));
    world.kubectl(&["-n", namespace, "create", "secret", "tls", secret, &key, &cert]);
}

const SITE: &str = "
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: site}
spec:
  tls: [{hosts: [shop.example], secretName: shop}]
  rules:
  - host: shop.example
    http:
      paths:
      - {path: /, pathType: Prefix, backend: {service: {name: front, port: {number: 80}}}}
      - {path: /api, pathType: Prefix, backend: {service: {name: later, port: {number: 80}}}}
  - host: '*.shop.example'
    http:
      paths:
      - {path: /, pathType: ImplementationSpecific, backend: {service: {name: back, port: {number: 80}}}}
";

#[test]
fn an_ingress_leads_to_pods() {
    let world = World::start_with(&["--enable", "ingress"]);
    server(&world, "default", "front");
    server(&world, "default", "back");
    world.wait_ready("front");
    world.wait_ready("back");
    let output = world.try_kubectl(&["create", "-f", world.write("site.yaml", SITE).to_str().unwrap()]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !told.contains("Warning"), "{told}");
    let site = world.watch(&["ingress", "site"], |ingress| {
        ingress["status"]["loadBalancer"]["ingress"][0]["ip"] == "10.244.0.1"
    });
    assert_eq!(site["spec"]["ingressClassName"], "ferrite", "the class is the default");

    let at = |host: &str, path: &str| (format!("Host: {host}"), format!("http://10.244.0.1{path}"));
    for (host, path, want) in [
        ("shop.example", "/", "front front"),
        ("shop.example", "/api/x", "does not exist\n\n503 "),
        ("eu.shop.example", "/", "back back"),
        ("shop.example", "/echo", "x-forwarded-for: 10.244.0.1"),
    ] {
        let (header, url) = at(host, path);
        curl_until(&world, &["-H", &header, &url], want);
    }
    let (header, url) = at("else.example", "/");
    assert!(curl(&world, &["-H", &header, &url]).contains("\n404 "));

    // The Secret comes later: until then the certificate is nobody's.
    let resolve = ["--resolve", "shop.example:443:10.244.0.1"];
    let insecure = [&resolve[..], &["-k", "https://shop.example/"]].concat();
    assert!(curl_until(&world, &insecure, "front front").ends_with("200 2"), "HTTP/2 over TLS");
    certificate(&world, "shop.example", "shop", "default");
    let authority = world.path("tls.crt").display().to_string();
    let trusted = [&resolve[..], &["--cacert", &authority, "https://shop.example/"]].concat();
    curl_until(&world, &trusted, "front front");
    assert!(curl(&world, &[&trusted[..], &["--http1.1"]].concat()).ends_with("200 1.1"));

    // The Service leads elsewhere, and then nowhere.
    world.kubectl(&["patch", "service", "front", "-p", r#"{"spec":{"selector":{"run":"back"}}}"#]);
    let (header, url) = at("shop.example", "/");
    curl_until(&world, &["-H", &header, &url], "back back");
    world.kubectl(&["delete", "pod", "back", "--grace-period=1"]);
    curl_until(&world, &["-H", &header, &url], "\n503 ");
    world.kubectl(&["delete", "ingress", "site"]);
    curl_until(&world, &["-H", &header, &url], "\n404 ");
}

#[test]
fn an_ingress_is_no_way_to_another_namespace() {
    let world = World::start_with(&["--enable", "ingress"]);
    for namespace in ["bank", "thief"] {
        world.kubectl(&["create", "namespace", namespace]);
        world.watch(&["-n", namespace, "serviceaccount", "default"], |_| true);
    }
    server(&world, "bank", "vault");
    server(&world, "thief", "trap");
    certificate(&world, "bank.example", "key", "bank");
    let authority = world.path("tls.crt").display().to_string();
    world.create(
        "apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: site, namespace: bank}\nspec:\n  \
         tls: [{hosts: [bank.example], secretName: key}]\n  rules: [{host: bank.example, http: {paths: [{path: /, \
         pathType: Prefix, backend: {service: {name: vault, port: {number: 80}}}}]}}]\n",
    );
    let resolve = ["--resolve", "bank.example:443:10.244.0.1", "--resolve", "thief.example:443:10.244.0.1"];
    let bank = [&resolve[..], &["--cacert", &authority, "https://bank.example/"]].concat();
    curl_until(&world, &bank, "vault vault");

    // A host of the bank, the bank's Secret, its Service by name and by another name.
    world.create(
        "apiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: thief}\nspec: {type: ExternalName, \
         externalName: vault.bank.svc.cluster.local, ports: [{port: 80}]}\n---\n\
         apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: site, namespace: thief}\nspec:\n  \
         tls: [{hosts: [thief.example], secretName: key}]\n  rules:\n  \
         - {host: bank.example, http: {paths: [{path: /, pathType: Exact, backend: {service: {name: trap, port: {number: 80}}}}]}}\n  \
         - {host: thief.example, http: {paths: [\n      \
         {path: /, pathType: Prefix, backend: {service: {name: trap, port: {number: 80}}}},\n      \
         {path: /vault, pathType: Prefix, backend: {service: {name: vault, port: {number: 80}}}},\n      \
         {path: /alias, pathType: Prefix, backend: {service: {name: alias, port: {number: 80}}}}]}}\n",
    );
    let thief =
        |path: &str| ["-H", "Host: thief.example", &format!("http://10.244.0.1{path}")].map(str::to_owned);
    let ask = |path: &str| curl(&world, &thief(path).each_ref().map(String::as_str));
    curl_until(&world, &thief("/").each_ref().map(String::as_str), "trap trap");
    assert!(ask("/vault").ends_with("does not exist\n\n503 1.1"), "{}", ask("/vault"));
    assert!(ask("/alias").contains("ExternalName"), "{}", ask("/alias"));
    // An exact path would count before the bank's prefix.
    assert!(curl(&world, &bank).contains("vault vault"));
    let own = [&resolve[..], &["--cacert", &authority, "-v", "https://thief.example/"]].concat();
    assert!(curl(&world, &own).ends_with("000 0"), "the bank's key speaks for the bank alone");
    let reasons = eventually("the thief's events", || {
        let text = world.kubectl(&["-n", "thief", "get", "events", "-o", "jsonpath={.items[*].reason}"]);
        (text.contains("HostTaken") && text.contains("NoCertificate")).then_some(text)
    });
    assert!(!reasons.is_empty());

    // The controller's account reads Secrets, writes status, and no more.
    let account = "--as=system:serviceaccount:kube-system:ferrite-ingress";
    for (verb, resource, want) in [
        ("list", "secrets", "yes"),
        ("get", "pods", "no"),
        ("create", "secrets", "no"),
        ("patch", "ingresses", "no"),
    ] {
        let output = world.try_kubectl(&["auth", "can-i", verb, resource, "-A", account]);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), want, "{verb} {resource}");
    }
}

/// The image of the tests has no WebSocket server: the test is one, at the node's address, as a pod in the node's network
/// would be.
#[test]
fn a_websocket_passes_through_an_ingress() {
    let world = World::start_with(&[
        "--enable",
        "ingress",
        "--ingress-http-port",
        "8081",
        "--ingress-https-port",
        "0",
    ]);
    world.netns.run(|| {
        let listener = std::net::TcpListener::bind("10.244.0.1:9000").unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let (stream, _) = listener.accept().await.unwrap();
                let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if message.is_close() || socket.send(message).await.is_err() {
                        return;
                    }
                }
            });
        });
    });
    world.create(
        "apiVersion: v1\nkind: Service\nmetadata: {name: echo}\nspec: {ports: [{port: 80, targetPort: 9000}]}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: echo, labels: {kubernetes.io/service-name: echo}}\n\
         addressType: IPv4\nports: [{port: 9000}]\nendpoints: [{addresses: [10.244.0.1]}]\n---\n\
         apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: echo}\nspec: {defaultBackend: {service: {name: echo, port: {number: 80}}}}\n",
    );
    world.watch(&["ingress", "echo"], |ingress| {
        ingress["status"]["loadBalancer"]["ingress"][0]["ip"].is_string()
    });
    let echoed = eventually("a WebSocket", || {
        world.netns.run(|| {
            let stream = std::net::TcpStream::connect("10.244.0.1:8081").ok()?;
            stream.set_nonblocking(true).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let stream = tokio::net::TcpStream::from_std(stream).unwrap();
                let (mut socket, _) =
                    tokio_tungstenite::client_async("ws://any.example/", stream).await.ok()?;
                socket.send("hello".into()).await.ok()?;
                Some(socket.next().await?.ok()?.to_text().ok()?.to_owned())
            })
        })
    });
    assert_eq!(echoed, "hello");
}

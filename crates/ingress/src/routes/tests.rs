use super::*;
use serde_json::{Value, json};

const CLASS: &str = "ferrite";

fn classes() -> Vec<Arc<IngressClass>> {
    let object = json!({"metadata": {"name": CLASS}, "spec": {"controller": crate::CONTROLLER}});
    vec![Arc::new(serde_json::from_value(object).unwrap())]
}

/// An Ingress `namespace/name`, made in the given second.
fn ingress(key: &str, second: u8, mut spec: Value) -> Arc<Ingress> {
    let (namespace, name) = key.split_once('/').unwrap();
    spec["ingressClassName"] = json!(CLASS);
    let created = format!("2026-01-01T00:00:{second:02}Z");
    let metadata = json!({"namespace": namespace, "name": name, "creationTimestamp": created});
    Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap())
}

fn backend(service: &str) -> Value {
    json!({"service": {"name": service, "port": {"number": 80}}})
}

/// A rule from `type path service` triples.
fn rule(host: &str, paths: &[(&str, &str, &str)]) -> Value {
    let paths: Vec<Value> = paths
        .iter()
        .map(|(type_, path, service)| json!({"pathType": type_, "path": path, "backend": backend(service)}))
        .collect();
    match host {
        "" => json!({"http": {"paths": paths}}),
        host => json!({"host": host, "http": {"paths": paths}}),
    }
}

/// `namespace/service` of the request's target.
fn target(routes: &Routes, host: &str, path: &str) -> String {
    match routes.find(host, path) {
        Some(Target::Service(backend)) => backend.service.to_string(),
        Some(Target::Unsupported) => "unsupported".into(),
        None => "none".into(),
    }
}

fn reasons(findings: &[Finding]) -> Vec<String> {
    findings.iter().map(|f| format!("{} {}", f.ingress, f.reason)).collect()
}

/// The examples of upstream's documentation, and the cases that it leaves open.
#[test]
fn paths_match_by_their_type() {
    for (rules, path, want) in [
        (&[("Prefix", "/", "a")][..], "/any/path", "a/a"),
        (&[("Exact", "/foo", "a")], "/foo", "a/a"),
        (&[("Exact", "/foo", "a")], "/bar", "none"),
        (&[("Exact", "/foo", "a")], "/foo/", "none"),
        (&[("Exact", "/foo/", "a")], "/foo", "none"),
        (&[("Exact", "/foo", "a")], "/FOO", "none"),
        (&[("Prefix", "/foo", "a")], "/foo", "a/a"),
        (&[("Prefix", "/foo", "a")], "/foo/", "a/a"),
        (&[("Prefix", "/foo/", "a")], "/foo", "a/a"),
        (&[("Prefix", "/foo/", "a")], "/foo/", "a/a"),
        (&[("Prefix", "/aaa/bb", "a")], "/aaa/bbb", "none"),
        (&[("Prefix", "/aaa/bbb", "a")], "/aaa/bbb", "a/a"),
        (&[("Prefix", "/aaa/bbb/", "a")], "/aaa/bbb", "a/a"),
        (&[("Prefix", "/aaa/bbb", "a")], "/aaa/bbb/ccc", "a/a"),
        (&[("Prefix", "/aaa/bbb", "a")], "/aaa/bbbxyz", "none"),
        (&[("Prefix", "/", "a"), ("Prefix", "/aaa", "b")], "/aaa/ccc", "a/b"),
        (&[("Prefix", "/", "a"), ("Prefix", "/aaa", "b")], "/ccc", "a/a"),
        (&[("Prefix", "/", "a"), ("Prefix", "/aaa", "b"), ("Prefix", "/aaa/bbb", "c")], "/aaa/bbb/c", "a/c"),
        // The exact type counts before a prefix of the same length.
        (&[("Prefix", "/foo", "a"), ("Exact", "/foo", "b")], "/foo", "a/b"),
        (&[("Prefix", "/foo", "a"), ("Exact", "/foo", "b")], "/foo/bar", "a/a"),
        (&[("ImplementationSpecific", "/foo", "a")], "/foo/bar", "a/a"),
        (&[("ImplementationSpecific", "/foo", "a"), ("Prefix", "/foo", "b")], "/foo/bar", "a/b"),
        (&[("Prefix", "/foo", "b"), ("ImplementationSpecific", "/foo", "a")], "/foo/bar", "a/b"),
        (&[("ImplementationSpecific", "", "a")], "/x", "a/a"),
        // Nobody reaches a path under the name of another.
        (&[("Prefix", "/open", "a"), ("Prefix", "/shut", "b")], "/open/../shut/x", "a/b"),
        (&[("Prefix", "/open", "a"), ("Prefix", "/shut", "b")], "/open/%2e%2e/shut", "a/b"),
        (&[("Prefix", "/open", "a"), ("Exact", "/shut", "b")], "//shut", "a/b"),
        (&[("Prefix", "/shut", "b"), ("Prefix", "/", "a")], "/%73hut/x", "a/b"),
    ] {
        let (routes, _) = build(&[ingress("a/one", 0, json!({"rules": [rule("", rules)]}))], &classes());
        assert_eq!(target(&routes, "host", path), want, "{rules:?} {path}");
    }
}

#[test]
fn hosts_match_exactly_then_by_wildcard_then_any() {
    let all = &[("Prefix", "/only", "exact")][..];
    let spec = json!({"rules": [
        rule("foo.example", all),
        rule("*.example", &[("Prefix", "/", "wild")]),
        rule("", &[("Prefix", "/", "any")]),
    ]});
    let (routes, findings) = build(&[ingress("a/one", 0, spec)], &classes());
    assert_eq!(findings, []);
    for (host, path, want) in [
        ("foo.example", "/only", "a/exact"),
        // The rules of the most specific host alone.
        ("foo.example", "/other", "none"),
        ("bar.example", "/x", "a/wild"),
        ("a.b.example", "/x", "a/any"),
        ("example", "/x", "a/any"),
        ("", "/x", "a/any"),
    ] {
        assert_eq!(target(&routes, host, path), want, "{host}{path}");
    }
}

#[test]
fn requests_that_match_no_rule_go_to_the_default_backend() {
    let with_rules = ingress(
        "a/rules",
        0,
        json!({"defaultBackend": backend("own"), "rules": [rule("foo.example", &[("Prefix", "/x", "x")])]}),
    );
    let alone = ingress("a/alone", 1, json!({"defaultBackend": backend("all")}));
    let plain = ingress("a/plain", 2, json!({"rules": [rule("bar.example", &[("Prefix", "/x", "x")])]}));
    let (routes, _) = build(&[with_rules, alone.clone(), plain.clone()], &classes());
    for (host, path, want) in [
        ("foo.example", "/x", "a/x"),
        ("foo.example", "/y", "a/own"),
        ("bar.example", "/y", "a/own"),
        ("else.example", "/", "a/own"),
    ] {
        assert_eq!(target(&routes, host, path), want, "{host}{path}");
    }
    let (routes, _) = build(&[alone, plain], &classes());
    assert_eq!(target(&routes, "bar.example", "/y"), "a/all");
    let resource = json!({"defaultBackend": {"resource": {"kind": "Bucket", "name": "b"}}});
    let (routes, findings) = build(&[ingress("a/r", 0, resource)], &classes());
    assert_eq!(target(&routes, "x", "/"), "unsupported");
    assert_eq!(reasons(&findings), ["a/r UnsupportedBackend"]);
}

#[test]
fn a_host_belongs_to_the_namespace_that_named_it_first() {
    let bank = ingress(
        "bank/site",
        0,
        json!({
            "rules": [rule("bank.example", &[("Prefix", "/", "site")]), rule("*.bank.example", &[("Prefix", "/", "site")])],
            "tls": [{"hosts": ["*.bank.example", "bank.example"], "secretName": "key"}],
        }),
    );
    let thief = ingress(
        "thief/site",
        1,
        json!({
            "defaultBackend": backend("trap"),
            "rules": [
                rule("bank.example", &[("Prefix", "/login", "trap")]),
                rule("login.bank.example", &[("Prefix", "/", "trap")]),
                rule("thief.example", &[("Prefix", "/", "trap")]),
            ],
            "tls": [{"hosts": ["bank.example", "login.bank.example"], "secretName": "forged"}],
        }),
    );
    // The order in which objects are listed does not count.
    let (routes, findings) = build(&[thief, bank], &classes());
    assert_eq!(target(&routes, "bank.example", "/login"), "bank/site");
    assert_eq!(target(&routes, "login.bank.example", "/"), "bank/site");
    assert_eq!(target(&routes, "thief.example", "/"), "thief/trap");
    for host in ["bank.example", "login.bank.example"] {
        assert_eq!(routes.certificate_of(host).unwrap().to_string(), "bank/key", "{host}");
    }
    assert_eq!(reasons(&findings), ["thief/site HostTaken", "thief/site HostTaken"]);
    assert_eq!(findings[0].message, "host bank.example belongs to namespace bank: an older Ingress names it");
}

#[test]
fn a_wildcard_lends_nothing_to_the_hosts_of_others() {
    let shop = ingress("shop/site", 0, json!({"rules": [rule("shop.example", &[("Prefix", "/", "shop")])]}));
    let wild = ingress(
        "mall/all",
        1,
        json!({
            "rules": [rule("*.example", &[("Prefix", "/", "mall")])],
            "tls": [{"hosts": ["*.example"], "secretName": "key"}],
        }),
    );
    let (routes, findings) = build(&[shop, wild], &classes());
    assert_eq!(findings, []);
    assert_eq!(target(&routes, "shop.example", "/"), "shop/shop");
    assert_eq!(target(&routes, "else.example", "/"), "mall/mall");
    assert_eq!(routes.certificate_of("shop.example"), None);
    assert_eq!(routes.certificate_of("else.example").unwrap().to_string(), "mall/key");
    assert_eq!(routes.certificate_of("a.b.example"), None);
}

#[test]
fn certificates_without_hosts_are_for_the_hosts_of_the_rules() {
    let spec = json!({
        "rules": [rule("a.example", &[("Prefix", "/", "a")]), rule("", &[("Prefix", "/", "a")])],
        "tls": [{"secretName": "key"}],
    });
    let (routes, _) = build(&[ingress("a/one", 0, spec)], &classes());
    for host in ["a.example", "else.example", ""] {
        assert_eq!(routes.certificate_of(host).unwrap().to_string(), "a/key", "{host}");
    }
    let spec =
        json!({"rules": [rule("a.example", &[("Prefix", "/", "a")])], "tls": [{"hosts": ["a.example"]}]});
    let (routes, _) = build(&[ingress("a/one", 0, spec)], &classes());
    assert_eq!(routes.certificate_of("a.example"), None);
}

#[test]
fn a_backend_is_in_the_namespace_of_its_ingress() {
    let spec = json!({"defaultBackend": {"service": {"name": "web", "port": {"name": "http"}}}});
    let (routes, _) = build(&[ingress("mine/one", 0, spec)], &classes());
    let wanted = BackendRef { service: ObjectKey::new("mine", "web"), port: PortRef::Name("http".into()) };
    assert_eq!(routes.backends.iter().map(|b| (**b).clone()).collect::<Vec<_>>(), [wanted]);
}

#[test]
fn the_older_of_two_equal_paths_counts() {
    let paths = |service| json!({"rules": [rule("a.example", &[("Exact", "/x", service), ("Prefix", "/y", service)])]});
    let ingresses = [ingress("a/new", 1, paths("new")), ingress("a/old", 0, paths("old"))];
    let (routes, findings) = build(&ingresses, &classes());
    assert_eq!(target(&routes, "a.example", "/x"), "a/old");
    assert_eq!(target(&routes, "a.example", "/y/z"), "a/old");
    assert_eq!(reasons(&findings), ["a/new PathTaken", "a/new PathTaken"]);
}

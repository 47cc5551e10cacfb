//! The API server alone among certificates, keys and tokens that somebody else made.

use crate::server::{Server, fails, text};
use crate::world::*;
use std::path::PathBuf;

/// An authority with certificates of a server, an administrator and a server of another name, and a key of service
/// accounts: all made with openssl, as installation guides do.
pub struct ForeignPki(pub PathBuf);

impl ForeignPki {
    pub fn make(world: &World) -> Self {
        let pki = Self(world.path("pki"));
        std::fs::create_dir(&pki.0).unwrap();
        let ca = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=foreign", "-days", "2"];
        pki.openssl(world, &ca, &[("-keyout", "ca.key"), ("-out", "ca.crt")]);
        pki.issue(world, "server", "/CN=kube-apiserver", "IP:127.0.0.1,DNS:localhost");
        pki.issue(world, "other", "/CN=other", "DNS:other.example");
        pki.issue(world, "admin", "/O=system:masters/CN=foreign-admin", "DNS:admin");
        pki.openssl(world, &["genpkey", "-algorithm", "RSA"], &[("-out", "sa.key")]);
        pki.openssl(world, &["rsa", "-pubout"], &[("-in", "sa.key"), ("-out", "sa.pub")]);
        std::fs::write(pki.0.join("tokens.csv"), "secret-token,alice,7,\"system:masters\"\nother,bob,8\n")
            .unwrap();
        pki
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn openssl(&self, world: &World, arguments: &[&str], files: &[(&str, &str)]) {
        let mut command = world.command("openssl", arguments);
        files.iter().for_each(|(flag, name)| {
            command.arg(flag).arg(self.0.join(name));
        });
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }

    pub fn issue(&self, world: &World, name: &str, subject: &str, names: &str) {
        let [key, request, certificate, extensions] =
            ["key", "csr", "crt", "ext"].map(|ending| format!("{name}.{ending}"));
        std::fs::write(self.0.join(&extensions), format!("subjectAltName={names}\n")).unwrap();
        let ask = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", subject];
        self.openssl(world, &ask, &[("-keyout", &key), ("-out", &request)]);
        let sign = ["x509", "-req", "-days", "2", "-CAcreateserial"];
        let files = [
            ("-in", request.as_str()),
            ("-CA", "ca.crt"),
            ("-CAkey", "ca.key"),
            ("-out", &certificate),
            ("-extfile", &extensions),
        ];
        self.openssl(world, &sign, &files);
    }
}

pub fn curl(world: &World, arguments: &[&str]) -> String {
    let output = world.command("curl", &["-sS", "--max-time", "20"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "curl {arguments:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn foreign_certificates_keys_and_tokens() {
    let world = World::prepare(&[]);
    let pki = ForeignPki::make(&world);
    let file = |name: &str| pki.file(name);
    let sni = format!("{},{}", file("other.crt"), file("other.key"));
    let files = [
        ("--tls-cert-file", file("server.crt")),
        ("--tls-private-key-file", file("server.key")),
        ("--tls-sni-cert-key", sni),
        ("--client-ca-file", file("ca.crt")),
        ("--service-account-key-file", file("sa.pub")),
        ("--service-account-signing-key-file", file("sa.key")),
        ("--token-auth-file", file("tokens.csv")),
        ("--kubelet-client-certificate", file("admin.crt")),
        ("--kubelet-client-key", file("admin.key")),
    ];
    let mut flags: Vec<&str> = vec![
        "--authorization-mode=Node,RBAC",
        "--anonymous-auth=false",
        "--allow-privileged=true",
        "--event-ttl=2h",
        "--service-account-max-token-expiration=20m",
        "--tls-min-version=VersionTLS13",
        "--controllers=serviceaccount-controller",
    ];
    files.iter().for_each(|(flag, path)| flags.extend([*flag, path]));
    let server = Server::start(&world, &flags);
    let (url, ca) = ("https://127.0.0.1:6443", file("ca.crt"));
    let (certificate, key) = (file("admin.crt"), file("admin.key"));
    let get = |path: &str, more: &[&str]| {
        let url = format!("{url}{path}");
        curl(&world, &[&["--cacert", &ca, &url], more].concat())
    };

    // Certificates of the foreign authority are known, strangers are not.
    let admin = ["--cert", certificate.as_str(), "--key", key.as_str()];
    assert!(get("/api/v1/namespaces/kube-system", &admin).contains("\"Active\""));
    assert!(get("/version", &[]).contains("\"code\":401"));
    assert!(!world.data().join("config/admin.kubeconfig").exists(), "nobody would get in with it");

    // Tokens of the file.
    let bearer = |token: &str| format!("Authorization: Bearer {token}");
    let alice = bearer("secret-token");
    assert!(get("/api/v1/nodes", &["-H", &alice]).contains("NodeList"));
    let bob = get("/api/v1/nodes", &["-H", &bearer("other")]);
    assert!(bob.contains("User \\\"bob\\\" cannot list resource"), "{bob}");
    assert!(get("/version", &["-H", &bearer("wrong")]).contains("\"code\":401"));

    // Another certificate for another name.
    let other = "https://other.example:6443/version";
    curl(&world, &["--cacert", &ca, "--resolve", "other.example:6443:127.0.0.1", "-H", &alice, other]);

    // Tokens are signed with the foreign key, and live no longer than allowed.
    let path = "/api/v1/namespaces/default/serviceaccounts/default";
    eventually("the account", || get(path, &["-H", &alice]).contains("\"uid\"").then_some(()));
    let body = r#"{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":7200}}"#;
    let json = "Content-Type: application/json";
    let reply = get(&format!("{path}/token"), &["-i", "-H", &alice, "-H", json, "-d", body]);
    assert!(reply.contains("requested expiration of 7200 seconds shortened to 1200 seconds"), "{reply}");
    let token = reply.split("\"token\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let review = get(
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        &[
            "-H",
            &bearer(token),
            "-H",
            json,
            "-d",
            r#"{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}"#,
        ],
    );
    assert!(review.contains("system:serviceaccount:default:default"), "{review}");
    assert!(get("/openid/v1/jwks", &["-H", &alice]).contains("\"kty\":\"RSA\""));
    server.stop();
}

#[test]
fn flags_that_ask_for_what_is_not_there_are_refused() {
    let world = World::prepare(&[]);
    for (flags, part) in [
        (&["--authorization-mode=RBAC,Magic"][..], "choose among"),
        (&["--allow-privileged=false"], "cannot do without"),
        (&["--cors-allowed-origins=example.com"], "does not pin to start/end of host"),
        (&["--strict-transport-security-directives=max-age"], "allowed values: max-age=expireTime"),
        (
            &["--egress-selector-config-file=/x"],
            "--egress-selector-config-file cannot be \"/x\": the server connects",
        ),
        (&["--admission-control=RuntimeClass", "--enable-admission-plugins=Priority"], "mutually exclusive"),
        (&["--admission-control=Magic"], "no admission plugin is called \"Magic\""),
        (&["--tls-cert-file=/no/such"], "--tls-private-key-file"),
        (&["--client-ca-file=/no/such"], "cannot read --client-ca-file /no/such"),
        (&["--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA"], "no cipher suite"),
        (&["--anonymous-auht=true"], "--anonymous-auth"),
    ] {
        let message = fails(&world, &[&["kube-apiserver", "--bind-address=127.0.0.1"], flags].concat());
        assert!(message.contains(part), "{flags:?}: {message}");
    }
}

/// The subject of the certificate that clients see.
fn shown(world: &World) -> String {
    let arguments = ["s_client", "-connect", "127.0.0.1:6443", "-servername", "localhost"];
    let output = world.command("openssl", &arguments).stdin(std::process::Stdio::null()).output().unwrap();
    let text = text(&output);
    text.lines().find(|line| line.starts_with("subject=")).unwrap_or_default().to_owned()
}

#[test]
fn certificates_and_authorities_are_followed() {
    let world = World::prepare(&[]);
    let pki = ForeignPki::make(&world);
    let file = |name: &str| pki.file(name);
    let files = [
        ("--tls-cert-file", file("server.crt")),
        ("--tls-private-key-file", file("server.key")),
        ("--client-ca-file", file("ca.crt")),
        ("--requestheader-client-ca-file", file("ca.crt")),
        ("--token-auth-file", file("tokens.csv")),
    ];
    let mut flags =
        vec!["--requestheader-username-headers=X-Remote-User", "--requestheader-allowed-names=front"];
    files.iter().for_each(|(flag, path)| flags.extend([*flag, path]));
    let server = Server::start(&world, &flags);
    std::fs::copy(file("ca.crt"), file("old-ca.crt")).unwrap();
    let [certificate, key] = ["admin.crt", "admin.key"].map(|name| {
        std::fs::copy(file(name), file(&format!("old-{name}"))).unwrap();
        file(&format!("old-{name}"))
    });
    let list = |more: &[&str]| {
        let url = "https://127.0.0.1:6443/api/v1/nodes";
        curl(&world, &[&["-k", url], more].concat())
    };
    let by_certificate = || list(&["--cert", &certificate, "--key", &key]);
    assert!(by_certificate().contains("NodeList"));
    assert!(shown(&world).contains("kube-apiserver"));

    // A certificate without its key changes nothing; both together count.
    pki.issue(&world, "new", "/CN=renewed", "IP:127.0.0.1,DNS:localhost");
    std::fs::copy(file("new.crt"), file("server.crt")).unwrap();
    assert!(shown(&world).contains("kube-apiserver"));
    std::fs::copy(file("new.key"), file("server.key")).unwrap();
    eventually("the new certificate is shown", || shown(&world).contains("renewed").then_some(()));

    // Half an authority changes nothing, another one counts: the old clients are unknown.
    let authority = std::fs::read_to_string(file("ca.crt")).unwrap();
    std::fs::write(file("ca.crt"), &authority[..authority.len() / 2]).unwrap();
    assert!(by_certificate().contains("NodeList"));
    let ca = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=another", "-days", "2"];
    pki.openssl(&world, &ca, &[("-keyout", "ca.key"), ("-out", "next-ca.crt")]);
    std::fs::rename(file("next-ca.crt"), file("ca.crt")).unwrap();
    eventually("old clients are unknown", || by_certificate().contains("\"code\":401").then_some(()));
    pki.issue(&world, "admin", "/O=system:masters/CN=new-admin", "DNS:admin");
    let (certificate, key) = (file("admin.crt"), file("admin.key"));
    assert!(list(&["--cert", &certificate, "--key", &key]).contains("NodeList"));
    // The authorities are published for extension API servers.
    let another = std::fs::read_to_string(file("ca.crt")).unwrap();
    let published = || {
        let url = "https://127.0.0.1:6443/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
        let map = curl(&world, &["-k", "-H", "Authorization: Bearer secret-token", url]);
        ferrite_json::from_str::<ferrite_json::Value>(&map).unwrap()["data"].clone()
    };
    eventually("the authorities are published", || {
        let data = published();
        let is = |key: &str| data[key] == *another;
        (is("client-ca-file") && is("requestheader-client-ca-file")).then_some(())
    });
    // So are those of front proxies.
    pki.issue(&world, "front", "/CN=front", "DNS:front");
    let (certificate, key) = (file("front.crt"), file("front.key"));
    let as_alice = ["--cert", &certificate, "--key", &key, "-H", "X-Remote-User: alice-by-proxy"];
    assert!(list(&as_alice).contains("alice-by-proxy"));
    server.stop();
}

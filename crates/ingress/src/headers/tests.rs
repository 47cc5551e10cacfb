use super::*;

const ORIGIN: &str = "192.0.2.7:4000";

fn request(version: Version, target: &str, headers: &[(&str, &str)]) -> Request<()> {
    let mut request = Request::builder().version(version).uri(target);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap()
}

#[test]
fn a_request_is_for_one_host() {
    const V10: Version = Version::HTTP_10;
    const V11: Version = Version::HTTP_11;
    const V2: Version = Version::HTTP_2;
    for (version, target, headers, want) in [
        (V11, "/", &[("host", "Foo.Example")][..], Ok("foo.example")),
        (V11, "/", &[("host", "foo.example:8080")], Ok("foo.example")),
        (V11, "/", &[("host", "foo.example.")], Ok("foo.example")),
        (V11, "/", &[("host", "[::1]:80")], Ok("[::1]")),
        (V11, "/", &[("host", "")], Ok("")),
        (V11, "/", &[], Err(BadRequest::Host)),
        (V10, "/", &[], Ok("")),
        (V11, "/", &[("host", "a"), ("host", "b")], Err(BadRequest::Host)),
        (V11, "/", &[("host", "a b")], Err(BadRequest::Host)),
        (V11, "/", &[("host", "user@a")], Err(BadRequest::Host)),
        (V11, "http://a.example/x", &[("host", "a.example")], Ok("a.example")),
        (V11, "http://a.example/x", &[("host", "b.example")], Err(BadRequest::Host)),
        (V2, "https://a.example/x", &[], Ok("a.example")),
        (V2, "https://a.example/x", &[("host", "b.example")], Err(BadRequest::Host)),
        (V11, "*", &[("host", "a")], Err(BadRequest::Target)),
    ] {
        let found = host_of(&request(version, target, headers));
        assert_eq!(found.as_deref(), want.as_deref(), "{target} {headers:?}");
    }
    let mut connect = request(V11, "a.example:443", &[("host", "a.example:443")]);
    *connect.method_mut() = Method::CONNECT;
    assert_eq!(host_of(&connect), Err(BadRequest::Connect));
}

/// The headers of a request as a server behind the proxy sees them, in order.
fn seen(target: &str, headers: &[(&str, &str)], websocket: bool) -> Vec<String> {
    let request = request(Version::HTTP_11, target, headers);
    let (parts, ()) = request.into_parts();
    let mut headers = parts.headers;
    let origin = Origin { client: ORIGIN.parse().unwrap(), port: 80, tls: false };
    forwarded(&mut headers, &parts.uri, origin, websocket).unwrap();
    let mut all: Vec<String> =
        headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    all.retain(|line| !line.starts_with("x-forwarded-s") && !line.starts_with("x-real"));
    all.sort();
    all
}

#[test]
fn a_request_goes_on_with_its_own_headers_and_a_true_origin() {
    let rest = [
        "via: 1.1 ferrite-ingress",
        "x-forwarded-for: 192.0.2.7",
        "x-forwarded-host: a",
        "x-forwarded-port: 80",
        "x-forwarded-proto: http",
    ];
    let with = |lines: &[&str]| {
        let mut all: Vec<String> = lines.iter().chain(&rest).map(|line| (*line).to_owned()).collect();
        all.sort();
        all
    };
    for (what, headers, want) in [
        ("plain", &[("host", "a"), ("accept", "x")][..], with(&["accept: x", "host: a"])),
        (
            "forged origin",
            &[
                ("host", "a"),
                ("x-forwarded-for", "10.0.0.1"),
                ("forwarded", "for=10.0.0.1"),
                ("x-forwarded-prefix", "/"),
                ("x_forwarded_for", "10.0.0.1"),
            ],
            with(&["host: a"]),
        ),
        (
            "hop by hop",
            &[
                ("host", "a"),
                ("connection", "close, X-Secret, x-forwarded-for, host, content-length"),
                ("x-secret", "1"),
                ("keep-alive", "5"),
                ("te", "gzip"),
                ("proxy-authorization", "x"),
                ("transfer-encoding", "chunked"),
                ("content-length", "7"),
                ("upgrade", "h2c"),
                ("http2-settings", "x"),
            ],
            with(&["host: a", "http2-settings: x"]),
        ),
        ("trailers", &[("host", "a"), ("te", "gzip, trailers")], with(&["host: a", "te: trailers"])),
    ] {
        assert_eq!(seen("/", headers, false), want, "{what}");
    }
    let websocket =
        seen("/", &[("host", "a"), ("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")], true);
    assert_eq!(websocket, with(&["host: a", "connection: upgrade", "upgrade: websocket"]));
}

#[test]
fn a_request_that_comes_back_is_noticed() {
    let (parts, ()) =
        request(Version::HTTP_11, "/", &[("host", "a"), ("via", "1.1 x, 1.1 ferrite-ingress")]).into_parts();
    let origin = Origin { client: ORIGIN.parse().unwrap(), port: 80, tls: true };
    let mut headers = parts.headers;
    assert_eq!(forwarded(&mut headers, &parts.uri, origin, false), Err(BadRequest::Loop));
}

#[test]
fn only_websockets_are_switched_to() {
    for (connection, upgrade, method, want) in [
        ("upgrade", "websocket", Method::GET, true),
        ("keep-alive, Upgrade", "WebSocket", Method::GET, true),
        ("upgrade", "h2c", Method::GET, false),
        ("upgrade", "websocket, h2c", Method::GET, false),
        ("close", "websocket", Method::GET, false),
        ("upgrade", "websocket", Method::POST, false),
    ] {
        let request = request(Version::HTTP_11, "/", &[("connection", connection), ("upgrade", upgrade)]);
        assert_eq!(
            wants_websocket(request.headers(), &method, Version::HTTP_11),
            want,
            "{connection} {upgrade}"
        );
    }
}

#[test]
fn an_answer_has_one_length() {
    for (headers, want) in [
        (&[("content-length", "5"), ("server", "x")][..], &["content-length: 5", "server: x"][..]),
        (&[("content-length", "5"), ("transfer-encoding", "chunked")], &[]),
        (&[("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "5"), ("etag", "1")], &["etag: 1"]),
    ] {
        let mut map = request(Version::HTTP_11, "/", headers).headers().clone();
        answered(&mut map, false);
        let mut all: Vec<String> = map.iter().map(|(n, v)| format!("{n}: {}", v.to_str().unwrap())).collect();
        all.sort();
        assert_eq!(all, want);
    }
}

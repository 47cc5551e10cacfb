use super::*;
use ferrite_json::json;

fn whole(rest: &str) -> String {
    format!("apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n{rest}")
}

fn parse(rest: &str) -> Result<AuthenticationConfig, String> {
    let reserved = ["https://kubernetes.default.svc".to_owned()];
    AuthenticationConfig::parse(whole(rest).as_bytes(), &reserved).map_err(|error| error.to_string())
}

/// One issuer with a username by its subject, and what else is given.
fn issuer(rest: &str) -> String {
    format!(
        "jwt:\n- issuer: {{url: 'https://issuer.example', audiences: [us]}}\n  claimMappings: {{username: {{claim: sub, prefix: ''}}}}\n{rest}"
    )
}

fn mapped(mappings: &str) -> String {
    format!(
        "jwt:\n- issuer: {{url: 'https://issuer.example', audiences: [us]}}\n  claimMappings: {{{mappings}}}\n"
    )
}

#[test]
fn mistakes_are_named_as_upstream_names_them() {
    let with_issuer = |issuer: &str| {
        format!("jwt:\n- issuer: {{{issuer}}}\n  claimMappings: {{username: {{claim: sub, prefix: ''}}}}\n")
    };
    let rows = [
        (with_issuer("audiences: [a]"), "jwt[0].issuer.url: Required value"),
        (
            with_issuer("url: 'http://a', audiences: [a]"),
            "jwt[0].issuer.url: Invalid value: \"http://a\": URL scheme must be https",
        ),
        (with_issuer("url: 'https://u:p@a', audiences: [a]"), "URL must not contain a username or password"),
        (with_issuer("url: 'https://a?b=c', audiences: [a]"), "URL must not contain a query"),
        (with_issuer("url: 'https://a#b', audiences: [a]"), "URL must not contain a fragment"),
        (
            with_issuer("url: 'https://kubernetes.default.svc', audiences: [a]"),
            "URL must not overlap with disallowed issuers: [https://kubernetes.default.svc]",
        ),
        (
            with_issuer("url: 'https://a', discoveryURL: 'https://a/', audiences: [a]"),
            "discoveryURL must be different from URL",
        ),
        (
            with_issuer("url: 'https://a'"),
            "jwt[0].issuer.audiences: Required value: at least one jwt[0].issuer.audiences is required",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a, b]"),
            "audienceMatchPolicy must be MatchAny for multiple audiences",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a], audienceMatchPolicy: MatchAll"),
            "must be empty or MatchAny for single audience",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a, a], audienceMatchPolicy: MatchAny"),
            "jwt[0].issuer.audiences[1]: Duplicate value: \"a\"",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a], certificateAuthority: nothing"),
            "certificateAuthority: Invalid value: \"<omitted>\"",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a], egressSelectorType: cluster"),
            "egress selectors are not supported",
        ),
        (
            with_issuer("url: 'https://a', audiences: [a], egressSelectorType: etcd"),
            "must be either controlplane or cluster",
        ),
        (
            format!("{}{}", issuer(""), issuer("").trim_start_matches("jwt:\n")),
            "jwt[1].issuer.url: Duplicate value",
        ),
        (mapped(""), "claimMappings.username: Required value: claim or expression is required"),
        (
            mapped("username: {claim: sub}"),
            "username.prefix: Required value: prefix is required when claim is set",
        ),
        (
            mapped("username: {claim: sub, prefix: '', expression: claims.sub}"),
            "claim and expression can't both be set",
        ),
        (mapped("username: {expression: 'claims.'}"), "compilation failed"),
        (
            mapped("username: {expression: 'claims.sub', prefix: a}"),
            "may not be specified when expression is set",
        ),
        (mapped("username: {expression: 'claims.email'}"), "claims.email_verified must be used in"),
        (
            mapped("username: {expression: 'claims.?email.orValue(\"x\")'}"),
            "claims.email_verified must be used in",
        ),
        (mapped("username: {claim: s, prefix: ''}, uid: {claim: a, expression: b}"), "claimMappings.uid"),
        (
            mapped("username: {claim: s, prefix: ''}, extra: [{key: foo, valueExpression: '\"a\"'}]"),
            "must be a domain-prefixed path",
        ),
        (
            mapped("username: {claim: s, prefix: ''}, extra: [{key: a.b/Foo, valueExpression: '\"a\"'}]"),
            "must be lowercase",
        ),
        (
            mapped(
                "username: {claim: s, prefix: ''}, extra: [{key: x.k8s.io/foo, valueExpression: '\"a\"'}]",
            ),
            "are reserved for Kubernetes use",
        ),
        (
            mapped("username: {claim: s, prefix: ''}, extra: [{key: a.b/foo}]"),
            "extra[0].valueExpression: Required value",
        ),
        (issuer("  claimValidationRules: [{}]\n"), "claim or expression is required"),
        (
            issuer("  claimValidationRules: [{claim: a, message: m}]\n"),
            "may not be specified when claim is set",
        ),
        (
            issuer("  claimValidationRules: [{expression: 'true', requiredValue: m}]\n"),
            "may not be specified when expression is set",
        ),
        (issuer("  claimValidationRules: [{expression: '\"a\"'}]\n"), "must evaluate to bool"),
        (issuer("  userValidationRules: [{}]\n"), "userValidationRules[0].expression: Required value"),
        (issuer("  userValidationRules: [{expression: 'user.nothing == 1'}]\n"), "compilation failed"),
        (issuer("  unknown: 1\n"), "strict decoding error: unknown field \"unknown\""),
        (
            "anonymous: {enabled: false, conditions: [{path: /livez}]}\n".to_owned(),
            "enabled should be set to true when conditions are defined",
        ),
    ];
    for (text, expected) in rows {
        let error = parse(&text).err().unwrap_or_default();
        assert!(error.contains(expected), "{text}\n{error}");
    }
    let other = AuthenticationConfig::parse(b"apiVersion: v1\nkind: Pod\n", &[]).unwrap_err().to_string();
    assert!(other.contains("no kind \"Pod\" is registered"), "{other}");
    assert!(matches!(AuthenticationConfig::parse(b"", &[]), Err(AuthenticationConfigError::Empty)));
}

#[test]
fn requests_without_credentials_may_be_limited_to_paths() {
    let of = |text: &str| parse(text).unwrap().anonymous;
    assert_eq!(of("jwt: []\n"), None);
    let all = of("anonymous: {enabled: true}\n").unwrap();
    assert!(all.allows("/anything"));
    let some = of("anonymous: {enabled: true, conditions: [{path: /livez}, {path: /readyz}]}\n").unwrap();
    assert!(some.allows("/livez") && some.allows("/readyz"));
    assert!(!some.allows("/livez/ping") && !some.allows("/api"));
    assert!(!of("anonymous: {enabled: false}\n").unwrap().allows("/livez"));
}

#[test]
fn claims_become_a_user() {
    let user = |text: &str, claims: Value| {
        let config = parse(text).unwrap();
        config.jwt[0].mapper.user(&claims)
    };
    let by_claims = mapped(
        "username: {claim: email, prefix: 'oidc:'}, groups: {claim: roles, prefix: 'g:'}, uid: {claim: sub}",
    );
    let jane =
        user(&by_claims, json!({"email": "jane@x", "roles": ["a", "b"], "sub": "7", "jti": "id"})).unwrap();
    assert_eq!((jane.name.as_str(), jane.uid.as_str()), ("oidc:jane@x", "7"));
    assert_eq!(jane.groups, ["g:a", "g:b", "system:authenticated"]);
    assert_eq!(jane.extra["authentication.kubernetes.io/credential-id"], ["JTI=id"]);
    let one =
        user(&by_claims, json!({"email": "j", "email_verified": true, "roles": "a", "sub": "7"})).unwrap();
    assert_eq!(one.groups, ["g:a", "system:authenticated"]);

    let by_expressions = format!(
        "{}  claimValidationRules: [{{expression: 'claims.exp - claims.iat <= 3600', message: too long}}, {{claim: hd, requiredValue: x}}]\n  userValidationRules: [{{expression: \"!user.username.startsWith('system:')\", message: reserved}}]\n",
        mapped(
            "username: {expression: 'claims.name'}, groups: {expression: 'claims.?roles.orValue([])'}, extra: [{key: a.b/team, valueExpression: claims.team}]"
        )
    );
    let claims = |name: &str, end: i64, hd: &str| json!({"name": name, "iat": 0, "exp": end, "hd": hd, "team": "blue"});
    let bob = user(&by_expressions, claims("bob", 3600, "x")).unwrap();
    assert_eq!((bob.name.as_str(), bob.groups), ("bob", vec!["system:authenticated".to_owned()]));
    assert_eq!(bob.extra["a.b/team"], ["blue"]);
    let rows = [
        (&by_claims, json!({"sub": "7"}), "oidc: parse username claims \"email\": claim not present"),
        (&by_claims, json!({"email": "j", "email_verified": false, "sub": "7"}), "oidc: email not verified"),
        (&by_claims, json!({"email": 1, "sub": "7"}), "the claim is not a string"),
        (&by_claims, json!({"email": "j", "roles": [1], "sub": "7"}), "oidc: parse groups claim"),
        (&by_claims, json!({"email": "j"}), "oidc: parse uid claim \"sub\": claim not present"),
        (&by_expressions, claims("bob", 3601, "x"), "failed: too long"),
        (
            &by_expressions,
            claims("bob", 3600, "y"),
            "required claim hd value does not match. Got = y, want = x",
        ),
        (&by_expressions, claims("system:admin", 3600, "x"), "failed: reserved"),
        (&by_expressions, claims("", 3600, "x"), "empty username via CEL expression is not allowed"),
        (&by_expressions, json!({"name": 1, "team": "a"}), "username claim expression must return a string"),
        (&by_expressions, json!({"team": "a"}), "no such key: name"),
        (
            &by_expressions,
            json!({"name": "b", "team": {"a": 1}, "hd": "x"}),
            "must return a string or a list of strings",
        ),
    ];
    for (text, claims, expected) in rows {
        let error = user(text, claims.clone()).err().unwrap_or_default();
        assert!(error.contains(expected), "{claims}: {error}");
    }
}

#[test]
fn flags_are_a_configuration_with_one_issuer() {
    let flags = |change: fn(&mut OidcFlags)| {
        let mut flags = OidcFlags {
            issuer_url: "https://issuer.example".into(),
            client_id: "us".into(),
            username_claim: "sub".into(),
            ..OidcFlags::default()
        };
        change(&mut flags);
        AuthenticationConfig::of_flags(&flags, &[])
    };
    let name = |change: fn(&mut OidcFlags), claims: Value| {
        let config = flags(change).unwrap();
        config.jwt[0].mapper.user(&claims).unwrap().name
    };
    assert_eq!(name(|_| {}, json!({"sub": "j"})), "https://issuer.example#j");
    assert_eq!(name(|f| f.username_prefix = "-".into(), json!({"sub": "j"})), "j");
    assert_eq!(name(|f| f.username_prefix = "x:".into(), json!({"sub": "j"})), "x:j");
    assert_eq!(name(|f| f.username_claim = "email".into(), json!({"email": "j"})), "j");
    assert_eq!(flags(|_| {}).unwrap().jwt[0].algorithms, ["RS256"]);
    let needed = flags(|f| f.required_claims = vec![("a".into(), "b".into())]).unwrap();
    assert!(needed.jwt[0].mapper.user(&json!({"sub": "j"})).is_err());
    for (change, expected) in [
        ((|f| f.client_id.clear()) as fn(&mut OidcFlags), "must be specified together"),
        (|f| f.signing_algorithms = vec!["HS256".into()], "unsupported signing alg: \"HS256\""),
        (|f| f.issuer_url = "http://a".into(), "URL scheme must be https"),
    ] {
        let error = flags(change).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

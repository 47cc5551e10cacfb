use super::*;

fn errors(providers: &str) -> String {
    let text = format!(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:{providers}"
    );
    aggregate(&validate(&decode(text.as_bytes()).unwrap()))
}

/// One provider that is right but for the lines given.
fn one(name: &str, lines: &str) -> String {
    format!("\n- name: {name}\n{lines}")
}

#[test]
fn what_upstream_refuses() {
    const REST: &str = "  matchImages: [r.io]\n  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n";
    const NO_VERSION: &str = "  matchImages: [r.io]\n  defaultCacheDuration: 1h\n";
    for (providers, expected) in [
        (one("p", REST), "[]"),
        (" []".to_owned(), "providers: Required value: at least 1 item in plugins is required"),
        (one("a/b", REST), "providers.name: Invalid value: \"a/b\": provider name cannot contain '/'"),
        (one("\"a b\"", REST), "providers.name: Invalid value: \"a b\": provider name cannot contain spaces"),
        (one("\".\"", REST), "providers.name: Invalid value: \".\": provider name cannot be '.'"),
        (one("\"..\"", REST), "providers.name: Invalid value: \"..\": provider name cannot be '..'"),
        (one("p", NO_VERSION), "providers.apiVersion: Required value"),
        (
            one("p", &format!("{NO_VERSION}  apiVersion: v2\n")),
            "providers.apiVersion: Unsupported value: \"v2\": supported values: \"credentialprovider.kubelet.k8s.io/v1\", \"credentialprovider.kubelet.k8s.io/v1alpha1\", \"credentialprovider.kubelet.k8s.io/v1beta1\"",
        ),
        (
            one("p", "  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1beta1\n"),
            "providers.matchImages: Required value: at least 1 item in matchImages is required",
        ),
        (
            one(
                "p",
                "  matchImages: [\"%invalid%\"]\n  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n",
            ),
            "providers.matchImages: Invalid value: \"%invalid%\": match image is invalid: parse \"https://%invalid%\": invalid URL escape \"%in\"",
        ),
        (
            one("p", "  matchImages: [r.io]\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n"),
            "providers.defaultCacheDuration: Required value",
        ),
        (
            one(
                "p",
                "  matchImages: [r.io]\n  defaultCacheDuration: -1m\n  apiVersion: credentialprovider.kubelet.k8s.io/v1alpha1\n",
            ),
            "providers.defaultCacheDuration: Invalid value: \"-1m\": defaultCacheDuration must be greater than or equal to 0",
        ),
        (
            one("p", ""),
            "[providers.apiVersion: Required value, providers.matchImages: Required value: at least 1 item in matchImages is required, providers.defaultCacheDuration: Required value]",
        ),
    ] {
        assert_eq!(errors(&providers), expected, "{providers}");
    }
}

#[test]
fn token_attributes() {
    let base = "  matchImages: [r.io]\n  defaultCacheDuration: 1h\n";
    let v1 = "  apiVersion: credentialprovider.kubelet.k8s.io/v1\n";
    for (version, attributes, expected) in [
        (v1, "{serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true}", "[]"),
        (
            v1,
            "{}",
            "[providers.tokenAttributes.serviceAccountTokenAudience: Required value, providers.tokenAttributes.requireServiceAccount: Required value, providers.tokenAttributes.cacheType: Required value: cacheType is required to be set when tokenAttributes is specified. Supported values are: ServiceAccount, Token]",
        ),
        (
            v1,
            "{serviceAccountTokenAudience: a, cacheType: Moon, requireServiceAccount: true}",
            "providers.tokenAttributes.cacheType: Unsupported value: \"Moon\": supported values: \"ServiceAccount\", \"Token\"",
        ),
        (
            "  apiVersion: credentialprovider.kubelet.k8s.io/v1beta1\n",
            "{serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true}",
            "providers.tokenAttributes: Forbidden: tokenAttributes is only supported for credentialprovider.kubelet.k8s.io/v1 API version",
        ),
        (
            v1,
            "{serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: false, requiredServiceAccountAnnotationKeys: [a/b]}",
            "providers.tokenAttributes.requiredServiceAccountAnnotationKeys: Forbidden: requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set",
        ),
        (
            v1,
            "{serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true, requiredServiceAccountAnnotationKeys: [a/B, a/B]}",
            "providers.tokenAttributes.requiredServiceAccountAnnotationKeys: Duplicate value: \"a/B\"",
        ),
        (
            v1,
            "{serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true, requiredServiceAccountAnnotationKeys: [a], optionalServiceAccountAnnotationKeys: [a]}",
            "providers.tokenAttributes: Invalid value: [\"a\"]: annotation keys cannot be both required and optional",
        ),
    ] {
        let lines = format!("{base}{version}  tokenAttributes: {attributes}\n");
        assert_eq!(errors(&one("p", &lines)), expected, "{attributes}");
    }
}

#[test]
fn files_that_are_something_else() {
    for (text, expected) in [
        ("{", "could not"),
        ("apiVersion: v1\nkind: Pod\n", "failed to decode \"Pod\" (wrong Kind)"),
        (
            "apiVersion: example.com/v1\nkind: CredentialProviderConfig\n",
            "failed to decode CredentialProviderConfig, unexpected Group: example.com",
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v9\nkind: CredentialProviderConfig\n",
            "no kind \"CredentialProviderConfig\" is registered for version \"kubelet.config.k8s.io/v9\"",
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders: [{name: p, colour: red}]\n",
            "unknown field `colour`",
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nkind: CredentialProviderConfig\n",
            "strict decoding error",
        ),
    ] {
        let error = decode(text.as_bytes()).err().unwrap();
        assert!(error.contains(expected) || text == "{", "{text}: {error}");
    }
}

#[test]
fn a_directory_of_files() {
    let directory = tempfile::tempdir().unwrap();
    let provider = |name: &str| {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:{}",
            one(
                name,
                "  matchImages: [r.io]\n  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n"
            )
        )
    };
    let bin = directory.path().join("bin");
    let config = directory.path().join("config");
    std::fs::create_dir(&bin).unwrap();
    std::fs::create_dir(&config).unwrap();
    assert!(matches!(Plugins::load(&config, &bin).err().unwrap(), ConfigError::NoFiles(_)));
    for name in ["a", "b", "c"] {
        std::fs::write(bin.join(name), "").unwrap();
        std::fs::set_permissions(bin.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    for (file, name) in [("20.yaml", "a"), ("10.yml", "c"), ("30.json", "b"), ("ignored.txt", "a")] {
        std::fs::write(config.join(file), provider(name)).unwrap();
    }
    let names: Vec<String> =
        Plugins::load(&config, &bin).unwrap().0.into_iter().map(|plugin| plugin.name).collect();
    assert_eq!(names, ["c", "a", "b"], "in the order of the files' names");
    std::fs::write(config.join("40.yaml"), provider("a")).unwrap();
    let error = Plugins::load(&config, &bin).err().unwrap();
    assert_eq!(error.to_string(), "duplicate provider name \"a\" found in configuration file(s)");
}

//! EncryptionConfiguration of apiserver.config.k8s.io/v1: decoding and validation, with upstream's words.

use crate::resources::GroupResource;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferrite_api::field::{FieldError, Path};
use ferrite_component::GoDuration;
use ferrite_json::Value;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::time::Duration;

const VERSION: &str = "apiserver.config.k8s.io/v1";
const KIND: &str = "EncryptionConfiguration";
const KMS_TIMEOUT: Duration = Duration::from_secs(3);
const AES_KEYS: &[usize] = &[16, 24, 32];
const SECRETBOX_KEYS: &[usize] = &[32];

/// A configuration that cannot be used. Never shows a key.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("error reading encryption provider configuration file {path:?}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("encryption provider configuration file {0:?} is empty")]
    Empty(String),
    #[error("encryption provider configuration file {0:?} is larger than 1 MiB")]
    TooLarge(String),
    #[error("error decoding encryption provider configuration file {path:?}: {problem}")]
    Decode { path: String, problem: String },
    #[error("{0}")]
    Invalid(String),
    #[error("resource {resource:?} is masked by earlier rule {rule:?}")]
    Masked { resource: String, rule: String },
    #[error(
        "KMS provider {0:?} is of apiVersion v1, which is deprecated and not supported: use a plugin of apiVersion v2"
    )]
    KmsV1(String),
    #[error("KMS provider {name:?}: {problem}")]
    Kms { name: String, problem: String },
}

/// A key's secret, in base64 as the file has it. Errors and logs never show it.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[REDACTED]")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) => Ok(Self(text.to_string())),
            _ => Err(serde::de::Error::custom("secret is not a string")),
        }
    }
}

impl Secret {
    /// As Go's decoder, which passes over line breaks.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let text: String = self.0.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
        STANDARD.decode(text).ok()
    }
}

/// The configuration as its file has it, found valid.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Configuration {
    pub(crate) resources: Vec<ResourceRule>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ResourceRule {
    pub resources: Vec<String>,
    pub providers: Vec<ProviderRule>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ProviderRule {
    pub aesgcm: Option<Keys>,
    pub aescbc: Option<Keys>,
    pub secretbox: Option<Keys>,
    pub identity: Option<Identity>,
    pub kms: Option<KmsSettings>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Keys {
    pub keys: Vec<NamedKey>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NamedKey {
    pub name: String,
    pub secret: Secret,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Identity {}

/// A key management service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KmsSettings {
    #[serde(rename = "apiVersion")]
    pub(crate) api_version: String,
    pub(crate) name: String,
    pub(crate) cachesize: Option<i32>,
    pub(crate) endpoint: String,
    pub(crate) timeout: Option<Timeout>,
}

/// A duration, or a text that is none or negative.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(crate) struct Timeout(String);

impl KmsSettings {
    fn version(&self) -> &str {
        if self.api_version.is_empty() { "v1" } else { &self.api_version }
    }

    /// The time limit of a call. None where the file has no positive duration.
    pub(crate) fn call_timeout(&self) -> Option<Duration> {
        match &self.timeout {
            None => Some(KMS_TIMEOUT),
            Some(Timeout(text)) => {
                text.parse::<GoDuration>().ok().map(|given| given.0).filter(|given| !given.is_zero())
            }
        }
    }
}

impl Configuration {
    /// Reads a file's contents. `reload` says whether the file is followed.
    pub fn parse(path: &str, text: &[u8], reload: bool) -> Result<Self, ConfigError> {
        if text.is_empty() {
            return Err(ConfigError::Empty(path.to_owned()));
        }
        let decode = |problem| ConfigError::Decode { path: path.to_owned(), problem };
        let configuration = decoded(text).map_err(decode)?;
        let errors = configuration.validate(reload);
        match errors.as_slice() {
            [] => {}
            [one] => return Err(ConfigError::Invalid(one.to_string())),
            many => {
                let all: Vec<String> = many.iter().map(ToString::to_string).collect();
                return Err(ConfigError::Invalid(format!("[{}]", all.join(", "))));
            }
        }
        configuration.check_masks()?;
        let kms = configuration.resources.iter().flat_map(|rule| &rule.providers);
        match kms.filter_map(|provider| provider.kms.as_ref()).find(|kms| kms.version() == "v1") {
            Some(kms) => Err(ConfigError::KmsV1(kms.name.clone())),
            None => Ok(configuration),
        }
    }

    fn validate(&self, reload: bool) -> Vec<FieldError> {
        let root = Path::new("resources");
        if self.resources.is_empty() {
            return vec![FieldError::required(&root, "at least one resources is required")];
        }
        let mut errors = Vec::new();
        let mut kms_names = BTreeSet::new();
        for (index, rule) in self.resources.iter().enumerate() {
            let resources = root.index(index).child("resources");
            let providers = root.index(index).child("providers");
            let needed = |path: &Path| {
                FieldError::required(path, format!("at least one {} is required", path.as_str()))
            };
            if rule.resources.is_empty() {
                errors.push(needed(&resources));
            }
            errors.extend(overlaps(&rule.resources, &resources));
            errors.extend(names(&rule.resources, &resources));
            if rule.providers.is_empty() {
                errors.push(needed(&providers));
            }
            for (index, provider) in rule.providers.iter().enumerate() {
                let path = providers.index(index);
                errors.extend(provider.single(&path));
                if let Some(kms) = &provider.kms {
                    errors.extend(kms.validate(&path.child("kms"), &kms_names, reload));
                    kms_names.insert(kms.name.clone());
                } else if let Some(keys) = &provider.aesgcm {
                    errors.extend(keys.validate(&path.child("aesgcm").child("keys"), AES_KEYS));
                } else if let Some(keys) = &provider.aescbc {
                    errors.extend(keys.validate(&path.child("aescbc").child("keys"), AES_KEYS));
                } else if let Some(keys) = &provider.secretbox {
                    errors.extend(keys.validate(&path.child("secretbox").child("keys"), SECRETBOX_KEYS));
                }
            }
        }
        errors
    }

    /// As upstream: a rule that an earlier one with a wildcard leaves without effect is a mistake.
    fn check_masks(&self) -> Result<(), ConfigError> {
        let mut seen = BTreeSet::new();
        let everything = GroupResource::new("*", "*");
        for text in self.resources.iter().flat_map(|rule| &rule.resources) {
            let resource = GroupResource::parse(text);
            let of_group = GroupResource::new(&resource.group, "*");
            for rule in [&of_group, &everything] {
                if seen.contains(rule) {
                    return Err(ConfigError::Masked {
                        resource: resource.to_string(),
                        rule: rule.to_string(),
                    });
                }
            }
            // Within one list the earlier ones count, too.
            seen.insert(resource);
        }
        Ok(())
    }
}

/// Decodes without ever quoting the file.
fn decoded(text: &[u8]) -> Result<Configuration, String> {
    let text = std::str::from_utf8(text).map_err(|_| "it is not UTF-8 text".to_owned())?;
    let value: Value = serde_saphyr::from_str(text).map_err(|error| match error.location() {
        Some(at) => format!("it is not valid YAML at line {} column {}", at.line(), at.column()),
        None => "it is not valid YAML".to_owned(),
    })?;
    let Value::Object(mut members) = value else { return Err("it is no object".to_owned()) };
    let mut text_of = |name: &str| match members.remove(name) {
        Some(Value::String(text)) => text.to_string(),
        _ => String::new(),
    };
    let (version, kind) = (text_of("apiVersion"), text_of("kind"));
    if kind.is_empty() {
        return Err("Object 'Kind' is missing".to_owned());
    }
    if version != VERSION || kind != KIND {
        return Err(format!(
            "no kind {kind:?} is registered for version {version:?}: a {KIND} of {VERSION} is read"
        ));
    }
    ferrite_json::from_value(members.into()).map_err(|error| {
        let text = error.to_string();
        match text.split_once(", expected ") {
            Some((what, _)) if what.starts_with("unknown field") => {
                format!("strict decoding error: {}", what.replace('`', "\""))
            }
            // The value that was found may be a secret.
            Some((_, expected)) => format!("a field has another type than expected: {expected}"),
            None => text,
        }
    })
}

fn overlaps(resources: &[String], path: &Path) -> Vec<FieldError> {
    let parsed: Vec<GroupResource> = resources.iter().map(|text| GroupResource::parse(text)).collect();
    let everything = GroupResource::new("*", "*");
    let (mut duplicate, mut overlap) = (false, false);
    for (i, one) in parsed.iter().enumerate() {
        for (_, other) in parsed.iter().enumerate().filter(|(j, _)| *j != i) {
            if one == other && !duplicate {
                duplicate = true;
            } else if *one == everything
                || (one.group == other.group && (one.resource == "*" || other.resource == "*"))
            {
                overlap = true;
            }
        }
    }
    let value = || Value::from(resources.iter().map(|text| Value::from(text.as_str())).collect::<Vec<_>>());
    let mut errors = Vec::new();
    if duplicate {
        let why = "the same resource cannot be specified multiple times";
        errors.push(FieldError::invalid(path, value(), why));
    }
    if overlap {
        let why = "using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked";
        errors.push(FieldError::invalid(path, value(), why));
    }
    errors
}

fn names(resources: &[String], path: &Path) -> Vec<FieldError> {
    let problem = |text: &str| {
        let GroupResource { group, resource } = GroupResource::parse(text);
        Some(if text.to_lowercase() != text {
            "resource name should not contain capital letters"
        } else if text == "*" {
            "use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources"
        } else if matches!(text, "apiserveripinfo" | "serviceipallocations" | "servicenodeportallocations") {
            "resources which do not have REST API/s cannot be encrypted"
        } else if group == "events.k8s.io" {
            "'*.events.k8s.io' objects are stored using the 'events' API group in etcd. Use 'events' instead in the config file"
        } else if group == "extensions" {
            "'extensions' group has been removed and cannot be used for encryption"
        } else if group == "*" && resource != "*" {
            "encrypting the same resource across groups is not supported"
        } else {
            return None;
        })
    };
    let found = |(index, text): (usize, &String)| {
        Some(FieldError::invalid(&path.index(index), text.as_str(), problem(text)?))
    };
    resources.iter().enumerate().filter_map(found).collect()
}

impl ProviderRule {
    fn single(&self, path: &Path) -> Option<FieldError> {
        let given = [
            self.kms.is_some(),
            self.aesgcm.is_some(),
            self.aescbc.is_some(),
            self.secretbox.is_some(),
            self.identity.is_some(),
        ];
        let why = match given.into_iter().filter(|given| *given).count() {
            1 => return None,
            0 => {
                "provider does not contain any of the expected providers: KMS, AESGCM, AESCBC, Secretbox, Identity"
            }
            _ => {
                "more than one provider specified in a single element, should split into different list elements"
            }
        };
        // The value has keys.
        Some(FieldError::invalid(path, "REDACTED", why))
    }
}

impl Keys {
    fn validate(&self, path: &Path, sizes: &[usize]) -> Vec<FieldError> {
        if self.keys.is_empty() {
            return vec![FieldError::required(path, "at least one keys is required")];
        }
        let mut errors = Vec::new();
        for (index, key) in self.keys.iter().enumerate() {
            let path = path.index(index);
            if key.name.is_empty() {
                errors.push(FieldError::required(&path.child("name"), "name is a mandatory field for a key"));
            }
            let path = path.child("secret");
            if key.secret.0.is_empty() {
                errors.push(FieldError::required(&path, "secret is a mandatory field for a key"));
                continue;
            }
            match key.secret.bytes() {
                None => {
                    errors.push(FieldError::invalid(&path, "REDACTED", "secrets must be base64 encoded"));
                }
                Some(bytes) if !sizes.contains(&bytes.len()) => {
                    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
                    let why = format!(
                        "secret is not of the expected length, got {}, expected one of [{}]",
                        bytes.len(),
                        sizes.join(" ")
                    );
                    errors.push(FieldError::invalid(&path, "REDACTED", why));
                }
                Some(_) => {}
            }
        }
        errors
    }
}

impl KmsSettings {
    fn validate(&self, path: &Path, names: &BTreeSet<String>, reload: bool) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let name = path.child("name");
        if self.name.is_empty() {
            errors.push(FieldError::required(&name, "name is a mandatory field for a provider"));
        }
        let old = self.version() == "v1";
        if !old && self.name.contains(':') {
            let why = format!("invalid KMS provider name {}, must not contain ':'", self.name);
            errors.push(FieldError::invalid(&name, self.name.as_str(), why));
        }
        if (reload || !old) && names.contains(&self.name) {
            let why = format!("duplicate KMS provider name {}, names must be unique", self.name);
            errors.push(FieldError::invalid(&name, self.name.as_str(), why));
        }
        if self.call_timeout().is_none() {
            let given = self.timeout.as_ref().map_or("", |Timeout(text)| text);
            errors.push(FieldError::invalid(
                &path.child("timeout"),
                given,
                "timeout should be a positive value",
            ));
        }
        errors.extend(self.check_endpoint(&path.child("endpoint")));
        let size = path.child("cachesize");
        match self.cachesize {
            Some(given) if !old => {
                errors.push(FieldError::invalid(&size, given, "cachesize is not supported in v2"));
            }
            Some(0) => {
                let why = "cachesize should be a positive value, or negative to disable";
                errors.push(FieldError::invalid(&size, 0, why));
            }
            _ => {}
        }
        if !matches!(self.version(), "v1" | "v2") {
            let why = "unsupported apiVersion apiVersion for KMS provider, only v1 and v2 are supported";
            errors.push(FieldError::invalid(&path.child("apiVersion"), self.version(), why));
        }
        errors
    }

    fn check_endpoint(&self, path: &Path) -> Option<FieldError> {
        if self.endpoint.is_empty() {
            return Some(FieldError::invalid(path, "", "endpoint is a mandatory field for a kms"));
        }
        let scheme = self.endpoint.split_once(':').map_or("", |(scheme, _)| scheme);
        (scheme != "unix").then(|| {
            let why = format!("unsupported scheme {scheme:?} for KMS provider, only unix is supported");
            FieldError::invalid(path, self.endpoint.as_str(), why)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn parse(rules: &str) -> Result<Configuration, String> {
        let text = format!("apiVersion: {VERSION}\nkind: {KIND}\nresources:\n{rules}");
        Configuration::parse("f", text.as_bytes(), true).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_is_read() {
        let rules = format!(
            "- resources: [secrets, pandas.bears.example]
  providers:
  - aescbc: {{keys: [{{name: key1, secret: {KEY}}}, {{name: key2, secret: MDEyMzQ1Njc4OWFiY2RlZg==}}]}}
  - kms: {{apiVersion: v2, name: far, endpoint: 'unix:///run/kms.sock', timeout: 5s}}
  - identity: {{}}
- resources: ['*.apps']
  providers: [{{secretbox: {{keys: [{{name: s, secret: {KEY}}}]}}}}, {{aesgcm: {{keys: [{{name: s, secret: {KEY}}}]}}}}]
- resources: ['*.*']
  providers: [{{identity: {{}}}}]
"
        );
        let configuration = parse(&rules).unwrap();
        assert_eq!(configuration.resources.len(), 3);
        let first = &configuration.resources[0].providers;
        assert_eq!(first[0].aescbc.as_ref().unwrap().keys[1].secret.bytes().unwrap().len(), 16);
        assert_eq!(first[1].kms.as_ref().unwrap().call_timeout(), Some(Duration::from_secs(5)));
        assert!(!format!("{configuration:?}").contains(KEY), "keys are not shown");
    }

    #[test]
    fn mistakes_are_named_as_upstream_names_them() {
        let keys = |provider: &str, keys: &str| {
            format!("- resources: [secrets]\n  providers: [{{{provider}: {{keys: {keys}}}}}]\n")
        };
        let kms = |kms: &str| format!("- resources: [secrets]\n  providers: [{{kms: {{{kms}}}}}]\n");
        let resources = |list: &str| format!("- resources: {list}\n  providers: [{{identity: {{}}}}]\n");
        let rows = [
            ("  []\n".to_owned(), "resources: Required value: at least one resources is required"),
            ("- {}\n".to_owned(), "resources[0].providers: Required value: at least one resources[0].providers is required"),
            (resources("[secrets, secrets]"), "the same resource cannot be specified multiple times"),
            (resources("['*.', secrets]"), "using overlapping resources"),
            (resources("['*.*', deployments.apps]"), "using overlapping resources"),
            (resources("['*']"), "resources[0].resources[0]: Invalid value: \"*\": use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources"),
            (resources("[Secrets]"), "resource name should not contain capital letters"),
            (resources("[events.events.k8s.io]"), "Use 'events' instead"),
            (resources("[ingresses.extensions]"), "'extensions' group has been removed"),
            (resources("[serviceipallocations]"), "do not have REST API/s"),
            (resources("['secrets.*']"), "encrypting the same resource across groups is not supported"),
            (
                "- resources: ['*.*']\n  providers: [{identity: {}}]\n- resources: [secrets]\n  providers: [{identity: {}}]\n".to_owned(),
                "resource \"secrets\" is masked by earlier rule \"*.*\"",
            ),
            (
                "- resources: ['*.']\n  providers: [{identity: {}}]\n- resources: [secrets]\n  providers: [{identity: {}}]\n".to_owned(),
                "resource \"secrets\" is masked by earlier rule \"*.\"",
            ),
            ("- resources: [secrets]\n  providers: [{}]\n".to_owned(), "provider does not contain any of the expected providers"),
            ("- resources: [secrets]\n  providers: [{identity: {}, aescbc: {keys: []}}]\n".to_owned(), "more than one provider specified"),
            (keys("aescbc", "[]"), "resources[0].providers[0].aescbc.keys: Required value: at least one keys is required"),
            (keys("aesgcm", &format!("[{{secret: {KEY}}}]")), "name is a mandatory field for a key"),
            (keys("aesgcm", "[{name: a}]"), "secret is a mandatory field for a key"),
            (keys("aesgcm", "[{name: a, secret: '?!?!'}]"), "Invalid value: \"REDACTED\": secrets must be base64 encoded"),
            (keys("secretbox", "[{name: a, secret: MDEyMzQ1Njc4OWFiY2RlZg==}]"), "secret is not of the expected length, got 16, expected one of [32]"),
            (keys("aescbc", "[{name: a, secret: MDEy}]"), "got 3, expected one of [16 24 32]"),
            (keys("aescbc", "[{name: a, sekret: MDEy}]"), "strict decoding error: unknown field \"sekret\""),
            (kms("name: a, endpoint: 'unix:///a'"), "apiVersion v1, which is deprecated"),
            (kms("apiVersion: v3, name: a, endpoint: 'unix:///a'"), "only v1 and v2 are supported"),
            (kms("apiVersion: v2, endpoint: 'unix:///a'"), "name is a mandatory field for a provider"),
            (kms("apiVersion: v2, name: 'a:b', endpoint: 'unix:///a'"), "must not contain ':'"),
            (kms("apiVersion: v2, name: a"), "endpoint is a mandatory field for a kms"),
            (kms("apiVersion: v2, name: a, endpoint: 'tcp://a:1'"), "unsupported scheme \"tcp\" for KMS provider, only unix is supported"),
            (kms("apiVersion: v2, name: a, endpoint: 'unix:///a', timeout: -1s"), "timeout should be a positive value"),
            (kms("apiVersion: v2, name: a, endpoint: 'unix:///a', cachesize: 3"), "cachesize is not supported in v2"),
        ];
        for (rules, expected) in rows {
            let error = parse(&rules).unwrap_err();
            assert!(error.contains(expected), "{rules}\n{error}");
        }
    }

    #[test]
    fn errors_never_quote_the_file() {
        let whole = |rest: &str| format!("apiVersion: {VERSION}\nkind: {KIND}\n{rest}");
        for text in [
            whole("resources: [{providers: [{aescbc: {keys: hunter2}}]}]"),
            whole("resources: [{providers: [{aescbc: {keys: [{secret: [hunter2]}]}}]}]"),
            whole("resources: hunter2"),
            whole("resources: [\n  hunter2"),
            "hunter2".to_owned(),
        ] {
            let error = Configuration::parse("f", text.as_bytes(), false).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let other = Configuration::parse("f", b"apiVersion: v1\nkind: Pod\n", false).unwrap_err().to_string();
        assert!(other.contains("no kind \"Pod\" is registered for version \"v1\""), "{other}");
        assert!(matches!(Configuration::parse("f", b"", false), Err(ConfigError::Empty(_))));
    }
}

//! AuthenticationConfiguration of apiserver.config.k8s.io: decoding, and validation with upstream's words.

use super::claims::Mapper;
use super::compile::Compiler;
use crate::auth::config_file::{self, MAX_BYTES};
use ferrite_api::field::{FieldError, Path};
use ferrite_json::Value;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::Deserialize;
use std::collections::BTreeSet;

const KIND: &str = "AuthenticationConfiguration";
const VERSIONS: [&str; 3] =
    ["apiserver.config.k8s.io/v1", "apiserver.config.k8s.io/v1beta1", "apiserver.config.k8s.io/v1alpha1"];
const MAX_ISSUERS: usize = 64;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthenticationConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{0} is larger than 1 MiB")]
    TooLarge(String),
    #[error("empty config data")]
    Empty,
    #[error("{0}")]
    Decode(String),
    #[error("{0}")]
    Invalid(String),
}

/// The file as it is written.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Given {
    jwt: Vec<GivenJwt>,
    anonymous: Option<Anonymous>,
}

/// Requests without credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Anonymous {
    pub(crate) enabled: bool,
    conditions: Vec<AnonymousCondition>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AnonymousCondition {
    path: String,
}

impl Anonymous {
    /// True if requests of this path need no credentials.
    pub(crate) fn allows(&self, path: &str) -> bool {
        self.enabled
            && (self.conditions.is_empty() || self.conditions.iter().any(|condition| condition.path == path))
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct GivenJwt {
    pub issuer: Issuer,
    pub claim_validation_rules: Vec<ClaimRule>,
    pub claim_mappings: Mappings,
    pub user_validation_rules: Vec<UserRule>,
}

/// An issuer of tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct Issuer {
    pub url: String,
    #[serde(rename = "discoveryURL")]
    pub discovery_url: String,
    pub certificate_authority: String,
    pub audiences: Vec<String>,
    pub audience_match_policy: String,
    pub egress_selector_type: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct ClaimRule {
    pub claim: String,
    pub required_value: String,
    pub expression: String,
    pub message: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mappings {
    pub username: Mapping,
    pub groups: Mapping,
    pub uid: Mapping,
    pub extra: Vec<Extra>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Mapping {
    pub claim: String,
    pub prefix: Option<String>,
    pub expression: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct Extra {
    pub key: String,
    pub value_expression: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct UserRule {
    pub expression: String,
    pub message: String,
}

/// One issuer with its compiled mappings.
#[derive(Debug)]
pub(super) struct JwtSettings {
    pub issuer: Issuer,
    /// Signature algorithms that are accepted.
    pub algorithms: Vec<String>,
    pub mapper: Mapper,
}

/// A configuration that was read and found valid.
#[derive(Debug, Default)]
pub struct AuthenticationConfig {
    pub(super) jwt: Vec<std::sync::Arc<JwtSettings>>,
    pub(crate) anonymous: Option<Anonymous>,
}

/// The `--oidc-*` flags.
#[derive(Debug, Clone, Default)]
pub struct OidcFlags {
    pub issuer_url: String,
    pub client_id: String,
    /// The authority of the issuer's certificate, as PEM; the system's when empty.
    pub certificate_authority: String,
    pub username_claim: String,
    pub username_prefix: String,
    pub groups_claim: String,
    pub groups_prefix: String,
    pub signing_algorithms: Vec<String>,
    pub required_claims: Vec<(String, String)>,
}

/// The algorithms that upstream allows.
const ALGORITHMS: [&str; 9] =
    ["ES256", "ES384", "ES512", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"];

impl AuthenticationConfig {
    /// `reserved` are issuers of the server's own.
    pub fn read(path: &std::path::Path, reserved: &[String]) -> Result<Self, AuthenticationConfigError> {
        let name = path.display().to_string();
        let text = config_file::read(path)
            .map_err(|source| AuthenticationConfigError::Read { path: name.clone(), source })?;
        if text.len() as u64 > MAX_BYTES {
            return Err(AuthenticationConfigError::TooLarge(name));
        }
        Self::parse(&text, reserved)
    }

    /// True if the file says something about requests without credentials.
    pub fn says_anonymous(&self) -> bool {
        self.anonymous.is_some()
    }

    pub fn parse(text: &[u8], reserved: &[String]) -> Result<Self, AuthenticationConfigError> {
        if text.is_empty() {
            return Err(AuthenticationConfigError::Empty);
        }
        let given: Given =
            config_file::decode(text, KIND, &VERSIONS).map_err(AuthenticationConfigError::Decode)?;
        let all = ALGORITHMS.map(str::to_owned).to_vec();
        Self::build(given, reserved, &all)
    }

    /// One issuer, as the flags have it.
    pub fn of_flags(flags: &OidcFlags, reserved: &[String]) -> Result<Self, AuthenticationConfigError> {
        let invalid = |why: &str| AuthenticationConfigError::Invalid(why.to_owned());
        if flags.issuer_url.is_empty() || flags.client_id.is_empty() {
            return Err(invalid(
                "oidc-issuer-url and oidc-client-id must be specified together when any oidc-* flags are set",
            ));
        }
        if let Some(other) = flags.signing_algorithms.iter().find(|name| !ALGORITHMS.contains(&name.as_str()))
        {
            return Err(invalid(&format!("oidc: unsupported signing alg: {other:?}")));
        }
        // As upstream: names of this issuer cannot be mistaken for others, unless somebody says so.
        let prefix = match flags.username_prefix.as_str() {
            "-" => String::new(),
            "" if flags.username_claim != "email" => format!("{}#", flags.issuer_url),
            given => given.to_owned(),
        };
        let groups = Mapping {
            claim: flags.groups_claim.clone(),
            prefix: (!flags.groups_claim.is_empty()).then(|| flags.groups_prefix.clone()),
            expression: String::new(),
        };
        let rule = |(claim, value): &(String, String)| ClaimRule {
            claim: claim.clone(),
            required_value: value.clone(),
            ..ClaimRule::default()
        };
        let jwt = GivenJwt {
            issuer: Issuer {
                url: flags.issuer_url.clone(),
                certificate_authority: flags.certificate_authority.clone(),
                audiences: vec![flags.client_id.clone()],
                ..Issuer::default()
            },
            claim_validation_rules: flags.required_claims.iter().map(rule).collect(),
            claim_mappings: Mappings {
                username: Mapping {
                    claim: flags.username_claim.clone(),
                    prefix: Some(prefix),
                    expression: String::new(),
                },
                groups,
                ..Mappings::default()
            },
            user_validation_rules: Vec::new(),
        };
        let algorithms = match flags.signing_algorithms.is_empty() {
            true => vec!["RS256".to_owned()],
            false => flags.signing_algorithms.clone(),
        };
        Self::build(Given { jwt: vec![jwt], anonymous: None }, reserved, &algorithms)
    }

    fn build(
        given: Given,
        reserved: &[String],
        algorithms: &[String],
    ) -> Result<Self, AuthenticationConfigError> {
        let mut errors = Vec::new();
        let root = Path::new("jwt");
        if given.jwt.len() > MAX_ISSUERS {
            errors.push(FieldError::too_many(&root, given.jwt.len(), MAX_ISSUERS));
            return Err(joined(&errors));
        }
        let (mut urls, mut discoveries) = (BTreeSet::new(), BTreeSet::new());
        let mut jwt = Vec::new();
        for (index, one) in given.jwt.into_iter().enumerate() {
            let path = root.index(index);
            let (mapper, complaints) = validate(&one, &path, reserved);
            errors.extend(complaints);
            let issuer = path.child("issuer");
            if !urls.insert(one.issuer.url.clone()) {
                errors.push(FieldError::duplicate(&issuer.child("url"), one.issuer.url.as_str()));
            }
            let discovery = &one.issuer.discovery_url;
            if !discovery.is_empty() && !discoveries.insert(discovery.clone()) {
                errors.push(FieldError::duplicate(&issuer.child("discoveryURL"), discovery.as_str()));
            }
            let algorithms = algorithms.to_vec();
            jwt.push(std::sync::Arc::new(JwtSettings { issuer: one.issuer, algorithms, mapper }));
        }
        if let Some(anonymous) = &given.anonymous
            && !anonymous.enabled
            && !anonymous.conditions.is_empty()
        {
            let paths: Vec<Value> = anonymous.conditions.iter().map(|c| c.path.as_str().into()).collect();
            errors.push(FieldError::invalid(
                &Path::new("anonymous").child("conditions"),
                paths,
                "enabled should be set to true when conditions are defined",
            ));
        }
        if errors.is_empty() { Ok(Self { jwt, anonymous: given.anonymous }) } else { Err(joined(&errors)) }
    }
}

fn joined(errors: &[FieldError]) -> AuthenticationConfigError {
    AuthenticationConfigError::Invalid(config_file::joined(errors))
}

fn validate(given: &GivenJwt, path: &Path, reserved: &[String]) -> (Mapper, Vec<FieldError>) {
    let mut errors = check_issuer(&given.issuer, &path.child("issuer"), reserved);
    let mut compiler = Compiler::new();
    let mut mapper = Mapper::default();
    compiler.claim_rules(given, &path.child("claimValidationRules"), &mut mapper, &mut errors);
    compiler.mappings(&given.claim_mappings, &path.child("claimMappings"), &mut mapper, &mut errors);
    compiler.user_rules(given, &path.child("userValidationRules"), &mut mapper, &mut errors);
    (mapper, errors)
}

fn check_issuer(issuer: &Issuer, path: &Path, reserved: &[String]) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let url = path.child("url");
    match issuer.url.as_str() {
        "" => errors.push(FieldError::required(&url, "")),
        text => {
            if reserved.iter().any(|own| own == text) {
                let why = format!("URL must not overlap with disallowed issuers: [{}]", reserved.join(" "));
                errors.push(FieldError::invalid(&url, text, why));
            }
            errors.extend(check_url(text, &url));
        }
    }
    let discovery = path.child("discoveryURL");
    if !issuer.discovery_url.is_empty() {
        if issuer.url.trim_end_matches('/') == issuer.discovery_url.trim_end_matches('/') {
            let why = "discoveryURL must be different from URL";
            errors.push(FieldError::invalid(&discovery, issuer.discovery_url.as_str(), why));
        }
        errors.extend(check_url(&issuer.discovery_url, &discovery));
    }
    errors.extend(check_audiences(issuer, path));
    let authority = issuer.certificate_authority.trim();
    let certificates = CertificateDer::pem_slice_iter(authority.as_bytes()).filter_map(Result::ok).count();
    if !authority.is_empty() && certificates == 0 {
        let why = "data does not contain any valid RSA or ECDSA certificates";
        errors.push(FieldError::invalid(&path.child("certificateAuthority"), "<omitted>", why));
    }
    let egress = path.child("egressSelectorType");
    match issuer.egress_selector_type.as_str() {
        "" => {}
        other @ ("controlplane" | "cluster") => {
            let why = "egress selectors are not supported";
            errors.push(FieldError::invalid(&egress, other, why));
        }
        other => {
            let why = "egress selector must be either controlplane or cluster";
            errors.push(FieldError::invalid(&egress, other, why));
        }
    }
    errors
}

fn check_audiences(issuer: &Issuer, path: &Path) -> Vec<FieldError> {
    let (audiences, policy) = (path.child("audiences"), issuer.audience_match_policy.as_str());
    if issuer.audiences.is_empty() {
        return vec![FieldError::required(
            &audiences,
            format!("at least one {} is required", audiences.as_str()),
        )];
    }
    let mut errors = Vec::new();
    let mut seen = BTreeSet::new();
    for (index, audience) in issuer.audiences.iter().enumerate() {
        let path = audiences.index(index);
        if audience.is_empty() {
            errors.push(FieldError::required(&path, ""));
        }
        if !seen.insert(audience) {
            errors.push(FieldError::duplicate(&path, audience.as_str()));
        }
    }
    let why = match (issuer.audiences.len(), policy) {
        (_, "MatchAny") | (1, "") => return errors,
        (1, _) => "audienceMatchPolicy must be empty or MatchAny for single audience",
        _ => "audienceMatchPolicy must be MatchAny for multiple audiences",
    };
    errors.push(FieldError::invalid(&path.child("audienceMatchPolicy"), policy, why));
    errors
}

fn check_url(text: &str, path: &Path) -> Vec<FieldError> {
    let invalid = |why: &str| FieldError::invalid(path, text, why);
    let (without, fragment) = text.split_once('#').unwrap_or((text, ""));
    let Ok(parsed) = without.parse::<::http::Uri>() else { return vec![invalid("invalid URL")] };
    let mut errors = Vec::new();
    if parsed.scheme_str() != Some("https") {
        errors.push(invalid("URL scheme must be https"));
    }
    if parsed.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        errors.push(invalid("URL must not contain a username or password"));
    }
    if parsed.query().is_some_and(|query| !query.is_empty()) {
        errors.push(invalid("URL must not contain a query"));
    }
    if !fragment.is_empty() {
        errors.push(invalid("URL must not contain a fragment"));
    }
    errors
}

#[cfg(test)]
mod tests;

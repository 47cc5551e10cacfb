//! `CredentialProviderConfig`: which plugins there are.

pub(super) mod duration;

use super::pattern::Pattern;
use ferrite_api::field::{FieldError, FieldErrors, Path as FieldPath};
use ferrite_api::meta_validation::qualified_name;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const KIND: &str = "CredentialProviderConfig";
const GROUP: &str = "kubelet.config.k8s.io";
const CONFIG_VERSIONS: &[&str] = &["v1", "v1beta1", "v1alpha1"];
const V1: &str = "credentialprovider.kubelet.k8s.io/v1";
/// Versions of the exchange with a plugin, sorted as they are listed to people.
const API_VERSIONS: &[&str] =
    &[V1, "credentialprovider.kubelet.k8s.io/v1alpha1", "credentialprovider.kubelet.k8s.io/v1beta1"];
const CACHE_TYPES: &[&str] = &["ServiceAccount", "Token"];
/// Largest configuration file we read.
const MAX_FILE: u64 = 1 << 20;

/// Why there are no plugins.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("plugin binary directory {} did not exist", .0.display())]
    NoBinDir(PathBuf),
    #[error("unable to access path {path:?}")]
    Access {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("no configuration files found in directory {0:?}")]
    NoFiles(PathBuf),
    #[error("error decoding config {path:?}: {problem}")]
    Decode { path: PathBuf, problem: String },
    #[error("duplicate provider name {0:?} found in configuration file(s)")]
    Duplicate(String),
    #[error("failed to validate credential provider config: {0}")]
    Invalid(String),
    #[error("plugin binary executable {} did not exist", .0.display())]
    NoPlugin(PathBuf),
    #[error("error inspecting binary executable {}: permission denied", .0.display())]
    NotExecutable(PathBuf),
}

/// The plugins of a node, checked: every program is there.
pub struct Plugins(pub(super) Vec<PluginConfig>);

pub(super) struct PluginConfig {
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub match_images: Vec<Pattern>,
    pub default_cache_duration: Duration,
    pub api_version: String,
    /// The service account the plugin works for, if it does.
    pub token: Option<TokenAttributes>,
}

pub(super) struct TokenAttributes {
    pub audience: String,
    pub cache_type: CacheType,
    pub require_service_account: bool,
    pub required_annotations: Vec<String>,
    pub optional_annotations: Vec<String>,
}

/// The scope of a response that was given for a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheType {
    ServiceAccount,
    Token,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    providers: Vec<Provider>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Provider {
    name: String,
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    api_version: String,
    args: Vec<String>,
    env: Vec<EnvVar>,
    token_attributes: Option<Token>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnvVar {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Token {
    service_account_token_audience: String,
    cache_type: String,
    require_service_account: Option<bool>,
    required_service_account_annotation_keys: Vec<String>,
    optional_service_account_annotation_keys: Vec<String>,
}

impl Plugins {
    /// Reads a file, or every JSON and YAML file of a directory in the order of their names, and looks for
    /// the plugins in `bin_dir`.
    pub fn load(config: &Path, bin_dir: &Path) -> Result<Self, ConfigError> {
        if !bin_dir.is_dir() {
            return Err(ConfigError::NoBinDir(bin_dir.to_owned()));
        }
        let mut providers: Vec<Provider> = Vec::new();
        for path in files(config)? {
            for provider in read(&path)? {
                if providers.iter().any(|known| known.name == provider.name) {
                    return Err(ConfigError::Duplicate(provider.name));
                }
                providers.push(provider);
            }
        }
        let errors = validate(&providers);
        if !errors.is_empty() {
            return Err(ConfigError::Invalid(aggregate(&errors)));
        }
        providers.into_iter().map(|provider| plugin(provider, bin_dir)).collect::<Result<_, _>>().map(Self)
    }
}

fn files(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let access = |source| ConfigError::Access { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(access)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(access)? {
        let entry = entry.map_err(access)?;
        let known = entry.path().extension().is_some_and(|e| e == "json" || e == "yaml" || e == "yml");
        if known && !entry.file_type().map_err(access)?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    if found.is_empty() { Err(ConfigError::NoFiles(path.to_owned())) } else { Ok(found) }
}

fn read(path: &Path) -> Result<Vec<Provider>, ConfigError> {
    use std::io::Read;
    let wrong = |problem: String| ConfigError::Decode { path: path.to_owned(), problem };
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|source| ConfigError::Access { path: path.to_owned(), source })?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(wrong(format!("longer than {MAX_FILE} bytes")));
    }
    decode(&bytes).map_err(wrong)
}

fn decode(bytes: &[u8]) -> Result<Vec<Provider>, String> {
    // JSON is YAML, too.
    let decoded = ferrite_api::codec::yaml::decode_any(bytes).map_err(|error| error.to_string())?;
    if let Some(complaint) = decoded.strict.first() {
        return Err(format!("strict decoding error: {complaint}"));
    }
    let text = |key: &str| decoded.value[key].as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text("apiVersion"), text("kind"));
    let (group, number) = version.split_once('/').unwrap_or(("", &version));
    if kind != KIND {
        return Err(format!("failed to decode {kind:?} (wrong Kind)"));
    }
    if group != GROUP {
        return Err(format!("failed to decode {KIND}, unexpected Group: {group}"));
    }
    if !CONFIG_VERSIONS.contains(&number) {
        return Err(format!("no kind {KIND:?} is registered for version {version:?}"));
    }
    let file: File =
        ferrite_json::from_value(decoded.value).map_err(|error| format!("strict decoding error: {error}"))?;
    Ok(file.providers)
}

fn validate(providers: &[Provider]) -> FieldErrors {
    let path = FieldPath::new("providers");
    let mut errors = Vec::new();
    if providers.is_empty() {
        errors.push(FieldError::required(&path, "at least 1 item in plugins is required"));
    }
    for provider in providers {
        let name = path.child("name");
        let problems = [
            (provider.name.contains('/'), "provider name cannot contain '/'"),
            (provider.name.contains(' '), "provider name cannot contain spaces"),
            (provider.name == ".", "provider name cannot be '.'"),
            (provider.name == "..", "provider name cannot be '..'"),
        ];
        for (_, problem) in problems.into_iter().filter(|(wrong, _)| *wrong) {
            errors.push(FieldError::invalid(&name, provider.name.as_str(), problem));
        }
        let version = path.child("apiVersion");
        if provider.api_version.is_empty() {
            errors.push(FieldError::required(&version, ""));
        } else if !API_VERSIONS.contains(&provider.api_version.as_str()) {
            errors.push(FieldError::not_supported(&version, provider.api_version.as_str(), API_VERSIONS));
        }
        let images = path.child("matchImages");
        if provider.match_images.is_empty() {
            errors.push(FieldError::required(&images, "at least 1 item in matchImages is required"));
        }
        for image in &provider.match_images {
            if let Err(error) = Pattern::parse(image) {
                let detail = format!("match image is invalid: {error}");
                errors.push(FieldError::invalid(&images, image.as_str(), detail));
            }
        }
        let lifetime = path.child("defaultCacheDuration");
        match &provider.default_cache_duration {
            None => errors.push(FieldError::required(&lifetime, "")),
            Some(text) => match duration::parse(text) {
                Some(nanos) if nanos >= 0 => {}
                Some(_) => {
                    let detail = "defaultCacheDuration must be greater than or equal to 0";
                    errors.push(FieldError::invalid(&lifetime, text.as_str(), detail));
                }
                None => errors.push(FieldError::invalid(&lifetime, text.as_str(), "not a duration")),
            },
        }
        if let Some(token) = &provider.token_attributes {
            validate_token(token, &provider.api_version, &path.child("tokenAttributes"), &mut errors);
        }
    }
    errors
}

fn validate_token(token: &Token, api_version: &str, path: &FieldPath, errors: &mut FieldErrors) {
    if token.service_account_token_audience.is_empty() {
        errors.push(FieldError::required(&path.child("serviceAccountTokenAudience"), ""));
    }
    if token.require_service_account.is_none() {
        errors.push(FieldError::required(&path.child("requireServiceAccount"), ""));
    }
    if api_version != V1 {
        let detail = format!("tokenAttributes is only supported for {V1} API version");
        errors.push(FieldError::forbidden(path, detail));
    }
    let (required, optional) =
        (&token.required_service_account_annotation_keys, &token.optional_service_account_annotation_keys);
    let (required_path, optional_path) = (
        path.child("requiredServiceAccountAnnotationKeys"),
        path.child("optionalServiceAccountAnnotationKeys"),
    );
    if token.require_service_account == Some(false) && !required.is_empty() {
        let detail = "requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set";
        errors.push(FieldError::forbidden(&required_path, detail));
    }
    validate_keys(required, &required_path, errors);
    validate_keys(optional, &optional_path, errors);
    let both: BTreeSet<&String> = required.iter().filter(|key| optional.contains(key)).collect();
    if !both.is_empty() {
        let both: Vec<ferrite_json::Value> = both.into_iter().map(|key| key.as_str().into()).collect();
        errors.push(FieldError::invalid(path, both, "annotation keys cannot be both required and optional"));
    }
    let kind = path.child("cacheType");
    if token.cache_type.is_empty() {
        let detail = format!(
            "cacheType is required to be set when tokenAttributes is specified. Supported values are: {}",
            CACHE_TYPES.join(", ")
        );
        errors.push(FieldError::required(&kind, detail));
    } else if !CACHE_TYPES.contains(&token.cache_type.as_str()) {
        errors.push(FieldError::not_supported(&kind, token.cache_type.as_str(), CACHE_TYPES));
    }
}

fn validate_keys(keys: &[String], path: &FieldPath, errors: &mut FieldErrors) {
    for (number, key) in keys.iter().enumerate() {
        // Upper case does not matter here.
        for problem in qualified_name(&key.to_lowercase()) {
            errors.push(FieldError::invalid(path, key.as_str(), problem));
        }
        if keys[..number].contains(key) {
            errors.push(FieldError::duplicate(path, key.as_str()));
        }
    }
}

/// Several errors as one text, as upstream writes an aggregate.
fn aggregate(errors: &FieldErrors) -> String {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    match texts.as_slice() {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

fn plugin(provider: Provider, bin_dir: &Path) -> Result<PluginConfig, ConfigError> {
    let program = bin_dir.join(&provider.name);
    match std::fs::metadata(&program) {
        Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => {}
        Ok(_) => return Err(ConfigError::NotExecutable(program)),
        Err(_) => return Err(ConfigError::NoPlugin(program)),
    }
    let lifetime = provider.default_cache_duration.as_deref().and_then(duration::parse).unwrap_or(0);
    Ok(PluginConfig {
        name: provider.name,
        program,
        args: provider.args,
        env: provider.env.into_iter().map(|var| (var.name, var.value)).collect(),
        match_images: provider.match_images.iter().filter_map(|text| Pattern::parse(text).ok()).collect(),
        default_cache_duration: duration::not_negative(lifetime),
        api_version: provider.api_version,
        token: provider.token_attributes.map(|token| TokenAttributes {
            audience: token.service_account_token_audience,
            cache_type: match token.cache_type.as_str() {
                "Token" => CacheType::Token,
                _ => CacheType::ServiceAccount,
            },
            require_service_account: token.require_service_account.unwrap_or(true),
            required_annotations: token.required_service_account_annotation_keys,
            optional_annotations: token.optional_service_account_annotation_keys,
        }),
    })
}

#[cfg(test)]
mod tests;

//! Flags of upstream's kube-apiserver for a server among foreign components: certificates and keys that somebody else
//! made, ways to authenticate and to authorize.

use crate::accepted::AcceptedFlags;
use crate::apiserver::{BoxError, read_file};
use crate::apiserver_flags::ApiServerFlags;
use crate::authorizing::{AuthorizationOptions, TokenWebhookOptions};
use ferrite_apiserver::{
    AuthenticationConfig, JwtAuthentication, Mode, OidcFlags, StaticTokens, go_duration,
};
use ferrite_pki::{Handshake, Identity, NamedIdentity, VerifyingKey};
use std::path::PathBuf;
use std::time::Duration;

/// Options of `ferrite kube-apiserver` alone. Without them the server makes its keys and certificates in
/// its data directory.
#[derive(Debug, Clone, clap::Args)]
pub struct StandaloneOptions {
    /// File with the certificate that clients see, and the certificates that lead to its authority.
    #[arg(long, value_name = "FILE", requires = "tls_private_key_file")]
    pub tls_cert_file: Option<PathBuf>,
    /// File with the key of --tls-cert-file.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Certificate and key for clients that ask for other names; may be given several times.
    #[arg(long, value_name = "CERT,KEY[:NAMES]", value_parser = parse_sni)]
    pub tls_sni_cert_key: Vec<SniFiles>,
    /// The oldest version of TLS: VersionTLS12 or VersionTLS13.
    #[arg(long, value_name = "VERSION", default_value = "VersionTLS12", value_parser = ["VersionTLS12", "VersionTLS13"])]
    pub tls_min_version: String,
    /// Cipher suites of TLS 1.2, by their IANA names.
    #[arg(long, value_name = "SUITES", value_delimiter = ',')]
    pub tls_cipher_suites: Vec<String>,
    /// File with the authorities of clients' certificates.
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// File with the certificate that the server shows to kubelets.
    #[arg(long, value_name = "FILE", requires = "kubelet_client_key")]
    pub kubelet_client_certificate: Option<PathBuf>,
    /// File with the key of --kubelet-client-certificate.
    #[arg(long, value_name = "FILE", requires = "kubelet_client_certificate")]
    pub kubelet_client_key: Option<PathBuf>,
    /// File with the authority of kubelets' serving certificates. With --kubelet-client-certificate and without this,
    /// as upstream, their certificates are not verified.
    #[arg(long, value_name = "FILE")]
    pub kubelet_certificate_authority: Option<PathBuf>,
    /// Types of nodes' addresses at which kubelets are reached, the best first. Hostname, InternalDNS and ExternalDNS
    /// are passed over: names are not looked up.
    #[arg(long, value_name = "TYPES", value_delimiter = ',')]
    pub kubelet_preferred_address_types: Vec<String>,
    /// File with keys that verify tokens of service accounts: public or private keys, or certificates; may be given
    /// several times.
    #[arg(long, value_name = "FILE")]
    pub service_account_key_file: Vec<PathBuf>,
    /// File with the private key that signs tokens of service accounts.
    #[arg(long, value_name = "FILE")]
    pub service_account_signing_key_file: Option<PathBuf>,
    /// Audiences that stand for this server; the issuer without it.
    #[arg(long, value_name = "AUDIENCES", value_delimiter = ',')]
    pub api_audiences: Vec<String>,
    /// The longest life of a token that somebody asks for.
    #[arg(long, value_name = "DURATION", value_parser = go_duration)]
    pub service_account_max_token_expiration: Option<Duration>,
    /// Where clients find the keys that verify tokens, if not at this server.
    #[arg(long, value_name = "URL")]
    pub service_account_jwks_uri: Option<String>,
    /// Let requests without credentials in as `system:anonymous`.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub anonymous_auth: Option<bool>,
    /// File with the issuers of tokens and the paths without credentials: an AuthenticationConfiguration of
    /// apiserver.config.k8s.io. Followed while the server runs.
    #[arg(long, value_name = "FILE")]
    pub authentication_config: Option<PathBuf>,
    #[command(flatten)]
    pub oidc: OidcOptions,
    /// File of comma-separated tokens: token, user name, user uid, and groups in quotes.
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,
    #[command(flatten)]
    pub token_webhook: TokenWebhookOptions,
    #[command(flatten)]
    pub authorization: AuthorizationOptions,
    /// Events are kept this long.
    #[arg(long, value_name = "DURATION", value_parser = go_duration)]
    pub event_ttl: Option<Duration>,
    /// Seconds that pods tolerate a node that is not ready, unless they say otherwise.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub default_not_ready_toleration_seconds: i64,
    /// Seconds that pods tolerate a node that cannot be reached, unless they say otherwise.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub default_unreachable_toleration_seconds: i64,
    #[command(flatten)]
    pub accepted: AcceptedOptions,
    #[command(flatten)]
    pub accepted_flags: AcceptedFlags<ApiServerFlags>,
    /// Serve HTTP/1.1 only.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub disable_http2_serving: bool,
    /// Share the port with other servers of this machine: SO_REUSEPORT.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub permit_port_sharing: bool,
    /// The host in addresses of this server that clients see; the address of the machine without it.
    #[arg(long, value_name = "HOST", default_value = "")]
    pub external_hostname: String,
    /// Port that the Service `kubernetes` opens on every node; 0 for none.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub kubernetes_service_node_port: u16,
    /// Refuse redirects of extension API servers instead of passing them on.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub aggregator_reject_forwarding_redirect: bool,
    /// All admission plugins that work, and no others. Not together with --enable-admission-plugins and
    /// --disable-admission-plugins, which are to be preferred.
    #[arg(long, value_name = "PLUGINS", value_delimiter = ',')]
    pub admission_control: Vec<String>,
}

/// One issuer of OpenID Connect tokens. --authentication-config has several.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct OidcOptions {
    /// The issuer of OpenID Connect tokens: an https URL.
    #[arg(long, value_name = "URL", conflicts_with = "authentication_config", requires = "oidc_client_id")]
    oidc_issuer_url: Option<String>,
    /// The audience that tokens must name.
    #[arg(long, value_name = "ID", requires = "oidc_issuer_url")]
    oidc_client_id: Option<String>,
    /// File with the authority of the issuer's certificate; the system's authorities without it.
    #[arg(long, value_name = "FILE", requires = "oidc_issuer_url")]
    oidc_ca_file: Option<PathBuf>,
    /// The claim that has the user's name.
    #[arg(long, value_name = "CLAIM", default_value = "sub")]
    oidc_username_claim: String,
    /// Put before the user's name; `-` for nothing. Without it the issuer and `#`, unless the claim is `email`.
    #[arg(long, value_name = "PREFIX", requires = "oidc_issuer_url", allow_hyphen_values = true)]
    oidc_username_prefix: Option<String>,
    /// The claim that has the user's groups.
    #[arg(long, value_name = "CLAIM", requires = "oidc_issuer_url")]
    oidc_groups_claim: Option<String>,
    /// Put before each group.
    #[arg(long, value_name = "PREFIX", requires = "oidc_issuer_url")]
    oidc_groups_prefix: Option<String>,
    /// Signature algorithms: RS256, RS384, RS512, ES256, ES384, PS256, PS384, PS512. Without it RS256.
    #[arg(long, value_name = "ALGS", value_delimiter = ',', requires = "oidc_issuer_url")]
    oidc_signing_algs: Vec<String>,
    /// A claim that tokens must have; may be given several times.
    #[arg(long, value_name = "CLAIM=VALUE", value_parser = parse_claim, requires = "oidc_issuer_url")]
    oidc_required_claim: Vec<(String, String)>,
}

fn parse_claim(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((claim, value)) if !claim.is_empty() => Ok((claim.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not like claim=value")),
    }
}

impl Default for StandaloneOptions {
    /// As the command line without a flag.
    fn default() -> Self {
        use clap::{Args, FromArgMatches};
        let matches =
            Self::augment_args(clap::Command::new("kube-apiserver")).get_matches_from(["kube-apiserver"]);
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// Flags that installations give and that ask for this server's fixed behaviour. A value that asks for
/// anything else is refused.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct AcceptedOptions {
    /// Privileged containers are allowed; Pod Security admission restricts them.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    allow_privileged: Option<bool>,
    /// Tokens of service accounts end with their account.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    service_account_lookup: Option<bool>,
    /// Dependents are deleted with their owners.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    enable_garbage_collector: Option<bool>,
    /// Lists and watches are answered from memory.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    watch_cache: Option<bool>,
    /// Extension API servers are reached at their endpoints.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    enable_aggregator_routing: Option<bool>,
    /// The API of etcd.
    #[arg(long, value_name = "BACKEND", value_parser = ["etcd3"])]
    storage_backend: Option<String>,
    /// The log goes to standard error.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = only_true)]
    logtostderr: Option<bool>,
}

fn only_true(text: &str) -> Result<bool, String> {
    match text {
        "true" => Ok(true),
        "false" => Err("this server cannot do without it".into()),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// The files of `--tls-sni-cert-key`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SniFiles {
    certificate: PathBuf,
    key: PathBuf,
    names: Vec<String>,
}

/// `cert,key` or `cert,key:name,name`.
fn parse_sni(text: &str) -> Result<SniFiles, String> {
    let bad =
        || format!("{text:?} is not like cert.pem,key.pem or cert.pem,key.pem:*.example.com,example.com");
    let (certificate, rest) = text.split_once(',').ok_or_else(bad)?;
    let (key, names) = rest.split_once(':').unwrap_or((rest, ""));
    if certificate.is_empty() || key.is_empty() {
        return Err(bad());
    }
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    Ok(SniFiles { certificate: certificate.into(), key: key.into(), names })
}

fn read_identity(
    flags: [&str; 2],
    certificate: &std::path::Path,
    key: &std::path::Path,
) -> Result<Identity, BoxError> {
    Ok(Identity { certificate: read_file(flags[0], certificate)?, key: read_file(flags[1], key)? })
}

impl StandaloneOptions {
    /// The certificate that clients see, if somebody else made it.
    pub fn serving(&self) -> Result<Option<Identity>, BoxError> {
        match (&self.tls_cert_file, &self.tls_private_key_file) {
            (Some(certificate), Some(key)) => {
                read_identity(["tls-cert-file", "tls-private-key-file"], certificate, key).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The authorities of clients' certificates, if they are not the cluster's own.
    pub fn client_ca(&self) -> Result<Option<String>, BoxError> {
        self.client_ca_file.as_ref().map(|file| read_file("client-ca-file", file)).transpose()
    }

    /// True if the administrator that the data directory knows can get in.
    pub fn knows_own_clients(&self) -> bool {
        self.tls_cert_file.is_none() && self.client_ca_file.is_none()
    }

    /// The identities for clients that ask for other names.
    pub fn by_name(&self) -> Result<Vec<NamedIdentity>, BoxError> {
        let named = self.tls_sni_cert_key.iter().map(|files| {
            let identity = read_identity(["tls-sni-cert-key"; 2], &files.certificate, &files.key)?;
            Ok(NamedIdentity { identity, names: files.names.clone() })
        });
        named.collect()
    }

    /// The choices of the handshake, without certificates.
    pub fn handshake<'a>(&self) -> Handshake<'a> {
        Handshake {
            protocols: if self.disable_http2_serving { &["http/1.1"] } else { &["h2", "http/1.1"] },
            newest_only: self.tls_min_version == "VersionTLS13",
            key_exchanges: Vec::new(),
            cipher_suites: self.tls_cipher_suites.clone(),
            ..Handshake::default()
        }
    }

    /// The files of certificates, keys and authorities that are followed.
    pub fn certificate_files(&self) -> impl Iterator<Item = PathBuf> {
        let given = [
            &self.tls_cert_file,
            &self.tls_private_key_file,
            &self.client_ca_file,
            &self.kubelet_client_certificate,
            &self.kubelet_client_key,
            &self.kubelet_certificate_authority,
        ];
        let by_name = self.tls_sni_cert_key.iter().flat_map(|files| [&files.certificate, &files.key]);
        given.into_iter().flatten().chain(by_name).cloned()
    }

    /// The server's way into kubelets: None if it is the cluster's own.
    pub fn kubelet_client(&self, own: &Identity) -> Result<Option<rustls::ClientConfig>, BoxError> {
        let authority = self.kubelet_certificate_authority.as_ref();
        let authority = authority.map(|file| read_file("kubelet-certificate-authority", file)).transpose()?;
        let foreign = match (&self.kubelet_client_certificate, &self.kubelet_client_key) {
            (Some(certificate), Some(key)) => {
                Some(read_identity(["kubelet-client-certificate", "kubelet-client-key"], certificate, key)?)
            }
            _ => None,
        };
        match (authority, &foreign) {
            (None, None) => Ok(None),
            (Some(authority), identity) => {
                Ok(Some(ferrite_pki::client_config(&authority, Some(identity.as_ref().unwrap_or(own)))?))
            }
            (None, Some(identity)) => {
                tracing::warn!(
                    "serving certificates of kubelets are not verified: give --kubelet-certificate-authority"
                );
                Ok(Some(ferrite_pki::unverified_client_config_as(Some(identity))?))
            }
        }
    }

    /// Types of nodes' addresses that are addresses.
    pub fn kubelet_addresses(&self) -> Option<Vec<String>> {
        let known = |kind: &&String| matches!(kind.as_str(), "InternalIP" | "ExternalIP");
        let chosen: Vec<String> =
            self.kubelet_preferred_address_types.iter().filter(known).cloned().collect();
        (!chosen.is_empty()).then_some(chosen)
    }

    /// The key that signs tokens, if it is not the cluster's own, and all that verify them. A private key that verifies
    /// also signs where no other is given.
    pub fn token_keys(&self) -> Result<(Option<String>, Vec<VerifyingKey>), BoxError> {
        let mut keys = Vec::new();
        let mut signing = match &self.service_account_signing_key_file {
            Some(file) => Some(read_file("service-account-signing-key-file", file)?),
            None => None,
        };
        for file in &self.service_account_key_file {
            let pem = read_file("service-account-key-file", file)?;
            let all = VerifyingKey::all_from_pem(&pem);
            keys.extend(
                all.map_err(|e| format!("cannot use --service-account-key-file {}: {e}", file.display()))?,
            );
            if signing.is_none() && pem.contains("PRIVATE KEY-----") {
                signing = Some(pem);
            }
        }
        Ok((signing, keys))
    }

    pub fn max_token_seconds(&self) -> Option<i64> {
        let longest = self.service_account_max_token_expiration.filter(|longest| !longest.is_zero())?;
        i64::try_from(longest.as_secs()).ok()
    }

    /// The configuration of the admission plugin DefaultTolerationSeconds, unless it is the usual one.
    pub fn tolerations(&self) -> Option<ferrite_json::Value> {
        let (ready, reachable) =
            (self.default_not_ready_toleration_seconds, self.default_unreachable_toleration_seconds);
        let configuration = ferrite_json::json!({"notReadySeconds": ready, "unreachableSeconds": reachable});
        (ready != 300 || reachable != 300).then_some(configuration)
    }

    /// Foreign issuers of tokens. `own` are the server's.
    pub fn jwt(&self, own: &[String]) -> Result<JwtAuthentication, BoxError> {
        if let Some(file) = &self.authentication_config {
            let authentication = JwtAuthentication::of_file(file, own)
                .map_err(|error| format!("cannot use --authentication-config {}: {error}", file.display()))?;
            if authentication.config.says_anonymous() && self.anonymous_auth.is_some() {
                return Err("--anonymous-auth flag cannot be set when anonymous field is configured in authentication configuration file".into());
            }
            return Ok(authentication);
        }
        let oidc = &self.oidc;
        let Some(issuer_url) = oidc.oidc_issuer_url.clone() else { return Ok(JwtAuthentication::default()) };
        let certificate_authority = match &oidc.oidc_ca_file {
            Some(file) => read_file("oidc-ca-file", file)?,
            None => String::new(),
        };
        let text = |given: &Option<String>| given.clone().unwrap_or_default();
        let flags = OidcFlags {
            issuer_url,
            client_id: text(&oidc.oidc_client_id),
            certificate_authority,
            username_claim: oidc.oidc_username_claim.clone(),
            username_prefix: text(&oidc.oidc_username_prefix),
            groups_claim: text(&oidc.oidc_groups_claim),
            groups_prefix: text(&oidc.oidc_groups_prefix),
            signing_algorithms: oidc.oidc_signing_algs.clone(),
            required_claims: oidc.oidc_required_claim.clone(),
        };
        let config = AuthenticationConfig::of_flags(&flags, own)?;
        Ok(JwtAuthentication::new(config))
    }

    pub fn static_tokens(&self) -> Result<StaticTokens, BoxError> {
        match &self.token_auth_file {
            Some(file) => Ok(StaticTokens::parse(&read_file("token-auth-file", file)?)?),
            None => Ok(StaticTokens::default()),
        }
    }

    /// As upstream: strangers are not let in where everything is allowed.
    pub fn anonymous_auth(&self, modes: &[Mode]) -> bool {
        let allowed = self.anonymous_auth.unwrap_or(true);
        if allowed && modes.contains(&Mode::AlwaysAllow) {
            tracing::warn!("requests without credentials are refused: everything is allowed to all others");
            return false;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_by_name_are_read_as_upstream_writes_them() {
        let sni = |certificate: &str, key: &str, names: &[&str]| SniFiles {
            certificate: certificate.into(),
            key: key.into(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        let rows = [
            ("a.crt,a.key", Some(sni("a.crt", "a.key", &[]))),
            ("a.crt,a.key:*.foo,bar", Some(sni("a.crt", "a.key", &["*.foo", "bar"]))),
            ("a.crt", None),
            (",a.key", None),
            ("a.crt,:x", None),
        ];
        for (text, expected) in rows {
            assert_eq!(parse_sni(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn strangers_stay_out_where_everything_is_allowed() {
        let options = StandaloneOptions::default();
        assert!(options.anonymous_auth(&[Mode::Rbac]) && !options.anonymous_auth(&[Mode::AlwaysAllow]));
    }
}

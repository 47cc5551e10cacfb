//! The registry protocol, as far as pulling needs it: authentication, manifests, blobs. Every response is
//! bounded before it is kept.

mod challenge;

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_RANGE, HeaderValue, RANGE, WWW_AUTHENTICATE};
use reqwest::redirect::Policy;
use reqwest::{RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;

use super::pull::{Auth, RegistryConfig, is_loopback};
use super::registries::Endpoint;
use super::{Digest, ImageError, Reference};
use challenge::{Challenge, Token, choose, parse_token};
use ferrite_cri::with_causes;

/// Manifests and indexes in both dialects.
const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
                        application/vnd.docker.distribution.manifest.list.v2+json, \
                        application/vnd.docker.distribution.manifest.v2+json";
/// Largest manifest that is taken, as containerd's.
pub(super) const MAX_MANIFEST: u64 = 4 * 1048 * 1048;
/// Largest answer of a token server, and most of an error that is read.
const MAX_ANSWER: u64 = 1 << 20;
/// Our client id at token servers.
const CLIENT_ID: &str = "ferrite";
const MAX_REDIRECTS: usize = 10;
/// A token is renewed this long before it ends.
const MARGIN: Duration = Duration::from_secs(5);

/// One pull's connection to one host.
pub(super) struct Registry {
    http: reqwest::Client,
    /// `https://host`.
    base: String,
    auth: Auth,
    reference: Reference,
    /// The `Authorization` header of requests, and its expiry.
    credential: Mutex<Option<(HeaderValue, Option<Instant>)>>,
}

/// A blob's bytes to come.
pub(super) struct Blob {
    /// True if the data begins at the requested offset, false if it begins at the blob's start.
    pub(super) partial: bool,
    body: Response,
}

#[derive(Deserialize, Default)]
struct Envelope {
    #[serde(default)]
    errors: Vec<RegistryFault>,
}

#[derive(Deserialize)]
struct RegistryFault {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

/// Returns true if a URL leads to this machine or to a service of its link, such as a cloud's metadata. A registry
/// elsewhere must not send the node there: what the node reads, the registry gets as a token.
fn is_private(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    // The parser of URLs has made every form of an address the usual one.
    let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() else {
        let name = host.trim_end_matches('.');
        return name == "localhost" || name.ends_with(".localhost");
    };
    let address = address.to_canonical();
    let of_link = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    address.is_loopback() || address.is_unspecified() || of_link
}

/// Whom a registry's name means: docker's is served under another.
fn host_of(registry: &str) -> &str {
    match registry {
        "docker.io" | "index.docker.io" => "registry-1.docker.io",
        other => other,
    }
}

impl Registry {
    pub(super) async fn connect(
        reference: Reference,
        endpoint: Endpoint,
        auth: Auth,
        config: &RegistryConfig,
    ) -> Result<Self, ImageError> {
        let Endpoint { host, settings, .. } = endpoint;
        let scheme = if is_loopback(&host) || settings.plain_http { "http" } else { "https" };
        let base = format!("{scheme}://{}", host_of(&host));
        let private = Url::parse(&base).is_ok_and(|base| is_private(&base));
        let (connect, read) = (config.connect_timeout, config.read_timeout);
        // Reads the machine's certificates.
        let made = tokio::task::spawn_blocking(move || {
            let _ = rustls::crypto::ring::default_provider().install_default();
            let mut certificates = Vec::new();
            for pem in &settings.ca_certificates {
                certificates.extend(reqwest::Certificate::from_pem_bundle(pem)?);
            }
            reqwest::Client::builder()
                .danger_accept_invalid_certs(settings.skip_verify)
                .tls_certs_merge(certificates)
                .connect_timeout(connect)
                .read_timeout(read)
                .redirect(Policy::custom(move |attempt| match () {
                    () if attempt.previous().len() > MAX_REDIRECTS => attempt.error("too many redirects"),
                    () if is_private(attempt.url()) && !private => {
                        attempt.error("a redirect leads to this machine")
                    }
                    () => attempt.follow(),
                }))
                .user_agent(concat!("ferrite/", env!("CARGO_PKG_VERSION")))
                .build()
        });
        let message = match made.await {
            Ok(Ok(http)) => return Ok(Self { http, base, auth, reference, credential: Mutex::default() }),
            Ok(Err(error)) => line(&error),
            Err(error) => error.to_string(),
        };
        Err(ImageError::Registry { reference: reference.to_string(), message })
    }

    pub(super) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// The manifest or index of a digest, or of the name.
    pub(super) async fn manifest(&self, digest: Option<&Digest>) -> Result<Vec<u8>, ImageError> {
        let tag = self.reference.tag().unwrap_or("latest");
        let wanted = digest.or(self.reference.digest()).map_or_else(|| tag.to_owned(), ToString::to_string);
        let url = format!("{}/v2/{}/manifests/{wanted}", self.base, self.reference.repository());
        let answer = self.get(&url, |request| request.header(ACCEPT, ACCEPTED)).await?;
        let answer = self.accepted(answer, &[StatusCode::OK]).await?;
        self.read(answer, MAX_MANIFEST, "size of a manifest").await
    }

    /// A blob from `offset` on, or all of it where the registry knows no ranges.
    pub(super) async fn blob(&self, digest: &Digest, offset: u64) -> Result<Blob, ImageError> {
        let url = format!("{}/v2/{}/blobs/{digest}", self.base, self.reference.repository());
        let ranged = |request: RequestBuilder| match offset {
            0 => request,
            _ => request.header(RANGE, format!("bytes={offset}-")),
        };
        let body =
            self.accepted(self.get(&url, ranged).await?, &[StatusCode::OK, StatusCode::PARTIAL_CONTENT]);
        let body = body.await?;
        let partial = body.status() == StatusCode::PARTIAL_CONTENT;
        let start = body.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).map(range_start);
        if partial && start.is_some_and(|start| start != Some(offset)) {
            return Err(self.fault("it sent another part of a blob than it was asked for"));
        }
        Ok(Blob { partial, body })
    }

    /// The next piece of a blob; `None` at its end.
    pub(super) async fn next(&self, blob: &mut Blob) -> Result<Option<bytes::Bytes>, ImageError> {
        blob.body.chunk().await.map_err(|error| self.unreachable(&error))
    }

    /// Sends a request, and repeats it once with the credentials that the registry asks for.
    async fn get(
        &self,
        url: &str,
        prepare: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response, ImageError> {
        let send = async |credential: Option<HeaderValue>| {
            let mut request = prepare(self.http.get(url));
            if let Some(credential) = credential {
                request = request.header(AUTHORIZATION, credential);
            }
            request.send().await.map_err(|error| self.unreachable(&error))
        };
        let known = self.known_credential()?;
        let answer = send(known).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let headers = answer.headers().get_all(WWW_AUTHENTICATE);
        let challenge = choose(headers.iter().filter_map(|header| header.to_str().ok()));
        match challenge {
            Some(challenge) => send(Some(self.authorize(challenge).await?)).await,
            None => Ok(answer),
        }
    }

    fn known_credential(&self) -> Result<Option<HeaderValue>, ImageError> {
        if let Auth::Bearer(token) = &self.auth {
            return self.header(&format!("Bearer {token}")).map(Some);
        }
        let known = self.credential.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fresh = |until: &Option<Instant>| until.is_none_or(|until| Instant::now() + MARGIN < until);
        Ok(known.filter(|(_, until)| fresh(until)).map(|(header, _)| header))
    }

    /// Obtains the credentials for a challenge.
    async fn authorize(&self, challenge: Challenge) -> Result<HeaderValue, ImageError> {
        let (header, until) = match (challenge, &self.auth) {
            (_, Auth::Bearer(_)) => return Err(self.unauthorized("it does not accept the token")),
            (Challenge::Basic, Auth::Basic { username, password }) => {
                use base64::Engine as _;
                let pair = format!("{username}:{password}");
                let encoded = base64::engine::general_purpose::STANDARD.encode(pair);
                (self.header(&format!("Basic {encoded}"))?, None)
            }
            (Challenge::Basic, _) => {
                return Err(self.unauthorized("it wants a user name and a password"));
            }
            (Challenge::Bearer { realm, service, scope }, _) => {
                let Token { token, life } = self.fetch_token(&realm, service, scope).await?;
                (self.header(&format!("Bearer {token}"))?, Some(Instant::now() + life))
            }
        };
        *self.credential.lock().unwrap_or_else(PoisonError::into_inner) = Some((header.clone(), until));
        Ok(header)
    }

    async fn fetch_token(
        &self,
        realm: &str,
        service: Option<String>,
        scope: Option<String>,
    ) -> Result<Token, ImageError> {
        let url = Url::parse(realm).map_err(|_| self.fault("it names a token server that is no URL"))?;
        let secret = self.auth != Auth::Anonymous;
        let open = url.scheme() == "http" && !url.host_str().is_some_and(is_loopback);
        if secret && open && self.base.starts_with("https:") {
            return Err(self.fault("it wants our secret sent to a token server without TLS"));
        }
        if is_private(&url) && !Url::parse(&self.base).is_ok_and(|base| is_private(&base)) {
            return Err(self.fault("it names a token server on this machine"));
        }
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.reference.repository()));
        let mut fields = vec![("scope", scope)];
        fields.extend(service.map(|service| ("service", service)));
        let request = match &self.auth {
            Auth::Identity(token) => {
                fields.push(("client_id", CLIENT_ID.to_owned()));
                fields.push(("grant_type", "refresh_token".to_owned()));
                fields.push(("refresh_token", token.clone()));
                self.http.post(url).form(&fields)
            }
            Auth::Basic { username, password } => {
                self.http.get(url).query(&fields).basic_auth(username, Some(password))
            }
            Auth::Anonymous | Auth::Bearer(_) => self.http.get(url).query(&fields),
        };
        let answer = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = answer.status();
        let bytes = self.read(answer, MAX_ANSWER, "size of a token server's answer").await?;
        if !status.is_success() {
            // The registry chose this server: its words may be anybody's, and the pod's author would read them.
            return Err(match status.is_server_error() {
                true => ImageError::Unreachable {
                    reference: self.reference.to_string(),
                    message: format!("token server: {status}"),
                },
                false => self.unauthorized(&format!("token server: {status}")),
            });
        }
        parse_token(&bytes).map_err(|message| self.fault(message))
    }

    /// The response if its status is one of those, else the error in the kubelet's distinctions.
    async fn accepted(&self, answer: Response, good: &[StatusCode]) -> Result<Response, ImageError> {
        let status = answer.status();
        if good.contains(&status) {
            return Ok(answer);
        }
        let bytes = self.read(answer, MAX_ANSWER, "size of an error").await.unwrap_or_default();
        let envelope: Envelope = serde_json::from_slice(&bytes).unwrap_or_default();
        let faults: Vec<String> = envelope
            .errors
            .iter()
            .map(|fault| format!("{}: {}", fault.code, fault.message).trim_end_matches([':', ' ']).to_owned())
            .collect();
        let message = match faults.is_empty() {
            true => status.to_string(),
            false => clean(&faults.join("; ")),
        };
        let has = |codes: &[&str]| envelope.errors.iter().any(|fault| codes.contains(&fault.code.as_str()));
        let reference = self.reference.to_string();
        const UNKNOWN: &[&str] =
            &["MANIFEST_UNKNOWN", "NAME_UNKNOWN", "NOT_FOUND", "BLOB_UNKNOWN", "MANIFEST_BLOB_UNKNOWN"];
        Err(match status.as_u16() {
            401 | 403 => self.unauthorized(&message),
            404 => ImageError::NotFound(reference),
            _ if has(UNKNOWN) => ImageError::NotFound(reference),
            _ if has(&["UNAUTHORIZED", "DENIED"]) => self.unauthorized(&message),
            500.. => ImageError::Unreachable { reference, message },
            _ => self.fault(&message),
        })
    }

    /// A body of at most `limit` bytes.
    async fn read(
        &self,
        mut answer: Response,
        limit: u64,
        what: &'static str,
    ) -> Result<Vec<u8>, ImageError> {
        if answer.content_length().is_some_and(|length| length > limit) {
            return Err(ImageError::Limit { what, limit });
        }
        let mut bytes = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(|error| self.unreachable(&error))? {
            if (bytes.len() + piece.len()) as u64 > limit {
                return Err(ImageError::Limit { what, limit });
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    fn header(&self, text: &str) -> Result<HeaderValue, ImageError> {
        let mut value =
            HeaderValue::from_str(text).map_err(|_| self.fault("a token or password fits in no header"))?;
        value.set_sensitive(true);
        Ok(value)
    }

    fn fault(&self, message: &str) -> ImageError {
        ImageError::Registry { reference: self.reference.to_string(), message: message.to_owned() }
    }

    fn unauthorized(&self, message: &str) -> ImageError {
        ImageError::Unauthorized { reference: self.reference.to_string(), message: message.to_owned() }
    }

    fn unreachable(&self, error: &reqwest::Error) -> ImageError {
        ImageError::Unreachable { reference: self.reference.to_string(), message: line(error) }
    }
}

/// Where a `Content-Range` begins.
fn range_start(header: &str) -> Option<u64> {
    header.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

/// An error and its causes, without text that a server may have put into it.
fn line(error: &reqwest::Error) -> String {
    clean(&with_causes(error))
}

/// One line of bounded length: registries put pages into their answers.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(1024).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_a_registry_elsewhere_may_not_name() {
        for (url, expected) in [
            ("http://127.0.0.1/token", true),
            ("http://127.1:5000/", true),
            ("http://2130706433/", true),
            ("http://localhost./", true),
            ("http://LOCALHOST/", true),
            ("http://x.localhost/", true),
            ("http://0.0.0.0/", true),
            ("http://[::1]/", true),
            ("http://[::]/", true),
            ("http://[::ffff:127.0.0.1]/", true),
            ("http://[::ffff:169.254.169.254]/", true),
            ("http://169.254.169.254/latest/", true),
            ("http://[fe80::1]/", true),
            ("https://auth.example.com/token", false),
            ("https://10.0.0.1/", false),
            ("https://[2001:db8::1]/", false),
            ("https://localhost.example.com/", false),
        ] {
            assert_eq!(is_private(&Url::parse(url).unwrap()), expected, "{url}");
        }
    }

    #[test]
    fn ranges() {
        for (header, want) in
            [("bytes 5-9/10", Some(5)), ("bytes 0-0/*", Some(0)), ("bytes */10", None), ("lines 1-2", None)]
        {
            assert_eq!(range_start(header), want, "{header}");
        }
    }
}

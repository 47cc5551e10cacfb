//! The authenticator of front proxies: a client with a certificate of their authority names the user in
//! headers.

use super::User;
use ferrite_api::Status;
use ferrite_pki::{ClientAuthorities, ClientCertificate, PkiError};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use rustls_pki_types::CertificateDer;
use std::time::SystemTime;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Headers that front proxies use by custom. No layer behind learns from them, and no proxied server sees them, however
/// the server is set up.
const STANDARD: [&str; 3] = ["x-remote-user", "x-remote-uid", "x-remote-group"];
const STANDARD_EXTRA: &str = "x-remote-extra-";

/// The identity of front proxies, and the headers in which they name the user: upstream's
/// `--requestheader-…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestHeader {
    /// The authority of front proxies' certificates, as PEM.
    pub client_ca: String,
    /// Common names of their certificates. Any, when there is none.
    pub allowed_names: Vec<String>,
    pub username_headers: Vec<String>,
    pub uid_headers: Vec<String>,
    pub group_headers: Vec<String>,
    pub extra_headers_prefix: Vec<String>,
}

impl RequestHeader {
    /// The settings that let other servers trust the same proxies, under upstream's keys.
    pub(crate) fn published(&self) -> Vec<(&'static str, String)> {
        let list = |names: &[String]| ferrite_json::Value::from(names.to_vec()).to_string();
        let mut data = vec![
            ("requestheader-allowed-names", list(&self.allowed_names)),
            ("requestheader-client-ca-file", self.client_ca.clone()),
            ("requestheader-extra-headers-prefix", list(&self.extra_headers_prefix)),
            ("requestheader-group-headers", list(&self.group_headers)),
            ("requestheader-username-headers", list(&self.username_headers)),
        ];
        if !self.uid_headers.is_empty() {
            data.push(("requestheader-uid-headers", list(&self.uid_headers)));
        }
        data
    }
}

pub(crate) struct FrontProxies {
    authorities: ClientAuthorities,
    headers: RequestHeader,
}

impl FrontProxies {
    pub fn new(headers: &RequestHeader) -> Result<Self, PkiError> {
        Ok(Self { authorities: ClientAuthorities::from_pem(&headers.client_ca)?, headers: headers.clone() })
    }

    /// Verifies that the certificates which a client presented are a front proxy's.
    pub fn verify(&self, presented: &[CertificateDer<'_>], now: SystemTime) -> Option<ClientCertificate> {
        let certificate = self.authorities.verify(presented, now).ok()?;
        let allowed = &self.headers.allowed_names;
        let (_, leaf) = X509Certificate::from_der(presented.first()?).ok()?;
        let name = leaf.subject().iter_common_name().last().and_then(|name| name.as_str().ok());
        let is_allowed = allowed.is_empty() || name.is_some_and(|name| allowed.iter().any(|a| a == name));
        is_allowed.then_some(certificate)
    }

    /// The user that a front proxy asks for. None when it names nobody.
    pub fn user(&self, headers: &HeaderMap) -> Result<Option<User>, Status> {
        let first = |names: &[String]| -> Result<String, Status> {
            let values = names.iter().filter_map(|name| headers.get(name.as_str()));
            values.map(text).find(|value| !matches!(value, Ok(""))).unwrap_or(Ok("")).map(str::to_owned)
        };
        let name = first(&self.headers.username_headers)?;
        if name.is_empty() {
            return Ok(None);
        }
        let groups = self.headers.group_headers.iter().flat_map(|name| headers.get_all(name.as_str()));
        let groups: Vec<&str> = groups.map(text).collect::<Result<_, _>>()?;
        let mut user = User::new(name, groups.into_iter().filter(|group| !group.is_empty()));
        user.uid = first(&self.headers.uid_headers)?;
        for prefix in &self.headers.extra_headers_prefix {
            for (header, value) in headers {
                if let Some(key) = header.as_str().strip_prefix(&prefix.to_ascii_lowercase()) {
                    let values = user.extra.entry(unescaped(key)).or_default();
                    values.push(text(value)?.to_owned());
                }
            }
        }
        Ok(Some(user))
    }
}

fn text(value: &HeaderValue) -> Result<&str, Status> {
    std::str::from_utf8(value.as_bytes()).map_err(|_| Status::unauthorized())
}

/// The key in the name of a header. As upstream, an escape that makes no sense leaves the key as it is.
fn unescaped(key: &str) -> String {
    let mut escapes = key.match_indices('%').map(|(at, _)| key.as_bytes().get(at + 1..at + 3));
    match escapes.all(|hex| hex.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))) {
        true => percent_decode_str(key).decode_utf8().map_or_else(|_| key.to_owned(), Into::into),
        false => key.to_owned(),
    }
}

/// Removes the headers of front proxies, the usual ones and those that are set up.
pub(crate) fn forget(headers: &mut HeaderMap, proxies: Option<&FrontProxies>) {
    let own = proxies.map(|proxies| &proxies.headers);
    let named = |name: &str| {
        let own = own.into_iter().flat_map(|h| [&h.username_headers, &h.uid_headers, &h.group_headers]);
        STANDARD.contains(&name) || own.flatten().any(|own| own.eq_ignore_ascii_case(name))
    };
    let extra = |name: &str| {
        let own = own.into_iter().flat_map(|h| &h.extra_headers_prefix);
        name.starts_with(STANDARD_EXTRA) || own.into_iter().any(|p| name.starts_with(&p.to_ascii_lowercase()))
    };
    let gone: Vec<HeaderName> =
        headers.keys().filter(|name| named(name.as_str()) || extra(name.as_str())).cloned().collect();
    for name in gone {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_pki::{Authority, Identity, Purpose, Subject};
    use rustls_pki_types::pem::PemObject;

    fn proxies(authority: &Authority, allowed: &[&str]) -> FrontProxies {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        FrontProxies::new(&RequestHeader {
            client_ca: authority.certificate().to_owned(),
            allowed_names: list(allowed),
            username_headers: list(&["X-Remote-User", "X-User"]),
            uid_headers: list(&["X-Remote-Uid"]),
            group_headers: list(&["X-Remote-Group"]),
            extra_headers_prefix: list(&["X-Remote-Extra-"]),
        })
        .expect("an authority")
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn only_certificates_of_front_proxies_are_theirs() {
        let (ours, theirs) = (Authority::create("a").expect("one"), Authority::create("b").expect("one"));
        let issue = |authority: &Authority, name: &str, purpose| {
            let Identity { certificate, .. } =
                authority.issue(&Subject::client(name, None), purpose).expect("a certificate");
            [CertificateDer::from_pem_slice(certificate.as_bytes()).expect("a certificate")]
        };
        let (named, any) = (proxies(&ours, &["front"]), proxies(&ours, &[]));
        let now = SystemTime::now();
        let rows = [
            (issue(&ours, "front", Purpose::Client), true, true),
            (issue(&ours, "other", Purpose::Client), false, true),
            (issue(&ours, "front", Purpose::Server), false, false),
            (issue(&theirs, "front", Purpose::Client), false, false),
        ];
        for (row, (presented, by_name, by_any)) in rows.iter().enumerate() {
            assert_eq!(named.verify(presented, now).is_some(), *by_name, "{row}");
            assert_eq!(any.verify(presented, now).is_some(), *by_any, "{row}");
        }
        assert!(any.verify(&[], now).is_none());
    }

    #[test]
    fn headers_name_the_user() {
        let proxies = proxies(&Authority::create("a").expect("one"), &[]);
        assert_eq!(proxies.user(&headers(&[("x-remote-group", "g")])), Ok(None));
        assert_eq!(proxies.user(&headers(&[("x-remote-user", "")])), Ok(None));
        let given = headers(&[
            ("x-user", "alice"),
            ("x-remote-uid", "7"),
            ("x-remote-group", "a"),
            ("x-remote-group", "b"),
            ("x-remote-group", ""),
            ("x-remote-extra-scopes%2fa", "x"),
            ("x-remote-extra-scopes%2fa", "y"),
            ("x-remote-extra-bad%zz", "z"),
        ]);
        let user = proxies.user(&given).expect("readable").expect("a user");
        assert_eq!((user.name.as_str(), user.uid.as_str()), ("alice", "7"));
        assert_eq!(user.groups, ["a", "b", "system:authenticated"]);
        assert_eq!(user.extra["scopes/a"], ["x", "y"]);
        assert_eq!(user.extra["bad%zz"], ["z"]);
        let mut unreadable = HeaderMap::new();
        unreadable.insert("x-remote-user", HeaderValue::from_bytes(b"\xff").expect("a value"));
        assert_eq!(proxies.user(&unreadable).expect_err("not text").code, 401);

        let mut left =
            headers(&[("x-remote-user", "a"), ("x-user", "a"), ("x-remote-extra-k", "v"), ("x-b", "c")]);
        forget(&mut left, None);
        assert_eq!(left, headers(&[("x-user", "a"), ("x-b", "c")]));
        forget(&mut left, Some(&proxies));
        assert_eq!(left, headers(&[("x-b", "c")]));
    }
}

//! Upstream's flags about front proxies that authenticate users, and the server's own certificate as one.

use crate::apiserver::{BoxError, read_file};
use ferrite_apiserver::RequestHeader;
use ferrite_pki::{ClusterPki, Identity, Purpose, Subject};
use std::path::PathBuf;

/// Front proxies that authenticate users for the server.
#[derive(Debug, Clone, clap::Args)]
pub struct RequestHeaderOptions {
    /// File with the authority of front proxies' certificates. A client with such a certificate names the
    /// user in headers. By default an authority made for this cluster, whose only certificate is the
    /// server's own.
    #[arg(long, value_name = "FILE")]
    pub requestheader_client_ca_file: Option<PathBuf>,
    /// Common names of front proxies' certificates; all of the authority's when empty.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = not_blank)]
    pub requestheader_allowed_names: Vec<String>,
    /// Headers in which front proxies say the user's name. X-Remote-User is common.
    #[arg(long, value_name = "HEADER", value_delimiter = ',', value_parser = not_blank)]
    pub requestheader_username_headers: Vec<String>,
    /// Headers in which front proxies say the user's UID. X-Remote-Uid is suggested.
    #[arg(long, value_name = "HEADER", value_delimiter = ',', value_parser = not_blank)]
    pub requestheader_uid_headers: Vec<String>,
    /// Headers in which front proxies say the user's groups. X-Remote-Group is suggested.
    #[arg(long, value_name = "HEADER", value_delimiter = ',', value_parser = not_blank)]
    pub requestheader_group_headers: Vec<String>,
    /// Prefixes of headers in which front proxies say what else is known of the user. X-Remote-Extra- is suggested.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', value_parser = not_blank)]
    pub requestheader_extra_headers_prefix: Vec<String>,
    /// File with the certificate that the server shows to extension API servers. By default one that is made for it.
    #[arg(long, value_name = "FILE", requires = "proxy_client_key_file")]
    pub proxy_client_cert_file: Option<PathBuf>,
    /// File with the key of --proxy-client-cert-file.
    #[arg(long, value_name = "FILE", requires = "proxy_client_cert_file")]
    pub proxy_client_key_file: Option<PathBuf>,
}

/// The common name of the server's own certificate for extension API servers.
const FRONT_PROXY: &str = "front-proxy-client";

impl RequestHeaderOptions {
    /// The server's client certificate for extension API servers, if somebody else made it.
    pub fn proxy_client(&self) -> Result<Option<Identity>, BoxError> {
        match (&self.proxy_client_cert_file, &self.proxy_client_key_file) {
            (Some(certificate), Some(key)) => Ok(Some(Identity {
                certificate: read_file("proxy-client-cert-file", certificate)?,
                key: read_file("proxy-client-key-file", key)?,
            })),
            _ => Ok(None),
        }
    }

    /// The server's own client certificate for extension API servers. None if only foreign front proxies are
    /// trusted.
    pub fn own_proxy_client(&self, pki: &ClusterPki) -> Result<Option<Identity>, BoxError> {
        if self.proxy_client_cert_file.is_some() || self.requestheader_client_ca_file.is_some() {
            return Ok(None);
        }
        let subject = Subject::client(FRONT_PROXY, None);
        Ok(Some(pki.front_proxy()?.ensure(FRONT_PROXY, &subject, Purpose::Client)?))
    }

    /// The server's own front proxy, with the names of headers that upstream's installers use.
    pub fn own(pki: &ClusterPki) -> Result<RequestHeader, BoxError> {
        Ok(RequestHeader {
            client_ca: pki.front_proxy()?.ca().to_owned(),
            allowed_names: vec![FRONT_PROXY.into()],
            username_headers: vec!["X-Remote-User".into()],
            uid_headers: vec!["X-Remote-Uid".into()],
            group_headers: vec!["X-Remote-Group".into()],
            extra_headers_prefix: vec!["X-Remote-Extra-".into()],
        })
    }

    /// The files that are followed.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        let given =
            [&self.requestheader_client_ca_file, &self.proxy_client_cert_file, &self.proxy_client_key_file];
        given.into_iter().flatten().cloned()
    }

    /// Foreign front proxies, if there are any.
    pub fn read(&self) -> Result<Option<RequestHeader>, BoxError> {
        let Some(file) = &self.requestheader_client_ca_file else { return Ok(None) };
        let client_ca = read_file("requestheader-client-ca-file", file)?;
        Ok(Some(RequestHeader {
            client_ca,
            allowed_names: self.requestheader_allowed_names.clone(),
            username_headers: self.requestheader_username_headers.clone(),
            uid_headers: self.requestheader_uid_headers.clone(),
            group_headers: self.requestheader_group_headers.clone(),
            extra_headers_prefix: self.requestheader_extra_headers_prefix.clone(),
        }))
    }
}

/// As upstream: an entry of nothing but spaces is a mistake.
fn not_blank(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("an entry is empty".into()),
        _ => Ok(text.to_owned()),
    }
}

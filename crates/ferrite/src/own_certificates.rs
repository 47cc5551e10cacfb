//! The certificates that a server makes for itself, and their renewal while it runs.

use crate::apiserver::BoxError;
use crate::front_proxies::RequestHeaderOptions;
use ferrite_apiserver::RequestHeader;
use ferrite_client::Scope;
use ferrite_pki::{ClusterPki, Identity, Purpose, ServerTls, Subject};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// Certificates live for a year, and are replaced when a third of it is left.
pub const CHECKED: Duration = Duration::from_secs(12 * 3600);

/// The server's own certificates, for flags that are not given.
#[derive(Clone, PartialEq, Eq)]
pub struct OwnCertificates {
    pub serving: Identity,
    pub client_ca: String,
    /// The server's identity towards kubelets.
    pub kubelet_client: Identity,
    pub request_header: RequestHeader,
    /// None if only foreign front proxies are trusted.
    pub proxy_client: Option<Identity>,
}

/// The way to certificates that are valid for long enough.
pub struct OwnCertificateSource {
    /// The directory of the cluster's certificates.
    pub dir: PathBuf,
    pub serving: Subject,
    pub kubelet_client: Subject,
    pub request_header: RequestHeaderOptions,
}

impl OwnCertificateSource {
    /// Reads the certificates, and makes those anew that are absent or end soon.
    pub fn ensure(&self) -> Result<OwnCertificates, BoxError> {
        let pki = ClusterPki::open(&self.dir)?;
        Ok(OwnCertificates {
            serving: pki.ensure("apiserver", &self.serving, Purpose::Server)?,
            client_ca: pki.ca().to_owned(),
            kubelet_client: pki.ensure("apiserver-kubelet-client", &self.kubelet_client, Purpose::Client)?,
            request_header: RequestHeaderOptions::own(&pki)?,
            proxy_client: self.request_header.own_proxy_client(&pki)?,
        })
    }
}

/// The settings of a port whose certificate is made here, as long as the scope lasts: a new one follows in time.
pub fn serving(
    dir: PathBuf,
    name: &'static str,
    subject: Subject,
    scope: &Scope,
) -> Result<watch::Receiver<Option<ServerTls>>, BoxError> {
    let ensure = move || -> Result<(Identity, ServerTls), BoxError> {
        let pki = ClusterPki::open(&dir)?;
        let identity = pki.ensure(name, &subject, Purpose::Server)?;
        let tls = ferrite_pki::server_config(&identity, pki.ca(), &["http/1.1"])?;
        Ok((identity, tls))
    };
    let (mut identity, tls) = ensure()?;
    let (swap, current) = watch::channel(Some(tls));
    scope.spawn(async move {
        loop {
            tokio::time::sleep(CHECKED).await;
            match ensure() {
                Ok((new, _)) if new == identity => {}
                Ok((new, tls)) => {
                    identity = new;
                    swap.send_replace(Some(tls));
                }
                Err(error) => tracing::warn!(%error, name, "a certificate cannot be renewed; will try again"),
            }
        }
    });
    Ok(current)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(name: &str) -> Subject {
        Subject { common_name: name.into(), organization: None, names: vec!["localhost".into()] }
    }

    #[tokio::test(start_paused = true)]
    async fn a_port_shows_the_certificate_that_replaces_a_lost_one() {
        let dir = tempfile::tempdir().unwrap();
        let scope = Scope::new();
        let mut current = serving(dir.path().to_owned(), "kubelet", subject("n"), &scope).unwrap();
        tokio::time::sleep(2 * CHECKED).await;
        assert!(!current.has_changed().unwrap(), "it is good for months");
        std::fs::remove_file(dir.path().join("kubelet.crt")).unwrap();
        tokio::time::timeout(2 * CHECKED, current.changed()).await.unwrap().unwrap();
        scope.shutdown().await;
    }
}

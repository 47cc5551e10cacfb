//! Certificates and authorities of the API server: read from the files of flags, and read again when the files change.

use crate::apiserver::BoxError;
use crate::front_proxies::RequestHeaderOptions;
use crate::own_certificates::{self, OwnCertificateSource, OwnCertificates};
use crate::standalone::StandaloneOptions;
use ferrite_apiserver::{ApiServer, Certificates, RequestHeader, ServingTls};
use ferrite_component::FollowedFiles;
use ferrite_pki::{ClientAuthorities, Handshake, Identity, NamedIdentity, ServerTls};
use std::path::PathBuf;
use std::sync::Arc;

/// The files of flags, and the certificates that stand in for flags that are not given.
pub struct CertificateFiles {
    standalone: StandaloneOptions,
    request_header: RequestHeaderOptions,
    own: OwnCertificates,
    followed: FollowedFiles,
}

/// The contents of the files, each part found usable by itself.
#[derive(Clone)]
pub struct LoadedCertificates {
    serving: Identity,
    by_name: Vec<NamedIdentity>,
    client_ca: String,
    request_header: RequestHeader,
    proxy_client: Option<Identity>,
    kubelet_client: Arc<rustls::ClientConfig>,
}

impl CertificateFiles {
    /// Follows the files from now on.
    pub fn new(
        standalone: &StandaloneOptions,
        request_header: &RequestHeaderOptions,
        own: OwnCertificates,
    ) -> Self {
        let files: Vec<PathBuf> = standalone.certificate_files().chain(request_header.files()).collect();
        Self {
            standalone: standalone.clone(),
            request_header: request_header.clone(),
            own,
            followed: FollowedFiles::new(files),
        }
    }

    fn serving(&self) -> Result<Identity, BoxError> {
        let serving = self.standalone.serving()?.unwrap_or_else(|| self.own.serving.clone());
        usable(&serving)?;
        Ok(serving)
    }

    fn by_name(&self) -> Result<Vec<NamedIdentity>, BoxError> {
        let by_name = self.standalone.by_name()?;
        by_name.iter().try_for_each(|named| usable(&named.identity))?;
        Ok(by_name)
    }

    fn client_ca(&self) -> Result<String, BoxError> {
        let authority = self.standalone.client_ca()?.unwrap_or_else(|| self.own.client_ca.clone());
        ClientAuthorities::from_pem(&authority)?;
        Ok(authority)
    }

    fn request_header(&self) -> Result<RequestHeader, BoxError> {
        let read = self.request_header.read()?.unwrap_or_else(|| self.own.request_header.clone());
        ClientAuthorities::from_pem(&read.client_ca)?;
        Ok(read)
    }

    fn proxy_client(&self) -> Result<Option<Identity>, BoxError> {
        let identity = self.request_header.proxy_client()?.or_else(|| self.own.proxy_client.clone());
        identity.as_ref().map_or(Ok(()), usable)?;
        Ok(identity)
    }

    fn kubelet_client(&self) -> Result<Arc<rustls::ClientConfig>, BoxError> {
        let own = &self.own;
        Ok(Arc::new(match self.standalone.kubelet_client(&own.kubelet_client)? {
            Some(client) => client,
            None => ferrite_pki::client_config(&own.client_ca, Some(&own.kubelet_client))?,
        }))
    }

    /// Reads all files.
    pub fn load(&self) -> Result<LoadedCertificates, BoxError> {
        Ok(LoadedCertificates {
            serving: self.serving()?,
            by_name: self.by_name()?,
            client_ca: self.client_ca()?,
            request_header: self.request_header()?,
            proxy_client: self.proxy_client()?,
            kubelet_client: self.kubelet_client()?,
        })
    }

    /// Reads the files again. A part that cannot be used stays as it was: the file may be half written, or the key
    /// come after its certificate.
    fn reload(&self, before: &LoadedCertificates) -> LoadedCertificates {
        fn kept<T: Clone>(what: &str, read: Result<T, BoxError>, before: &T) -> T {
            read.unwrap_or_else(|error| {
                tracing::warn!(%error, "{what} cannot be loaded anew and stays as it was");
                before.clone()
            })
        }
        LoadedCertificates {
            serving: kept("the serving certificate", self.serving(), &before.serving),
            by_name: kept("the certificates of --tls-sni-cert-key", self.by_name(), &before.by_name),
            client_ca: kept("the authority of clients", self.client_ca(), &before.client_ca),
            request_header: kept(
                "the authority of front proxies",
                self.request_header(),
                &before.request_header,
            ),
            proxy_client: kept("the certificate of the proxy", self.proxy_client(), &before.proxy_client),
            kubelet_client: kept(
                "the certificates for kubelets",
                self.kubelet_client(),
                &before.kubelet_client,
            ),
        }
    }

    /// Takes the server's own certificates as they are now. Returns true if one of them is new.
    fn renew(&mut self, own: Result<OwnCertificates, BoxError>) -> bool {
        match own {
            Ok(own) => std::mem::replace(&mut self.own, own) != self.own,
            Err(error) => {
                tracing::warn!(%error, "certificates cannot be renewed; will try again");
                false
            }
        }
    }

    /// The settings of the handshake.
    pub fn tls(&self, loaded: &LoadedCertificates) -> Result<ServerTls, BoxError> {
        let handshake = Handshake {
            by_name: loaded.by_name.clone(),
            other_clients: Some(&loaded.request_header.client_ca),
            ..self.standalone.handshake()
        };
        Ok(ferrite_pki::server_config_with(&loaded.serving, &loaded.client_ca, &handshake)?)
    }

    /// Lets the server use the files as they change, and its own certificates as they are renewed. Runs until it is dropped.
    pub async fn follow(
        mut self,
        source: OwnCertificateSource,
        server: Arc<ApiServer>,
        tls: ServingTls,
        mut loaded: LoadedCertificates,
    ) {
        let first = tokio::time::Instant::now() + own_certificates::CHECKED;
        let mut checks = tokio::time::interval_at(first, own_certificates::CHECKED);
        loop {
            tokio::select! {
                () = self.followed.changed() => {}
                _ = checks.tick() => {
                    if !self.renew(source.ensure()) {
                        continue;
                    }
                }
            }
            loaded = self.reload(&loaded);
            let made = self.tls(&loaded).map(|made| tls.set(made));
            let set = server.set_certificates(loaded.certificates()).await;
            match made.and_then(|()| Ok(set?)) {
                Ok(()) => tracing::info!("loaded certificates and authorities anew"),
                Err(error) => tracing::error!(%error, "certificates stay as they were"),
            }
        }
    }
}

impl LoadedCertificates {
    pub fn certificates(&self) -> Certificates {
        Certificates {
            kubelet_client: Some(Arc::clone(&self.kubelet_client)),
            client_ca: Some(self.client_ca.clone()),
            request_header: Some(self.request_header.clone()),
            proxy_client: self.proxy_client.clone(),
        }
    }
}

/// Fails if the key is not that of the certificate.
fn usable(identity: &Identity) -> Result<(), BoxError> {
    ferrite_pki::anonymous_server_config(identity, &[])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use ferrite_pki::{Authority, Purpose, Subject};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        standalone: StandaloneOptions,
        #[command(flatten)]
        request_header: RequestHeaderOptions,
    }

    #[test]
    fn certificates_of_the_servers_own_are_renewed() {
        let dir = tempfile::tempdir().unwrap();
        let line = Line::parse_from(["x"]);
        let source = OwnCertificateSource {
            dir: dir.path().to_owned(),
            serving: Subject::client("kube-apiserver", None),
            kubelet_client: Subject::client("kubelet-client", None),
            request_header: line.request_header.clone(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let own = source.ensure().unwrap();
        let mut files = CertificateFiles::new(&line.standalone, &line.request_header, own);
        let first = files.load().unwrap();
        assert!(!files.renew(source.ensure()), "they are good for months");
        assert!(!files.renew(Err("the disk is full".into())));
        std::fs::remove_file(dir.path().join("apiserver.crt")).unwrap();
        assert!(files.renew(source.ensure()));
        let second = files.reload(&first);
        assert!(second.serving != first.serving && second.client_ca == first.client_ca);
    }

    #[test]
    fn parts_that_cannot_be_used_stay_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let write = |name: &str, text: &str| std::fs::write(path(name), text).unwrap();
        let authority = Authority::create("a").unwrap();
        let issue = |name: &str, purpose| authority.issue(&Subject::client(name, None), purpose).unwrap();
        let put = |name: &str, identity: &Identity| {
            write(&format!("{name}.crt"), &identity.certificate);
            write(&format!("{name}.key"), &identity.key);
        };
        put("serving", &issue("serving", Purpose::Server));
        put("proxy", &issue("proxy", Purpose::Client));
        write("ca.crt", authority.certificate());
        let flags = [
            "x".to_owned(),
            format!("--tls-cert-file={}", path("serving.crt")),
            format!("--tls-private-key-file={}", path("serving.key")),
            format!("--client-ca-file={}", path("ca.crt")),
            format!("--proxy-client-cert-file={}", path("proxy.crt")),
            format!("--proxy-client-key-file={}", path("proxy.key")),
        ];
        let line = Line::parse_from(flags);
        let own = OwnCertificates {
            serving: issue("own", Purpose::Server),
            client_ca: authority.certificate().to_owned(),
            kubelet_client: issue("kubelet-client", Purpose::Client),
            request_header: RequestHeader {
                client_ca: authority.certificate().to_owned(),
                ..RequestHeader::default()
            },
            proxy_client: None,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let files = CertificateFiles::new(&line.standalone, &line.request_header, own);
        let first = files.load().unwrap();
        assert!(files.tls(&first).is_ok());

        // A certificate without its key, a file that is cut off, and one that is gone.
        let other = issue("serving2", Purpose::Server);
        write("serving.crt", &other.certificate);
        write("ca.crt", &authority.certificate()[..100]);
        std::fs::remove_file(path("proxy.key")).unwrap();
        let second = files.reload(&first);
        assert!(second.serving == first.serving && second.client_ca == first.client_ca);
        assert!(second.proxy_client == first.proxy_client && second.proxy_client.is_some());

        // Each counts once it is whole, whatever the others are like.
        write("serving.key", &other.key);
        let third = files.reload(&second);
        assert!(third.serving == other && third.client_ca == first.client_ca);
        let both = format!("{}{}", authority.certificate(), Authority::create("b").unwrap().certificate());
        write("ca.crt", &both);
        assert_eq!(files.reload(&third).client_ca, both);
    }
}

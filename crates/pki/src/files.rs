//! The directory of a cluster's certificates.

use crate::authority::{Authority, Identity, LIFETIME, Purpose, Subject};
use crate::der;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use time::OffsetDateTime;

/// Why certificates could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("cannot use {}", .path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make or read a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("{what} is not valid PEM of the kind expected")]
    Pem { what: String },
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    #[error("there is no cipher suite {name}: choose among {known}")]
    CipherSuite { name: String, known: String },
    #[error("there is no key exchange {number}: choose among {known}")]
    KeyExchange { number: u16, known: String },
}

/// The keys that all servers of a cluster share: names of files in the directory, and their content.
pub type SharedKeys = BTreeMap<String, String>;

/// The files of [`SharedKeys`]. The authority's certificate is the last: a directory with it is complete.
const SHARED: [&str; 6] =
    ["sa.key", "sa.pub", "front-proxy-ca.key", "front-proxy-ca.crt", "ca.key", "ca.crt"];

/// The cluster's certificates on disk. Opening makes missing ones and renews those that are about to
/// expire.
pub struct ClusterPki {
    dir: PathBuf,
    ca: Authority,
}

impl std::fmt::Debug for ClusterPki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterPki").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl ClusterPki {
    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))?;
        Self::with_authority(dir, "ca", "kubernetes")
    }

    /// The certificates of front proxies in the same directory. Their authority is another one: a certificate of it
    /// lets its holder speak for any user.
    pub fn front_proxy(&self) -> Result<Self, PkiError> {
        Self::with_authority(&self.dir, "front-proxy-ca", "front-proxy-ca")
    }

    fn with_authority(dir: &Path, name: &str, common_name: &str) -> Result<Self, PkiError> {
        let ca = match load(dir, name)? {
            Some(identity) => Authority::from_identity(identity)?,
            None => {
                let ca = Authority::create(common_name)?;
                save(dir, name, ca.identity())?;
                ca
            }
        };
        Ok(Self { dir: dir.to_owned(), ca })
    }

    /// The keys and authorities that another server of the cluster needs.
    pub fn shared_keys(&self) -> Result<SharedKeys, PkiError> {
        self.front_proxy()?;
        self.service_account_key()?;
        let read = |name: &str| {
            let path = self.dir.join(name);
            Ok((name.to_owned(), fs::read_to_string(&path).map_err(at(&path))?))
        };
        SHARED.into_iter().map(read).collect()
    }

    /// Makes a directory one of a further server.
    pub fn install(dir: &Path, keys: &SharedKeys) -> Result<(), PkiError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))?;
        let missing = |name: &str| PkiError::Pem { what: name.to_owned() };
        for name in SHARED {
            let text = keys.get(name).ok_or_else(|| missing(name))?;
            write(&dir.join(name), text.as_bytes(), if name.ends_with(".key") { 0o600 } else { 0o644 })?;
        }
        Ok(())
    }

    /// The authority itself, for signing.
    pub fn authority(&self) -> Result<Authority, PkiError> {
        Authority::from_identity(self.ca.identity().clone())
    }

    /// The authority's certificate, as PEM.
    pub fn ca(&self) -> &str {
        self.ca.certificate()
    }

    /// The certificate `<name>.crt` with its key, issued anew when it is absent, unreadable, about to expire,
    /// not of this authority, or not for this subject.
    pub fn ensure(&self, name: &str, subject: &Subject, purpose: Purpose) -> Result<Identity, PkiError> {
        if let Ok(Some(identity)) = load(&self.dir, name)
            && is_current(&identity, subject, self.ca.certificate(), RENEWED)
        {
            return Ok(identity);
        }
        let identity = self.ca.issue(subject, purpose)?;
        save(&self.dir, name, &identity)?;
        Ok(identity)
    }

    /// The key that signs service account tokens (`sa.key`), as PEM, made when absent.
    pub fn service_account_key(&self) -> Result<String, PkiError> {
        let path = self.dir.join("sa.key");
        match fs::read_to_string(&path) {
            Ok(key) => Ok(key),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
                write(&self.dir.join("sa.pub"), key.public_key_pem().as_bytes(), 0o644)?;
                write(&path, key.serialize_pem().as_bytes(), 0o600)?;
                Ok(key.serialize_pem())
            }
            Err(e) => Err(at(&path)(e)),
        }
    }
}

/// A certificate with less time left than this is asked for again.
const RENEWED: i64 = LIFETIME.whole_seconds() / 3;

/// Returns true if this authority issued the certificate for this subject, and more than `seconds` seconds
/// are left.
fn is_current(identity: &Identity, subject: &Subject, ca: &str, seconds: i64) -> bool {
    let Ok((_, pem)) = x509_parser::pem::parse_x509_pem(identity.certificate.as_bytes()) else {
        return false;
    };
    let Ok(certificate) = pem.parse_x509() else { return false };
    let Ok((_, ca_pem)) = x509_parser::pem::parse_x509_pem(ca.as_bytes()) else {
        return false;
    };
    let Ok(ca) = ca_pem.parse_x509() else { return false };
    let left = certificate.validity().not_after.timestamp() - OffsetDateTime::now_utc().unix_timestamp();
    certificate.issuer() == ca.subject()
        && certificate.verify_signature(Some(ca.public_key())).is_ok()
        && left > seconds
        && covers(&certificate, subject)
}

/// The certificates of a node that joined a cluster: it has no authority, only the authority's certificate.
#[derive(Debug)]
pub struct NodePki {
    dir: PathBuf,
}

impl NodePki {
    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The certificate of the cluster's authority, as PEM; none before the node has joined.
    pub fn ca(&self) -> Result<Option<String>, PkiError> {
        let path = self.dir.join("ca.crt");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(at(&path)(e)),
        }
    }

    pub fn save_ca(&self, ca: &str) -> Result<(), PkiError> {
        write(&self.dir.join("ca.crt"), ca.as_bytes(), 0o644)
    }

    /// The certificate `<name>.crt` with its key; none if it must be asked for: it is absent, of another authority or
    /// for another subject, or more than two thirds of its time are over.
    pub fn load(&self, name: &str, subject: &Subject) -> Result<Option<Identity>, PkiError> {
        let Some(ca) = self.ca()? else { return Ok(None) };
        Ok(load(&self.dir, name)?.filter(|identity| is_current(identity, subject, &ca, RENEWED)))
    }

    /// The same as long as it is valid at all: good enough to ask for the one that replaces it.
    pub fn load_valid(&self, name: &str, subject: &Subject) -> Result<Option<Identity>, PkiError> {
        let Some(ca) = self.ca()? else { return Ok(None) };
        Ok(load(&self.dir, name)?.filter(|identity| is_current(identity, subject, &ca, 0)))
    }

    pub fn save(&self, name: &str, identity: &Identity) -> Result<(), PkiError> {
        save(&self.dir, name, identity)
    }
}

/// SHA-256 of an authority's public key, in hexadecimal digits: kubeadm's discovery-token-ca-cert-hash. Of several
/// certificates the first counts.
pub fn public_key_hash(ca: &str) -> Result<String, PkiError> {
    let bad = || PkiError::Pem { what: "the authority".into() };
    let (_, pem) = x509_parser::pem::parse_x509_pem(ca.as_bytes()).map_err(|_| bad())?;
    hash_of_key(&pem.contents).ok_or_else(bad)
}

/// The certificates of `ca` whose public key has this hash, as PEM. None if there is no such certificate.
///
/// A text that came over an unverified connection may have others beside the right one, which nobody must trust.
pub fn pinned_authority(ca: &str, hash: &str) -> Option<String> {
    let certificates = CertificateDer::pem_slice_iter(ca.as_bytes()).collect::<Result<Vec<_>, _>>().ok()?;
    let pinned: String = certificates
        .iter()
        .filter(|certificate| hash_of_key(certificate).is_some_and(|found| found == hash))
        .map(|certificate| der::to_pem("CERTIFICATE", certificate))
        .collect();
    (!pinned.is_empty()).then_some(pinned)
}

fn hash_of_key(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let hash = ring::digest::digest(&ring::digest::SHA256, certificate.public_key().raw);
    Some(hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn covers(certificate: &x509_parser::certificate::X509Certificate<'_>, subject: &Subject) -> bool {
    use x509_parser::extensions::GeneralName;
    let name = certificate.subject();
    let first = |mut values: Vec<&str>| values.pop().map(str::to_owned);
    let common = first(name.iter_common_name().filter_map(|n| n.as_str().ok()).collect());
    let organization = first(name.iter_organization().filter_map(|n| n.as_str().ok()).collect());
    let names: Vec<String> = match certificate.subject_alternative_name() {
        Ok(Some(san)) => san
            .value
            .general_names
            .iter()
            .filter_map(|n| match n {
                GeneralName::DNSName(n) => Some((*n).to_owned()),
                GeneralName::IPAddress(b) => match b.len() {
                    4 => <[u8; 4]>::try_from(*b).ok().map(|b| std::net::IpAddr::from(b).to_string()),
                    16 => <[u8; 16]>::try_from(*b).ok().map(|b| std::net::IpAddr::from(b).to_string()),
                    _ => None,
                },
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    common.as_deref() == Some(&*subject.common_name)
        && organization == subject.organization
        && subject.names.iter().all(|n| names.contains(n))
}

fn load(dir: &Path, name: &str) -> Result<Option<Identity>, PkiError> {
    let read = |suffix: &str| {
        let path = dir.join(format!("{name}.{suffix}"));
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(at(&path)(e)),
        }
    };
    Ok(match (read("crt")?, read("key")?) {
        (Some(certificate), Some(key)) => Some(Identity { certificate, key }),
        _ => None,
    })
}

fn save(dir: &Path, name: &str, identity: &Identity) -> Result<(), PkiError> {
    // The key first: a certificate without its key would be taken for an authority kept elsewhere.
    write(&dir.join(format!("{name}.key")), identity.key.as_bytes(), 0o600)?;
    write(&dir.join(format!("{name}.crt")), identity.certificate.as_bytes(), 0o644)
}

/// Replaces a file as a whole: readers see the old or the new one.
fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), PkiError> {
    let temporary = path.with_extension("tmp");
    let result = (|| {
        let mut file =
            fs::OpenOptions::new().create(true).truncate(true).write(true).mode(mode).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    result.map_err(at(path))
}

fn at(path: &Path) -> impl Fn(io::Error) -> PkiError + '_ {
    move |source| PkiError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn server(names: &[&str]) -> Subject {
        Subject {
            common_name: "kube-apiserver".into(),
            organization: None,
            names: names.iter().map(|n| (*n).to_owned()).collect(),
        }
    }

    #[test]
    fn the_same_certificates_are_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let subject = server(&["localhost", "127.0.0.1"]);
        let first =
            ClusterPki::open(dir.path()).unwrap().ensure("apiserver", &subject, Purpose::Server).unwrap();
        let again =
            ClusterPki::open(dir.path()).unwrap().ensure("apiserver", &subject, Purpose::Server).unwrap();
        assert_eq!(first, again);
    }

    #[test]
    fn a_certificate_that_lacks_a_name_is_issued_anew() {
        let dir = tempfile::tempdir().unwrap();
        let pki = ClusterPki::open(dir.path()).unwrap();
        let first = pki.ensure("apiserver", &server(&["localhost"]), Purpose::Server).unwrap();
        let wider = pki.ensure("apiserver", &server(&["localhost", "10.96.0.1"]), Purpose::Server).unwrap();
        assert_ne!(first, wider);
    }

    #[test]
    fn a_certificate_of_another_authority_is_replaced() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let subject = Subject::client("admin", Some("system:masters"));
        let first = ClusterPki::open(one.path()).unwrap().ensure("admin", &subject, Purpose::Client).unwrap();
        let pki = ClusterPki::open(two.path()).unwrap();
        save(two.path(), "admin", &first).unwrap();
        assert_ne!(pki.ensure("admin", &subject, Purpose::Client).unwrap(), first);
    }

    #[test]
    fn front_proxies_have_an_authority_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let pki = ClusterPki::open(dir.path()).unwrap();
        let proxies = pki.front_proxy().unwrap();
        assert_ne!(pki.ca(), proxies.ca());
        assert_eq!(proxies.ca(), pki.front_proxy().unwrap().ca(), "found again");
        let subject = Subject::client("front-proxy-client", None);
        let client = proxies.ensure("front-proxy-client", &subject, Purpose::Client).unwrap();
        assert!(is_current(&client, &subject, proxies.ca(), RENEWED));
        assert!(!is_current(&client, &subject, pki.ca(), RENEWED));
    }

    #[test]
    fn certificates_beside_the_pinned_one_are_dropped() {
        let (ca, other) =
            (Authority::create("kubernetes").unwrap(), Authority::create("kubernetes").unwrap());
        let hash = public_key_hash(ca.certificate()).unwrap();
        let alone = pinned_authority(ca.certificate(), &hash).unwrap();
        let both = [ca.certificate(), other.certificate()].concat();
        let reversed = [other.certificate(), ca.certificate()].concat();
        for text in [ca.certificate(), &both, &reversed, &[&*both, "noise"].concat()] {
            assert_eq!(pinned_authority(text, &hash).as_ref(), Some(&alone), "{text}");
        }
        assert_eq!(alone.matches("BEGIN CERTIFICATE").count(), 1);
        for text in ["", "noise", other.certificate()] {
            assert_eq!(pinned_authority(text, &hash), None, "{text}");
        }
    }

    #[test]
    fn a_node_keeps_what_its_authority_signed() {
        use crate::request::NewRequest;
        let (dir, ca) = (tempfile::tempdir().unwrap(), Authority::create("kubernetes").unwrap());
        let pki = NodePki::open(dir.path()).unwrap();
        let subject = Subject {
            common_name: "system:node:n".into(),
            organization: Some("system:nodes".into()),
            names: vec!["n".into(), "192.0.2.1".into()],
        };
        assert_eq!(pki.ca().unwrap(), None);
        pki.save_ca(ca.certificate()).unwrap();
        assert_eq!(pki.load("kubelet", &subject).unwrap(), None);
        let request = NewRequest::new(&subject).unwrap();
        let asked = crate::Request::parse(request.request.as_bytes()).unwrap();
        assert_eq!(
            (asked.common_name.as_str(), asked.dns_names.as_slice()),
            ("system:node:n", &["n".to_owned()][..])
        );
        assert_eq!(asked.addresses, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
        let sign = |seconds| ca.sign(&request.request, &["server auth".into()], seconds).unwrap();
        let identity = |certificate| Identity { certificate, key: request.key.clone() };
        pki.save("kubelet", &identity(sign(365 * 24 * 3600))).unwrap();
        assert!(pki.load("kubelet", &subject).unwrap().is_some());
        let other = Subject { names: vec!["192.0.2.2".into()], ..subject.clone() };
        assert_eq!(pki.load("kubelet", &other).unwrap(), None, "another address");
        pki.save("kubelet", &identity(sign(3600))).unwrap();
        assert_eq!(pki.load("kubelet", &subject).unwrap(), None, "about to end");
        assert!(pki.load_valid("kubelet", &subject).unwrap().is_some(), "good until then");
        assert_eq!(pki.load_valid("kubelet", &other).unwrap(), None);
        let stranger = Authority::create("kubernetes").unwrap();
        assert_eq!(public_key_hash(ca.certificate()).unwrap().len(), 64);
        assert_ne!(
            public_key_hash(ca.certificate()).unwrap(),
            public_key_hash(stranger.certificate()).unwrap()
        );
    }

    #[test]
    fn a_further_server_has_the_same_keys() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = ClusterPki::open(one.path()).unwrap();
        let keys = first.shared_keys().unwrap();
        ClusterPki::install(two.path(), &keys).unwrap();
        let second = ClusterPki::open(two.path()).unwrap();
        assert_eq!(second.ca(), first.ca());
        assert_eq!(second.front_proxy().unwrap().ca(), first.front_proxy().unwrap().ca());
        assert_eq!(second.service_account_key().unwrap(), first.service_account_key().unwrap());
        let mode = fs::metadata(two.path().join("ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let subject = Subject::client("admin", None);
        let admin = second.ensure("admin", &subject, Purpose::Client).unwrap();
        assert!(is_current(&admin, &subject, first.ca(), RENEWED));
        let three = tempfile::tempdir().unwrap();
        let part = keys.into_iter().filter(|(name, _)| name != "ca.key").collect();
        assert!(ClusterPki::install(three.path(), &part).is_err());
        assert!(!three.path().join("ca.crt").exists(), "what is not complete has no authority");
    }

    #[test]
    fn keys_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let pki = ClusterPki::open(dir.path()).unwrap();
        pki.service_account_key().unwrap();
        pki.ensure("admin", &Subject::client("admin", None), Purpose::Client).unwrap();
        for name in ["ca.key", "sa.key", "admin.key"] {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }
}

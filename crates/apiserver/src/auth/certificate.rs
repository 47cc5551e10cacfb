//! The authenticator of client certificates. The handshake has proved that the client has the key; the chain is
//! verified here, so that a certificate that proves no identity is answered with 401.

use super::User;
use ferrite_component::metrics::{Histogram, registry};
use ferrite_pki::{ClientAuthorities, ClientCertificate};
use rustls_pki_types::CertificateDer;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;
use x509_parser::asn1_rs::{Oid, oid};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The attribute of a subject that has the user's uid.
const UID: Oid<'static> = oid!(1.3.6.1.4.1.57683.2);

/// Among the extensions of a request whose client presented a certificate that proves no identity: without another
/// credential it is answered with 401.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefusedCertificate;

const HOUR: f64 = 3600.0;
const DAY: f64 = 24.0 * HOUR;
/// Upstream's buckets: from nothing to a year.
const LIFETIMES: &[f64] = &[
    0.0,
    0.5 * HOUR,
    HOUR,
    2.0 * HOUR,
    6.0 * HOUR,
    12.0 * HOUR,
    DAY,
    2.0 * DAY,
    4.0 * DAY,
    7.0 * DAY,
    30.0 * DAY,
    90.0 * DAY,
    180.0 * DAY,
    360.0 * DAY,
];

static EXPIRATION: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    let help = "The time that certificates of requests had left.";
    registry().histogram("apiserver_client_certificate_expiration_seconds", help, &[], LIFETIMES).with(&[])
});

/// The client of a connection, by its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Client {
    /// It presented no certificate, or one that names nobody.
    Nobody,
    Refused,
    Known {
        user: Arc<User>,
        certificate: ClientCertificate,
    },
}

impl Client {
    /// Verifies the certificates that a client presented.
    pub(crate) fn of(
        presented: &[CertificateDer<'_>],
        authorities: &ClientAuthorities,
        now: SystemTime,
    ) -> Self {
        let Some(leaf) = presented.first() else { return Self::Nobody };
        let certificate = match authorities.verify(presented, now) {
            Ok(certificate) => certificate,
            Err(error) => {
                tracing::debug!(%error, "a client certificate is refused");
                return Self::Refused;
            }
        };
        match user(leaf) {
            Ok(Some(user)) => Self::Known { user: Arc::new(user), certificate },
            Ok(None) => Self::Nobody,
            Err(RefusedCertificate) => Self::Refused,
        }
    }

    /// The user of a request that arrives now: the certificate may have expired since the handshake.
    pub(crate) fn user(&self, now: SystemTime) -> Result<Option<Arc<User>>, RefusedCertificate> {
        match self {
            Self::Nobody => Ok(None),
            Self::Refused => Err(RefusedCertificate),
            Self::Known { user, certificate } => match certificate.is_valid_at(now) {
                true => {
                    EXPIRATION.observe(certificate.remaining(now));
                    Ok(Some(Arc::clone(user)))
                }
                false => Err(RefusedCertificate),
            },
        }
    }
}

/// The user that a verified certificate speaks for: the name is the last common name, as Go reads a subject; the
/// groups are the organisations. A certificate without a name speaks for nobody.
fn user(der: &[u8]) -> Result<Option<User>, RefusedCertificate> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| RefusedCertificate)?;
    let subject = certificate.subject();
    let name = match subject.iter_common_name().last() {
        Some(name) => name.as_str().map_err(|_| RefusedCertificate)?,
        None => "",
    };
    if name.is_empty() {
        return Ok(None);
    }
    let uids: Result<Vec<&str>, _> = subject.iter_by_oid(&UID).map(|uid| uid.as_str()).collect();
    let uid = match uids.map_err(|_| RefusedCertificate)?.as_slice() {
        [] => "",
        [uid] if !uid.is_empty() => uid,
        _ => return Err(RefusedCertificate),
    };
    let digest = ring::digest::digest(&ring::digest::SHA256, der);
    let hex: String = digest.as_ref().iter().map(|b| format!("{b:02x}")).collect();
    let groups = subject.iter_organization().filter_map(|o| o.as_str().ok());
    let user = User { uid: uid.to_owned(), ..User::new(name, groups) };
    Ok(Some(user.with_credential(format!("X509SHA256={hex}"))))
}

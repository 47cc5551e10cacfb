//! An authority and the certificates that it issues.

use crate::files::PkiError;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use time::{Duration, OffsetDateTime};

/// A certificate and its private key, as PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The subject of a certificate. The API server reads the user from the common name and its group from the
/// organisation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub common_name: String,
    pub organization: Option<String>,
    /// DNS names and IP addresses a server is reached by.
    pub names: Vec<String>,
}

impl Subject {
    pub fn client(user: &str, group: Option<&str>) -> Self {
        Self { common_name: user.into(), organization: group.map(Into::into), names: Vec::new() }
    }
}

/// The allowed use of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Server,
    Client,
    /// Both: members of an etcd present one certificate in either role.
    Peer,
}

/// A certificate authority that can issue.
pub struct Authority {
    identity: Identity,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// Allowance for clocks that differ a little.
pub(crate) const BACKDATE: Duration = Duration::minutes(5);
pub(crate) const CA_LIFETIME: Duration = Duration::days(3650);
/// Lifetime of issued certificates. They are renewed at start-up when less than a third is left.
pub(crate) const LIFETIME: Duration = Duration::days(365);

impl Authority {
    pub fn create(name: &str) -> Result<Self, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = distinguished_name(name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params, CA_LIFETIME);
        let certificate = params.self_signed(&key)?.pem();
        Self::from_identity(Identity { certificate, key: key.serialize_pem() })
    }

    pub fn from_identity(identity: Identity) -> Result<Self, PkiError> {
        let key = KeyPair::from_pem(&identity.key)?;
        let issuer = Issuer::from_ca_cert_pem(&identity.certificate, key)?;
        Ok(Self { identity, issuer })
    }

    /// The authority's own certificate, as PEM: the trust anchor of others.
    pub fn certificate(&self) -> &str {
        &self.identity.certificate
    }

    pub(crate) fn issuer(&self) -> &Issuer<'static, KeyPair> {
        &self.issuer
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn issue(&self, subject: &Subject, purpose: Purpose) -> Result<Identity, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::new(subject.names.clone())?;
        params.distinguished_name = distinguished_name(&subject.common_name, subject.organization.as_deref());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = match purpose {
            Purpose::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Purpose::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Purpose::Peer => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, LIFETIME);
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Identity { certificate, key: key.serialize_pem() })
    }
}

pub(crate) fn distinguished_name(common_name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common_name);
    name
}

fn set_validity(params: &mut CertificateParams, lifetime: Duration) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - BACKDATE;
    params.not_after = now + lifetime;
}

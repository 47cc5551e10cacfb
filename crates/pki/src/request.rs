//! Requests for certificates, and signing them.

use crate::authority::{Authority, Subject};
use crate::der;
use crate::files::PkiError;
use rcgen::{
    CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, SanType, SigningKey, SubjectPublicKeyInfo,
};
use std::net::IpAddr;
use time::{Duration, OffsetDateTime};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

/// The contents of a certificate signing request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    /// The addresses of IP it names.
    pub addresses: Vec<IpAddr>,
    /// True if it names anything else: mail addresses, URIs.
    pub other_names: bool,
}

impl Request {
    /// Reads a PEM. None when it is no request, or has a name, an organisation or an address that others might read and
    /// we cannot.
    pub fn parse(pem: &[u8]) -> Option<Self> {
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        let subject = &request.certification_request_info.subject;
        let names: Vec<&str> =
            subject.iter_common_name().map(|name| name.as_str().ok()).collect::<Option<_>>()?;
        let mut parsed = Self {
            // As Go and the API server read a subject: of several names, the last counts.
            common_name: names.last().copied().unwrap_or_default().to_owned(),
            organizations: subject
                .iter_organization()
                .map(|o| o.as_str().ok().map(Into::into))
                .collect::<Option<_>>()?,
            ..Self::default()
        };
        for extension in request.requested_extensions().into_iter().flatten() {
            let ParsedExtension::SubjectAlternativeName(names) = extension else { continue };
            for name in &names.general_names {
                match name {
                    GeneralName::DNSName(name) => parsed.dns_names.push((*name).to_owned()),
                    GeneralName::IPAddress(bytes) => parsed.addresses.push(address(bytes)?),
                    _ => parsed.other_names = true,
                }
            }
        }
        Some(parsed)
    }
}

/// A request for a certificate, and the key that it is for.
pub struct NewRequest {
    /// The request, as PEM.
    pub request: String,
    /// The key, as PEM. It stays with the requester.
    pub key: String,
}

impl std::fmt::Debug for NewRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("NewRequest").field("request", &self.request).finish_non_exhaustive()
    }
}

impl NewRequest {
    /// Makes a key and a request for this subject.
    pub fn new(subject: &Subject) -> Result<Self, PkiError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::new(subject.names.clone())?;
        params.distinguished_name =
            crate::authority::distinguished_name(&subject.common_name, subject.organization.as_deref());
        Ok(Self { request: params.serialize_request(&key)?.pem()?, key: key.serialize_pem() })
    }
}

impl Authority {
    /// Signs a request for the usages named as the API names them. The certificate has the request's subject as
    /// [`Request::parse`] reads it and its alternative names; nothing else of the request is taken over. It ends after `seconds`, and never
    /// after the authority's own would be trusted for longer than a year.
    pub fn sign(&self, pem: &str, usages: &[String], seconds: u64) -> Result<String, PkiError> {
        let bad = || PkiError::Pem { what: "the request".into() };
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| bad())?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).map_err(|_| bad())?;
        request.verify_signature().map_err(|_| bad())?;
        let info = &request.certification_request_info;
        let mut params = CertificateParams::default();
        // The subject is put in afterwards: the library for certificates supports one organisation only.
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = alternative_names(&request)?;
        params.is_ca = IsCa::NoCa;
        params.key_usages = usages.iter().filter_map(|usage| key_usage(usage)).collect();
        params.extended_key_usages = usages.iter().filter_map(|usage| extended(usage)).collect();
        params.use_authority_key_identifier_extension = true;
        let now = OffsetDateTime::now_utc();
        params.not_before = now - crate::authority::BACKDATE;
        params.not_after = now
            + Duration::seconds(i64::try_from(seconds).unwrap_or(i64::MAX))
                .min(crate::authority::CA_LIFETIME);
        let key = SubjectPublicKeyInfo::from_der(info.subject_pki.raw)?;
        let certificate = params.signed_by(&key, self.issuer())?;
        let signer = |message: &[u8]| self.issuer().key().sign(message);
        let subject = certified_subject(&info.subject).ok_or_else(bad)?;
        let signed = der::with_subject(certificate.der(), &subject, signer).ok_or_else(bad)??;
        Ok(der::to_pem("CERTIFICATE", &signed))
    }
}

/// The attributes of a subject that are certified, in Go's order: the last part of their object identifiers, which begin
/// with 2.5.4, and true for those that may have several values.
const CERTIFIED: [(u8, bool); 9] = [
    (6, true),  // country
    (10, true), // organization
    (11, true), // organizational unit
    (7, true),  // locality
    (8, true),  // province
    (9, true),  // street address
    (17, true), // postal code
    (3, false), // common name
    (5, false), // serial number
];

/// A subject written anew, as upstream's signers do. A certificate must not have a second name beside the one that was
/// checked, nor attributes that nobody checks. None if a value cannot be read.
fn certified_subject(subject: &X509Name<'_>) -> Option<Vec<u8>> {
    let mut sets = Vec::new();
    for (kind, several) in CERTIFIED {
        let oid = [0x55, 4, kind];
        let values = subject.iter_attributes().filter(|attribute| attribute.attr_type().as_bytes() == oid);
        let values: Vec<&str> = values.map(|value| value.as_str().ok()).collect::<Option<_>>()?;
        let from = if several { 0 } else { values.len().saturating_sub(1) };
        let set: Vec<u8> = values[from..].iter().flat_map(|value| der::attribute(&oid, value)).collect();
        if !set.is_empty() {
            sets.extend(der::element(der::SET, &set));
        }
    }
    Some(der::element(der::SEQUENCE, &sets))
}

fn alternative_names(request: &X509CertificationRequest<'_>) -> Result<Vec<SanType>, PkiError> {
    let bad = || PkiError::Pem { what: "an alternative name of the request".into() };
    let mut found = Vec::new();
    for extension in request.requested_extensions().into_iter().flatten() {
        let ParsedExtension::SubjectAlternativeName(names) = extension else { continue };
        for name in &names.general_names {
            found.push(match name {
                GeneralName::DNSName(name) => SanType::DnsName((*name).try_into()?),
                GeneralName::RFC822Name(name) => SanType::Rfc822Name((*name).try_into()?),
                GeneralName::URI(name) => SanType::URI((*name).try_into()?),
                GeneralName::IPAddress(bytes) => SanType::IpAddress(address(bytes).ok_or_else(bad)?),
                _ => return Err(bad()),
            });
        }
    }
    Ok(found)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from).ok();
    let v6 = || <[u8; 16]>::try_from(bytes).map(IpAddr::from).ok();
    v4().or_else(v6)
}

fn key_usage(usage: &str) -> Option<KeyUsagePurpose> {
    Some(match usage {
        "signing" | "digital signature" => KeyUsagePurpose::DigitalSignature,
        "content commitment" => KeyUsagePurpose::ContentCommitment,
        "key encipherment" => KeyUsagePurpose::KeyEncipherment,
        "key agreement" => KeyUsagePurpose::KeyAgreement,
        "data encipherment" => KeyUsagePurpose::DataEncipherment,
        "cert sign" => KeyUsagePurpose::KeyCertSign,
        "crl sign" => KeyUsagePurpose::CrlSign,
        "encipher only" => KeyUsagePurpose::EncipherOnly,
        "decipher only" => KeyUsagePurpose::DecipherOnly,
        _ => return None,
    })
}

fn extended(usage: &str) -> Option<ExtendedKeyUsagePurpose> {
    Some(match usage {
        "client auth" => ExtendedKeyUsagePurpose::ClientAuth,
        "server auth" => ExtendedKeyUsagePurpose::ServerAuth,
        "any" => ExtendedKeyUsagePurpose::Any,
        "code signing" => ExtendedKeyUsagePurpose::CodeSigning,
        "email protection" | "s/mime" => ExtendedKeyUsagePurpose::EmailProtection,
        "timestamping" => ExtendedKeyUsagePurpose::TimeStamping,
        "ocsp signing" => ExtendedKeyUsagePurpose::OcspSigning,
        "ipsec end system" => ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1, 5, 5, 7, 3, 5]),
        "ipsec tunnel" => ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1, 5, 5, 7, 3, 6]),
        "ipsec user" => ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1, 5, 5, 7, 3, 7]),
        "microsoft sgc" => ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1, 4, 1, 311, 10, 3, 3]),
        "netscape sgc" => ExtendedKeyUsagePurpose::Other(vec![2, 16, 840, 1, 113_730, 4, 1]),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{DnType, KeyPair};

    fn request(names: &[&str]) -> String {
        let mut params =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, "system:node:n");
        let key = KeyPair::generate().unwrap();
        params.serialize_request(&key).unwrap().pem().unwrap()
    }

    #[test]
    fn a_request_is_read_and_signed() {
        let pem = request(&["n.example", "10.0.0.1"]);
        let parsed = Request::parse(pem.as_bytes()).unwrap();
        assert_eq!(parsed.common_name, "system:node:n");
        assert_eq!(parsed.organizations, ["system:nodes"]);
        assert_eq!((parsed.dns_names.len(), parsed.addresses.len(), parsed.other_names), (1, 1, false));
        let authority = Authority::create("kubernetes").unwrap();
        let usages = ["digital signature".to_owned(), "server auth".to_owned()];
        let certificate = authority.sign(&pem, &usages, 3600).unwrap();
        let (_, certificate) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).unwrap();
        let certificate = certificate.parse_x509().unwrap();
        let lifetime =
            certificate.validity().not_after.timestamp() - OffsetDateTime::now_utc().unix_timestamp();
        assert!((3590..=3600).contains(&lifetime), "{lifetime}");
        assert!(certificate.extended_key_usage().unwrap().unwrap().value.server_auth);
        assert!(!certificate.is_ca());
        // Usages of any signer; none makes an authority.
        let usages = ["cert sign", "crl sign", "code signing", "ipsec user"].map(str::to_owned);
        let other = authority.sign(&pem, &usages, 3600).unwrap();
        let (_, other) = x509_parser::pem::parse_x509_pem(other.as_bytes()).unwrap();
        let other = other.parse_x509().unwrap();
        let (usage, extended) =
            (other.key_usage().unwrap().unwrap(), other.extended_key_usage().unwrap().unwrap());
        assert!(usage.value.crl_sign() && usage.value.key_cert_sign() && extended.value.code_signing);
        assert_eq!(extended.value.other.len(), 1);
        assert!(!other.is_ca());
        let usages = ["server auth".to_owned()];
        assert!(authority.sign("nonsense", &usages, 1).is_err());
        assert!(Request::parse(b"nonsense").is_none());
    }

    #[test]
    fn every_organisation_is_kept() {
        let authority = Authority::create("kubernetes").unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["fd00::1".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "alice");
        let plain = params.serialize_request(&key).unwrap();
        let set = |groups: &[&str]| {
            let groups: Vec<u8> =
                groups.iter().flat_map(|group| der::attribute(&[0x55, 4, 10], group)).collect();
            der::element(0x31, &groups)
        };
        let user = der::element(0x31, &der::attribute(&[0x55, 4, 3], "alice"));
        // One set of several, as Go writes them, and several sets of one.
        for sets in
            [vec![set(&["devs", "ops", "night"])], vec![set(&["devs"]), set(&["ops"]), set(&["night"])]]
        {
            let subject = der::element(0x30, &[sets.concat(), user.clone()].concat());
            let signer = |message: &[u8]| key.sign(message);
            let request = der::with_request_subject(plain.der(), &subject, signer).unwrap().unwrap();
            let pem = der::to_pem("CERTIFICATE REQUEST", &request);
            assert_eq!(Request::parse(pem.as_bytes()).unwrap().organizations, ["devs", "ops", "night"]);
            let signed = authority.sign(&pem, &["client auth".to_owned()], 3600).unwrap();
            let (_, signed) = x509_parser::pem::parse_x509_pem(signed.as_bytes()).unwrap();
            let signed = signed.parse_x509().unwrap();
            let certified: Vec<&str> =
                signed.subject().iter_organization().map(|o| o.as_str().unwrap()).collect();
            assert_eq!(certified, ["devs", "ops", "night"]);
            let (_, ca) = x509_parser::pem::parse_x509_pem(authority.certificate().as_bytes()).unwrap();
            let ca = ca.parse_x509().unwrap();
            assert!(signed.verify_signature(Some(ca.public_key())).is_ok());
            assert_eq!(signed.issuer(), ca.subject());
            // A request that was changed after it was signed is none.
            let mut changed = request.clone();
            let at = changed.windows(4).position(|w| w == b"devs").unwrap();
            changed[at] = b'D';
            assert!(authority.sign(&der::to_pem("CERTIFICATE REQUEST", &changed), &[], 1).is_err());
        }
        // A subject with an empty set is odd, but no reason to fall over.
        let odd = der::element(0x30, &der::element(0x31, &[]));
        let request = der::with_request_subject(plain.der(), &odd, |m: &[u8]| key.sign(m)).unwrap().unwrap();
        let _ = authority.sign(&der::to_pem("CERTIFICATE REQUEST", &request), &[], 1);
    }

    /// A request whose subject is these sets of attributes.
    fn with_subject(sets: &[Vec<u8>]) -> String {
        let key = KeyPair::generate().unwrap();
        let plain = CertificateParams::default().serialize_request(&key).unwrap();
        let sets: Vec<u8> = sets.iter().flat_map(|set| der::element(0x31, set)).collect();
        let subject = der::element(0x30, &sets);
        let request = der::with_request_subject(plain.der(), &subject, |m: &[u8]| key.sign(m));
        der::to_pem("CERTIFICATE REQUEST", &request.unwrap().unwrap())
    }

    #[test]
    fn the_name_that_is_checked_is_the_one_that_is_certified() {
        const COMMON_NAME: &[u8] = &[0x55, 4, 3];
        const ORGANIZATION: &[u8] = &[0x55, 4, 10];
        // 1.3.6.1.4.1.57683.2, the UID of a user.
        const UID: &[u8] = &[0x2b, 6, 1, 4, 1, 0x83, 0xc2, 0x53, 2];
        let name = |name: &str| der::attribute(COMMON_NAME, name);
        let nodes = der::attribute(ORGANIZATION, "system:nodes");
        let authority = Authority::create("kubernetes").unwrap();
        for sets in [
            vec![nodes.clone(), name("system:node:n"), name("system:kube-controller-manager")],
            vec![nodes.clone(), [name("system:node:n"), name("system:kube-controller-manager")].concat()],
            vec![
                name("system:node:n"),
                nodes,
                der::attribute(UID, "u"),
                name("system:kube-controller-manager"),
            ],
        ] {
            let pem = with_subject(&sets);
            // As Go reads it.
            assert_eq!(Request::parse(pem.as_bytes()).unwrap().common_name, "system:kube-controller-manager");
            let signed = authority.sign(&pem, &["client auth".to_owned()], 3600).unwrap();
            let (_, signed) = x509_parser::pem::parse_x509_pem(signed.as_bytes()).unwrap();
            let signed = signed.parse_x509().unwrap();
            let subject: Vec<&str> =
                signed.subject().iter_attributes().map(|attribute| attribute.as_str().unwrap()).collect();
            assert_eq!(subject, ["system:nodes", "system:kube-controller-manager"]);
        }
        // A name that cannot be read could be one that others read.
        let bitmap = [der::element(6, COMMON_NAME), der::element(0x1e, &[0, b'a'])].concat();
        let unreadable = with_subject(&[der::element(0x30, &bitmap), name("system:node:n")]);
        assert!(Request::parse(unreadable.as_bytes()).is_none());
        assert!(authority.sign(&unreadable, &[], 1).is_err());
    }
}

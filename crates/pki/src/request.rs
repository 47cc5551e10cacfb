//! Requests for certificates, and signing them.

use crate::authority::Authority;
use crate::files::PkiError;
use rcgen::{CertificateSigningRequestParams, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
use time::{Duration, OffsetDateTime};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

/// What a request wants certified.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    /// How many addresses of IP it names.
    pub addresses: usize,
    /// Whether it names anything else: mail addresses, URIs.
    pub other_names: bool,
}

impl Request {
    /// Reads a PEM. None when it is no request.
    pub fn parse(pem: &[u8]) -> Option<Self> {
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        let subject = &request.certification_request_info.subject;
        let mut parsed = Self {
            common_name: subject.iter_common_name().find_map(|n| n.as_str().ok()).unwrap_or_default().into(),
            organizations: subject
                .iter_organization()
                .filter_map(|o| o.as_str().ok())
                .map(Into::into)
                .collect(),
            ..Self::default()
        };
        for extension in request.requested_extensions().into_iter().flatten() {
            let ParsedExtension::SubjectAlternativeName(names) = extension else { continue };
            for name in &names.general_names {
                match name {
                    GeneralName::DNSName(name) => parsed.dns_names.push((*name).to_owned()),
                    GeneralName::IPAddress(_) => parsed.addresses += 1,
                    _ => parsed.other_names = true,
                }
            }
        }
        Some(parsed)
    }
}

impl Authority {
    /// Signs a request for the usages named as the API names them. The certificate ends after `seconds`, and
    /// never after the authority's own would be trusted for longer than a year.
    pub fn sign(&self, pem: &str, usages: &[String], seconds: u64) -> Result<String, PkiError> {
        let mut request = CertificateSigningRequestParams::from_pem(pem)?;
        let params = &mut request.params;
        params.is_ca = IsCa::NoCa;
        params.key_usages = usages.iter().filter_map(|usage| key_usage(usage)).collect();
        params.extended_key_usages = usages.iter().filter_map(|usage| extended(usage)).collect();
        params.use_authority_key_identifier_extension = true;
        let now = OffsetDateTime::now_utc();
        params.not_before = now - crate::authority::BACKDATE;
        params.not_after = now
            + Duration::seconds(i64::try_from(seconds).unwrap_or(i64::MAX)).min(crate::authority::LIFETIME);
        Ok(request.signed_by(self.issuer())?.pem())
    }
}

fn key_usage(usage: &str) -> Option<KeyUsagePurpose> {
    Some(match usage {
        "signing" | "digital signature" => KeyUsagePurpose::DigitalSignature,
        "content commitment" => KeyUsagePurpose::ContentCommitment,
        "key encipherment" => KeyUsagePurpose::KeyEncipherment,
        "key agreement" => KeyUsagePurpose::KeyAgreement,
        "data encipherment" => KeyUsagePurpose::DataEncipherment,
        _ => return None,
    })
}

fn extended(usage: &str) -> Option<ExtendedKeyUsagePurpose> {
    Some(match usage {
        "client auth" => ExtendedKeyUsagePurpose::ClientAuth,
        "server auth" => ExtendedKeyUsagePurpose::ServerAuth,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

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
        assert_eq!((parsed.dns_names.len(), parsed.addresses, parsed.other_names), (1, 1, false));
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
        assert!(authority.sign("nonsense", &usages, 1).is_err());
        assert!(Request::parse(b"nonsense").is_none());
    }
}

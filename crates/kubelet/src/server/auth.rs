//! Who is calling.

use ferrite_pki::{ClientAuthorities, ClientCertificate};
use rustls::pki_types::CertificateDer;
use std::time::SystemTime;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The group that may do everything.
const MASTERS: &str = "system:masters";

/// The subject of a verified client certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub name: String,
    pub groups: Vec<String>,
}

/// A caller whose certificate was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    identity: Identity,
    certificate: ClientCertificate,
}

impl Caller {
    /// Verifies the certificates that a caller presented in the handshake, which proves no more than that the caller
    /// has the key. None when they prove no identity.
    pub(crate) fn of(
        presented: &[CertificateDer<'_>],
        authorities: &ClientAuthorities,
        now: SystemTime,
    ) -> Option<Self> {
        let certificate = authorities.verify(presented, now).ok()?;
        Some(Self { identity: Identity::of(presented.first()?)?, certificate })
    }

    /// The caller's identity, until the certificate expires.
    pub(crate) fn identity(&self, now: SystemTime) -> Option<&Identity> {
        self.certificate.is_valid_at(now).then_some(&self.identity)
    }
}

impl Identity {
    fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let subject = parsed.subject();
        let name = subject.iter_common_name().last()?.as_str().ok()?.to_string();
        let groups =
            subject.iter_organization().filter_map(|o| o.as_str().ok()).map(str::to_string).collect();
        (!name.is_empty()).then_some(Self { name, groups })
    }

    pub(crate) fn may_use(&self, names: &[String]) -> bool {
        self.groups.iter().any(|g| g == MASTERS) || names.contains(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_trusted_are_let_in() {
        let names = ["kube-apiserver-kubelet-client".to_string()];
        for (name, groups, allowed) in [
            ("kube-apiserver-kubelet-client", vec![], true),
            ("admin", vec!["system:masters"], true),
            ("admin", vec!["developers"], false),
            ("system:node:a", vec!["system:nodes"], false),
            ("system:masters", vec![], false),
        ] {
            let identity =
                Identity { name: name.into(), groups: groups.iter().map(|g| g.to_string()).collect() };
            assert_eq!(identity.may_use(&names), allowed, "{name}");
        }
    }

    #[test]
    fn garbage_is_nobody() {
        assert_eq!(Identity::of(&CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])), None);
    }
}

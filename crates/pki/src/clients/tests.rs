use super::ClientCertificateError::*;
use super::*;
use crate::{Authority, Identity, Purpose, Subject, server_config};
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DnType, ExtendedKeyUsagePurpose, GeneralSubtree,
    IsCa, Issuer, KeyPair, NameConstraints, PKCS_ECDSA_P256_SHA256, SigningKey,
};
use rustls::{ClientConfig, ClientConnection, ServerConnection};
use std::sync::Arc;
use time::OffsetDateTime;

type Der = CertificateDer<'static>;

fn params(name: &str, change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - time::Duration::hours(1), now + time::Duration::hours(1));
    change(&mut params);
    params
}

fn authority(params: &mut CertificateParams) {
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
}

fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()
}

/// A root, an issuer for it, and its verifier.
struct Root {
    issuer: Issuer<'static, KeyPair>,
    certificate: Der,
    clients: ClientAuthorities,
}

impl Root {
    fn new(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let params = params("root", |p| {
            authority(p);
            change(p);
        });
        let key = key();
        let certificate = params.self_signed(&key).unwrap();
        let clients = ClientAuthorities::from_pem(&certificate.pem()).unwrap();
        Self { certificate: certificate.der().clone(), issuer: Issuer::new(params, key), clients }
    }

    fn leaf(&self, change: impl FnOnce(&mut CertificateParams)) -> Der {
        params("alice", change).signed_by(&key(), &self.issuer).unwrap().der().clone()
    }

    fn version_1(&self) -> (Der, KeyPair) {
        let key = key();
        let plain = params("alice", |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth])
            .signed_by(&key, &self.issuer)
            .unwrap();
        let old = der::as_version_1(plain.der(), |m: &[u8]| self.issuer.key().sign(m)).unwrap().unwrap();
        (Der::from(old), key)
    }

    fn verify(&self, chain: &[Der]) -> Result<(), ClientCertificateError> {
        self.clients.verify(chain, SystemTime::now()).map(drop)
    }
}

fn hours(count: i64) -> OffsetDateTime {
    OffsetDateTime::now_utc() + time::Duration::hours(count)
}

#[test]
fn a_certificate_is_verified_by_upstreams_rules() {
    use ExtendedKeyUsagePurpose::{Any, ClientAuth, ServerAuth};
    let root = Root::new(|_| {});
    type Change = fn(&mut CertificateParams);
    let unknown = |critical| {
        let mut extension = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        extension.set_criticality(critical);
        vec![extension]
    };
    let rows: [(&str, Change, Result<(), ClientCertificateError>); 8] = [
        ("no usage", |_| {}, Ok(())),
        ("for clients", |p| p.extended_key_usages = vec![ServerAuth, ClientAuth], Ok(())),
        ("for anything", |p| p.extended_key_usages = vec![Any], Ok(())),
        ("for servers", |p| p.extended_key_usages = vec![ServerAuth], Err(Usage)),
        ("expired", |p| (p.not_before, p.not_after) = (hours(-3), hours(-2)), Err(OutOfTime)),
        ("too early", |p| (p.not_before, p.not_after) = (hours(2), hours(3)), Err(OutOfTime)),
        ("an authority itself", authority, Ok(())),
        (
            "with names",
            |p| p.subject_alt_names = vec![rcgen::SanType::DnsName("a.b".try_into().unwrap())],
            Ok(()),
        ),
    ];
    for (row, change, expected) in rows {
        assert_eq!(root.verify(&[root.leaf(change)]), expected, "{row}");
    }
    assert_eq!(root.verify(&[root.leaf(|p| p.custom_extensions = unknown(false))]), Ok(()));
    let critical = root.leaf(|p| p.custom_extensions = unknown(true));
    assert_eq!(root.verify(&[critical]), Err(CriticalExtension));
    assert_eq!(root.verify(std::slice::from_ref(&root.certificate)), Ok(()), "a root speaks for itself");
    assert_eq!(root.verify(&[]), Err(Malformed));
    let stranger = Root::new(|_| {});
    assert_eq!(root.verify(&[stranger.leaf(|_| {})]), Err(UnknownAuthority), "the same name, another key");
    let sent_along = [stranger.leaf(|_| {}), stranger.certificate.clone()];
    assert_eq!(root.verify(&sent_along), Err(UnknownAuthority), "a client brings no authority of its own");
    let old = Root::new(|p| (p.not_before, p.not_after) = (hours(-3), hours(-2)));
    assert_eq!(old.verify(&[old.leaf(|_| {})]), Err(OutOfTime), "an authority has its time, too");
}

#[test]
fn a_certificate_of_version_1_is_verified() {
    let root = Root::new(|_| {});
    let (old, _) = root.version_1();
    assert_eq!(X509Certificate::from_der(&old).unwrap().1.version(), X509Version::V1);
    assert_eq!(root.verify(std::slice::from_ref(&old)), Ok(()));
    assert_eq!(Root::new(|_| {}).verify(&[old]), Err(UnknownAuthority));
}

#[test]
fn chains_pass_through_authorities_only() {
    let root = Root::new(|_| {});
    let link = |change: fn(&mut CertificateParams)| {
        let (params, key) = (params("middle", change), key());
        let der = params.signed_by(&key, &root.issuer).unwrap().der().clone();
        (der, Issuer::new(params, key))
    };
    let under = |issuer: &Issuer<'_, KeyPair>| {
        params("alice", |_| {}).signed_by(&key(), issuer).unwrap().der().clone()
    };
    let (der, issuer) = link(authority);
    let leaf = under(&issuer);
    assert_eq!(root.verify(&[leaf.clone(), der.clone()]), Ok(()));
    assert_eq!(root.verify(std::slice::from_ref(&leaf)), Err(UnknownAuthority), "a link is missing");
    // Any certificate of the authority would do as an authority otherwise.
    let (der, issuer) = link(|_| {});
    assert_eq!(root.verify(&[under(&issuer), der]), Err(UnknownAuthority));
    let (der, issuer) = link(|p| {
        authority(p);
        p.key_usages = vec![rcgen::KeyUsagePurpose::DigitalSignature];
    });
    assert_eq!(root.verify(&[under(&issuer), der]), Err(UnknownAuthority));
    let (der, issuer) = link(|p| {
        authority(p);
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    assert_eq!(root.verify(&[under(&issuer), der]), Err(Usage));
    let (der, issuer) = link(|p| {
        authority(p);
        (p.not_before, p.not_after) = (hours(-3), hours(-2));
    });
    assert_eq!(root.verify(&[under(&issuer), der]), Err(OutOfTime));

    let short = Root::new(|p| p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let (middle, middle_key) = (params("middle", authority), key());
    let der = middle.signed_by(&middle_key, &short.issuer).unwrap().der().clone();
    assert_eq!(short.verify(&[under(&Issuer::new(middle, middle_key)), der]), Err(UnknownAuthority));
    assert_eq!(short.verify(&[short.leaf(|_| {})]), Ok(()));
}

#[test]
fn constraints_on_names_refuse_certificates_with_names() {
    let root = Root::new(|p| {
        let permitted_subtrees = vec![GeneralSubtree::DnsName("a.test".into())];
        p.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() });
    });
    assert_eq!(root.verify(&[root.leaf(|_| {})]), Ok(()));
    let named =
        root.leaf(|p| p.subject_alt_names = vec![rcgen::SanType::DnsName("b.test".try_into().unwrap())]);
    assert_eq!(root.verify(&[named]), Err(UnknownAuthority));
}

#[test]
fn a_certificate_outlives_no_link_of_its_chain() {
    let root = Root::new(|_| {});
    let leaf = root.leaf(|p| p.not_after = hours(5));
    let verified = root.clients.verify(&[leaf], SystemTime::now()).unwrap();
    assert!(verified.is_valid_at(SystemTime::now()));
    assert!(!verified.is_valid_at(SystemTime::now() + Duration::from_secs(2 * 3600)), "the root ends before");
}

#[test]
fn the_search_is_bounded() {
    let root = Root::new(|_| {});
    assert_eq!(root.verify(&vec![root.leaf(|_| {}); MAX_CERTIFICATES + 1]), Err(TooComplex));
    // Keys of one name that all sign each other: there are as many chains as orders of the keys.
    let keys: Vec<KeyPair> = (0..4).map(|_| key()).collect();
    let issuer = |i: usize| {
        Issuer::new(params("middle", authority), KeyPair::from_pem(&keys[i].serialize_pem()).unwrap())
    };
    let mut chain = vec![params("alice", |_| {}).signed_by(&key(), &issuer(0)).unwrap().der().clone()];
    for (i, key) in keys.iter().enumerate() {
        for j in (0..4).filter(|j| *j != i) {
            chain.push(params("middle", authority).signed_by(key, &issuer(j)).unwrap().der().clone());
        }
    }
    assert_eq!(root.verify(&chain), Err(TooComplex));
}

#[test]
fn damaged_certificates_are_refused() {
    let root = Root::new(|_| {});
    let good = root.leaf(|p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    assert_eq!(root.verify(std::slice::from_ref(&good)), Ok(()));
    for at in 0..good.len() {
        let mut bytes = good.to_vec();
        bytes[at] ^= 1;
        assert!(root.verify(&[Der::from(bytes)]).is_err(), "byte {at}");
        assert!(root.verify(&[Der::from(good[..at].to_vec())]).is_err(), "{at} bytes");
    }
    let trailing = [good.as_ref(), &[0]].concat();
    assert_eq!(root.verify(&[Der::from(trailing)]), Err(Malformed));
    let huge = root.leaf(|p| {
        p.custom_extensions = vec![CustomExtension::from_oid_content(&[1, 2, 3], vec![0; 1 << 20])];
    });
    assert_eq!(root.verify(&[huge]), Ok(()), "the handshake bounds the size");
    assert_eq!(root.verify(&[good, Der::from(vec![0x30, 3, 1, 2, 3])]), Err(Malformed));
}

/// Does a handshake in memory; the certificates that the server received.
fn handshake(client: ClientConfig, server: &crate::ServerTls) -> Result<Vec<Der>, rustls::Error> {
    let mut client = ClientConnection::new(Arc::new(client), "localhost".try_into().unwrap()).unwrap();
    let mut server = ServerConnection::new(Arc::clone(&server.config)).unwrap();
    let mut wire = Vec::new();
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() {
        wire.clear();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        let mut rest = wire.as_slice();
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets()?;
        }
        wire.clear();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        let mut rest = wire.as_slice();
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets()?;
        }
    }
    Ok(server.peer_certificates().unwrap_or_default().iter().map(|c| c.clone().into_owned()).collect())
}

#[test]
fn a_handshake_accepts_any_certificate_whose_key_the_client_has() {
    let ours = Authority::create("ours").unwrap();
    let subject = Subject { common_name: "s".into(), organization: None, names: vec!["localhost".into()] };
    let server =
        server_config(&ours.issue(&subject, Purpose::Server).unwrap(), ours.certificate(), &[]).unwrap();
    let foreign =
        Authority::create("theirs").unwrap().issue(&Subject::client("a", None), Purpose::Client).unwrap();
    let (old, old_key) = Root::new(|_| {}).version_1();
    let old = Identity { certificate: der::to_pem("CERTIFICATE", &old), key: old_key.serialize_pem() };
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let with = |identity: Option<&Identity>, proves: bool| {
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_protocol_versions(&[version])
                .unwrap();
            let mut roots = rustls::RootCertStore::empty();
            roots.add(Der::from_pem_slice(ours.certificate().as_bytes()).unwrap()).unwrap();
            let builder = builder.with_root_certificates(roots);
            let Some(identity) = identity else { return builder.with_no_client_auth() };
            let chain = vec![Der::from_pem_slice(identity.certificate.as_bytes()).unwrap()];
            let key = if proves { identity.key.clone() } else { key().serialize_pem() };
            let key = rustls_pki_types::PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            let key = ring::default_provider().key_provider.load_private_key(key).unwrap();
            let certified = rustls::sign::CertifiedKey::new(chain, key);
            builder.with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)))
        };
        assert_eq!(handshake(with(None, true), &server).unwrap().len(), 0);
        for identity in [&foreign, &old] {
            let received = handshake(with(Some(identity), true), &server).unwrap();
            assert_eq!(received.len(), 1);
            assert_eq!(server.clients.verify(&received, SystemTime::now()), Err(UnknownAuthority));
            handshake(with(Some(identity), false), &server)
                .expect_err("the client has not the certificate's key");
        }
    }
}

use super::*;
use ferrite_json::json;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};

#[test]
fn a_spec_names_all_that_it_is_for() {
    let (request, _) = signed_request();
    let spec = json!({
        "signerName": "example.com/signer", "podName": "p", "podUID": "1", "serviceAccountName": "s",
        "serviceAccountUID": "2", "nodeName": "n", "nodeUID": "3", "maxExpirationSeconds": 86400,
        "stubPKCS10Request": request,
    });
    let kubernetes = json!("kubernetes.io/signer");
    let long = "a".repeat(129);
    for (changes, expected) in [
        (json!({}), vec![]),
        (json!({"signerName": ""}), vec!["spec.signerName: Required value"]),
        (json!({"podUID": ""}), vec![r#"spec.podUID: Invalid value: "": must not be empty"#]),
        (json!({"nodeUID": long}), vec!["spec.nodeUID: Too long: may not be more than 128 bytes"]),
        (
            json!({"maxExpirationSeconds": 3599}),
            vec!["spec.maxExpirationSeconds: Invalid value: 3599: must be in the range [3600, 7862400]"],
        ),
        (
            json!({"maxExpirationSeconds": 86401, "signerName": kubernetes}),
            vec!["spec.maxExpirationSeconds: Invalid value: 86401: must be in the range [3600, 86400]"],
        ),
        (
            json!({"maxExpirationSeconds": null}),
            vec!["spec.maxExpirationSeconds: Required value: must be set"],
        ),
        (
            json!({"unverifiedUserAnnotations": {"plain": "x", "example.com/Key": "y"}}),
            vec![
                r#"spec.unverifiedUserAnnotations: Invalid value: "plain": must be a domain-prefixed key (such as "acme.io/foo")"#,
            ],
        ),
        (
            json!({"stubPKCS10Request": STANDARD.encode("nonsense")}),
            vec!["spec.stubPKCS10Request: Invalid value: must be a valid PKCS#10 CSR"],
        ),
        (
            json!({"stubPKCS10Request": null}),
            vec![
                "spec: Invalid value: exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set",
            ],
        ),
        (
            json!({"pkixPublicKey": "AAAA"}),
            vec![
                "spec: Invalid value: exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set",
            ],
        ),
    ] {
        let mut changed = spec.clone();
        for (key, value) in changes.as_object().unwrap() {
            changed[key.as_str()] = value.clone();
        }
        let errors = validate_spec(&changed, &Path::new("spec"));
        assert_eq!(errors.iter().map(ToString::to_string).collect::<Vec<_>>(), expected, "{changes}");
    }
}

/// The DER of an element.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut der = match length {
        0..=0x7f => vec![tag, length as u8],
        0x80..=0xff => vec![tag, 0x81, length as u8],
        _ => vec![tag, 0x82, (length >> 8) as u8, length as u8],
    };
    der.extend_from_slice(content);
    der
}

/// The DER of a public key: an algorithm, and the bits of the key.
fn public_key(algorithm: &[u8], key: &[u8]) -> Vec<u8> {
    let bits = element(3, &[&[0], key].concat());
    element(0x30, &[element(0x30, algorithm), bits].concat())
}

const ED25519_ALGORITHM: [u8; 5] = [6, 3, 0x2b, 0x65, 0x70];

/// A request as a kubelet makes it, with its key: empty but for the key.
fn signed_request() -> (String, Vec<u8>) {
    let pair =
        Ed25519KeyPair::from_pkcs8(Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap().as_ref());
    let pair = pair.unwrap();
    let key = public_key(&ED25519_ALGORITHM, pair.public_key().as_ref());
    let info =
        element(0x30, &[element(2, &[0]), element(0x30, &[]), key.clone(), element(0xa0, &[])].concat());
    let signature = element(3, &[&[0], pair.sign(&info).as_ref()].concat());
    let request = element(0x30, &[info, element(0x30, &ED25519_ALGORITHM), signature].concat());
    (STANDARD.encode(request), key)
}

#[test]
fn a_request_must_be_signed_with_its_own_key() {
    let path = Path::new("r");
    let (request, _) = signed_request();
    let mut request = STANDARD.decode(request).unwrap();
    assert_eq!(validate_request(&request, &path), None);
    *request.last_mut().unwrap() ^= 1;
    let error = validate_request(&request, &path).unwrap();
    assert_eq!(error.to_string(), "r: Invalid value: invalid signature");
    let error = validate_request(&[0x30; KEY_MAX + 1], &path).unwrap();
    assert_eq!(error.to_string(), "r: Too long: may not be more than 10240 bytes");
}

#[test]
fn the_older_form_proves_its_key_with_the_uid_of_the_pod() {
    const P384: [u8; 16] = [6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 6, 5, 0x2b, 0x81, 4, 0, 0x22];
    let random = SystemRandom::new();
    let pair = Ed25519KeyPair::from_pkcs8(Ed25519KeyPair::generate_pkcs8(&random).unwrap().as_ref()).unwrap();
    let der = public_key(&ED25519_ALGORITHM, pair.public_key().as_ref());
    let check = |der: &[u8], uid: &str, proof: &[u8]| {
        let spec = json!({"podUID": uid, "pkixPublicKey": STANDARD.encode(der)});
        validate_public_key(&spec, der, proof, &Path::new("spec")).map(|error| error.to_string())
    };
    let refused = Some(
        "spec.proofOfPossession: Invalid value: could not verify proof-of-possession signature".to_owned(),
    );
    assert_eq!(check(&der, "uid", pair.sign(b"uid").as_ref()), None);
    assert_eq!(check(&der, "other", pair.sign(b"uid").as_ref()), refused, "a proof of another pod");
    // A P-384 key with a signature of the wrong hash.
    let algorithm = &ECDSA_P384_SHA384_ASN1_SIGNING;
    let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).unwrap();
    let der = public_key(&P384, pair.public_key().as_ref());
    assert!(matches!(Key::parse(&der), Some(Key::Ecdsa { curve: "P-384", .. })));
    assert_eq!(check(&der, "uid", pair.sign(&random, b"uid").unwrap().as_ref()), refused);
}

#[test]
fn weak_and_unknown_keys_are_refused() {
    let path = Path::new("k");
    let rsa = |bits: usize| Key::Rsa { modulus: vec![0xff; bits / 8], exponent: vec![1, 0, 1] };
    let ecdsa = |curve| Key::Ecdsa { curve, point: vec![4] };
    for (key, expected) in [
        (rsa(3072), None),
        (rsa(4096), None),
        (
            rsa(2048),
            Some(r#"k: Invalid value: "2048-bit modulus": RSA keys must have modulus size 3072 or 4096"#),
        ),
        (ecdsa("P-256"), None),
        (ecdsa("P-521"), None),
        (
            ecdsa("P-224"),
            Some(
                r#"k: Invalid value: "curve P-224": elliptic public keys must use curve P256, P384, or P521"#,
            ),
        ),
        (
            Key::Other,
            Some("k: Invalid value: unknown public key type; supported types are Ed25519, ECDSA, and RSA"),
        ),
    ] {
        let error = validate_strength(&key, &path, "P256, P384, or P521").map(|error| error.to_string());
        assert_eq!(error.as_deref(), expected, "{key:?}");
    }
}

#[test]
fn a_request_never_changes_and_starts_without_a_status() {
    let strategy = PodCertificateRequests;
    let mut object = json!({"spec": {"podName": "p"}, "status": {"certificateChain": "forged"}});
    strategy.default(&mut object);
    strategy.prepare_create(&mut object);
    assert_eq!(object["spec"]["maxExpirationSeconds"], 86400);
    assert!(!present(&object["status"], "certificateChain"), "{object}");
    let mut changed = object.clone();
    changed["spec"]["podName"] = "other".into();
    assert_eq!(strategy.validate_update(&changed, &object).len(), 1);
    // The status subresource takes nothing of the spec.
    strategy.prepare_status_update(&mut changed, &object);
    assert_eq!(changed["spec"]["podName"], "p");
}

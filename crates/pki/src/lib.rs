//! Certificates and keys of a cluster: authorities, serving and client certificates, and the rustls
//! configurations made from them.
//!
//! Everything lives as PEM files in one directory with upstream's names (`ca.crt`, `apiserver.key`, …), so that
//! usual tools read them and a certificate made elsewhere can be put in place of ours.

mod authority;
mod clients;
mod der;
mod detached;
mod files;
mod request;
mod sealed;
mod stub_request;
mod system;
mod tls;
mod token;

pub use authority::{Authority, Identity, Purpose, Subject};
pub use clients::{ClientAuthorities, ClientCertificate, ClientCertificateError};
pub use detached::detached_signature;
pub use files::{ClusterPki, NodePki, PkiError, SharedKeys, pinned_authority, public_key_hash};
pub use request::{NewRequest, Request};
pub use sealed::{SealError, SealKey};
pub use stub_request::{StubRequest, StubRequestError};
pub use system::system_authorities;
pub use tls::{
    Handshake, NamedIdentity, ServerTls, anonymous_server_config, client_config, mutual_server_config,
    server_config, server_config_with, unverified_client_config, unverified_client_config_as,
};
pub use token::{KeyError, LEGACY_ISSUER, TokenSigner, VerifyingKey};

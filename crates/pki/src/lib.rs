//! Certificates and keys: authorities, serving and client certificates, renewal.

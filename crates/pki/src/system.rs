//! The authorities that the machine trusts.

use std::path::{Path, PathBuf};

/// Files in which systems keep them.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The file with the authorities that the system trusts; `None` if there is none.
pub fn system_authorities() -> Option<PathBuf> {
    BUNDLES.iter().map(Path::new).find(|path| path.is_file()).map(Path::to_owned)
}

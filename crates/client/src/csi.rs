//! Names shared by the attach-detach controller, kubelets and CSI drivers: those of attachments and of
//! volumes.

use k8s_openapi::api::storage::v1::CSIDriver;
use ring::digest::{SHA256, digest};

/// The plugin of every CSI volume.
pub const PLUGIN: &str = "kubernetes.io/csi";

/// The name of the VolumeAttachment of a volume on a node.
pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", sha256_hex(&[handle, driver, node]))
}

/// True for a name that [`attachment_name`] makes. An attachment with another name was made by somebody else.
pub fn is_attachment_name(name: &str) -> bool {
    let digest = name.strip_prefix("csi-").unwrap_or_default();
    digest.len() == 64 && digest.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The handle of a volume that is written into a pod.
pub fn inline_handle(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", sha256_hex(&[pod_uid, volume]))
}

/// The name of a volume in a node's `volumesAttached` and `volumesInUse`.
pub fn unique_name(driver: &str, handle: &str) -> String {
    format!("{PLUGIN}/{driver}^{handle}")
}

/// The driver and the handle of a unique name.
pub fn parse_unique_name(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(PLUGIN)?.strip_prefix('/')?.split_once('^')
}

/// Returns true if volumes of the driver are attached before a node mounts them. A driver without an object
/// requires it.
pub fn attach_required(driver: Option<&CSIDriver>) -> bool {
    driver.is_none_or(|driver| driver.spec.attach_required != Some(false))
}

/// The SHA-256 of the parts, one after the other, in hexadecimal.
pub fn sha256_hex(parts: &[&str]) -> String {
    let hash = digest(&SHA256, parts.concat().as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_upstreams() {
        assert_eq!(
            attachment_name("vol1", "driver", "node"),
            format!("csi-{}", sha256_hex(&["vol1drivernode"]))
        );
        assert!(is_attachment_name(&attachment_name("vol1", "driver", "node")));
        for other in ["va-1", "csi-", "csi-abc", &format!("csi-{}", "G".repeat(64))] {
            assert!(!is_attachment_name(other), "{other}");
        }
        assert_eq!(sha256_hex(&["abc"]), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(unique_name("d.example.com", "h^1"), "kubernetes.io/csi/d.example.com^h^1");
        assert_eq!(parse_unique_name("kubernetes.io/csi/d^h^1"), Some(("d", "h^1")));
        assert_eq!(parse_unique_name("kubernetes.io/host-path/x"), None);
    }
}

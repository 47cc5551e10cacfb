//! The version of Kubernetes whose API this is.

/// Every component that says a Kubernetes version says this one.
pub const KUBERNETES_VERSION: &str = "v1.36.4";

/// The user agent of probes, which names the version without its patch level.
pub const PROBE_USER_AGENT: &str = "kube-probe/1.36";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_name_the_same_version() {
        let minor = PROBE_USER_AGENT.strip_prefix("kube-probe/").unwrap();
        assert!(KUBERNETES_VERSION.starts_with(&format!("v{minor}.")), "{minor}");
    }
}

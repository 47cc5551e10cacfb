//! Versions that are going: since when they are deprecated, and when they are gone.

/// Group and version, the kinds (all of the version if there are none), the release that deprecates them, the release
/// that has them no more, and the version that replaces them, if one is named.
type Deprecation =
    (&'static str, &'static str, &'static [&'static str], &'static str, &'static str, &'static str);

const DEPRECATIONS: &[Deprecation] = &[
    ("admissionregistration.k8s.io", "v1alpha1", &[], "1.35", "1.38", ""),
    ("certificates.k8s.io", "v1alpha1", &[], "1.34", "1.37", ""),
    ("coordination.k8s.io", "v1alpha2", &[], "1.35", "1.38", ""),
    ("coordination.k8s.io", "v1beta1", &[], "1.36", "1.39", ""),
    ("networking.k8s.io", "v1beta1", &[], "1.34", "1.37", ""),
    ("resource.k8s.io", "v1alpha3", &["DeviceTaintRule"], "1.36", "1.39", ""),
    ("resource.k8s.io", "v1beta1", &[], "1.35", "1.38", ""),
    (
        "resource.k8s.io",
        "v1beta2",
        &["DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice"],
        "1.36",
        "1.39",
        "",
    ),
    ("storage.k8s.io", "v1beta1", &[], "1.34", "1.37", "v1"),
];

/// The warning that each use of a deprecated version brings.
pub fn deprecation(group: &str, version: &str, kind: &str) -> Option<String> {
    let row = DEPRECATIONS
        .iter()
        .find(|row| row.0 == group && row.1 == version && (row.2.is_empty() || row.2.contains(&kind)))?;
    let (since, until, replacement) = (row.3, row.4, row.5);
    let warning = format!("{group}/{version} {kind} is deprecated in v{since}+, unavailable in v{until}+");
    Some(match replacement {
        "" => warning,
        other => format!("{warning}; use {group}/{other} {kind}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_say_when_they_go() {
        for (group, version, kind, told) in [
            (
                "coordination.k8s.io",
                "v1beta1",
                "LeaseCandidate",
                "coordination.k8s.io/v1beta1 LeaseCandidate is deprecated in v1.36+, unavailable in v1.39+",
            ),
            (
                "storage.k8s.io",
                "v1beta1",
                "VolumeAttributesClass",
                "storage.k8s.io/v1beta1 VolumeAttributesClass is deprecated in v1.34+, unavailable in v1.37+; use storage.k8s.io/v1 VolumeAttributesClass",
            ),
            ("resource.k8s.io", "v1beta2", "DeviceTaintRule", ""),
            ("certificates.k8s.io", "v1beta1", "ClusterTrustBundle", ""),
            ("apps", "v1", "Deployment", ""),
        ] {
            assert_eq!(
                deprecation(group, version, kind).unwrap_or_default(),
                told,
                "{group}/{version} {kind}"
            );
        }
    }
}

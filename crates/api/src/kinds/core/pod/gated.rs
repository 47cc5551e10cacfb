//! Fields of a pod's spec whose features can be turned off.

use crate::kinds::common::access::{list, list_mut, object_mut, remove};
use ferrite_json::Value;

/// Sources of projected volumes, and their feature gates.
const SOURCES: [(&str, &str); 2] =
    [("clusterTrustBundle", "ClusterTrustBundleProjection"), ("podCertificate", "PodCertificateRequest")];

/// Drops the fields of features that are off. As upstream, a spec that already used a feature keeps it.
pub fn drop_disabled(spec: &mut Value, old: Option<&Value>, is_on: impl Fn(&str) -> bool) {
    for (source, gate) in SOURCES {
        if is_on(gate) || old.is_some_and(|old| uses(old, source)) {
            continue;
        }
        for volume in list_mut(spec, "volumes") {
            let Some(projected) = object_mut(volume, "projected") else { continue };
            for part in list_mut(projected, "sources") {
                remove(part, source);
            }
        }
    }
}

fn uses(spec: &Value, source: &str) -> bool {
    let projected = list(spec, "volumes").iter().map(|volume| &volume["projected"]);
    projected.flat_map(|projected| list(projected, "sources")).any(|part| part[source].is_object())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_feature_that_is_off_loses_its_field_unless_the_object_has_it() {
        let spec = |sources: Value| json!({"volumes": [{"name": "v", "projected": {"sources": sources}}, {"name": "e"}]});
        let both = json!([{"clusterTrustBundle": {"path": "a"}}, {"podCertificate": {"keyType": "ED25519"}}]);
        let bundle = json!([{"clusterTrustBundle": {"path": "a"}}, {}]);
        let certificate = json!([{}, {"podCertificate": {"keyType": "ED25519"}}]);
        for (on, old, expected) in [
            (&[][..], None, json!([{}, {}])),
            (&["ClusterTrustBundleProjection"], None, bundle.clone()),
            (&["ClusterTrustBundle"], None, json!([{}, {}])),
            (&["PodCertificateRequest"], None, certificate.clone()),
            (&["ClusterTrustBundleProjection", "PodCertificateRequest"], None, both.clone()),
            (&[], Some(spec(certificate.clone())), certificate),
            (&[], Some(spec(json!([{"secret": {}}]))), json!([{}, {}])),
        ] {
            let mut new = spec(both.clone());
            drop_disabled(&mut new, old.as_ref(), |gate| on.contains(&gate));
            assert_eq!(new, spec(expected), "{on:?} {old:?}");
        }
    }
}

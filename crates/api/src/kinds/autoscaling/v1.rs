//! HorizontalPodAutoscalers as the older version has them: only the use of cpu is a metric of its own.

use super::convert::{ANNOTATIONS, from_v2, to_v2};
use super::v2;
use crate::kinds::common::access::{default_field, ensure_object};
use crate::kinds::common::converted::Converted;
use crate::resource::Storage;
use ferrite_json::Value;

pub(in crate::kinds) const STORAGE: Storage = Storage {
    group: "autoscaling",
    version: "v2",
    kind: "HorizontalPodAutoscaler",
    plural: "horizontalpodautoscalers",
    to_storage: to_v2,
    from_storage: from_v2,
};

pub(in crate::kinds) fn strategy() -> Converted<v2::HorizontalPodAutoscalers> {
    Converted { inner: v2::HorizontalPodAutoscalers, storage: STORAGE, default, hidden: &ANNOTATIONS }
}

fn default(object: &mut Value) {
    default_field(ensure_object(object, "spec"), "minReplicas", 1);
}

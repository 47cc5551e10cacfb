//! Limits of huge pages, for each size of page that the kernel has: who asks for none may use none.

use crate::container::resources::requests;
use crate::pod::model;
use crate::quantity;
use ferrite_cgroup::HugePages;
use ferrite_cri::v1::HugepageLimit;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

const RESOURCE: &str = "hugepages-";

/// The sizes of huge pages of this machine's kernel, in bytes.
pub(crate) fn sizes() -> &'static [i64] {
    static SIZES: LazyLock<Vec<i64>> = LazyLock::new(|| {
        let pools = crate::node::hugepages(Path::new("/sys/kernel/mm/hugepages"));
        pools.iter().filter_map(|(size, _)| quantity::value(&Quantity(size.clone()))).collect()
    });
    &SIZES
}

/// A size of pages as the kernel writes it: `2MB`.
fn unit(mut size: i64) -> String {
    let mut units = ["B", "KB", "MB", "GB", "TB", "PB"].iter();
    let mut unit = units.next();
    while size >= 1024 && size % 1024 == 0 {
        let Some(larger) = units.next() else { break };
        unit = Some(larger);
        size /= 1024;
    }
    format!("{size}{}", unit.unwrap_or(&"B"))
}

/// Bytes of huge pages by the size of a page.
fn amounts<'a>(list: impl Iterator<Item = (&'a String, i64)>) -> BTreeMap<i64, i64> {
    let amounts = list.filter_map(|(name, amount)| {
        let size = quantity::value(&Quantity(name.strip_prefix(RESOURCE)?.to_owned()))?;
        Some((size, amount.max(0)))
    });
    amounts.collect()
}

fn of_list(list: Option<&BTreeMap<String, Quantity>>) -> BTreeMap<i64, i64> {
    amounts(list.into_iter().flatten().filter_map(|(name, q)| Some((name, quantity::value(q)?))))
}

/// The limits of a container: its own, else the pod's.
pub(super) fn of_container(pod: &Pod, container: &Container, sizes: &[i64]) -> Vec<HugepageLimit> {
    let of_pod = model::spec(pod).resources.as_ref();
    let mut limits = of_list(of_pod.and_then(|r| r.limits.as_ref()));
    limits.extend(of_list(container.resources.as_ref().and_then(|r| r.limits.as_ref())));
    let limit = |size: &i64| HugepageLimit {
        page_size: unit(*size),
        limit: limits.get(size).and_then(|limit| u64::try_from(*limit).ok()).unwrap_or(0),
    };
    sizes.iter().map(limit).collect()
}

/// The limits of the pod's group: the requests of the pod, or of all its containers together.
pub(crate) fn of_pod(pod: &Pod, sizes: &[i64]) -> Vec<HugePages> {
    let mut asked = amounts(requests(pod).iter().map(|(name, amount)| (name, *amount)));
    asked.extend(of_list(model::spec(pod).resources.as_ref().and_then(|r| r.requests.as_ref())));
    for (size, amount) in of_list(model::spec(pod).overhead.as_ref()) {
        let sum = asked.entry(size).or_default();
        *sum = sum.saturating_add(amount);
    }
    let limit = |size: &i64| HugePages { size: unit(*size), limit: asked.get(size).copied().unwrap_or(0) };
    sizes.iter().map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    const SIZES: [i64; 2] = [2 << 20, 1 << 30];

    #[test]
    fn sizes_have_the_kernels_names() {
        for (size, name) in [(2 << 20, "2MB"), (1 << 30, "1GB"), (64 << 10, "64KB"), (1000, "1000B")] {
            assert_eq!(unit(size), name);
        }
    }

    #[test]
    fn every_size_has_a_limit() {
        let resources = |pages: Value| json!({"requests": pages, "limits": pages});
        for (of_pod_, containers, pod_limits, first_limits) in [
            (json!({}), vec![json!({})], [0, 0], [0, 0]),
            (json!({}), vec![json!({"hugepages-2Mi": "4Mi"})], [4 << 20, 0], [4 << 20, 0]),
            // The same size in another spelling.
            (json!({}), vec![json!({"hugepages-2048Ki": "4Mi"})], [4 << 20, 0], [4 << 20, 0]),
            (
                json!({}),
                vec![
                    json!({"hugepages-2Mi": "4Mi"}),
                    json!({"hugepages-2Mi": "2Mi", "hugepages-1Gi": "1Gi"}),
                ],
                [6 << 20, 1 << 30],
                [4 << 20, 0],
            ),
            // A size that the machine lacks.
            (json!({}), vec![json!({"hugepages-16Mi": "16Mi"})], [0, 0], [0, 0]),
            (json!({"hugepages-2Mi": "8Mi"}), vec![json!({})], [8 << 20, 0], [8 << 20, 0]),
            (
                json!({"hugepages-2Mi": "8Mi"}),
                vec![json!({"hugepages-2Mi": "2Mi"})],
                [8 << 20, 0],
                [2 << 20, 0],
            ),
        ] {
            let containers: Vec<Value> = containers
                .into_iter()
                .map(|pages| json!({"name": "c", "resources": resources(pages)}))
                .collect();
            let spec = json!({"resources": resources(of_pod_), "containers": containers});
            let pod: Pod = ferrite_json::from_value(json!({"spec": spec})).unwrap();
            let found: Vec<(String, i64)> =
                of_pod(&pod, &SIZES).into_iter().map(|limit| (limit.size, limit.limit)).collect();
            assert_eq!(
                found,
                [("2MB".to_owned(), pod_limits[0]), ("1GB".to_owned(), pod_limits[1])],
                "{spec}"
            );
            let first = &model::spec(&pod).containers[0];
            let found: Vec<u64> = of_container(&pod, first, &SIZES).iter().map(|limit| limit.limit).collect();
            assert_eq!(found, first_limits, "{spec}");
        }
    }
}

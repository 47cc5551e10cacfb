//! Short names for content: equal content with equal collision counts has equal names.

use k8s_openapi::api::core::v1::PodTemplateSpec;

/// Letters and digits that cannot spell a word or be mistaken for one another.
pub(crate) const SAFE: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// The name of a pod template. A higher collision count gives another name to the same template.
pub(crate) fn template_hash(template: &PodTemplateSpec, collisions: Option<i32>) -> String {
    // Fields are written in the order of their declaration and maps are sorted, so the text is stable.
    let mut text = ferrite_json::to_vec(template).unwrap_or_default();
    if let Some(collisions) = collisions {
        text.extend(collisions.to_le_bytes());
    }
    content_hash(&text)
}

/// The name of any content.
pub(crate) fn content_hash(content: &[u8]) -> String {
    let hash = content
        .iter()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    hash.to_string().bytes().map(|digit| char::from(SAFE[usize::from(digit) % SAFE.len()])).collect()
}

//! Image names.

/// The name with a tag: `latest` when it names neither tag nor digest. Nothing when it is not an image name.
pub(crate) fn with_tag(image: &str) -> Option<String> {
    let (name, digest) = match image.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (image, None),
    };
    if let Some(digest) = digest {
        let (algorithm, hex) = digest.split_once(':')?;
        let hex_ok = hex.len() >= 32 && hex.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase());
        if algorithm.is_empty() || !hex_ok {
            return None;
        }
    }
    let (repository, tag) = split_tag(name);
    if let Some(tag) = tag
        && (tag.is_empty()
            || tag.len() > 128
            || tag.starts_with(['.', '-'])
            || !tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-')))
    {
        return None;
    }
    let (host, path) = split_host(repository);
    let host_ok = host.is_none_or(|h| {
        !h.is_empty()
            && h.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b':' | b'[' | b']'))
    });
    if !host_ok || path.len() > 255 || !path.split('/').all(is_component) {
        return None;
    }
    Some(if tag.is_none() && digest.is_none() { format!("{image}:latest") } else { image.to_string() })
}

/// The name without tag and digest. Nothing when it is not an image name.
pub(crate) fn repository(image: &str) -> Option<&str> {
    with_tag(image)?;
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    Some(split_tag(name).0)
}

fn split_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, Some(tag)),
        _ => (name, None),
    }
}

/// The registry's host, when the first part of the name is one.
fn split_host(repository: &str) -> (Option<&str>, &str) {
    match repository.split_once('/') {
        Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => (Some(first), rest),
        _ => (None, repository),
    }
}

fn is_component(part: &str) -> bool {
    !part.is_empty()
        && part
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-'))
        && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        && part.ends_with(|c: char| c.is_ascii_alphanumeric())
}

/// Host and path, as credentials are matched: the default registry and its library are made explicit.
pub(crate) fn registry_path(image: &str) -> (String, String) {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    let (repository, _) = split_tag(name);
    match split_host(repository) {
        (Some(host), path) => (host.to_string(), path.to_string()),
        (None, path) if path.contains('/') => ("docker.io".into(), path.to_string()),
        (None, path) => ("docker.io".into(), format!("library/{path}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_get_their_tag() {
        let digest = format!("a/b@sha256:{}", "0".repeat(64));
        for (image, expected) in [
            ("busybox", Some("busybox:latest")),
            ("busybox:1.36", Some("busybox:1.36")),
            ("localhost:5000/x/y", Some("localhost:5000/x/y:latest")),
            ("localhost:5000/x:1", Some("localhost:5000/x:1")),
            (digest.as_str(), Some(digest.as_str())),
            ("", None),
            ("UPPER", None),
            ("a b", None),
            ("a:", None),
            ("a//b", None),
            ("a@sha256:xyz", None),
        ] {
            assert_eq!(with_tag(image).as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn names_without_tag_and_digest() {
        let digest = format!("a/b:1@sha256:{}", "0".repeat(64));
        for (image, expected) in [
            ("busybox", Some("busybox")),
            ("busybox:1.36", Some("busybox")),
            ("localhost:5000/x", Some("localhost:5000/x")),
            ("localhost:5000/x:1", Some("localhost:5000/x")),
            (digest.as_str(), Some("a/b")),
            ("NOT VALID", None),
        ] {
            assert_eq!(repository(image), expected, "{image}");
        }
    }

    #[test]
    fn registries() {
        for (image, host, path) in [
            ("busybox:1", "docker.io", "library/busybox"),
            ("me/app", "docker.io", "me/app"),
            ("quay.io/a/b:1", "quay.io", "a/b"),
            ("localhost:5000/x@sha256:0", "localhost:5000", "x"),
        ] {
            assert_eq!(registry_path(image), (host.to_string(), path.to_string()));
        }
    }
}

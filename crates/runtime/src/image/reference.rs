//! Image references, normalised as Docker does.

use std::fmt;
use std::str::FromStr;

use super::{Digest, ImageError};

const DEFAULT_REGISTRY: &str = "docker.io";
/// Names under this registry belong to the program itself.
const BUILT_IN_REGISTRY: &str = "ferrite.local";

/// A complete reference: registry, repository and tag or digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    version: Version,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Version {
    Tag(String),
    /// A tag beside a digest is dropped: the digest alone says which image is meant.
    Digest(Digest),
}

impl Reference {
    /// The registry's host, and port if there is one: `docker.io` when the text names none.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository within the registry: `library/nginx`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, unless the reference is by digest.
    pub fn tag(&self) -> Option<&str> {
        match &self.version {
            Version::Tag(tag) => Some(tag),
            Version::Digest(_) => None,
        }
    }

    /// The digest, if the reference has one.
    pub fn digest(&self) -> Option<&Digest> {
        match &self.version {
            Version::Tag(_) => None,
            Version::Digest(digest) => Some(digest),
        }
    }

    /// Registry and repository: the common part of repo tags and repo digests.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The same repository at `digest`.
    pub fn at_digest(&self, digest: Digest) -> Self {
        Self { version: Version::Digest(digest), ..self.clone() }
    }

    /// Returns true if the image is built in and exists on no registry.
    pub fn is_built_in(&self) -> bool {
        self.registry == BUILT_IN_REGISTRY
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Version::Tag(tag) => write!(f, "{}/{}:{tag}", self.registry, self.repository),
            Version::Digest(digest) => write!(f, "{}/{}@{digest}", self.registry, self.repository),
        }
    }
}

impl FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let fail = |why| ImageError::BadReference { reference: text.chars().take(256).collect(), why };
        if text.len() > 1024 {
            return Err(fail("too long"));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                (rest, Some(digest.parse::<Digest>().map_err(|_| fail("the digest is not a sha256 digest"))?))
            }
            None => (text, None),
        };
        // A colon after the last slash starts a tag; before it, a port.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        if name.is_empty() {
            return Err(fail("it has no name"));
        }
        if digest.is_none() && tag.is_none() && Digest::from_hex(name).is_some() {
            return Err(fail("64 hexadecimal digits are an image id, not a name"));
        }
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(fail(
                "a tag is up to 128 letters, digits, '_', '.' or '-' and begins with none of the last two",
            ));
        }
        let (registry, repository) = split_registry(name);
        if !is_registry(registry) {
            return Err(fail("the registry is not a host name with an optional port"));
        }
        let repository = match (registry, repository.contains('/')) {
            (DEFAULT_REGISTRY, false) => format!("library/{repository}"),
            _ => repository.to_owned(),
        };
        if repository.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(fail("the repository name must be lower case"));
        }
        if repository.len() + registry.len() > 255 || !repository.split('/').all(is_component) {
            return Err(fail(
                "the repository name may have lower-case letters and digits, with single '.', '_', '__' or any '-' between",
            ));
        }
        let version = match (digest, tag) {
            (Some(digest), _) => Version::Digest(digest),
            (None, tag) => Version::Tag(tag.unwrap_or("latest").to_owned()),
        };
        Ok(Self { registry: registry.to_owned(), repository, version })
    }
}

/// The part before the first slash is a registry only if it looks like a host.
fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some(("index.docker.io", rest)) => (DEFAULT_REGISTRY, rest),
        Some((first, rest))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            (first, rest)
        }
        _ => (DEFAULT_REGISTRY, name),
    }
}

fn is_registry(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            match rest {
                "" => return true,
                rest => ("ipv6", rest.strip_prefix(':')),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => return is_host(text),
        },
    };
    is_host(host) && port.is_some_and(|port| port.parse::<u16>().is_ok() && !port.starts_with('+'))
}

fn is_host(text: &str) -> bool {
    !text.is_empty()
        && text.split('.').all(|label| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        })
}

fn is_tag(text: &str) -> bool {
    (1..=128).contains(&text.len())
        && !text.starts_with(['.', '-'])
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn is_component(text: &str) -> bool {
    let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else { return false };
    alphanumeric(first)
        && alphanumeric(last)
        && bytes
            .split(alphanumeric)
            .all(|between| matches!(between, b"" | b"." | b"_" | b"__") || between.iter().all(|b| *b == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised() {
        let hex = "0".repeat(64);
        for (text, want) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("nginx:1.27", "docker.io/library/nginx:1.27"),
            ("docker.io/nginx", "docker.io/library/nginx:latest"),
            ("index.docker.io/library/nginx", "docker.io/library/nginx:latest"),
            ("bitnami/redis", "docker.io/bitnami/redis:latest"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("localhost/x", "localhost/x:latest"),
            ("localhost:5000/x/y:z", "localhost:5000/x/y:z"),
            ("127.0.0.1:5000/x", "127.0.0.1:5000/x:latest"),
            ("[::1]:5000/x", "[::1]:5000/x:latest"),
            ("a__b/c-.d", ""),
            ("a__b/c--d_e.f", "docker.io/a__b/c--d_e.f:latest"),
            ("ferrite.local/tools", "ferrite.local/tools:latest"),
            (&format!("nginx@sha256:{hex}"), &format!("docker.io/library/nginx@sha256:{hex}")),
            (&format!("nginx:1@sha256:{hex}"), &format!("docker.io/library/nginx@sha256:{hex}")),
            (&hex, ""),
            ("", ""),
            (":tag", ""),
            ("nginx:", ""),
            ("nginx:-x", ""),
            ("nginx@sha256:12", ""),
            ("Nginx", ""),
            ("host.example/Upper", ""),
            ("a/../b", ""),
            ("a//b", ""),
            ("/a", ""),
            ("a/", ""),
            ("-host.example/x", ""),
            ("host.example:port/x", ""),
            ("a b", ""),
            (&"x".repeat(300), ""),
        ] {
            match text.parse::<Reference>() {
                Ok(reference) => {
                    assert_eq!(reference.to_string(), want, "{text}");
                    assert_eq!(want.parse::<Reference>().unwrap(), reference, "{text}: stable");
                }
                Err(error) => assert_eq!(want, "", "{text}: {error}"),
            }
        }
    }

    #[test]
    fn built_in() {
        assert!("ferrite.local/tools".parse::<Reference>().unwrap().is_built_in());
        assert!(!"example.com/ferrite.local/tools".parse::<Reference>().unwrap().is_built_in());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,80}") {
            if let Ok(reference) = text.parse::<Reference>() {
                proptest::prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
            }
        }
    }
}

//! Which name means which image: one small file, rewritten as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::content::write_atomic;
use super::{Digest, ImageError, Reference};

/// One image, by the digest of its configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredImage {
    /// The manifest the configuration came with; absent for archives without one.
    pub(crate) manifest: Option<Digest>,
    /// Base first.
    pub(crate) chain_ids: Vec<Digest>,
    /// The blobs its layers came in, base first; only where they are kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) archives: Vec<Digest>,
    #[serde(default)]
    pub(crate) repo_tags: BTreeSet<String>,
    #[serde(default)]
    pub(crate) repo_digests: BTreeSet<String>,
    pub(crate) size: u64,
    /// Kept whatever garbage collection says.
    #[serde(default)]
    pub(crate) pinned: bool,
    /// For a built-in image: a fingerprint of the file it was made from.
    #[serde(default)]
    pub(crate) stamp: Option<String>,
}

/// All images of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) images: BTreeMap<Digest, StoredImage>,
}

impl Index {
    pub(crate) fn load(path: &Path) -> Result<Self, ImageError> {
        match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| ImageError::invalid(format!("image index {}", path.display()), error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(ImageError::io("read image index", path)(error)),
        }
    }

    pub(crate) fn save(&self, path: &Path) -> Result<(), ImageError> {
        let bytes =
            serde_json::to_vec_pretty(self).map_err(|error| ImageError::invalid("image index", error))?;
        write_atomic(path, &bytes)
    }

    /// Adds an image, or the names of one that is there. A name leaves the image that had it before.
    pub(crate) fn add(&mut self, id: Digest, mut image: StoredImage) {
        for other in self.images.values_mut() {
            other.repo_tags.retain(|tag| !image.repo_tags.contains(tag));
        }
        if let Some(known) = self.images.remove(&id) {
            image.repo_tags.extend(known.repo_tags);
            image.repo_digests.extend(known.repo_digests);
            image.pinned |= known.pinned;
            image.manifest = image.manifest.or(known.manifest);
            if image.archives.is_empty() {
                image.archives = known.archives;
            }
        }
        self.images.insert(id, image);
    }

    /// The image a text means: an id (with or without `sha256:`, possibly shortened to a unique prefix
    /// of at least 12 digits), or a reference.
    pub(crate) fn resolve(&self, text: &str) -> Result<Option<Digest>, ImageError> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        if let Some(id) = Digest::from_hex(hex) {
            return Ok(self.images.contains_key(&id).then_some(id));
        }
        // A shortened id also reads as a name (`sha256` with a tag, or a repository); names go first.
        let reference = text.parse::<Reference>()?;
        let name = reference.to_string();
        let found = self.images.iter().find(|(_, image)| match reference.digest() {
            // A digest names the same bytes in every repository, but a name is only ours if we know it.
            Some(_) => image.repo_digests.contains(&name),
            None => image.repo_tags.contains(&name),
        });
        Ok(found.map(|(id, _)| id.clone()).or_else(|| self.by_prefix(hex)))
    }

    fn by_prefix(&self, hex: &str) -> Option<Digest> {
        if hex.len() < 12 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let mut matching = self.images.keys().filter(|id| id.hex().starts_with(hex));
        matching.next().filter(|_| matching.next().is_none()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(tags: &[&str], digests: &[&str]) -> StoredImage {
        StoredImage {
            manifest: None,
            chain_ids: vec![],
            archives: vec![],
            repo_tags: tags.iter().map(|t| (*t).to_owned()).collect(),
            repo_digests: digests.iter().map(|t| (*t).to_owned()).collect(),
            size: 1,
            pinned: false,
            stamp: None,
        }
    }

    #[test]
    fn names_move_and_resolve() {
        let mut index = Index::default();
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let by_digest = format!("docker.io/library/x@{}", Digest::of(b"m"));
        index.add(a.clone(), image(&["docker.io/library/x:latest", "docker.io/library/x:1"], &[&by_digest]));
        index.add(b.clone(), image(&["docker.io/library/x:latest"], &[]));
        let rows: Vec<(String, Option<&Digest>)> = vec![
            ("x".into(), Some(&b)),
            ("docker.io/library/x:1".into(), Some(&a)),
            ("x:2".into(), None),
            (format!("x@{}", Digest::of(b"m")), Some(&a)),
            (format!("y@{}", Digest::of(b"m")), None),
            (a.to_string(), Some(&a)),
            (a.hex(), Some(&a)),
            (a.hex()[..12].into(), Some(&a)),
            (format!("sha256:{}", &b.hex()[..20]), Some(&b)),
            (a.hex()[..11].into(), None),
            (Digest::of(b"c").to_string(), None),
        ];
        for (text, want) in rows {
            assert_eq!(index.resolve(&text).unwrap().as_ref(), want, "{text}");
        }
        assert!(index.resolve("not a name").is_err());
        index.add(a.clone(), image(&["docker.io/library/y:latest"], &[]));
        assert_eq!(index.images[&a].repo_tags.len(), 2, "names gather");
    }
}

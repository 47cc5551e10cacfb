//! Images from archives: those of `docker save`, and OCI layouts.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

use oci_spec::image::{Descriptor, ImageIndex};
use serde::Deserialize;

use super::digest::chain_ids;
use super::extract::LimitedReader;
use super::layer::decompress;
use super::pull::blocking;
use super::store::{MAX_METADATA, NewImage, parse_config, parse_manifest};
use super::tar_reader::{Kind, TarReader, read_error};
use super::{Digest, ImageError, ImageStore, Platform, Progress, ProgressEvent, Reference};

const MAX_FILES: usize = 100_000;
const MAX_LINKS: usize = 16;

/// An image in a `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

/// The files of an archive, each already a blob.
#[derive(Default)]
struct Files {
    blobs: HashMap<String, Digest>,
    links: HashMap<String, String>,
}

/// An image found in an archive.
struct Found {
    manifest: Option<Digest>,
    config: Digest,
    layers: Vec<Digest>,
    names: Vec<Reference>,
}

impl ImageStore {
    /// Takes the images out of an archive, plain or compressed, written by `docker save` or in the OCI
    /// layout. Returns their names; an image without one is named by its id.
    pub async fn import(
        self: &Arc<Self>,
        archive: impl Read + Send + 'static,
        progress: Progress,
    ) -> Result<Vec<String>, ImageError> {
        let store = Arc::clone(self);
        blocking(move || store.import_blocking(archive, &Platform::host(), &progress)).await
    }

    /// [`import`](Self::import) on the calling thread, for `platform`.
    pub fn import_blocking(
        self: &Arc<Self>,
        archive: impl Read,
        platform: &Platform,
        progress: &Progress,
    ) -> Result<Vec<String>, ImageError> {
        // Blobs come before anybody knows which of them belong to an image.
        let hold = self.hold();
        let files = self.read_archive(archive)?;
        let imported = self.import_files(&files, platform, progress);
        let blobs: Vec<Digest> = files.blobs.into_values().collect();
        drop(hold);
        self.discard(&blobs, self.lease([]))?;
        imported
    }

    fn import_files(
        self: &Arc<Self>,
        files: &Files,
        platform: &Platform,
        progress: &Progress,
    ) -> Result<Vec<String>, ImageError> {
        let found = match (files.get("manifest.json"), files.get("index.json")) {
            (Some(manifest), _) => self.saved_images(files, &manifest)?,
            (None, Some(index)) => self.layout_images(files, &index, platform)?,
            (None, None) => {
                return Err(ImageError::invalid(
                    "image archive",
                    "it has neither manifest.json nor index.json",
                ));
            }
        };
        let mut names = Vec::new();
        for image in found {
            self.check_names(&image.names)?;
            let tags: Vec<String> = image.names.iter().map(Reference::to_string).collect();
            match tags.is_empty() {
                true => names.push(image.config.to_string()),
                false => names.extend(tags.iter().cloned()),
            }
            self.import_image(image, tags, progress)?;
        }
        Ok(names)
    }

    fn import_image(
        self: &Arc<Self>,
        image: Found,
        repo_tags: Vec<String>,
        progress: &Progress,
    ) -> Result<(), ImageError> {
        let (_, diff_ids) = parse_config(&self.content.read(&image.config, MAX_METADATA)?)?;
        if diff_ids.len() != image.layers.len() {
            let why = format!(
                "{} layers in the archive, {} in the configuration",
                image.layers.len(),
                diff_ids.len()
            );
            return Err(ImageError::invalid(format!("image {}", image.config), why));
        }
        progress(ProgressEvent::Resolved { digest: image.config.clone() });
        let chain = chain_ids(&diff_ids);
        let mut staged = Vec::new();
        for ((chain_id, diff_id), layer) in chain.iter().zip(&diff_ids).zip(&image.layers) {
            if self.layers.has(chain_id) {
                progress(ProgressEvent::Present { chain_id: chain_id.clone() });
                continue;
            }
            let layer = self.layers.stage(self.content.open_blob(layer)?, diff_id, &self.limits)?;
            progress(ProgressEvent::Unpacked { chain_id: chain_id.clone() });
            staged.push((chain_id.clone(), layer));
        }
        self.layers.commit(staged)?;
        self.record_image(NewImage {
            id: image.config,
            manifest: image.manifest,
            chain_ids: chain,
            archives: image.layers,
            repo_tags,
            repo_digests: Vec::new(),
            pinned: false,
            stamp: None,
        })
    }

    /// Puts every file of the archive into the content store.
    fn read_archive(&self, archive: impl Read) -> Result<Files, ImageError> {
        let mut reader = TarReader::new(LimitedReader::new(decompress(archive)?, self.limits.bytes));
        let mut files = Files::default();
        let mut buffer = vec![0; 256 << 10];
        while let Some(entry) = reader.next()? {
            let Some(name) = clean_name(&entry.path) else {
                return Err(ImageError::invalid("image archive", "a file name is not usable"));
            };
            match entry.kind {
                Kind::File => {
                    let mut writer = self.content.writer()?;
                    loop {
                        match reader.read(&mut buffer).map_err(read_error)? {
                            0 => break,
                            read => writer.write(&buffer[..read])?,
                        }
                    }
                    let digest = writer.commit(None)?;
                    files.blobs.insert(name, digest);
                }
                // Old `docker save` writes a layer that occurs twice as a link to its first file.
                Kind::Symlink | Kind::HardLink => {
                    let base = match entry.kind {
                        Kind::Symlink => {
                            name.rsplit_once('/').map(|(directory, _)| directory).unwrap_or_default()
                        }
                        _ => "",
                    };
                    let target = String::from_utf8_lossy(&entry.link).into_owned();
                    files.links.insert(name.clone(), join(base, &target));
                }
                _ => {}
            }
            if files.blobs.len() + files.links.len() > MAX_FILES {
                return Err(ImageError::Limit {
                    what: "number of files in an image archive",
                    limit: MAX_FILES as u64,
                });
            }
        }
        Ok(files)
    }

    fn saved_images(&self, files: &Files, manifest: &Digest) -> Result<Vec<Found>, ImageError> {
        let images: Vec<SavedImage> = self.json("manifest.json", manifest)?;
        let missing = |name: &str| ImageError::invalid("image archive", format!("{name:?} is missing"));
        images
            .into_iter()
            .map(|image| {
                let names = image.repo_tags.unwrap_or_default();
                Ok(Found {
                    manifest: None,
                    config: files.get(&image.config).ok_or_else(|| missing(&image.config))?,
                    layers: image
                        .layers
                        .unwrap_or_default()
                        .iter()
                        .map(|layer| files.get(layer).ok_or_else(|| missing(layer)))
                        .collect::<Result<_, _>>()?,
                    names: names.iter().map(|name| name.parse()).collect::<Result<_, _>>()?,
                })
            })
            .collect()
    }

    fn layout_images(
        &self,
        files: &Files,
        index: &Digest,
        platform: &Platform,
    ) -> Result<Vec<Found>, ImageError> {
        let index: ImageIndex = self.json("index.json", index)?;
        index
            .manifests()
            .iter()
            .map(|descriptor| {
                let mut digest: Digest = descriptor.digest().to_string().parse()?;
                let mut bytes = self.layout_blob(files, &digest)?;
                // One level: an image's own index of platforms.
                if let Ok(nested) = serde_json::from_slice::<ImageIndex>(&bytes) {
                    digest = platform.choose(&digest.to_string(), &nested)?;
                    bytes = self.layout_blob(files, &digest)?;
                }
                let ((config, _), layers) = parse_manifest(&bytes)?;
                self.layout_blob(files, &config)?;
                for (layer, _) in &layers {
                    files.layout(layer)?;
                }
                Ok(Found {
                    manifest: Some(digest),
                    config,
                    layers: layers.into_iter().map(|(layer, _)| layer).collect(),
                    names: layout_name(descriptor).into_iter().collect(),
                })
            })
            .collect()
    }

    fn layout_blob(&self, files: &Files, digest: &Digest) -> Result<Vec<u8>, ImageError> {
        files.layout(digest)?;
        self.content.read(digest, MAX_METADATA)
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, name: &str, digest: &Digest) -> Result<T, ImageError> {
        let bytes = self.content.read(digest, MAX_METADATA)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| ImageError::invalid(format!("image archive: {name}"), error))
    }

    /// The program's own images cannot be replaced from outside.
    fn check_names(&self, names: &[Reference]) -> Result<(), ImageError> {
        for name in names {
            let name = name.to_string();
            if self.index().images.values().any(|image| image.pinned && image.repo_tags.contains(&name)) {
                return Err(ImageError::Pinned(name));
            }
        }
        Ok(())
    }
}

impl Files {
    fn get(&self, name: &str) -> Option<Digest> {
        let mut name = join("", name);
        for _ in 0..MAX_LINKS {
            match (self.blobs.get(&name), self.links.get(&name)) {
                (Some(digest), _) => return Some(digest.clone()),
                (None, Some(target)) => name = target.clone(),
                (None, None) => return None,
            }
        }
        None
    }

    /// The file of an OCI layout's blob; its name promises its digest.
    fn layout(&self, digest: &Digest) -> Result<(), ImageError> {
        let name = format!("blobs/sha256/{}", digest.hex());
        match self.get(&name) {
            Some(actual) if actual == *digest => Ok(()),
            Some(actual) => Err(ImageError::Corrupt {
                what: format!("archive file {name}"),
                expected: digest.clone(),
                actual,
            }),
            None => Err(ImageError::invalid("image archive", format!("{name:?} is missing"))),
        }
    }
}

/// The name an OCI layout gives an image; a bare tag names nothing without a repository.
fn layout_name(descriptor: &Descriptor) -> Option<Reference> {
    let annotations = descriptor.annotations().as_ref()?;
    let full = annotations.get("io.containerd.image.name").map(String::as_str);
    let short = annotations.get("org.opencontainers.image.ref.name").map(String::as_str);
    full.or(short.filter(|name| name.contains(['/', ':'])))?.parse().ok()
}

fn clean_name(path: &[u8]) -> Option<String> {
    std::str::from_utf8(path).ok().map(|path| join("", path))
}

/// `base/path` without `.` and `..`; a path that would lead out of the archive stays at its root.
fn join(base: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

//! Export of images: the contents of a store, without opening it, and archives as `docker save` writes
//! them.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::digest::HashingReader;
use super::layer::decompress;
use super::store::{MAX_METADATA, parse_config};
use super::{Digest, ImageError, ImageRecord, ImageStore};

/// A store as it was at one moment, for looking only. Others may open and change the store meanwhile.
#[derive(Debug)]
pub struct ImageView(ImageStore);

impl ImageView {
    /// Looks at the store under `root`; an absent one is empty.
    pub fn of(root: PathBuf) -> Result<Self, ImageError> {
        ImageStore::look(root).map(Self)
    }

    /// All images whose configuration can be read.
    pub fn list(&self) -> Vec<ImageRecord> {
        let ids: Vec<Digest> = self.0.list_ids();
        ids.iter().filter_map(|id| self.0.image(&id.to_string())).collect()
    }

    /// The image a reference or an id means. Ids may be shortened as long as they fit only one image.
    pub fn find(&self, reference_or_id: &str) -> Result<Option<ImageRecord>, ImageError> {
        match self.0.status(reference_or_id) {
            Ok(Some(record)) => return Ok(Some(record)),
            Ok(None) => {}
            // A text that is no valid name may still be the beginning of an id.
            Err(ImageError::BadReference { .. }) => {}
            Err(error) => return Err(error),
        }
        let prefix = reference_or_id.strip_prefix("sha256:").unwrap_or(reference_or_id);
        if prefix.is_empty() || !prefix.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Ok(None);
        }
        let ids = self.0.list_ids();
        let mut matching = ids.iter().filter(|id| id.hex().starts_with(prefix));
        match (matching.next(), matching.next()) {
            (Some(id), None) => self.0.status(&id.to_string()),
            _ => Ok(None),
        }
    }

    /// The directories to mount for an image, topmost first.
    pub fn lower_dirs(&self, id: &Digest) -> Vec<PathBuf> {
        self.0.lower_dirs(&id.to_string())
    }

    /// An image's configuration, byte for byte.
    pub fn config_bytes(&self, id: &Digest) -> Result<Vec<u8>, ImageError> {
        self.0.content.read(id, MAX_METADATA)
    }

    /// Writes an archive of images, each with the names it is to have when loaded. Layers are written as
    /// they came, so that ids stay the same.
    pub fn save(&self, images: &[(Digest, Vec<String>)], out: impl Write) -> Result<(), ImageError> {
        let failed = |error: io::Error| ImageError::invalid("image archive", error);
        let mut archive = tar::Builder::new(out);
        let mut manifest: Vec<Value> = Vec::new();
        let mut written: HashSet<Digest> = HashSet::new();
        for (id, names) in images {
            let config = self.config_bytes(id)?;
            let (_, diff_ids) = parse_config(&config)?;
            let mut layers = Vec::new();
            for diff_id in &diff_ids {
                let name = format!("{}/layer.tar", diff_id.hex());
                if written.insert(diff_id.clone()) {
                    self.save_layer(diff_id, &name, &mut archive)?;
                }
                layers.push(name);
            }
            let name = format!("{}.json", id.hex());
            if written.insert(id.clone()) {
                append(&mut archive, &name, config.len() as u64, config.as_slice()).map_err(failed)?;
            }
            manifest.push(json!({"Config": name, "RepoTags": names, "Layers": layers}));
        }
        let text = Value::Array(manifest).to_string();
        append(&mut archive, "manifest.json", text.len() as u64, text.as_bytes()).map_err(failed)?;
        archive.into_inner().and_then(|mut out| out.flush()).map_err(failed)
    }

    fn save_layer(
        &self,
        diff_id: &Digest,
        name: &str,
        archive: &mut tar::Builder<impl Write>,
    ) -> Result<(), ImageError> {
        let blob = self.0.archive_of(diff_id)?.ok_or_else(|| {
            ImageError::invalid(format!("layer {diff_id}"), "its archive is not here: pull the image again")
        })?;
        let failed = |error: io::Error| ImageError::invalid(format!("layer {diff_id}"), error);
        // A header needs the size, and the size of an unpacked blob is known only at its end.
        let mut counted = HashingReader::new(decompress(self.0.content.open_blob(&blob)?)?);
        io::copy(&mut counted, &mut io::sink()).map_err(failed)?;
        let (actual, size) = counted.finish();
        if actual != *diff_id {
            let (what, expected) = (format!("archive of layer {diff_id}"), diff_id.clone());
            return Err(ImageError::Corrupt { what, expected, actual });
        }
        append(archive, name, size, decompress(self.0.content.open_blob(&blob)?)?).map_err(failed)
    }
}

fn append(archive: &mut tar::Builder<impl Write>, name: &str, size: u64, data: impl Read) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(0);
    archive.append_data(&mut header, name, data)
}

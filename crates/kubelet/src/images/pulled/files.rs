//! The files of records: a directory of pulls that have begun, and one of images that were pulled.
//!
//! Names and form are upstream's, so that either kubelet goes on with the other's records.

use super::record::{API_VERSION, ImagePullIntent, ImagePulledRecord};
use crate::state_file;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(super) struct RecordFiles {
    pulling: PathBuf,
    pulled: PathBuf,
}

/// A record that was asked for.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    Record(Box<ImagePulledRecord>),
    /// There is one that cannot be read: the image is no preloaded one, and nothing else is known of it.
    Damaged,
}

impl RecordFiles {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let root = root.join("image_manager");
        let files = Self { pulling: root.join("pulling"), pulled: root.join("pulled") };
        for path in [&root, &files.pulling, &files.pulled] {
            ferrite_hostfs::private_dir(path)?;
        }
        Ok(files)
    }

    pub(super) fn write_intent(&self, image: &str) -> io::Result<()> {
        let intent = ImagePullIntent {
            kind: "ImagePullIntent".into(),
            api_version: API_VERSION.into(),
            image: image.to_owned(),
        };
        write(&self.pulling, image, &intent)
    }

    pub(super) fn has_intent(&self, image: &str) -> io::Result<bool> {
        self.pulling.join(file_name(image)).try_exists()
    }

    pub(super) fn remove_intent(&self, image: &str) -> io::Result<()> {
        remove(&self.pulling, image)
    }

    /// The images whose pulls have begun. Files that are no intents are left out.
    pub(super) fn intents(&self) -> io::Result<Vec<String>> {
        let all: Vec<ImagePullIntent> = read_all(&self.pulling)?;
        Ok(all.into_iter().filter(|i| i.kind == "ImagePullIntent").map(|i| i.image).collect())
    }

    pub(super) fn write_record(&self, record: &ImagePulledRecord) -> io::Result<()> {
        write(&self.pulled, &record.image_ref, record)
    }

    pub(super) fn record(&self, image_ref: &str) -> Found {
        let read = state_file::read(&self.pulled.join(file_name(image_ref)));
        let bytes = match read {
            Ok(None) => return Found::Nothing,
            Ok(Some(bytes)) => bytes,
            Err(error) => {
                tracing::warn!(image = image_ref, %error, "cannot read the record of an image");
                return Found::Damaged;
            }
        };
        match ferrite_json::from_slice::<ImagePulledRecord>(&bytes) {
            Ok(record) if record.image_ref == image_ref => Found::Record(Box::new(record)),
            _ => Found::Damaged,
        }
    }

    pub(super) fn remove_record(&self, image_ref: &str) -> io::Result<()> {
        remove(&self.pulled, image_ref)
    }

    pub(super) fn records(&self) -> io::Result<Vec<ImagePulledRecord>> {
        read_all(&self.pulled)
    }
}

fn file_name(key: &str) -> String {
    format!("sha256-{}", crate::images::credentials::sha256_hex(key.as_bytes()))
}

fn write<T: serde::Serialize>(directory: &Path, key: &str, value: &T) -> io::Result<()> {
    let bytes = ferrite_json::to_vec(value).map_err(io::Error::other)?;
    state_file::write(&directory.join(file_name(key)), &bytes)?;
    // The name must be on disk before the image is.
    std::fs::File::open(directory)?.sync_all()
}

fn remove(directory: &Path, key: &str) -> io::Result<()> {
    match std::fs::remove_file(directory.join(file_name(key))) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn read_all<T: serde::de::DeserializeOwned>(directory: &Path) -> io::Result<Vec<T>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        // Files that are being replaced have an ending.
        if !name.to_str().is_some_and(|name| name.starts_with("sha256-") && !name.contains('.')) {
            continue;
        }
        let read = state_file::read(&entry.path());
        match read.map(|bytes| bytes.and_then(|bytes| ferrite_json::from_slice(&bytes).ok())) {
            Ok(Some(value)) => all.push(value),
            Ok(None) => tracing::warn!(file = %entry.path().display(), "this is no record of an image"),
            Err(error) => tracing::warn!(file = %entry.path().display(), %error, "cannot read a record"),
        }
    }
    Ok(all)
}

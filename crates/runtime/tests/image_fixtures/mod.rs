//! Images made by the tests themselves.
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_runtime::image::{Digest, ImageStore, Progress};
use serde_json::{Value, json};

pub fn store(root: &Path) -> Arc<ImageStore> {
    ImageStore::open(root.join("images")).unwrap()
}

pub fn quiet() -> Progress {
    Arc::new(|_| {})
}

/// A tar archive of regular files.
pub fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// An image: uncompressed layers, and how each is packed.
pub struct TestImage {
    pub layers: Vec<Vec<u8>>,
    pub packed: Vec<Vec<u8>>,
    pub config: Vec<u8>,
}

impl TestImage {
    pub fn new(layers: Vec<Vec<u8>>, pack: impl Fn(&[u8]) -> Vec<u8>) -> Self {
        let config = json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": ["/bin/sh"], "Cmd": null, "Env": ["A=b"], "User": "1000:1000",
                "ExposedPorts": {"80/tcp": {}}, "Volumes": null, "Labels": null,
            },
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|l| Digest::of(l)).collect::<Vec<_>>()},
            "history": [{"created_by": "test", "empty_layer": true}],
        });
        let packed = layers.iter().map(|layer| pack(layer)).collect();
        Self { layers, packed, config: config.to_string().into_bytes() }
    }

    pub fn plain(layers: Vec<Vec<u8>>) -> Self {
        Self::new(layers, <[u8]>::to_vec)
    }

    pub fn id(&self) -> Digest {
        Digest::of(&self.config)
    }

    pub fn manifest(&self) -> Vec<u8> {
        let layer = |bytes: &Vec<u8>| json!({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": Digest::of(bytes), "size": bytes.len()});
        json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": self.id(), "size": self.config.len(),
            },
            "layers": self.packed.iter().map(layer).collect::<Vec<_>>(),
        })
        .to_string()
        .into_bytes()
    }

    /// The image as an archive in the format of `docker save`.
    pub fn docker_save(&self, names: &[&str]) -> Vec<u8> {
        let config = format!("{}.json", self.id().hex());
        let layers: Vec<String> = (0..self.packed.len()).map(|n| format!("layer{n}/layer.tar")).collect();
        let manifest = json!([{"Config": config, "RepoTags": names, "Layers": layers}]).to_string();
        let mut files: Vec<(&str, &[u8])> = vec![(&config, &self.config)];
        files.extend(layers.iter().zip(&self.packed).map(|(name, bytes)| (name.as_str(), bytes.as_slice())));
        files.push(("manifest.json", manifest.as_bytes()));
        tar(&files)
    }

    /// An OCI layout with one manifest; `annotations` name it.
    pub fn oci_layout(&self, annotations: Value) -> Vec<u8> {
        let manifest = self.manifest();
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": Digest::of(&manifest), "size": manifest.len(), "annotations": annotations,
            }],
        })
        .to_string();
        let blobs: Vec<&[u8]> = self
            .packed
            .iter()
            .map(Vec::as_slice)
            .chain([self.config.as_slice(), manifest.as_slice()])
            .collect();
        let names: Vec<String> =
            blobs.iter().map(|b| format!("blobs/sha256/{}", Digest::of(b).hex())).collect();
        let mut files: Vec<(&str, &[u8])> =
            vec![("oci-layout", b"{\"imageLayoutVersion\":\"1.0.0\"}"), ("index.json", index.as_bytes())];
        files.extend(names.iter().map(String::as_str).zip(blobs));
        tar(&files)
    }
}

pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub fn read(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(name)).unwrap()
}

pub fn count(dir: PathBuf) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

//! The images of the run, made here: nothing is fetched from anywhere.

use std::io::Write;

use crate::docker_registry::Registry;
use crate::image_fixtures::{TestImage, gzip, tar};

const MIB: usize = 1 << 20;

/// Names of images in the run's registry.
pub struct Pushed {
    pub pause: String,
    pub app: String,
    pub large: String,
    /// Compressed and uncompressed bytes of the large image.
    pub large_size: (usize, usize),
}

impl Pushed {
    pub fn new(registry: &Registry, large: Option<&TestImage>) -> Self {
        let busybox = busybox();
        let programs = ["bin/sh", "bin/sleep", "bin/true"].map(|path| (path, busybox.as_slice()));
        let app = TestImage::new(vec![tar(&programs)], gzip);
        let mut pause = TestImage::new(vec![tar(&programs)], gzip);
        let config = String::from_utf8(pause.config).unwrap();
        pause.config = config.replace("[\"/bin/sh\"]", "[\"/bin/sleep\",\"100000\"]").into_bytes();
        registry.push("bench/app", &app, "v1");
        registry.push("bench/pause", &pause, "v1");
        let mut large_size = (0, 0);
        if let Some(large) = large {
            registry.push("bench/large", large, "v1");
            let bytes = |layers: &[Vec<u8>]| layers.iter().map(Vec::len).sum();
            large_size = (bytes(&large.packed), bytes(&large.layers));
        }
        let name = |image: &str| format!("{}/bench/{image}:v1", registry.address);
        Self { pause: name("pause"), app: name("app"), large: name("large"), large_size }
    }
}

pub fn busybox() -> Vec<u8> {
    std::fs::read("/bin/busybox").expect("busybox-static is installed")
}

/// About 200 MB in five layers, as real images are: a base, many small files that compress well, large files that
/// compress somewhat, and large ones that do not.
pub fn large() -> TestImage {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let busybox = busybox();
    let base = tar(&[("bin/sh", &busybox), ("etc/large", b"yes\n")]);
    let small = layer("usr/share/doc", 60 * MIB / 8192, || random.text(8192));
    let medium = layer("usr/lib", 40, || random.half(MIB + MIB / 4));
    let noise = layer("opt/data", 4, || random.noise(12 * MIB));
    let text = layer("opt/text", 12, || random.text(3 * MIB));
    TestImage::new(vec![base, small, medium, noise, text], |layer| {
        // As image builders pack: the fixtures' quick packing makes archives that are quick to unpack, too.
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(layer).unwrap();
        encoder.finish().unwrap()
    })
}

fn layer(dir: &str, files: usize, mut content: impl FnMut() -> Vec<u8>) -> Vec<u8> {
    let files: Vec<(String, Vec<u8>)> =
        (0..files).map(|n| (format!("{dir}/{:03}/file-{n}", n / 100), content())).collect();
    let listed: Vec<(&str, &[u8])> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    tar(&listed)
}

/// The same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn noise(&mut self, length: usize) -> Vec<u8> {
        (0..length / 8).flat_map(|_| self.next().to_le_bytes()).collect()
    }

    /// Words from a small vocabulary: compresses to about a third.
    fn text(&mut self, length: usize) -> Vec<u8> {
        let mut text = Vec::with_capacity(length + 16);
        while text.len() < length {
            let word = (self.next() % 1024).wrapping_mul(0x2545_f491_4f6c_dd1d);
            let letters = 2 + (word >> 60) as usize % 8;
            text.extend(word.to_le_bytes().iter().take(letters).map(|byte| b'a' + byte % 26));
            text.push(if word.is_multiple_of(11) { b'\n' } else { b' ' });
        }
        text.truncate(length);
        text
    }

    /// Pages of text and pages of noise in turns, as programs are.
    fn half(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            bytes.extend(self.text(4096));
            bytes.extend(self.noise(2048));
        }
        bytes
    }
}

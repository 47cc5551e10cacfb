//! Debian's `docker-registry`, in the network of a test.

use crate::world::Netns;
use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// `user:secret`, as the registries with a lock want it.
const AUTHORIZATION: &str = "Basic dXNlcjpzZWNyZXQ=";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A registry, ended with the value.
pub struct Registry {
    child: Child,
    pub address: SocketAddr,
}

impl Registry {
    /// Starts one that keeps its files in `directory`; with a lock it wants user `user` and password `secret`.
    pub fn start(netns: &Netns, directory: &Path, locked: bool) -> Self {
        std::fs::create_dir(directory).unwrap();
        let mut text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:0\n",
            directory.join("data").display()
        );
        if locked {
            let users = directory.join("htpasswd");
            std::fs::write(&users, "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n")
                .unwrap();
            text.push_str(&format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", users.display()));
        }
        let config = directory.join("config.yml");
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(&config).stdout(Stdio::null()).stderr(Stdio::piped());
        netns.enter(&mut command);
        let spawned = command.spawn();
        let mut child =
            spawned.expect("docker-registry can be run: `cargo xtask test --install` installs it");
        let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the registry ended").unwrap();
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.split('"').next().unwrap().parse().unwrap();
            }
        };
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    /// Takes in a `docker save` archive of one layer, as `latest`; answers the manifest's digest.
    pub fn push(&self, netns: &Netns, repository: &str, archive: &Path) -> String {
        let (mut config, mut layer) = (Vec::new(), Vec::new());
        for entry in tar::Archive::new(std::fs::File::open(archive).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            match name.as_str() {
                "layer.tar" => drop(entry.read_to_end(&mut layer).unwrap()),
                "manifest.json" => {}
                _ => drop(entry.read_to_end(&mut config).unwrap()),
            }
        }
        let manifest = ferrite_json::json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(&config), "size": config.len()},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(&layer), "size": layer.len()}],
        })
        .to_string();
        let (address, repository, pushed) = (self.address, repository.to_owned(), manifest.clone());
        netns.run(move || {
            for blob in [&config, &layer] {
                let answer = put(address, "POST", &format!("/v2/{repository}/blobs/uploads/"), "", b"");
                let location =
                    answer.lines().find_map(|line| line.strip_prefix("Location: ")).unwrap().to_owned();
                let place =
                    location.split_once(&address.to_string()).map_or(location.as_str(), |(_, path)| path);
                let path = format!("{place}&digest={}", digest(blob));
                put(address, "PUT", &path, "application/octet-stream", blob);
            }
            put(address, "PUT", &format!("/v2/{repository}/manifests/latest"), MANIFEST, pushed.as_bytes());
        });
        digest(manifest.as_bytes())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = digest.as_ref().iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

fn put(address: SocketAddr, method: &str, path: &str, kind: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nAuthorization: {AUTHORIZATION}\r\n\
         Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 20"), "{method} {path}: {answer}");
    answer
}

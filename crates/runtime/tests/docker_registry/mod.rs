//! Debian's `docker-registry` on a loopback port.
#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

use base64::Engine;
use ferrite_runtime::image::Digest;

use crate::image_fixtures::TestImage;

/// `docker-registry`, ended with the value.
pub struct Registry {
    child: Child,
    pub address: SocketAddr,
    _data: tempfile::TempDir,
    log: Option<thread::JoinHandle<()>>,
}

impl Registry {
    /// Starts one, with user `user` and password `secret` if asked. `None` where it is not installed.
    pub fn start(with_auth: bool) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut config = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:0\n",
            data.path().join("data").display()
        );
        if with_auth {
            let users = data.path().join("htpasswd");
            std::fs::write(&users, "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n")
                .unwrap();
            write!(config, "auth:\n  htpasswd:\n    realm: test\n    path: {}\n", users.display()).unwrap();
        }
        let path = data.path().join("config.yml");
        std::fs::write(&path, config).unwrap();
        let spawned = Command::new("docker-registry")
            .arg("serve")
            .arg(&path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child =
            spawned.expect("docker-registry can be run: `cargo xtask test --install` installs it");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the registry ended").unwrap();
            if let Some((_, rest)) = line.split_once("listening on ") {
                break rest.split('"').next().unwrap().parse().unwrap();
            }
        };
        let log = thread::spawn(move || lines.for_each(drop));
        Self { child, address, _data: data, log: Some(log) }
    }

    pub fn push(&self, repository: &str, image: &TestImage, reference: &str) -> Digest {
        for blob in image.packed.iter().chain([&image.config]) {
            self.push_blob(repository, blob);
        }
        let manifest = image.manifest();
        self.push_manifest(repository, reference, "application/vnd.oci.image.manifest.v1+json", &manifest);
        Digest::of(&manifest)
    }

    pub fn push_blob(&self, repository: &str, blob: &[u8]) {
        let (status, headers) = self.request("POST", &format!("/v2/{repository}/blobs/uploads/"), "", b"");
        assert_eq!(status, 202);
        let location = headers["location"]
            .split_once(&self.address.to_string())
            .map_or(headers["location"].as_str(), |(_, p)| p);
        let (status, _) = self.request(
            "PUT",
            &format!("{location}&digest={}", Digest::of(blob)),
            "application/octet-stream",
            blob,
        );
        assert_eq!(status, 201);
    }

    pub fn push_manifest(&self, repository: &str, reference: &str, kind: &str, manifest: &[u8]) {
        let (status, _) =
            self.request("PUT", &format!("/v2/{repository}/manifests/{reference}"), kind, manifest);
        assert_eq!(status, 201);
    }

    fn request(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> (u16, HashMap<String, String>) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let credentials = base64::engine::general_purpose::STANDARD.encode("user:secret");
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nAuthorization: Basic {credentials}\r\n\
             Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        )
        .unwrap();
        stream.write_all(body).unwrap();
        let mut lines = BufReader::new(stream).lines();
        let status = lines.next().unwrap().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.map_while(|line| {
            let line = line.unwrap();
            line.split_once(": ").map(|(key, value)| (key.to_ascii_lowercase(), value.to_owned()))
        });
        (status, headers.collect())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(log) = self.log.take() {
            let _ = log.join();
        }
    }
}

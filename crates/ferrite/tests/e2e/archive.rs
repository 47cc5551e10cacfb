//! Images made by the tests: Debian's static busybox and a few files.

use std::path::{Path, PathBuf};

fn busybox() -> PathBuf {
    let found = ["/bin/busybox", "/usr/bin/busybox"].into_iter().map(PathBuf::from).find(|p| p.exists());
    found.expect("busybox-static is installed (cargo xtask test --install)")
}

/// Writes a `docker save` archive of an image that serves `page` with busybox's httpd on port 8080.
pub fn web_image(path: &Path, name: &str, page: &str) {
    image(path, name, page, &["/bin/httpd", "-f", "-p", "8080", "-h", "/www"]);
}

/// As [`web_image`], with another command.
pub fn image(path: &Path, name: &str, page: &str, command: &[&str]) {
    odd_image(path, name, page, command, &Oddities::default());
}

/// Contents of an image that no honest one has.
#[derive(Default)]
pub struct Oddities<'a> {
    pub user: &'a str,
    /// Further lines of /etc/passwd.
    pub users: &'a str,
    pub directories: &'a [&'a str],
    /// Links and where they lead.
    pub links: &'a [(&'a str, &'a str)],
}

/// As [`image`], with oddities.
pub fn odd_image(path: &Path, name: &str, page: &str, command: &[&str], odd: &Oddities<'_>) {
    let mut layer = tar::Builder::new(Vec::new());
    for dir in ["bin/", "www/", "tmp/", "etc/"].iter().chain(odd.directories).copied() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(if dir == "tmp/" { 0o1777 } else { 0o755 });
        header.set_size(0);
        layer.append_data(&mut header, dir, std::io::empty()).unwrap();
    }
    append(&mut layer, "bin/busybox", &std::fs::read(busybox()).unwrap(), 0o755);
    append(&mut layer, "www/index.html", page.as_bytes(), 0o644);
    let users = format!("root:x:0:0:root:/:/bin/sh\nweb:x:1000:1000:web:/:/bin/sh\n{}", odd.users);
    append(&mut layer, "etc/passwd", users.as_bytes(), 0o644);
    for (link, target) in odd.links {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        layer.append_link(&mut header, link, target).unwrap();
    }
    for applet in ["sh", "httpd", "cat", "ls", "sleep", "id", "touch", "env", "wget", "mount", "echo", "tar"]
    {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        layer.append_link(&mut header, format!("bin/{applet}"), "busybox").unwrap();
    }
    let layer = layer.into_inner().unwrap();
    let diff_id = format!("sha256:{}", sha256(&layer));
    let config = ferrite_json::json!({
        "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin"],
            "Cmd": command,
            "User": odd.user,
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    })
    .to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let manifest =
        ferrite_json::json!([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}])
            .to_string();
    let mut archive = tar::Builder::new(std::fs::File::create(path).unwrap());
    append(&mut archive, &config_name, config.as_bytes(), 0o644);
    append(&mut archive, "layer.tar", &layer, 0o644);
    append(&mut archive, "manifest.json", manifest.as_bytes(), 0o644);
    archive.finish().unwrap();
}

fn append<W: std::io::Write>(archive: &mut tar::Builder<W>, name: &str, bytes: &[u8], mode: u32) {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(mode);
    archive.append_data(&mut header, name, bytes).unwrap();
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

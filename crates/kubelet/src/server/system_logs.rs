//! `/logs/`: the files of the host's log directory.
//!
//! Pods may write there, so nothing is opened that is not a regular file or a directory, and no link is followed.

use super::{Answer, Body, answer, decode, full, text};
use bytes::Bytes;
use ferrite_hostfs::Dir;
use http_body_util::{BodyExt, StreamBody};
use hyper::StatusCode;
use hyper::body::Frame;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use tokio::sync::mpsc;

/// Bytes read at a time.
const PIECE: usize = 64 * 1024;
/// Names of a directory that are listed.
const MAX_NAMES: usize = 10_000;

enum Found {
    File(std::fs::File),
    Names(Vec<String>),
}

/// Answers with the file or with the list of the directory at `path` below `root`.
pub(super) async fn serve(root: PathBuf, path: &str) -> Answer {
    let path = decode(path);
    let Some(below) = relative(&path) else { return missing() };
    let found = tokio::task::spawn_blocking(move || find(&root, &below)).await;
    match found {
        Ok(Ok(Found::File(file))) => answer(StatusCode::OK, "text/plain; charset=utf-8", stream(file)),
        Ok(Ok(Found::Names(names))) => answer(StatusCode::OK, "text/html; charset=utf-8", full(list(&names))),
        _ => missing(),
    }
}

fn missing() -> Answer {
    text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// A path with nothing but names in it.
pub(super) fn relative(path: &str) -> Option<PathBuf> {
    let path = Path::new(path.trim_start_matches('/'));
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    plain.then(|| path.to_owned())
}

fn find(root: &Path, below: &Path) -> io::Result<Found> {
    let root = Dir::open(root)?;
    if !below.as_os_str().is_empty() {
        match root.open_file(below) {
            Ok(file) => return Ok(Found::File(file)),
            Err(_) => return names(&root.open_dir(below)?),
        }
    }
    names(&root)
}

fn names(dir: &Dir) -> io::Result<Found> {
    let mut names: Vec<String> = Vec::new();
    for name in dir.names(MAX_NAMES)? {
        let slash = if dir.is_dir(&name).unwrap_or(false) { "/" } else { "" };
        names.push(format!("{}{slash}", name.to_string_lossy()));
    }
    names.sort();
    Ok(Found::Names(names))
}

/// The form of Go's file server.
fn list(names: &[String]) -> String {
    let mut page =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        page.push_str(&format!("<a href=\"{}\">{}</a>\n", escape_url(name), escape(name)));
    }
    page.push_str("</pre>\n");
    page
}

fn escape(name: &str) -> String {
    name.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&#34;")
        .replace('\'', "&#39;")
}

fn escape_url(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte);
    name.bytes().map(|b| if plain(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}

/// Reads in a thread of its own: the file may be on a file system that does not answer.
pub(super) fn stream(mut file: std::fs::File) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(2);
    tokio::task::spawn_blocking(move || {
        let mut piece = vec![0; PIECE];
        loop {
            let read = match file.read(&mut piece) {
                Ok(0) => return,
                Ok(count) => Ok(Bytes::copy_from_slice(&piece[..count])),
                Err(error) => Err(error),
            };
            let failed = read.is_err();
            // The caller hung up.
            if sender.blocking_send(read).is_err() || failed {
                return;
            }
        }
    });
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece.map(Frame::data), receiver))
    });
    BodyExt::boxed(StreamBody::new(super::logs::SyncStream::new(frames)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[tokio::test]
    async fn only_files_beneath_the_directory_are_served() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        std::fs::create_dir_all(root.join("pods")).unwrap();
        std::fs::write(dir.path().join("secret"), "secret").unwrap();
        std::fs::write(root.join("a <b>.log"), "text").unwrap();
        symlink("../secret", root.join("link")).unwrap();
        symlink("..", root.join("pods/up")).unwrap();
        nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (path, status, part) in [
            ("", 200, "<a href=\"a%20%3Cb%3E.log\">a &lt;b&gt;.log</a>"),
            ("pods/", 200, ">up<"),
            ("a%20%3Cb%3E.log", 200, "text"),
            ("link", 404, ""),
            ("pipe", 404, ""),
            ("none", 404, ""),
            ("../secret", 404, ""),
            ("%2e%2e/secret", 404, ""),
            ("pods/up/link", 404, ""),
            ("pods/up/secret", 404, ""),
        ] {
            let answer = serve(root.clone(), path).await;
            assert_eq!(answer.status().as_u16(), status, "{path}");
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(String::from_utf8_lossy(&body).contains(part), "{path}: {body:?}");
        }
    }
}

//! Port-forward: connections from a client to ports inside a pod.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::body::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::spdy::Stream;
use crate::service::Inner;

/// Pairs that may wait for their second half.
const MAX_HALVES: usize = 256;
const CONNECTING: Duration = Duration::from_secs(10);

/// Serves pairs of streams until the client opens no more and the last one has ended.
pub async fn serve(inner: &Arc<Inner>, sandbox: &str, mut accepted: mpsc::Receiver<Stream>) {
    let mut halves: HashMap<String, Stream> = HashMap::new();
    let mut running = FuturesUnordered::new();
    let mut open = true;
    while open || !running.is_empty() {
        tokio::select! {
            stream = accepted.recv(), if open => match stream {
                None => open = false,
                Some(stream) => {
                    // Clients older than request ids pair a data stream with the error stream before it.
                    let key = stream.headers.get("requestid").cloned().unwrap_or_else(|| {
                        let is_error = stream.headers.get("streamtype").is_some_and(|t| t == "error");
                        if is_error { stream.id } else { stream.id.saturating_sub(2) }.to_string()
                    });
                    match halves.remove(&key) {
                        Some(first) => running.push(pair(inner, sandbox, first, stream)),
                        None if halves.len() < MAX_HALVES => {
                            halves.insert(key, stream);
                        }
                        None => {}
                    }
                }
            },
            Some(()) = running.next(), if !running.is_empty() => {}
        }
    }
}

async fn pair(inner: &Arc<Inner>, sandbox: &str, first: Stream, second: Stream) {
    let is_error = |stream: &Stream| stream.headers.get("streamtype").is_some_and(|kind| kind == "error");
    let (error, data) = if is_error(&first) { (first, second) } else { (second, first) };
    let port = data.headers.get("port").and_then(|port| port.parse::<u16>().ok());
    let result = match port {
        Some(port) => copy(inner, sandbox, port, data).await,
        None => {
            data.outgoing.finish().await;
            Err("the port is missing or not a number".to_owned())
        }
    };
    if let Err(message) = result {
        let _ = error.outgoing.send(Bytes::from(message)).await;
    }
    error.outgoing.finish().await;
}

async fn copy(inner: &Arc<Inner>, sandbox: &str, port: u16, mut data: Stream) -> Result<(), String> {
    let socket = match open(inner, sandbox, port).await {
        Ok(socket) => socket,
        Err(message) => {
            data.outgoing.finish().await;
            return Err(message);
        }
    };
    let (mut read, mut write) = socket.into_split();
    let outgoing = async {
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(count) = read.read(&mut buffer).await {
            if count == 0 || data.outgoing.send(Bytes::copy_from_slice(&buffer[..count])).await.is_err() {
                break;
            }
        }
        data.outgoing.finish().await;
    };
    let incoming = async {
        while let Some(bytes) = data.incoming.recv().await {
            if write.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = write.shutdown().await;
    };
    tokio::join!(outgoing, incoming);
    Ok(())
}

/// A connection to a port of the pod, or what to tell the client.
pub async fn open(inner: &Arc<Inner>, sandbox: &str, port: u16) -> Result<tokio::net::TcpStream, String> {
    let namespace = inner.network_namespace(sandbox).map_err(|error| error.to_string())?;
    connect(namespace, port)
        .await
        .map_err(|error| format!("failed to connect to localhost:{port} inside the pod: {error}"))
}

/// Connects from inside the pod's network. The socket stays in the namespace it was made in, so a thread
/// that enters it, connects and ends is all it takes.
async fn connect(namespace: Option<PathBuf>, port: u16) -> io::Result<tokio::net::TcpStream> {
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("port-forward".into()).stack_size(64 * 1024).spawn(move || {
        let connect = || -> io::Result<std::net::TcpStream> {
            if let Some(path) = namespace {
                let namespace = std::fs::File::open(path)?;
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
            }
            let addresses: [SocketAddr; 2] =
                [([127, 0, 0, 1], port).into(), (std::net::Ipv6Addr::LOCALHOST, port).into()];
            let first = std::net::TcpStream::connect_timeout(&addresses[0], CONNECTING);
            first.or_else(|error| {
                std::net::TcpStream::connect_timeout(&addresses[1], CONNECTING).map_err(|_| error)
            })
        };
        let _ = done.send(connect());
    })?;
    let socket = result.await.map_err(io::Error::other)??;
    socket.set_nonblocking(true)?;
    tokio::net::TcpStream::from_std(socket)
}

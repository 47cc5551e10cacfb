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
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, mpsc};

use super::spdy::Stream;
use crate::service::Inner;

/// Pairs that may wait for their second half.
const MAX_HALVES: usize = 256;
/// Connections one client has open at the same time.
const MAX_PAIRS: usize = 512;
/// Threads that enter pods' networks at the same time.
const MAX_THREADS: usize = 16;
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
                        Some(first) => {
                            let full = running.len() >= MAX_PAIRS;
                            running.push(pair(inner, sandbox, first, stream, full));
                        }
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

async fn pair(inner: &Arc<Inner>, sandbox: &str, first: Stream, second: Stream, full: bool) {
    let is_error = |stream: &Stream| stream.headers.get("streamtype").is_some_and(|kind| kind == "error");
    let (error, data) = if is_error(&first) { (first, second) } else { (second, first) };
    let port = data.headers.get("port").and_then(|port| port.parse::<u16>().ok());
    let result = match port {
        _ if full => {
            data.outgoing.finish().await;
            Err(format!("more than {MAX_PAIRS} connections at the same time; close some"))
        }
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

/// A connection to a port of the pod, or the error for the client.
pub async fn open(inner: &Arc<Inner>, sandbox: &str, port: u16) -> Result<TcpStream, String> {
    let namespace = inner.network_namespace(sandbox).map_err(|error| error.to_string())?;
    connect(namespace, port)
        .await
        .map_err(|error| format!("failed to connect to localhost:{port} inside the pod: {error}"))
}

/// Connects from inside the pod's network. A socket stays in the namespace it was made in, so a thread that enters
/// it, makes the sockets and ends is all it takes; the connecting waits for no thread.
async fn connect(namespace: Option<PathBuf>, port: u16) -> io::Result<TcpStream> {
    let (v4, v6) = sockets(namespace).await?;
    let reach = async |socket: io::Result<TcpSocket>, address: SocketAddr| {
        let connecting = tokio::time::timeout(CONNECTING, socket?.connect(address));
        connecting.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    };
    match reach(v4, ([127, 0, 0, 1], port).into()).await {
        Ok(stream) => Ok(stream),
        Err(error) => reach(v6, (std::net::Ipv6Addr::LOCALHOST, port).into()).await.map_err(|_| error),
    }
}

type Sockets = (io::Result<TcpSocket>, io::Result<TcpSocket>);

async fn sockets(namespace: Option<PathBuf>) -> io::Result<Sockets> {
    let Some(path) = namespace else { return Ok((TcpSocket::new_v4(), TcpSocket::new_v6())) };
    static THREADS: Semaphore = Semaphore::const_new(MAX_THREADS);
    let _place = THREADS.acquire().await.map_err(io::Error::other)?;
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("port-forward".into()).stack_size(64 * 1024).spawn(move || {
        let make = || -> io::Result<Sockets> {
            let namespace = std::fs::File::open(path)?;
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
            Ok((TcpSocket::new_v4(), TcpSocket::new_v6()))
        };
        let _ = done.send(make());
    })?;
    result.await.map_err(io::Error::other)?
}

//! Published ports: a process that passes connections on to a container.
//!
//! The process that starts the container opens the ports before it runs. The proxy gets them as open
//! descriptors. It ends on request, and with the container's supervisor.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ferrite_runtime::standalone;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use crate::ports::{PortBinding, Protocol, PublishedPort};

/// Connections passed on at the same time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;
/// Senders of datagrams remembered; the one silent for longest is forgotten.
const MAX_PEERS: usize = 1024;
const PEER_PATIENCE: Duration = Duration::from_secs(90);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// A port of the host that nobody else has any more.
#[derive(Debug)]
pub struct Listener {
    pub port: PublishedPort,
    socket: OwnedFd,
}

impl Listener {
    pub fn bind(binding: &PortBinding) -> io::Result<Self> {
        let address = SocketAddr::new(binding.address(), binding.host_port.unwrap_or(0));
        let (socket, bound): (OwnedFd, SocketAddr) = match binding.protocol {
            Protocol::Tcp => {
                let listener = TcpListener::bind(address)?;
                let bound = listener.local_addr()?;
                (listener.into(), bound)
            }
            Protocol::Udp => {
                let socket = UdpSocket::bind(address)?;
                let bound = socket.local_addr()?;
                (socket.into(), bound)
            }
        };
        let port = PublishedPort {
            container: binding.container,
            protocol: binding.protocol,
            host_ip: bound.ip(),
            host_port: bound.port(),
        };
        Ok(Self { port, socket })
    }
}

/// Starts the process for a container at that address; returns its identity.
pub fn spawn(listeners: Vec<Listener>, container: &str, supervisor: i32) -> io::Result<String> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferrite").args(["docker", crate::cli::PROXY, container, &supervisor.to_string()]);
    for listener in &listeners {
        let port = &listener.port;
        command.arg(format!("{}:{}:{}", listener.socket.as_raw_fd(), port.protocol, port.container));
    }
    command.env_clear().current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let sockets: Vec<RawFd> = listeners.iter().map(|listener| listener.socket.as_raw_fd()).collect();
    // SAFETY: only system calls between fork and exec; the descriptors are open until after the fork.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            for fd in &sockets {
                if libc::fcntl(*fd, libc::F_SETFD, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let child = command.spawn()?;
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    standalone::process_identity(pid).ok_or_else(|| io::Error::other("the proxy ended at once"))
}

/// Ends the process.
pub fn end(identity: &str) {
    if let Some(pid) = standalone::process_alive(identity) {
        // SAFETY: a signal; the identity says that the process is still our proxy.
        unsafe { libc::kill(pid, libc::SIGTERM) };
    }
}

/// The process itself: `<container address> <supervisor> <descriptor>:<protocol>:<port>…`.
pub fn main(arguments: &[String]) -> ExitCode {
    let Some((address, supervisor, rest)) = parse(arguments) else {
        eprintln!("the port proxy is started by the engine, not by hand");
        return ExitCode::from(2);
    };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        for (fd, protocol, port) in rest {
            // SAFETY: our parent process left this descriptor open for us, and named it once.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let (target, room) = (SocketAddr::new(address, port), Arc::clone(&room));
            match protocol {
                Protocol::Tcp => tasks.spawn(serve_tcp(socket.into(), target, room)),
                Protocol::Udp => tasks.spawn(serve_udp(socket.into(), target, MAX_PEERS)),
            };
        }
        standalone::process_ended(supervisor).await;
        tasks.shutdown().await;
    });
    ExitCode::SUCCESS
}

type Endpoint = (RawFd, Protocol, u16);

fn parse(arguments: &[String]) -> Option<(IpAddr, i32, Vec<Endpoint>)> {
    let [address, supervisor, rest @ ..] = arguments else { return None };
    let endpoint = |text: &String| -> Option<Endpoint> {
        let mut parts = text.split(':');
        let fd: RawFd = parts.next()?.parse().ok().filter(|fd| *fd > 2)?;
        let protocol = match parts.next()? {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return None,
        };
        Some((fd, protocol, parts.next()?.parse().ok()?))
    };
    let endpoints = rest.iter().map(endpoint).collect::<Option<Vec<_>>>()?;
    Some((address.parse().ok()?, supervisor.parse().ok()?, endpoints))
}

async fn serve_tcp(listener: TcpListener, target: SocketAddr, room: Arc<Semaphore>) {
    let listener = listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener));
    let Ok(listener) = listener else { return };
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else {
                    // Out of descriptors, most likely: do not spin until clients have left.
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                connections.spawn(async move {
                    pass(client, target).await;
                    drop(permit);
                });
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

async fn pass(mut client: tokio::net::TcpStream, target: SocketAddr) {
    if let Ok(mut server) = tokio::net::TcpStream::connect(target).await {
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        let _ = client.shutdown().await;
    }
}

/// A sender of datagrams.
struct Peer {
    /// The socket towards the container.
    socket: Arc<tokio::net::UdpSocket>,
    /// Passes answers on.
    answers: tokio::task::AbortHandle,
    /// The number of its last datagram among all.
    last: u64,
}

/// Forgets the sender that was silent for longest. Senders can be forged, and must not keep others out.
fn forget_one(peers: &mut HashMap<SocketAddr, Peer>) {
    let oldest = peers.iter().min_by_key(|(_, peer)| peer.last).map(|(sender, _)| *sender);
    if let Some(peer) = oldest.and_then(|sender| peers.remove(&sender)) {
        peer.answers.abort();
    }
}

/// Every sender gets a socket of its own towards the container, so that answers find their way back.
async fn serve_udp(socket: UdpSocket, target: SocketAddr, most: usize) {
    let socket = socket.set_nonblocking(true).and_then(|()| tokio::net::UdpSocket::from_std(socket));
    let Ok(socket) = socket.map(Arc::new) else { return };
    let mut peers: HashMap<SocketAddr, Peer> = HashMap::new();
    let mut answers = tokio::task::JoinSet::new();
    let mut buffer = vec![0; 65_536];
    let mut number = 0;
    loop {
        tokio::select! {
            received = socket.recv_from(&mut buffer) => {
                let Ok((count, sender)) = received else { continue };
                number += 1;
                if !peers.contains_key(&sender) {
                    if peers.len() >= most {
                        forget_one(&mut peers);
                    }
                    let Ok(own) = tokio::net::UdpSocket::bind("0.0.0.0:0").await else { continue };
                    if own.connect(target).await.is_err() {
                        continue;
                    }
                    let own = Arc::new(own);
                    let task = answers.spawn(answer(Arc::clone(&own), Arc::clone(&socket), sender));
                    peers.insert(sender, Peer { socket: own, answers: task, last: number });
                }
                if let Some(peer) = peers.get_mut(&sender) {
                    peer.last = number;
                    let _ = peer.socket.send(&buffer[..count]).await;
                }
            }
            // A task of a sender that was forgotten has nothing to report.
            Some(ended) = answers.join_next(), if !answers.is_empty() => {
                if let Ok(silent) = ended
                    && peers.get(&silent).is_some_and(|peer| peer.answers.is_finished())
                {
                    peers.remove(&silent);
                }
            }
        }
    }
}

async fn answer(
    peer: Arc<tokio::net::UdpSocket>,
    socket: Arc<tokio::net::UdpSocket>,
    sender: SocketAddr,
) -> SocketAddr {
    let mut buffer = vec![0; 65_536];
    while let Ok(Ok(count)) = tokio::time::timeout(PEER_PATIENCE, peer.recv(&mut buffer)).await {
        if socket.send_to(&buffer[..count], sender).await.is_err() {
            break;
        }
    }
    sender
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    /// Sends a datagram and waits for its echo.
    async fn ask(socket: &tokio::net::UdpSocket, at: SocketAddr, text: &[u8]) {
        socket.send_to(text, at).await.unwrap();
        let mut buffer = [0; 16];
        let (count, _) =
            tokio::time::timeout(BOUND, socket.recv_from(&mut buffer)).await.expect("an answer").unwrap();
        assert_eq!(&buffer[..count], text);
    }

    #[tokio::test]
    async fn senders_that_are_silent_make_room_for_others() {
        let container = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let target = container.local_addr().unwrap();
        let echo = tokio::spawn(async move {
            let mut buffer = [0; 16];
            while let Ok((count, sender)) = container.recv_from(&mut buffer).await {
                container.send_to(&buffer[..count], sender).await.unwrap();
            }
        });
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        let serving = tokio::spawn(serve_udp(socket, target, 2));
        let mut senders = Vec::new();
        for number in 0..5u8 {
            let sender = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
            ask(&sender, at, &[number]).await;
            senders.push(sender);
        }
        // One that was forgotten begins anew.
        ask(&senders[0], at, b"again").await;
        serving.abort();
        echo.abort();
    }

    #[test]
    fn a_port_that_takes_no_connection_is_left_alone_for_a_while() {
        use std::os::fd::FromRawFd;
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().start_paused(true).build().unwrap();
            runtime.block_on(async {
                // A socket that does not listen answers every attempt with an error, as one without descriptors does.
                // SAFETY: a new socket, which belongs to nobody else.
                let fd = unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0)) };
                let target = SocketAddr::from(([127, 0, 0, 1], 9));
                let serving = serve_tcp(fd.into(), target, Arc::new(Semaphore::new(1)));
                // Paused time passes only while there is nothing to do.
                let _ = tokio::time::timeout(PAUSE * 3, serving).await;
            });
            let _ = done.send(());
        });
        ended.recv_timeout(BOUND).expect("a pause between attempts");
    }
}

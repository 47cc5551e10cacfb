//! `ferrite image`: the images of this machine's nodes.
//!
//! While the cluster runs its process does the work; otherwise the store is opened here.

use crate::apiserver::BoxError;
use crate::cli::DataDir;
use crate::control::{self, Client, ImageRow, PullLine, PullRequest};
use crate::data_dir::DataDirectory;
use crate::machines::Machines;
use crate::node::NodeParts;
use crate::paths::Paths;
use crate::progress::Bar;
use crate::status::State;
use bytes::Bytes;
use clap::{Args, Subcommand};
use futures_util::StreamExt;
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::Method;
use hyper::body::Frame;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tokio_util::io::ReaderStream;

/// Images of this machine's nodes.
#[derive(Debug, Args)]
pub struct Image {
    #[command(flatten)]
    data: DataDir,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Take in an archive made by `docker save` or in the OCI layout (also compressed).
    Import {
        #[arg(required = true)]
        archives: Vec<PathBuf>,
    },
    /// Fetch an image from its registry.
    Pull {
        name: String,
        /// Registry to talk to without TLS; loopback addresses always are.
        #[arg(long, value_name = "REGISTRY")]
        insecure_registry: Vec<String>,
    },
    /// List images.
    #[command(visible_alias = "ls")]
    List,
    /// Remove images.
    Rm {
        #[arg(required = true)]
        names: Vec<String>,
    },
}

impl Image {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        if let Some(endpoint) = State::load(&paths).and_then(|s| s.runtime_endpoint) {
            return Err(format!(
                "the pods of this cluster run on the container runtime at {endpoint}, which has images of its own: use its tools, e.g. `ctr -n k8s.io images import`"
            )
            .into());
        }
        let mut client = Client::connect(&paths).await?;
        let mut first = None;
        if client.is_none() && !Machines::control_planes(&paths).is_empty() {
            // No node is in the cluster's own process: any other is as good as the first.
            let (name, node) =
                other_nodes(&paths, None).await?.into_iter().next().ok_or(
                    "no node of this cluster runs: start one with `ferrite up` or `ferrite node start`",
                )?;
            (first, client) = (Some(name), Some(node));
        }
        let first = first.as_deref();
        let _claimed = match client {
            Some(_) => None,
            None => Some(DataDirectory::claim(&paths)?),
        };
        match self.command {
            Command::Import { archives } => {
                for archive in &archives {
                    for name in import(&paths, client.as_mut(), archive).await? {
                        println!("{name}");
                    }
                    for (node, mut client) in other_nodes(&paths, first).await? {
                        let imported = import(&paths, Some(&mut client), archive).await;
                        imported.map_err(|e| format!("node {node}: {e}"))?;
                    }
                }
            }
            Command::Pull { name, insecure_registry } => {
                let request = PullRequest { name, insecure: insecure_registry };
                println!("{}", pull(&paths, client.as_mut(), request.clone()).await?);
                for (node, mut client) in other_nodes(&paths, first).await? {
                    if let Err(error) = pull(&paths, Some(&mut client), request.clone()).await {
                        // Nodes on the virtual segment reach registries of this machine only.
                        eprintln!("node {node} does not have the image: {error}");
                    }
                }
            }
            Command::List => {
                let rows = match &mut client {
                    Some(client) => client.call(Method::GET, "/images", &()).await?,
                    None => control::list(&*NodeParts::images(&paths, &[])?)?,
                };
                show(&rows);
            }
            Command::Rm { names } => {
                for name in names {
                    remove(&paths, client.as_mut(), &name).await?;
                    for (node, mut client) in other_nodes(&paths, first).await? {
                        let removed = remove(&paths, Some(&mut client), &name).await;
                        removed.map_err(|e| format!("node {node}: {e}"))?;
                    }
                    println!("{name}");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The other nodes of this machine that run, but for `first`.
async fn other_nodes(paths: &Paths, first: Option<&str>) -> Result<Vec<(String, Client)>, BoxError> {
    let mut nodes = Vec::new();
    for machine in Machines::list(paths).into_iter().filter(|machine| Some(machine.name.as_str()) != first) {
        if let Some(client) = Client::connect(&Machines::paths_of(paths, &machine.name)).await? {
            nodes.push((machine.name, client));
        }
    }
    Ok(nodes)
}

fn show(rows: &[ImageRow]) {
    println!("{:<52} {:<14} {:>10}", "NAME", "ID", "SIZE");
    for row in rows {
        let id = row.id.strip_prefix("sha256:").unwrap_or(&row.id);
        let size = format!("{:.1} MiB", row.size as f64 / f64::from(1 << 20));
        let short = id.get(..12).unwrap_or(id);
        if row.names.is_empty() {
            println!("{:<52} {short:<14} {size:>10}", "<none>");
        }
        for name in &row.names {
            println!("{name:<52} {short:<14} {size:>10}");
        }
    }
}

async fn import(paths: &Paths, client: Option<&mut Client>, archive: &Path) -> Result<Vec<String>, BoxError> {
    let open = |e: std::io::Error| format!("cannot read {}: {e}", archive.display());
    let file = std::fs::File::open(archive).map_err(open)?;
    let total = file.metadata().map_err(open)?.len();
    let bar = Arc::new(Bar::new(&archive.display().to_string()));
    let counted = Counted { file, done: 0, total, bar: Arc::clone(&bar) };
    let names = match client {
        Some(client) => {
            let stream = ReaderStream::with_capacity(Blocking(counted), 256 << 10)
                .map(|piece| piece.map(Frame::data).map_err(|e| -> BoxError { e.into() }));
            let body = BodyExt::boxed_unsync(StreamBody::new(stream));
            let answer = client.send(Method::POST, "/images/import", body).await?;
            ferrite_json::from_slice(&answer.collect().await?.to_bytes())?
        }
        None => {
            let images = NodeParts::images(paths, &[])?;
            let names = images.store().import(counted, Arc::new(|_| {})).await?;
            names.into_iter().map(|n| n.to_string()).collect()
        }
    };
    bar.finish();
    Ok(names)
}

/// A file that shows how much of it has been read.
struct Counted {
    file: std::fs::File,
    done: u64,
    total: u64,
    bar: Arc<Bar>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.done += read as u64;
        self.bar.update(self.done, Some(self.total));
        Ok(read)
    }
}

/// A file read on the task itself: local files answer at once, and this is a command's only work.
struct Blocking(Counted);

impl tokio::io::AsyncRead for Blocking {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        let read = self.0.read(buffer.initialize_unfilled())?;
        buffer.advance(read);
        std::task::Poll::Ready(Ok(()))
    }
}

async fn pull(paths: &Paths, client: Option<&mut Client>, request: PullRequest) -> Result<String, BoxError> {
    let bar = Bar::new(&request.name);
    let mut layers: HashMap<String, (u64, u64)> = HashMap::new();
    let mut outcome: Option<Result<String, BoxError>> = None;
    let mut take = |line: PullLine| match line {
        PullLine::Downloading { digest, done, total } => {
            layers.insert(digest, (done, total));
            let done = layers.values().map(|(done, _)| done).sum();
            bar.update(done, Some(layers.values().map(|(_, total)| total).sum()));
        }
        PullLine::Done { id } => outcome = Some(Ok(id)),
        PullLine::Error { message } => outcome = Some(Err(message.into())),
    };
    match client {
        Some(client) => {
            let body = http_body_util::Full::new(Bytes::from(ferrite_json::to_vec(&request)?))
                .map_err(|never| match never {})
                .boxed_unsync();
            let mut stream = BodyStream::new(client.send(Method::POST, "/images/pull", body).await?);
            let mut pending = Vec::new();
            while let Some(frame) = stream.next().await {
                let Ok(data) = frame?.into_data() else { continue };
                pending.extend_from_slice(&data);
                while let Some(end) = pending.iter().position(|b| *b == b'\n') {
                    take(ferrite_json::from_slice(&pending[..end])?);
                    pending.drain(..=end);
                }
            }
        }
        None => {
            let images = NodeParts::images(paths, &[])?;
            let (lines, mut received) = tokio::sync::mpsc::channel(64);
            let work = control::pull(&images, &request, lines);
            let read = async {
                while let Some(line) = received.recv().await {
                    take(line);
                }
            };
            tokio::join!(work, read);
        }
    }
    bar.finish();
    outcome.unwrap_or_else(|| Err("the pull was interrupted: try again".into()))
}

async fn remove(paths: &Paths, client: Option<&mut Client>, name: &str) -> Result<(), BoxError> {
    if let Some(client) = client {
        return client.call::<()>(Method::POST, "/images/remove", &name).await;
    }
    // Containers may run although the cluster does not, and only its process knows their images.
    if paths.runtime().exists() {
        return Err(
            "the cluster is stopped but its containers may still use the image: run `ferrite up` first"
                .into(),
        );
    }
    let images = NodeParts::images(paths, &[])?;
    Ok(images.store().remove(name, &std::collections::HashSet::new())?)
}

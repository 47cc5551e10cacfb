//! Small programs for pods: the commands of the built-in image `ferrite.local/tools`.

use crate::apiserver::BoxError;
use bytes::Bytes;
use clap::{Args, Subcommand};
use http_body_util::Full;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use std::convert::Infallible;
use std::io::{BufRead, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

/// Helpers for pods.
#[derive(Debug, Args)]
pub struct Tools {
    #[command(subcommand)]
    tool: Option<Tool>,
}

#[derive(Debug, Subcommand)]
enum Tool {
    /// Serve HTTP: `/` returns the host name, `/healthz` is ok, `/echo` returns the request, `/exit?code=N`
    /// ends.
    Http(HttpArgs),
    /// Do nothing until a signal, or for a number of seconds.
    Sleep {
        /// Seconds; without it, for ever.
        seconds: Option<f64>,
    },
    /// Look a name up as the pod sees it.
    Dns { name: String },
    /// Fetch an http:// address and print the answer.
    Get {
        url: String,
        /// Give up after this many seconds.
        #[arg(long, default_value_t = 5.0)]
        timeout: f64,
    },
    /// Ask the API server for a path, such as /api/v1/namespaces, as the pod's service account, and print the answer.
    Api {
        path: String,
        /// Give up after this many seconds.
        #[arg(long, default_value_t = 5.0)]
        timeout: f64,
    },
    /// Print arguments, then standard input if it is not a terminal.
    Echo { words: Vec<String> },
    /// Print a file.
    Cat { files: Vec<PathBuf> },
    /// Print the environment.
    Env,
    /// End at once with a code.
    Exit { code: u8 },
    /// Succeed.
    #[command(disable_help_flag = true)]
    True {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        ignored: Vec<std::ffi::OsString>,
    },
    /// Fail.
    #[command(disable_help_flag = true)]
    False {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        ignored: Vec<std::ffi::OsString>,
    },
    /// Use memory, a mebibyte at a time, and keep it.
    Eat {
        #[arg(default_value_t = 64)]
        mebibytes: usize,
    },
    /// Keep one processor busy until a signal.
    Spin,
    /// Print a numbered line at this interval in milliseconds.
    Tick {
        #[arg(default_value_t = 1000)]
        milliseconds: u64,
        /// Stop after this many lines.
        #[arg(long)]
        count: Option<u64>,
    },
}

#[derive(Debug, Args)]
struct HttpArgs {
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Text that `/` answers besides the host name.
    #[arg(long, default_value = "ferrite")]
    text: String,
    /// Not ready (503 on /readyz) until this file exists.
    #[arg(long)]
    ready_file: Option<PathBuf>,
    /// After SIGTERM, go on serving for this many seconds, so that no request is lost while others notice.
    #[arg(long, default_value_t = 0.0)]
    drain: f64,
}

impl Tools {
    pub fn run(self) -> Result<ExitCode, BoxError> {
        match self.tool.unwrap_or(Tool::Sleep { seconds: None }) {
            Tool::Echo { words } => {
                println!("{}", words.join(" "));
                return Ok(ExitCode::SUCCESS);
            }
            Tool::Cat { files } => return cat(&files),
            Tool::Env => {
                for (key, value) in std::env::vars_os() {
                    println!("{}={}", key.to_string_lossy(), value.to_string_lossy());
                }
                return Ok(ExitCode::SUCCESS);
            }
            Tool::Exit { code } => return Ok(ExitCode::from(code)),
            Tool::True { .. } => return Ok(ExitCode::SUCCESS),
            Tool::False { .. } => return Ok(ExitCode::FAILURE),
            Tool::Dns { name } => return dns(&name),
            Tool::Eat { mebibytes } => eat(mebibytes),
            other => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                return runtime.block_on(other.wait());
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(Tool::Sleep { seconds: None }.wait())
    }
}

impl Tool {
    async fn wait(self) -> Result<ExitCode, BoxError> {
        let mut terminate = signal(SignalKind::terminate())?;
        match self {
            Self::Http(args) => return serve(args, terminate).await,
            Self::Get { url, timeout } => {
                return tokio::time::timeout(Duration::from_secs_f64(timeout), get(&url))
                    .await
                    .map_err(|_| format!("{url}: no answer within {timeout} s"))?;
            }
            Self::Api { path, timeout } => {
                return tokio::time::timeout(Duration::from_secs_f64(timeout), ask_api(&path))
                    .await
                    .map_err(|_| format!("{path}: no answer within {timeout} s"))?;
            }
            Self::Tick { milliseconds, count } => {
                let mut timer = tokio::time::interval(Duration::from_millis(milliseconds.max(1)));
                for number in 0..count.unwrap_or(u64::MAX) {
                    tokio::select! {
                        _ = timer.tick() => println!("tick {number}"),
                        _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
                    }
                    std::io::stdout().flush()?;
                }
            }
            Self::Spin => {
                std::thread::spawn(|| {
                    loop {
                        std::hint::black_box(0);
                    }
                });
                terminate.recv().await;
            }
            Self::Sleep { seconds: Some(seconds) } => {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_secs_f64(seconds.max(0.0))) => {}
                    _ = terminate.recv() => {}
                }
            }
            _ => {
                terminate.recv().await;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn cat(files: &[PathBuf]) -> Result<ExitCode, BoxError> {
    let mut out = std::io::stdout().lock();
    if files.is_empty() {
        for line in std::io::stdin().lock().lines() {
            writeln!(out, "{}", line?)?;
        }
    }
    for file in files {
        let bytes = std::fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
        out.write_all(&bytes)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn dns(name: &str) -> Result<ExitCode, BoxError> {
    let found: Vec<SocketAddr> =
        (name, 0).to_socket_addrs().map_err(|e| format!("{name} cannot be resolved: {e}"))?.collect();
    for address in found {
        println!("{}", address.ip());
    }
    Ok(ExitCode::SUCCESS)
}

fn eat(mebibytes: usize) {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for number in 0..mebibytes {
        // Written, not only reserved: the kernel counts touched pages.
        kept.push(vec![u8::try_from(number % 251).unwrap_or(1).max(1); 1 << 20]);
    }
    println!("holding {} MiB", kept.len());
    std::mem::forget(kept);
}

async fn serve(args: HttpArgs, mut terminate: tokio::signal::unix::Signal) -> Result<ExitCode, BoxError> {
    // The first takes both families; a kernel without IPv6 takes the second.
    let anywhere: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    let anywhere = anywhere.map(|address| SocketAddr::new(address, args.port));
    let listener = TcpListener::bind(&anywhere[..]).await?;
    println!("serving on port {}", args.port);
    let hostname = nix::unistd::gethostname()?.to_string_lossy().into_owned();
    let greeting: Bytes = format!("{} {hostname}\n", args.text).into();
    let (exit, mut exited) = tokio::sync::mpsc::channel::<u8>(1);
    let mut drain = None;
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            code = exited.recv() => return Ok(ExitCode::from(code.unwrap_or(0))),
            _ = terminate.recv(), if drain.is_none() => {
                drain = Some(tokio::time::Instant::now() + Duration::from_secs_f64(args.drain.max(0.0)));
                continue;
            }
            () = tokio::time::sleep_until(drain.unwrap_or_else(tokio::time::Instant::now)), if drain.is_some() => {
                return Ok(ExitCode::SUCCESS);
            }
        };
        let greeting = greeting.clone();
        let exit = exit.clone();
        let ready_file = args.ready_file.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let answer = respond(&request, &greeting, ready_file.as_deref(), &exit);
                async move { Ok::<_, Infallible>(answer) }
            });
            // A client that goes away is not our problem.
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn respond(
    request: &Request<hyper::body::Incoming>,
    greeting: &Bytes,
    ready_file: Option<&std::path::Path>,
    exit: &tokio::sync::mpsc::Sender<u8>,
) -> Response<Full<Bytes>> {
    let text = |code: StatusCode, body: Bytes| {
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = code;
        response
    };
    match request.uri().path() {
        "/" => text(StatusCode::OK, greeting.clone()),
        "/healthz" => text(StatusCode::OK, "ok\n".into()),
        "/readyz" if ready_file.is_none_or(|f| f.exists()) => text(StatusCode::OK, "ok\n".into()),
        "/readyz" => text(StatusCode::SERVICE_UNAVAILABLE, "not ready\n".into()),
        "/echo" => {
            let mut body = format!("{} {}\n", request.method(), request.uri());
            for (name, value) in request.headers() {
                body.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
            }
            text(StatusCode::OK, body.into())
        }
        "/exit" => {
            let code = request.uri().query().and_then(|q| q.strip_prefix("code=")?.parse().ok()).unwrap_or(0);
            let _ = exit.try_send(code);
            text(StatusCode::OK, "bye\n".into())
        }
        _ => text(StatusCode::NOT_FOUND, "not found\n".into()),
    }
}

/// Asks as any client in a pod does: address from the environment, token and certificates from the volume.
async fn ask_api(path: &str) -> Result<ExitCode, BoxError> {
    let client = kube::Client::try_from(kube::Config::incluster_env()?)?;
    let request = Request::get(path).body(Vec::new())?;
    println!("{}", client.request_text(request).await?);
    Ok(ExitCode::SUCCESS)
}

async fn get(url: &str) -> Result<ExitCode, BoxError> {
    let rest = url.strip_prefix("http://").ok_or("only http:// addresses can be fetched")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    // The last part of an address of IPv6 is in brackets.
    let has_port = authority.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
    let address = if has_port { authority.to_owned() } else { format!("{authority}:80") };
    let stream = TcpStream::connect(&address).await.map_err(|e| format!("{address}: {e}"))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get(format!("/{path}")).header("host", authority).body(Full::<Bytes>::default())?;
    let response = sender.send_request(request).await?;
    let code = response.status();
    let body = http_body_util::BodyExt::collect(response.into_body()).await?.to_bytes();
    std::io::stdout().write_all(&body)?;
    if !code.is_success() {
        eprintln!("{url}: {code}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_a_link_for_every_tool() {
        let command = Tool::augment_subcommands(clap::Command::new("tools"));
        let mut names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        names.sort_unstable();
        assert_eq!(names, ferrite_runtime::image::TOOLS);
    }
}

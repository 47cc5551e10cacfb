//! `/exec`, `/attach`, `/portForward`: the runtime gives a one-time URL, and the upgraded connection is
//! passed through byte for byte.

use super::{Answer, Server, answer, full, query, text};
use crate::pod::model::{self, PodId};
use crate::pod::observe::observe;
use crate::pod::runtime_pod::RuntimePod;
use bytes::Bytes;
use ferrite_client::ObjectKey;
use ferrite_cri::Code;
use ferrite_cri::v1::{AttachRequest, ExecRequest, PortForwardRequest};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HOST, UPGRADE};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Bytes of a runtime's refusal that are passed on.
const MAX_REFUSAL: usize = 64 * 1024;

/// Which streams a caller wants, by the kubelet's names or by the API's.
#[derive(Debug, Default, PartialEq, Eq)]
struct Streams {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    tty: bool,
    command: Vec<String>,
    ports: Vec<i32>,
}

impl Streams {
    fn parse(pairs: Vec<(String, String)>) -> Self {
        let mut streams = Self::default();
        for (key, value) in pairs {
            let set = matches!(value.as_str(), "1" | "true");
            match key.as_str() {
                "input" | "stdin" => streams.stdin |= set,
                "output" | "stdout" => streams.stdout |= set,
                "error" | "stderr" => streams.stderr |= set,
                "tty" => streams.tty |= set,
                "command" => streams.command.push(value),
                "port" | "ports" => {
                    streams.ports.extend(value.split(',').filter_map(|p| p.parse::<i32>().ok()))
                }
                _ => {}
            }
        }
        // A terminal has no separate error stream.
        streams.stderr &= !streams.tty;
        streams
    }
}

impl Server {
    async fn find(&self, namespace: &str, pod: &str) -> Result<RuntimePod, Answer> {
        let context = &self.context;
        let key = ObjectKey::new(namespace, pod);
        let missing = || text(StatusCode::NOT_FOUND, format!("pod does not exist: {namespace}/{pod}\n"));
        let found = context.pods.get(&key).ok_or_else(missing)?;
        observe(&*context.runtime, &PodId::of(&found).uid).await.map_err(|e| refusal(&e))
    }

    pub(super) async fn running(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Result<String, Answer> {
        let runtime = self.find(namespace, pod).await?;
        let instance = runtime.latest(container).filter(|i| i.is_running()).map(|i| i.id.clone());
        instance
            .ok_or_else(|| text(StatusCode::NOT_FOUND, format!("container not found (\"{container}\")\n")))
    }

    pub(super) async fn exec(
        &self,
        request: Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Answer {
        let streams = Streams::parse(query(&request));
        let id = match self.running(namespace, pod, container).await {
            Ok(id) => id,
            Err(answer) => return answer,
        };
        if !(streams.stdin || streams.stdout || streams.stderr) {
            return text(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr\n");
        }
        let exec = ExecRequest {
            container_id: id,
            cmd: streams.command,
            tty: streams.tty,
            stdin: streams.stdin,
            stdout: streams.stdout,
            stderr: streams.stderr,
        };
        match self.context.runtime.exec(exec).await {
            Ok(answer) => self.tunnel(request, &answer.url).await,
            Err(e) => refusal(&e),
        }
    }

    pub(super) async fn attach(
        &self,
        request: Request<Incoming>,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Answer {
        let mut streams = Streams::parse(query(&request));
        let id = match self.running(namespace, pod, container).await {
            Ok(id) => id,
            Err(answer) => return answer,
        };
        // The container was made with or without a terminal; attaching cannot change that.
        let key = ObjectKey::new(namespace, pod);
        if let Some(pod) = self.context.pods.get(&key)
            && let Some(c) = model::containers(&pod).iter().find(|c| c.name() == container)
        {
            streams.tty = c.spec.tty.unwrap_or(false);
            streams.stderr &= !streams.tty;
        }
        let attach = AttachRequest {
            container_id: id,
            stdin: streams.stdin,
            tty: streams.tty,
            stdout: streams.stdout,
            stderr: streams.stderr,
        };
        match self.context.runtime.attach(attach).await {
            Ok(answer) => self.tunnel(request, &answer.url).await,
            Err(e) => refusal(&e),
        }
    }

    pub(super) async fn port_forward(
        &self,
        request: Request<Incoming>,
        namespace: &str,
        pod: &str,
    ) -> Answer {
        let streams = Streams::parse(query(&request));
        let runtime = match self.find(namespace, pod).await {
            Ok(runtime) => runtime,
            Err(answer) => return answer,
        };
        let Some(sandbox) = runtime.sandbox() else {
            return text(StatusCode::NOT_FOUND, format!("pod not found (\"{pod}_{namespace}\")\n"));
        };
        let forward = PortForwardRequest { pod_sandbox_id: sandbox.id.clone(), port: streams.ports };
        match self.context.runtime.port_forward(forward).await {
            Ok(answer) => self.tunnel(request, &answer.url).await,
            Err(e) => refusal(&e),
        }
    }

    /// Asks the runtime's streaming server for the same upgrade, then joins the two connections.
    async fn tunnel(&self, mut request: Request<Incoming>, url: &str) -> Answer {
        if !request.headers().contains_key(UPGRADE) {
            return text(StatusCode::BAD_REQUEST, "Upgrade request required\n");
        }
        let bad =
            |what: String| text(StatusCode::INTERNAL_SERVER_ERROR, format!("streaming server: {what}\n"));
        let Ok(uri) = url.parse::<Uri>() else { return bad(format!("bad address {url:?}")) };
        let Some(authority) = uri.authority().filter(|_| uri.scheme_str() == Some("http")) else {
            return bad(format!("cannot reach {url:?}"));
        };
        let address = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
        let stream = match TcpStream::connect(address).await {
            Ok(stream) => stream,
            Err(e) => return bad(e.to_string()),
        };
        let _ = stream.set_nodelay(true);
        let (mut sender, connection) = match hyper::client::conn::http1::handshake(TokioIo::new(stream)).await
        {
            Ok(pair) => pair,
            Err(e) => return bad(e.to_string()),
        };
        self.scope.spawn(async move {
            if let Err(e) = connection.with_upgrades().await {
                tracing::debug!(error = %e, "the connection to the streaming server broke");
            }
        });
        let mut onward = Request::new(Empty::<Bytes>::new());
        *onward.method_mut() = request.method().clone();
        *onward.uri_mut() = match uri.path_and_query() {
            Some(path) => Uri::from(path.clone()),
            None => Uri::from_static("/"),
        };
        for (name, value) in request.headers() {
            if *name != HOST {
                onward.headers_mut().append(name.clone(), value.clone());
            }
        }
        if let Ok(host) = authority.as_str().parse() {
            onward.headers_mut().insert(HOST, host);
        }
        let mut theirs = match sender.send_request(onward).await {
            Ok(answer) => answer,
            Err(e) => return bad(e.to_string()),
        };
        if theirs.status() != StatusCode::SWITCHING_PROTOCOLS {
            let status = theirs.status();
            let body = Limited::new(theirs.into_body(), MAX_REFUSAL).collect().await;
            let body = body.map(|b| b.to_bytes()).unwrap_or_default();
            return answer(status, "text/plain; charset=utf-8", full(body));
        }
        let mut ours = Response::new(full(Bytes::new()));
        *ours.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        for (name, value) in theirs.headers() {
            ours.headers_mut().append(name.clone(), value.clone());
        }
        if !ours.headers().contains_key(CONNECTION) {
            ours.headers_mut().insert(CONNECTION, hyper::header::HeaderValue::from_static("Upgrade"));
        }
        let caller = hyper::upgrade::on(&mut request);
        let callee = hyper::upgrade::on(&mut theirs);
        self.scope.spawn(async move {
            let (Ok(caller), Ok(callee)) = tokio::join!(caller, callee) else { return };
            let (mut caller, mut callee) = (TokioIo::new(caller), TokioIo::new(callee));
            // Either side may simply hang up; that is how such connections end.
            let _ = tokio::io::copy_bidirectional(&mut caller, &mut callee).await;
        });
        ours
    }
}

fn refusal(e: &ferrite_cri::Error) -> Answer {
    let status = match e.code {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    text(status, format!("{e}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_streams_are_understood() {
        let pairs =
            |list: &[(&str, &str)]| list.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let kubelet = Streams::parse(pairs(&[
            ("input", "1"),
            ("output", "1"),
            ("error", "1"),
            ("command", "sh"),
            ("command", "-c"),
        ]));
        let api = Streams::parse(pairs(&[
            ("stdin", "true"),
            ("stdout", "true"),
            ("stderr", "true"),
            ("command", "sh"),
            ("command", "-c"),
        ]));
        assert_eq!(kubelet, api);
        assert_eq!(kubelet.command, ["sh", "-c"]);
        let tty = Streams::parse(pairs(&[("tty", "1"), ("error", "1"), ("port", "80,81")]));
        assert!(tty.tty && !tty.stderr);
        assert_eq!(tty.ports, [80, 81]);
    }
}

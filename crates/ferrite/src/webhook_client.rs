//! Connections to webhooks that a kubeconfig names: for audit events and for reviews.

use crate::apiserver::BoxError;
use bytes::Bytes;
use ferrite_apiserver::{AuditSender, WebhookReply, WebhookSender, WebhookSenders};
use futures_util::future::BoxFuture;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Limited};
use kube::config::{KubeConfigOptions, Kubeconfig};
use std::path::Path;
use std::sync::Arc;

/// The server of a kubeconfig. Requests go to the path of its address, as upstream's do.
pub struct WebhookClient {
    client: kube::Client,
    path: String,
}

impl std::fmt::Debug for WebhookClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookClient").field("path", &self.path).finish_non_exhaustive()
    }
}

/// An answer that is no success.
#[derive(Debug, thiserror::Error)]
#[error("the server answered {0}")]
struct Refused(http::StatusCode);

impl WebhookClient {
    pub async fn open(file: &Path) -> Result<Self, BoxError> {
        let kubeconfig = Kubeconfig::read_from(file)?;
        let mut config =
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        // Callers try again by upstream's rules.
        config.default_retry = false;
        let path = match config.cluster_url.path_and_query().map_or("/", |path| path.as_str()) {
            "/" | "" => "/".to_owned(),
            path => path.trim_end_matches('/').to_owned(),
        };
        let mut parts = config.cluster_url.clone().into_parts();
        parts.path_and_query = Some(http::uri::PathAndQuery::from_static("/"));
        config.cluster_url = http::Uri::from_parts(parts)?;
        Ok(Self { client: kube::Client::try_from(config)?, path })
    }

    async fn send(&self, body: Bytes) -> Result<Response<kube::client::Body>, BoxError> {
        let request = Request::post(&self.path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, */*")
            .header(header::USER_AGENT, "kube-apiserver")
            .body(kube::client::Body::from(body))?;
        Ok(self.client.send(request).await?)
    }
}

impl AuditSender for WebhookClient {
    fn post(&self, body: Bytes) -> BoxFuture<'_, Result<(), BoxError>> {
        Box::pin(async move {
            match self.send(body).await?.status() {
                status if status.is_success() => Ok(()),
                status => Err(Refused(status).into()),
            }
        })
    }
}

impl WebhookSender for WebhookClient {
    fn post(&self, body: Bytes, limit: usize) -> BoxFuture<'_, Result<WebhookReply, BoxError>> {
        Box::pin(async move {
            let (parts, body) = self.send(body).await?.into_parts();
            let body = Limited::new(body, limit).collect().await?.to_bytes();
            let retry_after = parts.headers.contains_key(header::RETRY_AFTER);
            Ok(WebhookReply { code: parts.status.as_u16(), retry_after, body })
        })
    }
}

/// Opens [`WebhookClient`]s.
#[derive(Debug)]
pub struct WebhookClients;

impl WebhookSenders for WebhookClients {
    fn open<'a>(&'a self, kubeconfig: &'a Path) -> BoxFuture<'a, Result<Arc<dyn WebhookSender>, BoxError>> {
        Box::pin(
            async move { Ok(Arc::new(WebhookClient::open(kubeconfig).await?) as Arc<dyn WebhookSender>) },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn client(address: std::net::SocketAddr) -> WebhookClient {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kubeconfig");
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: 'http://{address}/audit/here'}}}}]\n\
             users: [{{name: u, user: {{token: secret}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
             current-context: x\n"
        );
        std::fs::write(&file, kubeconfig).unwrap();
        WebhookClient::open(&file).await.unwrap()
    }

    /// Reads one request whose body ends with `end`, answers it, and returns it.
    async fn serve(listener: &TcpListener, end: &[u8], reply: &str) -> String {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(end) {
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&buffer[..read]);
        }
        stream.write_all(reply.as_bytes()).await.unwrap();
        String::from_utf8_lossy(&seen).to_lowercase()
    }

    #[tokio::test]
    async fn events_are_posted_to_the_server_of_the_kubeconfig() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let webhook = client(listener.local_addr().unwrap()).await;
        for (answer, good) in [("200 OK", true), ("500 Internal Server Error", false)] {
            let reply = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let body = Bytes::from_static(b"{\"kind\":\"EventList\"}");
            let served = serve(&listener, b"{\"kind\":\"EventList\"}", &reply);
            let (seen, sent) = tokio::join!(served, AuditSender::post(&webhook, body));
            assert!(seen.starts_with("post /audit/here http/1.1\r\n"), "{seen}");
            assert!(seen.contains("authorization: bearer secret"), "{seen}");
            assert_eq!(sent.is_ok(), good, "{sent:?}");
        }
    }

    #[tokio::test]
    async fn replies_are_read_up_to_a_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let webhook = client(listener.local_addr().unwrap()).await;
        for (size, fits) in [(100, true), (101, false)] {
            let reply = format!(
                "HTTP/1.1 429 Busy\r\nretry-after: 1\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n{}",
                "x".repeat(size)
            );
            let served = serve(&listener, b"{}", &reply);
            let body = Bytes::from_static(b"{}");
            let (_, replied) = tokio::join!(served, WebhookSender::post(&webhook, body, 100));
            assert_eq!(replied.is_ok(), fits, "{replied:?}");
            if let Ok(reply) = replied {
                assert_eq!((reply.code, reply.retry_after, reply.body.len()), (429, true, 100));
            }
        }
    }
}

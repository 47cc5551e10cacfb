//! The gRPC health check (`grpc.health.v1.Health/Check`): one message each way, coded by hand.

use super::Outcome;
use super::http::{authority, dial_error};
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::time::Duration;
use tokio::net::TcpStream;

const MAX_ANSWER: usize = 4096;

pub(crate) async fn check(host: &str, port: u16, service: &str, limit: Duration) -> Outcome {
    match tokio::time::timeout(limit, exchange(host, port, service)).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Failure(format!(
            "timeout: failed to connect service {:?} within {}: context deadline exceeded",
            authority(host, port),
            crate::clock::go_duration(limit)
        )),
    }
}

async fn exchange(host: &str, port: u16, service: &str) -> Outcome {
    let stream = match TcpStream::connect((host, port)).await {
        Ok(stream) => stream,
        Err(e) => return Outcome::Failure(dial_error(host, port, &e)),
    };
    let (mut sender, connection) = match http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await {
        Ok(pair) => pair,
        Err(e) => return Outcome::Failure(e.to_string()),
    };
    let request =
        hyper::Request::post(format!("http://{}/grpc.health.v1.Health/Check", authority(host, port)))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("user-agent", ferrite_api::version::PROBE_USER_AGENT)
            .body(Full::new(encode(service)));
    let request = match request {
        Ok(request) => request,
        Err(e) => return Outcome::Error(e.to_string()),
    };
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|e| e.to_string())?;
        let headers = answer.headers().clone();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(|e| e.to_string())?;
        let status =
            body.trailers().and_then(|t| t.get("grpc-status")).or(headers.get("grpc-status")).cloned();
        let code = status.as_ref().and_then(|s| s.to_str().ok()).unwrap_or("0").to_string();
        Ok::<_, String>((code, body.to_bytes()))
    };
    tokio::pin!(exchange);
    tokio::pin!(connection);
    let answer = tokio::select! {
        answer = &mut exchange => answer,
        _ = &mut connection => exchange.await,
    };
    match answer {
        Err(e) => Outcome::Failure(e),
        Ok((code, _)) if code != "0" => Outcome::Failure(format!("rpc error: code = {code}")),
        Ok((_, body)) => match serving_status(&body) {
            Some(1) => Outcome::Success,
            status => Outcome::Failure(format!("service unhealthy (responded with {status:?})")),
        },
    }
}

fn encode(service: &str) -> Bytes {
    let mut message = BytesMut::new();
    if !service.is_empty() {
        message.put_u8(0x0a);
        let mut length = service.len();
        while length >= 0x80 {
            message.put_u8((length as u8 & 0x7f) | 0x80);
            length >>= 7;
        }
        message.put_u8(length as u8);
        message.put_slice(service.as_bytes());
    }
    let mut frame = BytesMut::with_capacity(5 + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frame.put(message);
    frame.freeze()
}

/// Field 1 of the answer: 1 is SERVING. An empty message means 0, UNKNOWN.
fn serving_status(frame: &[u8]) -> Option<u8> {
    let message = frame.get(5..)?;
    match message {
        [] => Some(0),
        [0x08, status, ..] => Some(*status),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_on_the_wire() {
        assert_eq!(encode("").as_ref(), [0, 0, 0, 0, 0]);
        assert_eq!(encode("ab").as_ref(), [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
        assert_eq!(serving_status(&[0, 0, 0, 0, 2, 8, 1]), Some(1));
        assert_eq!(serving_status(&[0, 0, 0, 0, 0]), Some(0));
        assert_eq!(serving_status(&[0, 0]), None);
    }
}

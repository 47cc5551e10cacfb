//! Requests and responses as bytes: the part of a client that does not depend on the kind.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::client::Body;
use kube::core::Status;

use crate::measures::count_request;

/// A response body larger than this is refused: it is more than a page of the largest objects.
const MAX_RESPONSE: usize = 1 << 30;

/// Sends `request` and returns the body, or the server's `Status` as an error.
pub(crate) async fn send(client: &Client, request: Request<Vec<u8>>) -> Result<Bytes, kube::Error> {
    let response = respond(client, request).await?;
    let status = response.status();
    let body = collect(response.into_body()).await?;
    if status.is_success() { Ok(body) } else { Err(failure(status, &body)) }
}

/// The JSON document at a path that is no object's: discovery, schemas. `accept` is the wanted media type.
pub async fn get_document(
    client: &Client,
    path: &str,
    accept: &str,
) -> Result<ferrite_json::Value, kube::Error> {
    let request = Request::get(path).header(http::header::ACCEPT, accept).body(Vec::new());
    let request = request.map_err(kube::Error::HttpError)?;
    let body = send(client, request).await?;
    ferrite_json::from_slice(&body).map_err(kube::Error::SerdeError)
}

/// Sends `request` and returns the body as it arrives, or the server's `Status` as an error.
pub(crate) async fn open(client: &Client, request: Request<Vec<u8>>) -> Result<Body, kube::Error> {
    let response = respond(client, request).await?;
    let status = response.status();
    if status.is_success() {
        return Ok(response.into_body());
    }
    let body = collect(response.into_body()).await?;
    Err(failure(status, &body))
}

async fn respond(client: &Client, request: Request<Vec<u8>>) -> Result<Response<Body>, kube::Error> {
    let method = request.method().clone();
    let response = client.send(request.map(Body::from)).await;
    count_request(&method, response.as_ref().ok().map(Response::status));
    response
}

async fn collect(body: Body) -> Result<Bytes, kube::Error> {
    Ok(Limited::new(body, MAX_RESPONSE).collect().await.map_err(kube::Error::Service)?.to_bytes())
}

/// The error of a response that is no success. Proxies answer with a page instead of a `Status`: its text is the
/// message then.
fn failure(code: StatusCode, body: &[u8]) -> kube::Error {
    let status = ferrite_json::from_slice::<Status>(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(&body[..body.len().min(1024)]);
        Status::failure(text.trim(), "Failed to parse error data").with_code(code.as_u16())
    });
    kube::Error::Api(Box::new(status))
}

/// An error of the request itself, before anything was sent.
pub(crate) fn invalid(error: kube::core::request::Error) -> kube::Error {
    kube::Error::BuildRequest(error)
}

//! Documents that are no objects of a kind which a client knows: discovery, scales, answers of extension API servers.

use ferrite_json::Value;
use http::{Method, Request, header};
use kube::Client;

use crate::object;
use crate::request::send_limited;

/// Reads the document at `path` (with its query), of at most `limit` bytes. `accept` is the representation asked for.
pub async fn read_document(
    client: &Client,
    path: &str,
    accept: &str,
    limit: usize,
) -> Result<Value, kube::Error> {
    let request = Request::builder().method(Method::GET).uri(path).header(header::ACCEPT, accept);
    let request = request.body(Vec::new()).map_err(kube::Error::HttpError)?;
    let body = send_limited(client, request, limit).await?;
    Ok(object::decode(&body)?)
}

/// Replaces the document at `path` and returns the server's answer.
pub async fn write_document(
    client: &Client,
    path: &str,
    document: &Value,
    limit: usize,
) -> Result<Value, kube::Error> {
    let request = Request::builder().method(Method::PUT).uri(path);
    let request = request.header(header::CONTENT_TYPE, "application/json");
    let request = request.body(object::encode(document)?).map_err(kube::Error::HttpError)?;
    let body = send_limited(client, request, limit).await?;
    Ok(object::decode(&body)?)
}

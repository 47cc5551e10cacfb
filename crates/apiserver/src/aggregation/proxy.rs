//! Passes requests for a group that an extension API server serves on to it, on behalf of their user.

use super::remote::{ReachError, Remote, identify};
use crate::filters::Asked;
use crate::http::{self, BoxError, Response};
use crate::server::ApiServer;
use crate::subresource::{dial, forwarding};
use ::http::{Request, StatusCode, header};
use ferrite_api::Status;
use http_body_util::BodyExt;

/// Answers a request with the response of the server behind an APIService.
pub(crate) async fn handle(server: &ApiServer, remote: &Remote, asked: Asked) -> Result<Response, Status> {
    let user = asked.user.ok_or_else(Status::unauthorized)?;
    if !remote.available {
        return Ok(unavailable());
    }
    if let Some(error) = remote.trust_error() {
        return Ok(http::text(500, format!("{error}\n")));
    }
    let mut parts = asked.parts;
    let target = parts.uri.path_and_query().map_or_else(|| parts.uri.path().to_owned(), ToString::to_string);
    let mut request = Request::builder()
        .method(parts.method.clone())
        .uri(target)
        .body(asked.body)
        .map_err(|error| Status::bad_request(format!("cannot pass the request on: {error}")))?;
    let headers = request.headers_mut();
    forwarding::copy_request_headers(&parts.headers, headers);
    let upgrades = parts.headers.contains_key(header::UPGRADE);
    if upgrades {
        dial::copy_upgrade_headers(&parts.headers, headers);
    }
    forwarding::append_peer(&parts, headers);
    identify(headers, &user);
    let response = match remote.send(server, parts.extensions.get(), request).await {
        Ok(response) => response,
        Err(ReachError::TooMany(error)) => return Err(Status::too_many_requests(error.to_string())),
        Err(ReachError::NoEndpoint { .. }) => return Ok(unavailable()),
        Err(error) => {
            tracing::debug!(api_service = remote.name, %error, "an extension API server did not answer");
            return Ok(http::text(503, format!("error trying to reach service: {error}\n")));
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return dial::join(server, &mut parts, response);
    }
    if server.config.rejects_redirects
        && response.status().is_redirection()
        && response.headers().get(header::LOCATION).is_some_and(|location| !location.is_empty())
    {
        // As upstream: an extension API server must not lead clients elsewhere with their credentials.
        let message = "the backend attempted to redirect this request, which is not permitted";
        return Ok(http::text(502, message));
    }
    let (far, body) = response.into_parts();
    let mut answer = Response::new(body.map_err(|error| -> BoxError { error.into() }).boxed_unsync());
    *answer.status_mut() = far.status;
    forwarding::copy_response_headers(&far.headers, answer.headers_mut());
    Ok(answer)
}

/// In upstream's words.
fn unavailable() -> Response {
    let mut answer = http::text(503, "service unavailable\n");
    let nosniff = ::http::HeaderValue::from_static("nosniff");
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    answer
}

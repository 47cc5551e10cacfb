//! The request that a redirect asks for.

use super::http::{HttpRequest, authority};
use hyper::Uri;
use hyper::http::uri::Scheme;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LocationError {
    #[error("failed to parse Location header {0:?}")]
    Syntax(String),
    #[error("unsupported protocol scheme {0:?}")]
    Scheme(String),
}

/// The request after this answer; None when the answer is no redirect.
pub(super) fn next(
    request: &HttpRequest,
    status: u16,
    location: Option<&str>,
) -> Result<Option<HttpRequest>, LocationError> {
    let location = match (status, location) {
        (301 | 302 | 303 | 307 | 308, Some(location)) if !location.is_empty() => location,
        _ => return Ok(None),
    };
    let syntax = || LocationError::Syntax(location.chars().take(256).collect());
    // A fragment is the client's own.
    let reference = location.split_once('#').map_or(location, |(reference, _)| reference);
    let scheme = if request.tls { "https" } else { "http" };
    let has_scheme = reference.split(['/', '?']).next().is_some_and(|head| head.contains(':'));
    let absolute = match reference {
        reference if has_scheme => reference.to_owned(),
        reference if reference.starts_with("//") => format!("{scheme}:{reference}"),
        reference => {
            let here = authority(&request.host, request.port);
            format!("{scheme}://{here}{}", beside(&request.path, reference))
        }
    };
    let uri: Uri = absolute.parse().map_err(|_| syntax())?;
    let tls = match uri.scheme() {
        Some(scheme) if *scheme == Scheme::HTTP => false,
        Some(scheme) if *scheme == Scheme::HTTPS => true,
        Some(other) => return Err(LocationError::Scheme(other.to_string())),
        None => return Err(syntax()),
    };
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(syntax)?;
    // As upstream: a header that names the host is about the place that was asked.
    let names_host = has_scheme || reference.starts_with("//");
    let headers =
        request.headers.iter().filter(|(name, _)| !(names_host && name.eq_ignore_ascii_case("host")));
    Ok(Some(HttpRequest {
        tls,
        host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
        port: uri.port_u16().unwrap_or(if tls { 443 } else { 80 }),
        path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        headers: headers.cloned().collect(),
    }))
}

/// The path and the query that a reference without a host means, seen from `path`.
fn beside(path: &str, reference: &str) -> String {
    let own = path.split_once('?').map_or(path, |(own, _)| own);
    if reference.starts_with('?') {
        return format!("{own}{reference}");
    }
    let (to, query) = reference.split_at(reference.find('?').unwrap_or(reference.len()));
    let directory = own.rsplit_once('/').map_or("", |(directory, _)| directory);
    let joined = if to.starts_with('/') { to.to_owned() } else { format!("{directory}/{to}") };
    let mut parts: Vec<&str> = Vec::new();
    let mut is_directory = false;
    for part in joined.split('/').skip(1) {
        is_directory = matches!(part, "." | "..");
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let end = if is_directory && !parts.is_empty() { "/" } else { "" };
    format!("/{}{end}{query}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_read_as_seen_from_the_request() {
        let request = HttpRequest {
            tls: false,
            host: "10.1.0.2".into(),
            port: 8080,
            path: "/a/b?x=1".into(),
            headers: vec![("Host".into(), "app".into()), ("X-A".into(), "b".into())],
        };
        for (location, expected) in [
            ("/c", "http://10.1.0.2:8080/c app"),
            ("c", "http://10.1.0.2:8080/a/c app"),
            ("../c?y=2", "http://10.1.0.2:8080/c?y=2 app"),
            ("..", "http://10.1.0.2:8080/ app"),
            ("../../../c/.", "http://10.1.0.2:8080/c/ app"),
            ("?y=2", "http://10.1.0.2:8080/a/b?y=2 app"),
            ("/c#part", "http://10.1.0.2:8080/c app"),
            ("/c?to=http://x/", "http://10.1.0.2:8080/c?to=http://x/ app"),
            ("//10.1.0.3/c", "http://10.1.0.3:80/c -"),
            ("https://10.1.0.2/c", "https://10.1.0.2:443/c -"),
            ("HTTP://10.1.0.2:9/c", "http://10.1.0.2:9/c -"),
            ("http://[fd00::1]:9", "http://[fd00::1]:9/ -"),
        ] {
            let next = next(&request, 302, Some(location)).unwrap().unwrap();
            let host = next.headers.iter().find(|(name, _)| name == "Host");
            let found = format!("{} {}", next.url(), host.map_or("-", |(_, value)| value));
            assert_eq!(found, expected, "{location}");
            assert!(next.headers.iter().any(|(name, _)| name == "X-A"));
        }
        for (status, location) in [(200, Some("/c")), (304, Some("/c")), (302, None), (302, Some(""))] {
            assert_eq!(next(&request, status, location), Ok(None), "{status} {location:?}");
        }
        for location in ["ftp://10.1.0.2/", "http://", "http://a b/", "x:y"] {
            assert!(next(&request, 302, Some(location)).is_err(), "{location}");
        }
    }
}

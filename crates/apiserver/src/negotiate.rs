//! Which representation a client wants.

use ferrite_api::Status;

/// The encodings we speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Yaml,
    Protobuf,
}

impl Format {
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
        }
    }

    fn of(media_type: &str) -> Option<Self> {
        Some(match media_type {
            "application/json" | "*/*" | "" => Self::Json,
            "application/yaml" => Self::Yaml,
            "application/vnd.kubernetes.protobuf" => Self::Protobuf,
            _ => return None,
        })
    }
}

/// The form of an object in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    AsIs,
    /// `meta.k8s.io/v1` or, when set, `v1beta1`.
    Table {
        beta: bool,
    },
    PartialObjectMetadata {
        beta: bool,
    },
    PartialObjectMetadataList {
        beta: bool,
    },
    /// `apidiscovery.k8s.io/v2`
    AggregatedDiscovery,
}

/// One acceptable answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Representation {
    pub format: Format,
    pub shape: Shape,
    pub pretty: bool,
}

pub(crate) const PLAIN_JSON: Representation =
    Representation { format: Format::Json, shape: Shape::AsIs, pretty: false };

pub(crate) const ACCEPTED: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf";
/// The media types of a watch.
pub(crate) const WATCHED: &str =
    "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";
/// Media types of the routes that list, which also watch.
const LISTED: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf, application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";

/// Longer headers are cut: nobody needs more alternatives.
const MAX_CLAUSES: usize = 64;

/// The clauses of an `Accept` header, the most wanted first.
pub(crate) fn clauses(header: &str) -> Vec<&str> {
    let mut clauses: Vec<(f32, &str)> = header
        .split(',')
        .take(MAX_CLAUSES)
        .map(|clause| (parameter(clause, "q").and_then(|q| q.parse().ok()).unwrap_or(1.0), clause))
        .collect();
    clauses.sort_by(|a, b| b.0.total_cmp(&a.0));
    clauses.into_iter().map(|(_, clause)| clause).collect()
}

/// Picks the best clause of an `Accept` header that we can serve, of those that are `allowed`.
pub(crate) fn accept(header: &str, allowed: impl Fn(Format, Shape) -> bool) -> Option<Representation> {
    if header.trim().is_empty() {
        return Some(PLAIN_JSON);
    }
    clauses(header).into_iter().find_map(|clause| {
        let format = Format::of(clause.split(';').next().unwrap_or_default().trim())?;
        let shape = shape(clause).filter(|shape| allowed(format, *shape))?;
        let pretty = parameter(clause, "pretty").is_some_and(|p| matches!(p, "1" | "true"));
        Some(Representation { format, shape, pretty })
    })
}

/// The representation of an error: errors have no other shape, and a client that accepts nothing we have
/// gets JSON.
pub(crate) fn for_errors(header: &str) -> Representation {
    accept(header, |_, shape| shape == Shape::AsIs).unwrap_or(PLAIN_JSON)
}

/// Refuses a header that names no media type of a route. As upstream, whose router looks before the handler does:
/// only a handler knows shapes.
pub(crate) fn check_route(header: &str, lists: bool) -> Result<(), Status> {
    let named = |clause: &str| Format::of(clause.split(';').next().unwrap_or_default().trim()).is_some();
    if header.trim().is_empty() || header.split(',').take(MAX_CLAUSES).any(named) {
        return Ok(());
    }
    Err(none_available(if lists { LISTED } else { ACCEPTED }))
}

/// As [`check_route`], for the log of a pod, which is text as well.
pub(crate) fn check_log(header: &str) -> Result<(), Status> {
    let text =
        header.split(',').any(|clause| clause.split(';').next().unwrap_or_default().trim() == "text/plain");
    if text {
        return Ok(());
    }
    check_route(header, false).map_err(|_| none_available(&format!("text/plain, {ACCEPTED}")))
}

/// The router's refusal, with the media types that the route has.
pub(crate) fn none_available(available: &str) -> Status {
    let message = format!("406: Not Acceptable\n\nAvailable representations: {available}");
    Status::new(406, "NotAcceptable", message).with_empty_details()
}

/// Refuses a header that names nothing but media types other than `only`.
pub(crate) fn check_only(header: &str, only: &str) -> Result<(), Status> {
    let named = |clause: &str| {
        let media_type = clause.split(';').next().unwrap_or_default().trim();
        media_type == "*/*" || media_type == only
    };
    match header.trim().is_empty() || header.split(',').take(MAX_CLAUSES).any(named) {
        true => Ok(()),
        false => Err(none_available(only)),
    }
}

fn shape(clause: &str) -> Option<Shape> {
    let Some(as_kind) = parameter(clause, "as") else { return Some(Shape::AsIs) };
    let group = parameter(clause, "g").unwrap_or_default();
    let version = parameter(clause, "v").unwrap_or_default();
    let beta = match (group, version) {
        ("meta.k8s.io", "v1") | ("apidiscovery.k8s.io", "v2") => false,
        ("meta.k8s.io", "v1beta1") => true,
        _ => return None,
    };
    Some(match (group, as_kind) {
        ("meta.k8s.io", "Table") => Shape::Table { beta },
        ("meta.k8s.io", "PartialObjectMetadata") => Shape::PartialObjectMetadata { beta },
        ("meta.k8s.io", "PartialObjectMetadataList") => Shape::PartialObjectMetadataList { beta },
        ("apidiscovery.k8s.io", "APIGroupDiscoveryList") => Shape::AggregatedDiscovery,
        _ => return None,
    })
}

pub(crate) fn parameter<'a>(clause: &'a str, name: &str) -> Option<&'a str> {
    clause.split(';').skip(1).find_map(|p| {
        let (key, value) = p.split_once('=')?;
        (key.trim() == name).then(|| value.trim().trim_matches('"'))
    })
}

/// The format of a request's body.
pub(crate) fn content_type(header: &str) -> Result<Format, Status> {
    // As upstream: media types have no case.
    let media_type = header.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // As upstream: a header with an empty parameter is no media type, but one semicolon at its end does no harm.
    let broken =
        header.trim_end().strip_suffix(';').unwrap_or(header).split(';').skip(1).any(|p| p.trim().is_empty());
    Format::of(&media_type)
        .filter(|_| media_type != "*/*" && !broken)
        .ok_or_else(|| Status::unsupported_media_type(ACCEPTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clause_we_can_serve_wins() {
        let table = Shape::Table { beta: false };
        let rows = [
            ("", Some((Format::Json, Shape::AsIs))),
            ("*/*", Some((Format::Json, Shape::AsIs))),
            ("text/html,*/*;q=0.8", Some((Format::Json, Shape::AsIs))),
            ("application/json;q=0.1,application/yaml;q=0.5", Some((Format::Yaml, Shape::AsIs))),
            ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Some((Format::Json, table))),
            (
                "application/json;as=Table;v=v9;g=meta.k8s.io,application/json",
                Some((Format::Json, Shape::AsIs)),
            ),
            ("application/vnd.kubernetes.protobuf,application/json", Some((Format::Protobuf, Shape::AsIs))),
            ("application/json;as=Bogus;v=v1;g=meta.k8s.io", None),
            ("text/html", None),
        ];
        for (header, expected) in rows {
            let got = accept(header, |format, shape| shape == Shape::AsIs || format != Format::Protobuf)
                .map(|r| (r.format, r.shape));
            assert_eq!(got, expected, "{header}");
        }
    }

    #[test]
    fn errors_have_no_shape_of_their_own() {
        let rows = [
            ("application/yaml", Format::Yaml),
            ("application/yaml;as=Table;v=v1;g=meta.k8s.io", Format::Json),
            ("application/json;as=Table;v=v1;g=meta.k8s.io,application/yaml", Format::Yaml),
            ("application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;v=v1;g=meta.k8s.io", Format::Json),
            ("application/vnd.kubernetes.protobuf", Format::Protobuf),
            ("text/html", Format::Json),
        ];
        for (header, expected) in rows {
            let got = for_errors(header);
            assert_eq!((got.format, got.shape), (expected, Shape::AsIs), "{header}");
        }
    }

    #[test]
    fn the_router_knows_media_types_but_no_shapes() {
        for (header, lists, taken) in [
            ("", true, true),
            ("application/json;as=Bogus;v=v1;g=meta.k8s.io", false, true),
            ("text/html,*/*", false, true),
            ("text/html", false, false),
            ("application/*", true, false),
        ] {
            let got = check_route(header, lists);
            assert_eq!(got.is_ok(), taken, "{header}");
            if let Err(status) = got {
                assert_eq!(status.message.ends_with("stream=watch"), lists, "{header}");
            }
        }
        assert!(check_only("application/jwk-set+json", "application/jwk-set+json").is_ok());
        assert!(check_only("application/json", "application/jwk-set+json").is_err());
    }
}

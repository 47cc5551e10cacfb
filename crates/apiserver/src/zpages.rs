//! `/statusz` and `/flagz`: the server's version and settings, as text for people or as an object of
//! `config.k8s.io` for programs.

use crate::encode;
use crate::http::{self, Response};
use crate::negotiate::{self, Format, Representation, Shape};
use crate::registry::metadata::time;
use crate::server::Config;
use crate::version::KUBERNETES_VERSION;
use ::http::{HeaderValue, header};
use ferrite_api::Status;
use ferrite_json::{Map, Value, json};
use jiff::Timestamp;
use std::collections::BTreeMap;

/// The name upstream's API server has in these pages.
const COMPONENT: &str = "apiserver";
const ACCEPTED: &str = "application/json, application/yaml, text/plain";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.";
/// The paths that `/statusz` lists, as upstream: those for debugging.
const PATHS: &[&str] = &["/flagz", "/healthz", "/livez", "/metrics", "/readyz", "/statusz", "/version"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Page {
    Statusz,
    Flagz,
}

impl Page {
    fn kind(self) -> &'static str {
        match self {
            Self::Statusz => "Statusz",
            Self::Flagz => "Flagz",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Statusz => "statusz",
            Self::Flagz => "flagz",
        }
    }
}

/// The representation that a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Text,
    Object { format: Format, version: &'static str },
}

/// The best clause of the `Accept` header that the page can be. As upstream: without a header there is none.
fn wanted(page: Page, accept: &str) -> Option<Wanted> {
    negotiate::clauses(accept).into_iter().find_map(|clause| {
        let media_type = clause.split(';').next().unwrap_or_default().trim();
        let format = match media_type {
            "text/plain" | "text/*" | "*/*" => return Some(Wanted::Text),
            "application/json" => Format::Json,
            "application/yaml" => Format::Yaml,
            _ => return None,
        };
        let is = |name, value| negotiate::parameter(clause, name) == Some(value);
        let version = ["v1alpha1", "v1beta1"].into_iter().find(|version| is("v", version))?;
        (is("g", "config.k8s.io") && is("as", page.kind())).then_some(Wanted::Object { format, version })
    })
}

/// The inputs of the pages.
pub(crate) struct About<'a> {
    pub config: &'a Config,
    pub started: Timestamp,
    pub now: Timestamp,
}

pub(crate) fn answer(page: Page, about: &About<'_>, accept: &str) -> Result<Response, Status> {
    // A header that names nothing accepts nothing here.
    let named = if accept.trim().is_empty() { None } else { wanted(page, accept) };
    let (format, version) = match named.ok_or_else(|| Status::not_acceptable(ACCEPTED))? {
        Wanted::Text => return Ok(http::text(200, text(page, about))),
        Wanted::Object { format, version } => (format, version),
    };
    let representation = Representation { format, shape: Shape::AsIs, pretty: false };
    let mut answer = encode::value(200, &object(page, about, version), representation)?;
    let content_type = format!("{};g=config.k8s.io;v={version};as={}", format.media_type(), page.kind());
    if let Ok(value) = HeaderValue::from_str(&content_type) {
        answer.headers_mut().insert(header::CONTENT_TYPE, value);
    }
    if version == "v1alpha1" {
        let warning = format!(
            "This version of the {} endpoint is deprecated. Please use a newer version.",
            page.name()
        );
        answer
            .headers_mut()
            .extend(crate::call::Call::warning_headers(&[warning]).map(|value| (header::WARNING, value)));
    }
    Ok(answer)
}

fn binary_version() -> &'static str {
    KUBERNETES_VERSION.trim_start_matches('v')
}

fn emulation_version() -> &'static str {
    binary_version().rsplit_once('.').map_or("", |(minor, _)| minor)
}

fn uptime(about: &About<'_>) -> i64 {
    about.now.duration_since(about.started).as_secs().max(0)
}

fn text(page: Page, about: &About<'_>) -> String {
    let head = format!("\n{COMPONENT} {}\n{WARNING}\n", page.name());
    let lines: Vec<String> = match page {
        Page::Flagz => {
            flags(about.config).into_iter().map(|(flag, value)| format!("{flag}:{value}")).collect()
        }
        Page::Statusz => {
            let up = uptime(about);
            let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
            vec![
                String::new(),
                format!("Started: {}", about.started.strftime("%a %b %e %H:%M:%S UTC %Y")),
                format!("Up: {hours} hr {minutes:02} min {seconds:02} sec"),
                "Go version: none".to_owned(),
                format!("Binary version: {}", binary_version()),
                format!("Emulation version: {}", emulation_version()),
                format!("Paths: {}", PATHS.join(" ")),
            ]
        }
    };
    head + &lines.join("\n") + "\n"
}

fn object(page: Page, about: &About<'_>, version: &str) -> Value {
    let mut object = json!({
        "kind": page.kind(), "apiVersion": format!("config.k8s.io/{version}"), "metadata": {"name": COMPONENT},
    });
    match page {
        Page::Flagz => {
            let flags: Map = flags(about.config).into_iter().map(|(k, v)| (k.to_owned(), v.into())).collect();
            object["flags"] = flags.into();
        }
        Page::Statusz => {
            object["startTime"] = time(about.started).into();
            object["uptimeSeconds"] = uptime(about).into();
            object["goVersion"] = "none".into();
            object["binaryVersion"] = binary_version().into();
            object["emulationVersion"] = emulation_version().into();
            object["paths"] = PATHS.iter().map(|p| Value::from(*p)).collect();
        }
    }
    object
}

/// The configuration under the names of upstream's flags. Keys and passwords are in none of them.
fn flags(config: &Config) -> BTreeMap<&'static str, String> {
    let serving = &config.serving;
    let list = |items: &[String]| format!("[{}]", items.join(","));
    let duration = |duration| ferrite_component::GoDuration(duration).to_string();
    let runtime: Vec<String> = config.runtime_config.iter().map(|(key, on)| format!("{key}={on}")).collect();
    let ranges: Vec<String> = config.service_ranges.iter().map(ToString::to_string).collect();
    BTreeMap::from([
        ("advertise-address", config.advertise.ip().to_string()),
        ("disable-admission-plugins", list(&config.admission.disable)),
        ("enable-admission-plugins", list(&config.admission.enable)),
        ("enable-bootstrap-token-auth", config.bootstrap_tokens.to_string()),
        ("event-ttl", duration(std::time::Duration::from_secs(config.event_ttl_seconds))),
        ("goaway-chance", serving.goaway_chance.to_string()),
        ("http2-max-streams-per-connection", serving.http2_max_streams.to_string()),
        ("max-mutating-requests-inflight", serving.max_mutating_requests_inflight.to_string()),
        ("max-requests-inflight", serving.max_requests_inflight.to_string()),
        ("min-request-timeout", serving.min_request_timeout.as_secs().to_string()),
        ("enable-priority-and-fairness", serving.flow_control.to_string()),
        ("profiling", serving.profiling.to_string()),
        ("request-timeout", duration(serving.request_timeout)),
        ("runtime-config", runtime.join(",")),
        ("secure-port", config.advertise.port().to_string()),
        ("service-account-extend-token-expiration", config.extend_token_expiration.to_string()),
        ("service-account-issuer", format!("[{}]", config.service_account_issuer)),
        ("service-cluster-ip-range", ranges.join(",")),
        ("service-node-port-range", format!("{}-{}", config.node_ports.start(), config.node_ports.end())),
        ("shutdown-delay-duration", duration(serving.shutdown_delay)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_text_or_an_object_of_its_own_kind() {
        let object = |format, version| Some(Wanted::Object { format, version });
        let rows = [
            ("text/plain", Some(Wanted::Text)),
            ("text/*", Some(Wanted::Text)),
            ("application/json,text/plain", Some(Wanted::Text)),
            (
                "*/*;q=0.1,application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
                object(Format::Json, "v1beta1"),
            ),
            ("application/yaml;v=v1alpha1;g=config.k8s.io;as=Statusz", object(Format::Yaml, "v1alpha1")),
            ("application/json", None),
            ("application/json;v=v1;g=config.k8s.io;as=Statusz", None),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz", None),
            ("application/*", None),
            ("text/html", None),
        ];
        for (accept, expected) in rows {
            assert_eq!(wanted(Page::Statusz, accept), expected, "{accept}");
        }
    }

    #[test]
    fn pages_tell_how_the_server_is_set_up() {
        let config = Config::new(([127, 0, 0, 1], 6443).into());
        let started = Timestamp::UNIX_EPOCH;
        let now = Timestamp::from_second(3661).expect("valid");
        let about = About { config: &config, started, now };
        let page = text(Page::Statusz, &about);
        assert!(page.contains("\nStarted: Thu Jan  1 00:00:00 UTC 1970\nUp: 1 hr 01 min 01 sec\n"), "{page}");
        assert!(text(Page::Flagz, &about).contains("\nservice-node-port-range:30000-32767\n"));
        let flagz = super::object(Page::Flagz, &about, "v1beta1");
        assert_eq!(flagz["flags"]["event-ttl"], "1h0m0s");
        let statusz = super::object(Page::Statusz, &about, "v1beta1");
        assert_eq!(statusz["uptimeSeconds"], 3661);
        assert_eq!(statusz["emulationVersion"], "1.36");
    }
}

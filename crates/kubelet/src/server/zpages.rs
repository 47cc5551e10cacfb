//! `/statusz` and `/flagz`: the kubelet's version and settings, as text for people or as an object of `config.k8s.io`
//! for programs.

use super::{Answer, answer, full, text};
use ferrite_api::codec::yaml;
use ferrite_api::version::KUBERNETES_VERSION;
use ferrite_json::{Map, Value, json};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, WARNING};
use jiff::Timestamp;
use std::collections::BTreeMap;

/// The name that upstream's kubelet has in these pages.
const COMPONENT: &str = "kubelet";
const NOTE: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.";
/// The paths that `/statusz` lists.
const PATHS: &[&str] = &[
    "/configz",
    "/debug/flags/v",
    "/debug/pprof/",
    "/flagz",
    "/healthz",
    "/logs/",
    "/metrics",
    "/metrics/cadvisor",
    "/metrics/probes",
    "/metrics/resource",
    "/pods",
    "/runningpods/",
    "/stats/summary",
    "/statusz",
];

/// The representation that a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Text,
    Object { is_yaml: bool, version: &'static str },
}

/// The first clause of the `Accept` header that the page can be. As upstream: without a header there is none.
fn wanted(kind: &str, accept: &str) -> Option<Wanted> {
    accept.split(',').find_map(|clause| {
        let mut parts = clause.split(';').map(str::trim);
        let media_type = parts.next().unwrap_or_default();
        let is_yaml = match media_type {
            "text/plain" | "text/*" | "*/*" => return Some(Wanted::Text),
            "application/json" => false,
            "application/yaml" => true,
            _ => return None,
        };
        let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
        let is = |name: &str, value: &str| parameters.iter().any(|(n, v)| *n == name && *v == value);
        let version = ["v1alpha1", "v1beta1"].into_iter().find(|version| is("v", version))?;
        (is("g", "config.k8s.io") && is("as", kind)).then_some(Wanted::Object { is_yaml, version })
    })
}

/// The page in one of its forms.
fn page(kind: &str, accept: &str, plain: impl Fn() -> String, fields: impl Fn() -> Map) -> Answer {
    let (is_yaml, version) = match wanted(kind, accept) {
        None => {
            let known = "application/json, application/yaml, text/plain";
            let message = format!("only the following media types are accepted: {known}\n");
            return text(StatusCode::NOT_ACCEPTABLE, message);
        }
        Some(Wanted::Text) => {
            let head = format!("\n{COMPONENT} {}\n{NOTE}\n", kind.to_lowercase());
            return text(StatusCode::OK, format!("{head}{}\n", plain()));
        }
        Some(Wanted::Object { is_yaml, version }) => (is_yaml, version),
    };
    let mut object = json!({
        "kind": kind, "apiVersion": format!("config.k8s.io/{version}"), "metadata": {"name": COMPONENT},
    });
    for (name, value) in fields() {
        object[name.as_str()] = value;
    }
    let written = match is_yaml {
        true => yaml::encode(&object).map(String::into_bytes).map_err(|e| e.to_string()),
        false => ferrite_json::to_vec(&object).map_err(|e| e.to_string()),
    };
    let body = match written {
        Ok(body) => body,
        Err(error) => return text(StatusCode::INTERNAL_SERVER_ERROR, error),
    };
    let form = if is_yaml { "yaml" } else { "json" };
    let content_type = format!("application/{form};g=config.k8s.io;v={version};as={kind}");
    let mut answer = answer(StatusCode::OK, "application/json", full(body));
    if let Ok(value) = HeaderValue::from_str(&content_type) {
        answer.headers_mut().insert(CONTENT_TYPE, value);
    }
    if version == "v1alpha1" {
        let name = kind.to_lowercase();
        let warning = format!(
            "299 - \"This version of the {name} endpoint is deprecated. Please use a newer version.\""
        );
        if let Ok(value) = HeaderValue::from_str(&warning) {
            answer.headers_mut().insert(WARNING, value);
        }
    }
    answer
}

pub(super) fn statusz(accept: &str, started: Timestamp, now: Timestamp) -> Answer {
    let up = now.duration_since(started).as_secs().max(0);
    let binary = KUBERNETES_VERSION.trim_start_matches('v');
    let emulation = binary.rsplit_once('.').map_or("", |(minor, _)| minor);
    let plain = || {
        let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
        [
            String::new(),
            format!("Started: {}", started.strftime("%a %b %e %H:%M:%S UTC %Y")),
            format!("Up: {hours} hr {minutes:02} min {seconds:02} sec"),
            "Go version: none".to_owned(),
            format!("Binary version: {binary}"),
            format!("Emulation version: {emulation}"),
            format!("Paths: {}", PATHS.join(" ")),
        ]
        .join("\n")
    };
    let fields = || {
        let pairs: [(&str, Value); 6] = [
            ("startTime", started.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()),
            ("uptimeSeconds", up.into()),
            ("goVersion", "none".into()),
            ("binaryVersion", binary.into()),
            ("emulationVersion", emulation.into()),
            ("paths", PATHS.iter().map(|path| Value::from(*path)).collect()),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    };
    page("Statusz", accept, plain, fields)
}

pub(super) fn flagz(accept: &str, flags: &BTreeMap<String, String>) -> Answer {
    let plain = || {
        let lines: Vec<String> = flags.iter().map(|(flag, value)| format!("{flag}={value}")).collect();
        lines.join("\n")
    };
    let fields = || {
        let flags: Map = flags.iter().map(|(flag, value)| (flag.clone(), value.as_str().into())).collect();
        [("flags".to_owned(), Value::from(flags))].into_iter().collect()
    };
    page("Flagz", accept, plain, fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn body(answer: Answer) -> (u16, String) {
        let status = answer.status().as_u16();
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&bytes).into_owned())
    }

    #[tokio::test]
    async fn pages_are_text_or_objects() {
        let (started, now) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(3661).unwrap());
        let (status, page) = body(statusz("*/*", started, now)).await;
        assert_eq!(status, 200);
        assert!(page.starts_with("\nkubelet statusz\nWarning: "), "{page}");
        assert!(page.contains("Up: 1 hr 01 min 01 sec\n") && page.contains("Emulation version: 1.36\n"));
        let accept = "application/json;v=v1beta1;g=config.k8s.io;as=Statusz";
        let (_, page) = body(statusz(accept, started, now)).await;
        let page: Value = ferrite_json::from_str(&page).unwrap();
        assert_eq!((&page["kind"], &page["uptimeSeconds"]), (&json!("Statusz"), &json!(3661)));
        let flags = BTreeMap::from([("max-pods".to_owned(), "5".to_owned())]);
        assert!(body(flagz("text/plain", &flags)).await.1.contains("\nmax-pods=5\n"));
        let accept = "application/yaml;v=v1alpha1;g=config.k8s.io;as=Flagz";
        let answer = flagz(accept, &flags);
        assert!(answer.headers().get(WARNING).is_some(), "an old version");
        assert!(body(answer).await.1.contains("max-pods: \"5\""));
        for accept in
            ["", "text/html", "application/json", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz"]
        {
            assert_eq!(body(flagz(accept, &flags)).await.0, 406, "{accept}");
        }
    }
}

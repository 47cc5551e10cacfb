//! `/debug/pprof/`, where Go's servers give profiles of themselves. Off unless asked for.

use crate::http::{self, Response};

/// Profiles of Go's runtime. This server has neither its collector nor its scheduler, and takes no samples.
const PROFILES: [&str; 9] =
    ["allocs", "block", "goroutine", "heap", "mutex", "profile", "symbol", "threadcreate", "trace"];

/// Answers for a profile, or the list of them.
pub(crate) fn answer(profile: &str) -> Response {
    match profile {
        "" => {
            let lines = PROFILES.map(|name| format!("{name}\tnot available"));
            http::text(200, format!("/debug/pprof/\n\ncmdline\n{}\n", lines.join("\n")))
        }
        "cmdline" => {
            let arguments: Vec<String> =
                std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
            http::text(200, arguments.join("\0"))
        }
        name if PROFILES.contains(&name) => http::text(
            501,
            format!(
                "the profile {name:?} is not available: use perf on the process, and /metrics for memory\n"
            ),
        ),
        _ => http::text(404, "Unknown profile\n"),
    }
}

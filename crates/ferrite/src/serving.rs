//! The API server's limits for requests and its shutdown: upstream's flags.

use crate::apiserver::BoxError;
use ferrite_apiserver::{ConnectionLimits, CorsOrigins, Serving, TransportSecurity, go_duration};
use std::time::Duration;

/// Options of serving, with upstream's names and defaults.
#[derive(Debug, Clone, clap::Args)]
pub struct ServingOptions {
    /// Requests that read, served at once; 0 is no limit.
    #[arg(long, default_value_t = 400, value_name = "N")]
    pub max_requests_inflight: usize,
    /// Requests that write, served at once; 0 is no limit.
    #[arg(long, default_value_t = 200, value_name = "N")]
    pub max_mutating_requests_inflight: usize,
    /// Divide the requests served at once by FlowSchemas and PriorityLevelConfigurations.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub enable_priority_and_fairness: bool,
    /// A request that is not a stream ends after this.
    #[arg(long, default_value = "1m0s", value_name = "DURATION", value_parser = go_duration)]
    pub request_timeout: Duration,
    /// Seconds after which watches without a timeout of their own may end.
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    pub min_request_timeout: u64,
    /// Chance that a request on HTTP/2 makes its client connect anew: 0 is never, 0.02 is the most.
    #[arg(long, default_value_t = 0.0, value_name = "CHANCE", value_parser = parse_chance)]
    pub goaway_chance: f64,
    /// Requests served at once on one connection of HTTP/2; 0 is the default, 100.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub http2_max_streams_per_connection: u32,
    /// Origins whose pages may read responses (CORS): regular expressions that match a whole host, like
    /// `//example.com(:|$)`.
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub cors_allowed_origins: Vec<String>,
    /// Directives of the header Strict-Transport-Security: max-age=SECONDS, includeSubDomains, preload.
    #[arg(long, value_name = "DIRECTIVES", value_delimiter = ',')]
    pub strict_transport_security_directives: Vec<String>,
    /// Answer below /debug/pprof/.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub profiling: bool,
    /// Time to serve on after the server reports that it is not ready any more.
    #[arg(long, default_value = "0s", value_name = "DURATION", value_parser = go_duration)]
    pub shutdown_delay_duration: Duration,
}

impl ServingOptions {
    pub fn to_serving(&self) -> Result<Serving, BoxError> {
        let usual = Serving::default();
        Ok(Serving {
            max_requests_inflight: self.max_requests_inflight,
            max_mutating_requests_inflight: self.max_mutating_requests_inflight,
            flow_control: self.enable_priority_and_fairness,
            request_timeout: self.request_timeout,
            min_request_timeout: Duration::from_secs(self.min_request_timeout),
            goaway_chance: self.goaway_chance,
            http2_max_streams: match self.http2_max_streams_per_connection {
                0 => usual.http2_max_streams,
                told => told,
            },
            idle_timeout: usual.idle_timeout,
            cors_origins: CorsOrigins::parse(self.cors_allowed_origins.iter().map(String::as_str))?,
            transport_security: TransportSecurity::parse(&self.strict_transport_security_directives)?,
            profiling: self.profiling,
            connections: ConnectionLimits::with_descriptors(ferrite_runtime::descriptors::raise()),
            shutdown_delay: self.shutdown_delay_duration,
        })
    }
}

/// As upstream: clients that reconnect more often than that are of no use to anybody.
const MAX_CHANCE: f64 = 0.02;

fn parse_chance(text: &str) -> Result<f64, String> {
    let chance = text.parse::<f64>().ok().filter(|c| (0.0..=MAX_CHANCE).contains(c));
    chance.ok_or_else(|| format!("{text:?} is not a number between 0 and {MAX_CHANCE}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_small() {
        for (text, fine) in [("0", true), ("0.02", true), ("0.021", false), ("-1", false), ("x", false)] {
            assert_eq!(parse_chance(text).is_ok(), fine, "{text}");
        }
    }
}

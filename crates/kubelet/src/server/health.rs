//! `/healthz` and the results of its checks; also on port 10248 without TLS, for the service manager of the machine.

use super::{Answer, text};
use crate::pod::context::Context;
use ferrite_client::Scope;
use ferrite_component::health::{self, Check};
use ferrite_component::{PlainLimits, serve_plain};
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// A watcher needs one connection.
const LIMITS: PlainLimits =
    PlainLimits { connections: 32, head: Duration::from_secs(10), connection: Duration::from_secs(10) };

/// As upstream: the least time after which pods that nobody looks after are a failure.
const LEAST_SILENCE: Duration = Duration::from_secs(300);

/// True if the manager of the pods has not shown itself for too long.
fn is_stuck(last: Option<Instant>, now: Instant, sync_frequency: Duration) -> bool {
    last.is_some_and(|last| now.duration_since(last) > LEAST_SILENCE.max(sync_frequency * 2))
}

/// True if no check of the kubelet's own fails.
pub(crate) fn is_well(context: &Context) -> bool {
    !is_stuck(context.workers.last_beat(), Instant::now(), context.sync_frequency)
}

fn checks(context: &Arc<Context>) -> [Check; 3] {
    let context = context.clone();
    let syncloop = move || match is_well(&context) {
        true => Ok(()),
        false => Err("sync Loop took longer than expected".to_owned()),
    };
    // The second is upstream's check of its log's writer, which does not exist here.
    [Check::ping(), Check::new("log", || Ok(())), Check::new("syncloop", syncloop)]
}

/// The answer to `/healthz`, or to one check below it.
pub(super) fn answer(context: &Arc<Context>, single: Option<&str>, query: &str) -> Answer {
    let report = health::respond("healthz", &checks(context), single, query);
    text(StatusCode::from_u16(report.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), report.body)
}

/// Listens and answers until the scope ends.
pub(crate) async fn start(
    context: Arc<Context>,
    address: SocketAddr,
    scope: &Scope,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    scope.spawn(serve_plain(listener, LIMITS, move |request: Request<Incoming>| {
        let context = context.clone();
        async move { respond(&context, &request) }
    }));
    Ok(address)
}

fn respond(context: &Arc<Context>, request: &Request<Incoming>) -> Answer {
    let query = request.uri().query().unwrap_or_default();
    match request.uri().path().trim_start_matches('/').split_once('/') {
        None if request.uri().path() == "/healthz" => answer(context, None, query),
        Some(("healthz", single)) => answer(context, Some(single), query),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;

    #[test]
    fn silence_is_a_failure_after_a_while() {
        let (seconds, now) = (Duration::from_secs, Instant::now() + Duration::from_secs(10_000));
        for (silent, sync_frequency, stuck) in [
            (None, 60, false),
            (Some(299), 60, false),
            (Some(301), 60, true),
            (Some(301), 200, false),
            (Some(401), 200, true),
        ] {
            let last = silent.map(|silent| now - seconds(silent));
            assert_eq!(is_stuck(last, now, seconds(sync_frequency)), stuck, "{silent:?} {sync_frequency}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_manager_shows_itself() {
        let h = Harness::start().await;
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(10)).await;
            tokio::task::yield_now().await;
        }
        assert_eq!(answer(&h.context, Some("syncloop"), "").status(), StatusCode::OK);
        h.stop().await;
        tokio::time::advance(Duration::from_secs(400)).await;
        assert_eq!(answer(&h.context, Some("syncloop"), "").status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer(&h.context, None, "").status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer(&h.context, None, "exclude=syncloop").status(), StatusCode::OK);
        assert_eq!(answer(&h.context, Some("ping"), "").status(), StatusCode::OK);
        assert_eq!(answer(&h.context, Some("other"), "").status(), StatusCode::NOT_FOUND);
    }
}

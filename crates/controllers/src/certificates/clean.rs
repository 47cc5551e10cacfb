//! Removes requests that nobody needs any more.

use std::time::Duration;

use ferrite_client::{Api, Informer};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::DeleteParams;

use super::{has, is_issued, settled};
use crate::Context;

const NAME: &str = "certificatesigningrequest-cleaner-controller";
/// Time that a request is kept after its approval, denial or failure.
const DECIDED: SignedDuration = SignedDuration::from_hours(1);
const PENDING: SignedDuration = SignedDuration::from_hours(24);

pub(crate) fn start(context: &Context) {
    let requests: Informer<CertificateSigningRequest> = context.informers.get();
    let client = context.client.clone();
    context.controller(NAME).reconciles(&requests).run(move |key| {
        let left = requests.get(&key).map(|request| left(&request, Timestamp::now()));
        let client = client.clone();
        async move {
            match left {
                None => Ok(None),
                Some(Some(left)) => Ok(Some(left)),
                Some(None) => {
                    let api: Api<CertificateSigningRequest> = Api::all(client);
                    settled(api.delete(&key.name, &DeleteParams::default()).await, &key.name)
                }
            }
        }
    });
}

/// Remaining lifetime of a request; `None` if it is over.
fn left(request: &CertificateSigningRequest, now: Timestamp) -> Option<Duration> {
    let conditions = request.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let decided = conditions
        .iter()
        .filter(|c| matches!(c.type_.as_str(), "Approved" | "Denied" | "Failed"))
        .filter_map(|c| c.last_update_time.as_ref().map(|time| time.0))
        .max();
    let is_decided = is_issued(request) || ["Approved", "Denied", "Failed"].iter().any(|c| has(request, c));
    let made = request.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let end = match is_decided {
        true => decided.unwrap_or(made).saturating_add(DECIDED),
        false => made.saturating_add(PENDING),
    };
    let left = end.unwrap_or(now).duration_since(now);
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn requests_stay_for_their_time() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let request = |made: &str, conditions: Value| -> CertificateSigningRequest {
            ferrite_json::from_value(json!({
                "metadata": {"creationTimestamp": made}, "spec": {"request": "", "signerName": "s/s"},
                "status": {"conditions": conditions},
            }))
            .unwrap()
        };
        let decided = |kind: &str, at: &str| json!([{"type": kind, "status": "True", "lastUpdateTime": at}]);
        for (made, conditions, expected) in [
            ("2026-01-01T12:00:00Z", json!([]), Some(12 * 3600)),
            ("2026-01-01T00:00:00Z", json!([]), None),
            ("2026-01-01T00:00:00Z", decided("Denied", "2026-01-01T23:30:00Z"), Some(1800)),
            ("2026-01-01T00:00:00Z", decided("Approved", "2026-01-01T22:00:00Z"), None),
        ] {
            let found = left(&request(made, conditions.clone()), now).map(|d| d.as_secs());
            assert_eq!(found, expected, "{made} {conditions}");
        }
    }
}

//! Removes PodCertificateRequests when every kubelet has had the time to read the answer.

use std::time::Duration;

use ferrite_client::{Api, Informer};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use kube::api::{DeleteParams, Preconditions};

use super::settled;
use crate::Context;

const NAME: &str = "podcertificaterequest-cleaner-controller";
/// As upstream: a request is answered and read sooner than this.
const KEPT: SignedDuration = SignedDuration::from_mins(15);

pub(crate) fn start(context: &Context) {
    let requests: Informer<PodCertificateRequest> = context.informers.get();
    let client = context.client.clone();
    context.controller(NAME).reconciles(&requests).run(move |key| {
        let request = requests.get(&key);
        let client = client.clone();
        async move {
            let Some(request) = request else { return Ok(None) };
            if let Some(left) = left(&request, Timestamp::now()) {
                return Ok(Some(left));
            }
            let api: Api<PodCertificateRequest> = Api::namespaced(client, &key.namespace);
            let preconditions = Preconditions { uid: request.metadata.uid.clone(), resource_version: None };
            let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            settled(api.delete(&key.name, &params).await, &key.name)
        }
    });
}

/// Remaining lifetime of a request; `None` if it is over.
fn left(request: &PodCertificateRequest, now: Timestamp) -> Option<Duration> {
    let made = request.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let left = made.saturating_add(KEPT).unwrap_or(now).duration_since(now);
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    #[test]
    fn a_request_stays_for_a_quarter_of_an_hour() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        for (age, expected) in [(0, Some(900)), (840, Some(60)), (900, None), (7200, None)] {
            let mut request = PodCertificateRequest::default();
            request.metadata.creation_timestamp = Some(Time(now - SignedDuration::from_secs(age)));
            assert_eq!(left(&request, now).map(|left| left.as_secs()), expected, "{age}");
        }
    }
}

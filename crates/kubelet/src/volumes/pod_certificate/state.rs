//! The life of one projected certificate: requested, issued, renewed, or refused for good. No clock, no client.

use ferrite_api::pem;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;

/// A request that is not there after so long was deleted by somebody. Upstream adds the jitter of [`jitter`].
const ASSUME_DELETED: SignedDuration = SignedDuration::from_mins(10);
/// A certificate that was not renewed for so long after its time is overdue.
const OVERDUE: SignedDuration = SignedDuration::from_mins(10);
/// Upstream's jitter, below this: certificates that were issued together are not renewed together.
pub(super) const JITTER: SignedDuration = SignedDuration::from_mins(5);

/// A key and its certificates.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// PEM of the key.
    pub key: String,
    /// PEM of the certificates, the pod's own first.
    pub chain: String,
    pub refresh_at: Timestamp,
    not_after: Timestamp,
    overdue_reported: bool,
    expiry_reported: bool,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("Credentials").field("refresh_at", &self.refresh_at).finish_non_exhaustive()
    }
}

/// A request that nobody has answered yet.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Pending {
    pub key: String,
    pub name: String,
    abandon_at: Timestamp,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("Pending").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Pending {
    pub(super) fn new(key: String, name: String, made: Timestamp, jitter: SignedDuration) -> Self {
        Self { key, name, abandon_at: made.saturating_add(ASSUME_DELETED + jitter).unwrap_or(Timestamp::MAX) }
    }
}

/// The end of a projection: there will be no other certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    outcome: &'static str,
    reason: String,
    message: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoCertificate {
    #[error("credential bundle is not issued yet")]
    NotIssued,
    #[error("PodCertificateRequest was permanently {outcome}: reason={reason:?} message={message:?}")]
    Refused { outcome: &'static str, reason: String, message: String },
}

/// An event for the pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub reason: &'static str,
    pub message: String,
}

/// One projected certificate.
#[derive(Debug, Default)]
pub(super) struct Projection {
    current: Option<Credentials>,
    pending: Option<Pending>,
    refused: Option<Refusal>,
}

impl Projection {
    /// The name of the request that is waited for.
    pub(super) fn awaited(&self) -> Option<&str> {
        self.pending.as_ref().map(|pending| pending.name.as_str())
    }

    pub(super) fn wait_for(&mut self, pending: Pending) {
        self.pending = Some(pending);
    }

    /// Takes notice of the time and of the awaited request, as the API has it. Returns the events for the pod.
    pub(super) fn advance(
        &mut self,
        request: Option<&PodCertificateRequest>,
        now: Timestamp,
        jitter: SignedDuration,
    ) -> Vec<Report> {
        let mut reports = self.report_age(now);
        let Some(pending) = &self.pending else { return reports };
        let Some(request) = request else {
            // The request may not have arrived yet, or it was deleted: time decides.
            if now > pending.abandon_at {
                self.pending = None;
            }
            return reports;
        };
        let status = request.status.clone().unwrap_or_default();
        for condition in status.conditions.iter().flatten() {
            match condition.type_.as_str() {
                "Issued" => {
                    let time = |time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>| {
                        time.map_or(now, |time| time.0)
                    };
                    let refresh_at = time(status.begin_refresh_at.as_ref());
                    self.current = Some(Credentials {
                        key: pending.key.clone(),
                        chain: clean(status.certificate_chain.as_deref().unwrap_or_default()),
                        refresh_at: refresh_at.saturating_add(jitter).unwrap_or(refresh_at),
                        not_after: time(status.not_after.as_ref()),
                        overdue_reported: false,
                        expiry_reported: false,
                    });
                    self.pending = None;
                    return reports;
                }
                "Denied" => reports.push(self.refuse(request, "denied", "was denied", condition)),
                "Failed" => reports.push(self.refuse(request, "failed", "failed", condition)),
                _ => continue,
            }
            return reports;
        }
        reports
    }

    fn refuse(
        &mut self,
        request: &PodCertificateRequest,
        outcome: &'static str,
        verb: &str,
        condition: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition,
    ) -> Report {
        self.pending = None;
        let (reason, message) = (condition.reason.clone(), condition.message.clone());
        let namespace = request.metadata.namespace.as_deref().unwrap_or_default();
        let name = request.metadata.name.as_deref().unwrap_or_default();
        let text = format!(
            "PodCertificateRequest {namespace}/{name} {verb}, reason={reason:?}, message={message:?}"
        );
        self.refused = Some(Refusal { outcome, reason, message });
        Report { reason: if outcome == "denied" { "Denied" } else { "Failed" }, message: text }
    }

    fn report_age(&mut self, now: Timestamp) -> Vec<Report> {
        let mut reports = Vec::new();
        let Some(current) = &mut self.current else { return reports };
        if !current.overdue_reported && overdue_at(current) < now {
            current.overdue_reported = true;
            let message = "PodCertificate refresh overdue".to_owned();
            reports.push(Report { reason: "CertificateOverdueForRefresh", message });
        }
        if !current.expiry_reported && current.not_after < now {
            current.expiry_reported = true;
            reports
                .push(Report { reason: "CertificateExpired", message: "PodCertificate expired".to_owned() });
        }
        reports
    }

    /// True if it is time to make a request.
    pub(super) fn needs_request(&self, now: Timestamp) -> bool {
        let is_due = self.current.as_ref().is_none_or(|current| current.refresh_at <= now);
        is_due && self.pending.is_none() && self.refused.is_none()
    }

    /// The credentials, and when to look again.
    pub(super) fn credentials(&self, now: Timestamp) -> Result<(Credentials, Timestamp), NoCertificate> {
        if let Some(Refusal { outcome, reason, message }) = &self.refused {
            let (reason, message) = (reason.clone(), message.clone());
            return Err(NoCertificate::Refused { outcome, reason, message });
        }
        let current = self.current.clone().ok_or(NoCertificate::NotIssued)?;
        let abandon_at = self.pending.as_ref().map(|pending| pending.abandon_at);
        let times =
            [Some(current.refresh_at), Some(overdue_at(&current)), Some(current.not_after), abandon_at];
        let next = times.into_iter().flatten().filter(|time| *time > now).min();
        let next = next.unwrap_or_else(|| now.saturating_add(OVERDUE).unwrap_or(now));
        // Events are due after their time, not at it.
        Ok((current, next.saturating_add(SignedDuration::from_secs(1)).unwrap_or(next)))
    }

    /// Upstream's word for the metric of states.
    pub(super) fn state(&self, now: Timestamp) -> &'static str {
        match (&self.refused, &self.current) {
            (Some(refused), _) => refused.outcome,
            (None, None) => "not_yet_issued",
            (None, Some(current)) if now > current.not_after => "expired",
            (None, Some(current)) if now > overdue_at(current) => "overdue_for_refresh",
            (None, Some(_)) => "fresh",
        }
    }
}

fn overdue_at(current: &Credentials) -> Timestamp {
    current.refresh_at.saturating_add(OVERDUE).unwrap_or(Timestamp::MAX)
}

/// A chain without the text between its certificates, and without headers.
fn clean(chain: &str) -> String {
    pem::blocks(chain.as_bytes()).iter().map(|block| pem::encode("CERTIFICATE", &block.content)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn request(status: Value) -> PodCertificateRequest {
        ferrite_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "req-1"},
            "spec": {"maxExpirationSeconds": 3600, "nodeName": "n", "nodeUID": "u", "podName": "p", "podUID": "q",
                "serviceAccountName": "s", "serviceAccountUID": "t", "signerName": "a.b/c", "stubPKCS10Request": ""},
            "status": status,
        }))
        .unwrap()
    }

    fn condition(kind: &str) -> Value {
        json!([{"type": kind, "status": "True", "reason": "Why", "message": "text", "lastTransitionTime": "2026-01-01T00:00:00Z"}])
    }

    fn issued() -> PodCertificateRequest {
        let chain = format!("a leaf\n{}", pem::encode("CERTIFICATE", b"der"));
        request(json!({"conditions": condition("Issued"), "certificateChain": chain,
            "notBefore": "2026-01-01T00:00:00Z", "beginRefreshAt": "2026-01-01T01:00:00Z", "notAfter": "2026-01-01T02:00:00Z"}))
    }

    fn at(time: &str) -> Timestamp {
        format!("2026-01-01T{time}:00Z").parse().unwrap()
    }

    const NO_JITTER: SignedDuration = SignedDuration::ZERO;

    fn waiting() -> Projection {
        let mut projection = Projection::default();
        assert!(projection.needs_request(at("00:00")));
        projection.wait_for(Pending::new("KEY".into(), "req-1".into(), at("00:00"), NO_JITTER));
        assert!(!projection.needs_request(at("00:00")));
        projection
    }

    #[test]
    fn a_certificate_is_issued_and_renewed() {
        let mut projection = waiting();
        assert_eq!(projection.credentials(at("00:01")), Err(NoCertificate::NotIssued));
        assert_eq!(projection.advance(Some(&request(json!({}))), at("00:01"), NO_JITTER), []);
        assert_eq!(projection.state(at("00:01")), "not_yet_issued");
        let jitter = SignedDuration::from_mins(2);
        assert_eq!(projection.advance(Some(&issued()), at("00:02"), jitter), []);
        let (credentials, next) = projection.credentials(at("00:02")).unwrap();
        assert_eq!((credentials.key.as_str(), credentials.refresh_at), ("KEY", at("01:02")));
        assert_eq!(credentials.chain, pem::encode("CERTIFICATE", b"der"), "only certificates");
        assert!(next > at("01:02") && next < at("01:03"), "{next}");
        assert!(!projection.needs_request(at("01:01")) && projection.needs_request(at("01:02")));
        // The old certificate stays until there is another.
        projection.wait_for(Pending::new("NEW".into(), "req-2".into(), at("01:02"), NO_JITTER));
        assert_eq!(projection.credentials(at("01:03")).unwrap().0.key, "KEY");
        assert_eq!(projection.advance(Some(&issued()), at("01:04"), NO_JITTER), []);
        assert_eq!(projection.credentials(at("01:04")).unwrap().0.key, "NEW");
    }

    #[test]
    fn a_refusal_is_for_ever() {
        for (kind, outcome, verb) in [("Denied", "denied", "was denied"), ("Failed", "failed", "failed")] {
            let mut projection = waiting();
            let reports = projection.advance(
                Some(&request(json!({"conditions": condition(kind)}))),
                at("00:01"),
                NO_JITTER,
            );
            let message = format!(r#"PodCertificateRequest ns/req-1 {verb}, reason="Why", message="text""#);
            assert_eq!(reports, [Report { reason: kind, message }]);
            let error = projection.credentials(at("00:01")).unwrap_err().to_string();
            assert_eq!(
                error,
                format!(r#"PodCertificateRequest was permanently {outcome}: reason="Why" message="text""#)
            );
            assert!(!projection.needs_request(at("23:00")));
            assert_eq!(projection.state(at("00:01")), outcome);
        }
    }

    #[test]
    fn a_request_that_is_gone_is_made_again() {
        let mut projection = waiting();
        projection.advance(None, at("00:09"), NO_JITTER);
        assert!(!projection.needs_request(at("00:09")), "it may not have arrived yet");
        projection.advance(None, at("00:11"), NO_JITTER);
        assert!(projection.needs_request(at("00:11")));
    }

    #[test]
    fn old_certificates_are_reported_once() {
        let mut projection = waiting();
        projection.advance(Some(&issued()), at("00:02"), NO_JITTER);
        projection.wait_for(Pending::new("NEW".into(), "req-2".into(), at("01:00"), NO_JITTER));
        let mut seen = Vec::new();
        for (time, state) in [
            ("01:05", "fresh"),
            ("01:11", "overdue_for_refresh"),
            ("01:12", "overdue_for_refresh"),
            ("02:01", "expired"),
            ("02:02", "expired"),
        ] {
            let reports = projection.advance(Some(&request(json!({}))), at(time), NO_JITTER);
            seen.extend(reports.into_iter().map(|report| (time, report.reason)));
            assert_eq!(projection.state(at(time)), state, "{time}");
        }
        assert_eq!(seen, [("01:11", "CertificateOverdueForRefresh"), ("02:01", "CertificateExpired")]);
    }
}

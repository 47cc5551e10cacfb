//! Auditing of the API server: upstream's flags.

use crate::apiserver::BoxError;
use crate::webhook_client::WebhookClient;
use ferrite_apiserver::{
    AuditBatch, AuditConfig, AuditFormat, AuditLog, AuditMode, AuditPolicy, AuditThrottle, AuditTruncate,
    AuditWebhook, go_duration,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const VERSION: &str = "audit.k8s.io/v1";
const MODES: [&str; 3] = ["batch", "blocking", "blocking-strict"];

/// Options of auditing, with upstream's names and defaults.
#[derive(Debug, Clone, clap::Args)]
pub struct AuditOptions {
    /// File with the audit policy: a Policy of audit.k8s.io/v1. Without it nothing is audited.
    #[arg(long, value_name = "FILE")]
    pub audit_policy_file: Option<PathBuf>,
    /// File to which audit events are written; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    pub audit_log_path: Option<String>,
    /// Days that old audit logs are kept; 0 is for ever.
    #[arg(long, default_value_t = 366, value_name = "DAYS")]
    pub audit_log_maxage: u32,
    /// Old audit logs that are kept; 0 is all.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub audit_log_maxbackup: usize,
    /// Megabytes after which a new audit log begins; 0 is never.
    #[arg(long, default_value_t = 100, value_name = "MEGABYTES")]
    pub audit_log_maxsize: u64,
    /// Compress old audit logs with gzip.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub audit_log_compress: bool,
    /// Format of the audit log: json, or legacy, which is one line of text for each event.
    #[arg(long, default_value = "json", value_name = "FORMAT", value_parser = ["legacy", "json"])]
    pub audit_log_format: String,
    /// Version of the events in the audit log.
    #[arg(long, default_value = VERSION, value_name = "VERSION", value_parser = [VERSION])]
    pub audit_log_version: String,
    /// Mode of the audit log: requests wait for it (blocking), and fail if the event is lost
    /// (blocking-strict), or do not wait (batch).
    #[arg(long, default_value = "blocking", value_name = "MODE", value_parser = MODES)]
    pub audit_log_mode: String,
    /// Events that may wait for the audit log in mode batch.
    #[arg(long, default_value_t = 10000, value_name = "N")]
    pub audit_log_batch_buffer_size: usize,
    /// Events that are written to the audit log together in mode batch.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub audit_log_batch_max_size: usize,
    /// The longest that an event waits for others in mode batch.
    #[arg(long, default_value = "0s", value_name = "DURATION", value_parser = go_duration)]
    pub audit_log_batch_max_wait: Duration,
    /// Limit the batches that are written to the audit log.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub audit_log_batch_throttle_enable: bool,
    /// Batches per second.
    #[arg(long, default_value_t = 0.0, value_name = "QPS")]
    pub audit_log_batch_throttle_qps: f64,
    /// Batches at once after a time without any.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub audit_log_batch_throttle_burst: u32,
    /// Leave objects out of events that are too large.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub audit_log_truncate_enabled: bool,
    /// Bytes of a batch.
    #[arg(long, default_value_t = 10 << 20, value_name = "BYTES")]
    pub audit_log_truncate_max_batch_size: usize,
    /// Bytes of an event. A larger one loses its objects; if that is not enough, it is dropped.
    #[arg(long, default_value_t = 100 << 10, value_name = "BYTES")]
    pub audit_log_truncate_max_event_size: usize,
    /// Kubeconfig file with the server to which audit events are posted.
    #[arg(long, value_name = "FILE")]
    pub audit_webhook_config_file: Option<PathBuf>,
    /// The time before a post that failed is tried again.
    #[arg(long, visible_alias = "audit-webhook-batch-initial-backoff", default_value = "10s", value_name = "DURATION", value_parser = go_duration)]
    pub audit_webhook_initial_backoff: Duration,
    /// Version of the events that are posted.
    #[arg(long, default_value = VERSION, value_name = "VERSION", value_parser = [VERSION])]
    pub audit_webhook_version: String,
    /// Mode of the webhook, as --audit-log-mode.
    #[arg(long, default_value = "batch", value_name = "MODE", value_parser = MODES)]
    pub audit_webhook_mode: String,
    /// Events that may wait for the webhook in mode batch.
    #[arg(long, default_value_t = 10000, value_name = "N")]
    pub audit_webhook_batch_buffer_size: usize,
    /// Events that are posted together in mode batch.
    #[arg(long, default_value_t = 400, value_name = "N")]
    pub audit_webhook_batch_max_size: usize,
    /// The longest that an event waits for others in mode batch.
    #[arg(long, default_value = "30s", value_name = "DURATION", value_parser = go_duration)]
    pub audit_webhook_batch_max_wait: Duration,
    /// Limit the batches that are posted.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub audit_webhook_batch_throttle_enable: bool,
    /// Batches per second.
    #[arg(long, default_value_t = 10.0, value_name = "QPS")]
    pub audit_webhook_batch_throttle_qps: f64,
    /// Batches at once after a time without any.
    #[arg(long, default_value_t = 15, value_name = "N")]
    pub audit_webhook_batch_throttle_burst: u32,
    /// Leave objects out of events that are too large.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub audit_webhook_truncate_enabled: bool,
    /// Bytes of a batch. A larger one is posted in parts.
    #[arg(long, default_value_t = 10 << 20, value_name = "BYTES")]
    pub audit_webhook_truncate_max_batch_size: usize,
    /// Bytes of an event. A larger one loses its objects; if that is not enough, it is dropped.
    #[arg(long, default_value_t = 100 << 10, value_name = "BYTES")]
    pub audit_webhook_truncate_max_event_size: usize,
}

/// An error in the flags or in the files that they name.
#[derive(Debug, thiserror::Error)]
pub enum AuditOptionsError {
    #[error("invalid audit batch {plugin} {what} {value}, must be a positive number")]
    Batch { plugin: &'static str, what: &'static str, value: String },
    #[error("invalid audit truncate {0} max event size 0, must be a positive number")]
    EventSize(&'static str),
    #[error(
        "invalid audit truncate {plugin} max batch size {batch}, must be greater than max event size ({event})"
    )]
    BatchSize { plugin: &'static str, batch: usize, event: usize },
    #[error("loading audit policy file: {0}")]
    Policy(#[from] ferrite_apiserver::PolicyError),
    #[error("initializing audit webhook: {0}")]
    Webhook(#[source] BoxError),
}

/// The flags of one backend.
struct Flags<'a> {
    plugin: &'static str,
    mode: &'a str,
    buffer_size: usize,
    max_size: usize,
    max_wait: Duration,
    throttled: bool,
    rate: f64,
    burst: u32,
    truncates: bool,
    max_event_size: usize,
    max_batch_size: usize,
}

impl Flags<'_> {
    fn read(&self) -> Result<(AuditMode, Option<AuditTruncate>), AuditOptionsError> {
        let plugin = self.plugin;
        let positive = |what: &'static str, good: bool, value: &dyn std::fmt::Display| match good {
            true => Ok(()),
            false => Err(AuditOptionsError::Batch { plugin, what, value: value.to_string() }),
        };
        let mode = match self.mode {
            "blocking" => AuditMode::Blocking,
            "blocking-strict" => AuditMode::BlockingStrict,
            _ => {
                positive("buffer size", self.buffer_size > 0, &self.buffer_size)?;
                positive("max batch size", self.max_size > 0, &self.max_size)?;
                if self.throttled {
                    positive("throttle QPS", self.rate > 0.0, &self.rate)?;
                    positive("throttle burst", self.burst > 0, &self.burst)?;
                }
                AuditMode::Batch(AuditBatch {
                    buffer_size: self.buffer_size,
                    max_size: self.max_size,
                    max_wait: self.max_wait,
                    throttle: self.throttled.then_some(AuditThrottle { rate: self.rate, burst: self.burst }),
                })
            }
        };
        let (event, batch) = (self.max_event_size, self.max_batch_size);
        match event {
            0 => return Err(AuditOptionsError::EventSize(plugin)),
            event if batch < event => return Err(AuditOptionsError::BatchSize { plugin, batch, event }),
            _ => {}
        }
        let truncate = AuditTruncate { max_event_size: event, max_batch_size: batch };
        Ok((mode, self.truncates.then_some(truncate)))
    }
}

impl AuditOptions {
    /// Translates the flags. None if nothing is audited.
    pub async fn read(&self) -> Result<Option<AuditConfig>, AuditOptionsError> {
        let log = self.log()?;
        let webhook = match &self.audit_webhook_config_file {
            None => None,
            Some(file) => {
                let (mode, truncate) = self.webhook_flags().read()?;
                let sender = WebhookClient::open(file).await.map_err(AuditOptionsError::Webhook)?;
                let initial_backoff = self.audit_webhook_initial_backoff;
                Some(AuditWebhook { sender: Arc::new(sender), initial_backoff, mode, truncate })
            }
        };
        let policy = self.audit_policy_file.as_deref().map(AuditPolicy::read).transpose()?;
        let Some(policy) = policy else {
            if log.is_some() || webhook.is_some() {
                tracing::warn!("there is no --audit-policy-file, so that no request is audited");
            }
            return Ok(None);
        };
        if log.is_none() && webhook.is_none() {
            tracing::warn!(
                "there is an audit policy and neither --audit-log-path nor --audit-webhook-config-file, \
                 so that no request is audited"
            );
            return Ok(None);
        }
        Ok(Some(AuditConfig { policy, log, webhook }))
    }

    fn log(&self) -> Result<Option<AuditLog>, AuditOptionsError> {
        let Some(path) = self.audit_log_path.as_deref().filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let flags = Flags {
            plugin: "log",
            mode: &self.audit_log_mode,
            buffer_size: self.audit_log_batch_buffer_size,
            max_size: self.audit_log_batch_max_size,
            max_wait: self.audit_log_batch_max_wait,
            throttled: self.audit_log_batch_throttle_enable,
            rate: self.audit_log_batch_throttle_qps,
            burst: self.audit_log_batch_throttle_burst,
            truncates: self.audit_log_truncate_enabled,
            max_event_size: self.audit_log_truncate_max_event_size,
            max_batch_size: self.audit_log_truncate_max_batch_size,
        };
        let (mode, truncate) = flags.read()?;
        Ok(Some(AuditLog {
            path: (path != "-").then(|| path.into()),
            max_age: self.audit_log_maxage,
            max_backups: self.audit_log_maxbackup,
            max_size: self.audit_log_maxsize,
            compress: self.audit_log_compress,
            format: match self.audit_log_format.as_str() {
                "legacy" => AuditFormat::Legacy,
                _ => AuditFormat::Json,
            },
            mode,
            truncate,
        }))
    }

    fn webhook_flags(&self) -> Flags<'_> {
        Flags {
            plugin: "webhook",
            mode: &self.audit_webhook_mode,
            buffer_size: self.audit_webhook_batch_buffer_size,
            max_size: self.audit_webhook_batch_max_size,
            max_wait: self.audit_webhook_batch_max_wait,
            throttled: self.audit_webhook_batch_throttle_enable,
            rate: self.audit_webhook_batch_throttle_qps,
            burst: self.audit_webhook_batch_throttle_burst,
            truncates: self.audit_webhook_truncate_enabled,
            max_event_size: self.audit_webhook_truncate_max_event_size,
            max_batch_size: self.audit_webhook_truncate_max_batch_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        audit: AuditOptions,
    }

    fn options(flags: &[&str]) -> Result<AuditOptions, clap::Error> {
        Ok(Line::try_parse_from([&["x"], flags].concat())?.audit)
    }

    #[tokio::test]
    async fn flags_are_checked_as_upstream_checks_them() {
        let directory = tempfile::tempdir().unwrap();
        let policy = directory.path().join("policy.yaml");
        std::fs::write(&policy, "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata}]")
            .unwrap();
        let policy = format!("--audit-policy-file={}", policy.display());
        let log = "--audit-log-path=-";
        assert!(options(&[]).unwrap().read().await.unwrap().is_none());
        assert!(options(&[log]).unwrap().read().await.unwrap().is_none(), "no policy, no audit");
        let config = options(&[log, &policy]).unwrap().read().await.unwrap().expect("an audit");
        let log_options = config.log.expect("a log");
        assert!(log_options.path.is_none() && matches!(log_options.mode, AuditMode::Blocking));
        assert_eq!((log_options.max_age, log_options.max_backups, log_options.max_size), (366, 100, 100));
        for (flags, why) in [
            (
                &[log, "--audit-log-mode=batch", "--audit-log-batch-buffer-size=0"][..],
                "invalid audit batch log buffer size 0, must be a positive number",
            ),
            (
                &[log, "--audit-log-mode=batch", "--audit-log-batch-throttle-enable"],
                "invalid audit batch log throttle QPS 0, must be a positive number",
            ),
            (
                &[log, "--audit-log-truncate-max-event-size=9", "--audit-log-truncate-max-batch-size=5"],
                "invalid audit truncate log max batch size 5, must be greater than max event size (9)",
            ),
        ] {
            let error = options(flags).unwrap().read().await.expect_err(why);
            assert_eq!(error.to_string(), why);
        }
        for flag in
            ["--audit-log-mode=fast", "--audit-log-format=xml", "--audit-log-version=audit.k8s.io/v1beta1"]
        {
            assert!(options(&[flag]).is_err(), "{flag}");
        }
        let missing = options(&["--audit-policy-file=/nowhere", log]).unwrap().read().await.unwrap_err();
        assert!(
            missing.to_string().starts_with("loading audit policy file: failed to read file path"),
            "{missing}"
        );
    }
}

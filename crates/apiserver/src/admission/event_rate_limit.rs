//! Events are taken in only so fast: over all, or of one namespace, one user, or one source about one object.

use super::{Attributes, Operation, Plugin, config};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_component::{Rate, TokenBucket};
use ferrite_json::Value;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

pub(super) const NAME: &str = "EventRateLimit";
const GROUP: &str = "eventratelimit.admission.k8s.io";
/// Keys of one limit that are remembered unless the configuration says otherwise.
const REMEMBERED: usize = 4096;

/// The key by which events are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Server,
    Namespace,
    User,
    SourceAndObject,
}

impl By {
    const ALL: [(&'static str, Self); 4] = [
        ("Server", Self::Server),
        ("Namespace", Self::Namespace),
        ("User", Self::User),
        ("SourceAndObject", Self::SourceAndObject),
    ];

    fn key(self, attributes: &Attributes<'_>, event: &Value) -> String {
        match self {
            Self::Server => String::new(),
            Self::Namespace => attributes.namespace.to_owned(),
            Self::User => attributes.user.name.clone(),
            Self::SourceAndObject => source_and_object(event),
        }
    }
}

/// The names of both groups' fields: one object has those of one.
fn source_and_object(event: &Value) -> String {
    let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let either =
        |one: &str, other: &str| if text(one).is_empty() { text(other) } else { text(one) }.to_owned();
    let object = |key: &str| either(&format!("/involvedObject/{key}"), &format!("/regarding/{key}"));
    [
        either("/source/component", "/deprecatedSource/component"),
        either("/source/host", "/deprecatedSource/host"),
        object("kind"),
        object("namespace"),
        object("name"),
        object("uid"),
        object("apiVersion"),
    ]
    .concat()
}

struct Limit {
    by: By,
    name: &'static str,
    rate: Rate,
    remembered: usize,
    buckets: HashMap<String, TokenBucket<Instant>>,
}

impl Limit {
    fn read(limit: &Value) -> Result<Self, String> {
        let positive = |key: &str| {
            let number = limit[key].as_f64().filter(|n| *n > 0.0);
            number.ok_or_else(|| format!("limits: {key} must be positive"))
        };
        let named = limit["type"].as_str().unwrap_or_default();
        let (name, by) = *By::ALL.iter().find(|(name, _)| *name == named).ok_or_else(|| {
            format!("limits: type {named:?} is none of Server, Namespace, User, SourceAndObject")
        })?;
        let remembered = match limit["cacheSize"].as_i64() {
            None | Some(0) => REMEMBERED,
            Some(size) => usize::try_from(size).map_err(|_| "limits: cacheSize must not be negative")?,
        };
        Ok(Self {
            by,
            name,
            rate: Rate { per_second: positive("qps")?, burst: positive("burst")? },
            remembered: if by == By::Server { 1 } else { remembered },
            buckets: HashMap::new(),
        })
    }

    /// Takes one event in, or not.
    fn accepts(&mut self, key: &str, now: Instant) -> bool {
        if !self.buckets.contains_key(key) && self.buckets.len() >= self.remembered {
            // Drop the bucket that was idle longest: it has the least to lose.
            let oldest =
                self.buckets.iter().min_by_key(|(_, bucket)| bucket.last()).map(|(key, _)| key.clone());
            oldest.map(|key| self.buckets.remove(&key));
        }
        let bucket = self.buckets.entry(key.to_owned());
        bucket.or_insert_with(|| TokenBucket::full(self.rate, now)).take(self.rate, now)
    }
}

struct EventRateLimit(Mutex<Vec<Limit>>);

pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let configuration = configuration
        .ok_or("it needs limits: name a file with a Configuration in --admission-control-config-file")?;
    config::check_kind(configuration, GROUP, "Configuration")?;
    let limits = configuration["limits"].as_array().filter(|limits| !limits.is_empty());
    let limits = limits.ok_or("limits must not be empty")?.iter().map(Limit::read);
    Ok(Box::new(EventRateLimit(Mutex::new(limits.collect::<Result<_, _>>()?))))
}

impl Plugin for EventRateLimit {
    fn name(&self) -> &'static str {
        NAME
    }

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(event) = object else { return Ok(()) };
        let counts = attributes.resource.kind == "Event"
            && attributes.operation != Operation::Delete
            && !attributes.options.dry_run;
        if !counts {
            return Ok(());
        }
        let now = Instant::now();
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut refused = None;
        // As upstream: a limit counts an event that another one refuses.
        for limit in limits.iter_mut() {
            let key = limit.by.key(attributes, event);
            if !limit.accepts(&key, now) {
                refused = Some(format!("limit reached on type {} for key {key}", limit.name));
            }
        }
        match refused {
            None => Ok(()),
            Some(why) => Err(Status::too_many_requests(format!("Too many requests: {why}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use std::time::Duration;

    #[test]
    fn a_bucket_fills_again_and_few_are_kept() {
        let limit = json!({"type": "User", "qps": 2, "burst": 3, "cacheSize": 2});
        let mut limit = Limit::read(&limit).expect("a limit");
        let start = Instant::now();
        let took = |limit: &mut Limit, key: &str, at: Duration| {
            (0..10).filter(|_| limit.accepts(key, start + at)).count()
        };
        assert_eq!(took(&mut limit, "a", Duration::ZERO), 3);
        assert_eq!(took(&mut limit, "b", Duration::ZERO), 3);
        assert_eq!(took(&mut limit, "a", Duration::from_secs(1)), 2);
        assert_eq!(took(&mut limit, "c", Duration::from_secs(1)), 3);
        assert_eq!(limit.buckets.len(), 2);
        assert!(limit.buckets.contains_key("a") && !limit.buckets.contains_key("b"));
    }

    #[test]
    fn limits_must_make_sense() {
        let with = |limits: Value| {
            make(Some(&json!({"apiVersion": "eventratelimit.admission.k8s.io/v1alpha1", "kind": "Configuration", "limits": limits}))).map(drop)
        };
        assert!(make(None).is_err());
        assert!(make(Some(&json!({"kind": "Configuration"}))).is_err());
        assert!(with(json!([{"type": "Server", "qps": 1, "burst": 1}])).is_ok());
        for wrong in [
            json!([]),
            json!([{"type": "Node", "qps": 1, "burst": 1}]),
            json!([{"type": "Server", "qps": 0, "burst": 1}]),
            json!([{"type": "Server", "qps": 1}]),
            json!([{"type": "User", "qps": 1, "burst": 1, "cacheSize": -1}]),
        ] {
            assert!(with(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn both_groups_events_are_told_apart_alike() {
        let core = json!({"source": {"component": "c"}, "involvedObject": {"kind": "Pod", "name": "p"}});
        let newer =
            json!({"deprecatedSource": {"component": "c"}, "regarding": {"kind": "Pod", "name": "p"}});
        assert_eq!(source_and_object(&core), source_and_object(&newer));
        assert_eq!(source_and_object(&core), "cPodp");
    }
}

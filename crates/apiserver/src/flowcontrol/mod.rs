//! API priority and fairness: chooses the requests to serve when there are too many to serve at once.
//!
//! A FlowSchema ([`rules`]) says which requests belong together and at which priority level; a level ([`level`]) has a
//! share ([`shares`]) of the server's seats and queues ([`queues`]) for the requests that find none. Levels lend seats that they do
//! not need to those that do, by their recent demand ([`demand`]).
//!
//! Differences from upstream: an event is encoded once however many watch, so a write is not charged for its watchers.
//! Components of this process wait instead of being refused, as they are known not to ask without end.

mod config;
mod demand;
mod estimate;
mod level;
mod measures;
mod queues;
mod retry_after;
mod rules;
mod shares;

use crate::auth::User;
use crate::options::Query;
use crate::registry::{ResourceMap, stored};
use crate::request::Verb;
use ::http::HeaderValue;
use config::{CATCH_ALL, Distinguisher, LevelConfig, SchemaConfig};
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use ferrite_store::{Snapshot, Store, Watch};
use futures_util::FutureExt;
use level::{Level, Settings};
use measures::FlowMeasures;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

pub(crate) use level::{Admission, Queued, Seat};
pub(crate) use rules::Digest;

const GROUP: &str = "flowcontrol.apiserver.k8s.io";
/// Levels lend and borrow anew after this time, as upstream.
const ADJUSTMENT: Duration = Duration::from_secs(10);

/// A FlowSchema and its level.
pub(crate) struct Schema {
    config: SchemaConfig,
    pub uid: HeaderValue,
    pub level: Arc<Level>,
    measures: Arc<FlowMeasures>,
}

#[derive(Default)]
struct Current {
    schemas: Vec<Arc<Schema>>,
    levels: Vec<Arc<Level>>,
    /// Serves requests that match no schema.
    fallback: Option<Arc<Schema>>,
}

pub(crate) struct FlowControl {
    /// The seats of the whole server.
    total: u32,
    current: RwLock<Arc<Current>>,
    sizes: estimate::Sizes,
    hasher: RandomState,
    started: Instant,
}

/// A request for a resource that is served, as far as its cost depends on it.
pub(crate) struct Reading<'a> {
    pub resource: &'a Resource,
    pub verb: Verb,
    pub name: Option<&'a str>,
    pub query: &'a Query,
}

fn header(uid: &str) -> HeaderValue {
    HeaderValue::from_str(uid).unwrap_or(HeaderValue::from_static(""))
}

impl FlowControl {
    /// Makes flow control with `total` seats; only the mandatory levels exist until [`FlowControl::apply`].
    pub fn new(total: usize) -> Self {
        let flow = Self {
            total: u32::try_from(total).unwrap_or(u32::MAX),
            current: RwLock::default(),
            sizes: estimate::Sizes::default(),
            hasher: RandomState::new(),
            started: Instant::now(),
        };
        flow.apply(Vec::new(), Vec::new());
        flow
    }

    fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts a configuration in place. Requests that wait or are served stay where they are.
    fn apply(&self, schemas: Vec<SchemaConfig>, levels: Vec<LevelConfig>) {
        let now = Instant::now();
        let (schemas, levels) = config::arranged(schemas, levels);
        let shares: Vec<_> = levels.iter().map(|level| level.share).collect();
        let bounds = shares::bounds(self.total, &shares);
        let before = self.current();
        let mut current = Current::default();
        for (config, bounds) in levels.into_iter().zip(bounds) {
            let (kind, uid) = (config.kind, header(&config.uid));
            let settings = Settings { name: config.name, uid, kind, share: config.share, bounds };
            let level = match before.levels.iter().find(|level| level.is_of(&settings)) {
                Some(level) => {
                    level.configure(kind, bounds, now);
                    Arc::clone(level)
                }
                None => Level::new(settings, now),
            };
            current.levels.push(level);
        }
        let made = |config: SchemaConfig| {
            let level = current.levels.iter().find(|level| level.name == config.level)?;
            let measures = Arc::new(FlowMeasures::new(&level.name, &config.name));
            Some(Arc::new(Schema { uid: header(&config.uid), level: Arc::clone(level), measures, config }))
        };
        let made: Vec<_> = schemas.into_iter().filter_map(made).collect();
        current.schemas = made;
        current.fallback = current.levels.iter().find(|level| level.name == CATCH_ALL).map(|level| {
            let uid = String::new();
            let config = SchemaConfig {
                name: CATCH_ALL.to_owned(),
                uid,
                precedence: i64::MAX,
                level: CATCH_ALL.to_owned(),
                distinguisher: Distinguisher::ByUser,
                rules: Vec::new(),
            };
            let measures = Arc::new(FlowMeasures::new(CATCH_ALL, CATCH_ALL));
            Arc::new(Schema { uid: header(""), level: Arc::clone(level), measures, config })
        });
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(current);
    }

    /// The schema that a request belongs to.
    pub fn classify(&self, user: &User, digest: &Digest<'_>) -> Option<Arc<Schema>> {
        let current = self.current();
        let matching =
            |schema: &&Arc<Schema>| schema.config.rules.iter().any(|rule| rule.matches(user, digest));
        current.schemas.iter().find(matching).or(current.fallback.as_ref()).cloned()
    }

    /// Asks for the seats of a request.
    pub fn admit(
        &self,
        schema: &Schema,
        user: &User,
        digest: &Digest<'_>,
        reading: Option<&Reading<'_>>,
        patient: bool,
        snapshot: impl FnOnce() -> Snapshot,
    ) -> Admission {
        let distinguished = match schema.config.distinguisher {
            Distinguisher::None => "",
            Distinguisher::ByUser => &user.name,
            Distinguisher::ByNamespace => digest.namespace(),
        };
        let seats = reading.map_or(1, |reading| {
            let widest = || schema.level.widest();
            self.sizes.seats(reading.resource, reading.verb, reading.name, reading.query, widest, snapshot)
        });
        let flow = self.hasher.hash_one((&schema.config.name, distinguished));
        schema.level.admit(queues::Request { flow, seats, patient }, &schema.measures)
    }

    /// The seconds after which a client that was refused may try again.
    pub fn retry_after(&self, schema: &Schema) -> u64 {
        schema.level.retry_after(self.started.elapsed().as_secs())
    }

    /// Lends the seats of levels that do not need them to those that do.
    fn adjust(&self) {
        let (current, now) = (self.current(), Instant::now());
        let claims: Vec<_> = current.levels.iter().map(|level| level.claim(now)).collect();
        let (seats, _) = shares::borrow(&claims);
        for (level, seats) in current.levels.iter().zip(seats) {
            level.set_limit(seats, now);
        }
    }

    /// The state of levels or queues, below `/debug/api_priority_and_fairness/`.
    pub fn dump(&self, what: &str) -> Option<String> {
        match what {
            "dump_priority_levels" => Some(self.dump_levels()),
            "dump_queues" => Some(self.dump_queues()),
            _ => None,
        }
    }

    fn dump_levels(&self) -> String {
        let mut out = String::from(
            "PriorityLevelName, ActiveQueues, IsIdle, IsQuiescing, WaitingRequests, ExecutingRequests, ConcurrencyLimit, SeatsInUse\n",
        );
        for dump in self.current().levels.iter().map(|level| level.dump()) {
            let active = dump.queues.iter().filter(|(waiting, executing)| waiting + executing > 0).count();
            let (idle, executing, seats) = (dump.executing + dump.waiting == 0, dump.executing, dump.seats);
            // An exempt level has neither queues nor a limit.
            let (active, waiting, limit) = match dump.exempt {
                true => ("<none>".to_owned(), "<none>".to_owned(), "<none>".to_owned()),
                false => (active.to_string(), dump.waiting.to_string(), dump.limit.to_string()),
            };
            let name = &dump.name;
            let _ =
                writeln!(out, "{name}, {active}, {idle}, false, {waiting}, {executing}, {limit}, {seats}");
        }
        out
    }

    fn dump_queues(&self) -> String {
        let mut out = String::from("PriorityLevelName, Index, PendingRequests, ExecutingRequests\n");
        for dump in self.current().levels.iter().map(|level| level.dump()) {
            for (index, (waiting, executing)) in dump.queues.iter().enumerate() {
                let _ = writeln!(out, "{}, {index}, {waiting}, {executing}", dump.name);
            }
        }
        out
    }
}

/// Keeps the configuration as it is stored.
pub(crate) struct Follower {
    flow: Arc<FlowControl>,
    store: Arc<Store>,
    table: Arc<ResourceMap>,
    watches: Vec<Watch>,
}

fn decoded(value: &[u8]) -> Option<Value> {
    ferrite_json::from_slice(value).ok()
}

impl Follower {
    pub fn new(flow: Arc<FlowControl>, store: Arc<Store>, table: Arc<ResourceMap>) -> Self {
        let mut follower = Self { flow, store, table, watches: Vec::new() };
        follower.load();
        follower
    }

    /// Reads everything, and watches from there.
    fn load(&mut self) {
        let snapshot = self.store.snapshot();
        self.watches.clear();
        let mut all = ["flowschemas", "prioritylevelconfigurations"].map(|plural| {
            let Some(resource) = self.table.find(GROUP, "v1", plural) else { return Vec::new() };
            let prefix = stored::prefix(resource);
            self.watches.extend(self.store.watch(prefix.as_bytes(), snapshot.revision()));
            let entries = snapshot.range(prefix.as_bytes(), None);
            entries.filter_map(|(_, entry)| decoded(entry.plain())).collect()
        });
        let levels = std::mem::take(&mut all[1]).iter().map(LevelConfig::read).collect();
        self.flow.apply(all[0].iter().map(SchemaConfig::read).collect(), levels);
    }

    pub async fn run(mut self) {
        let mut adjustments = tokio::time::interval(ADJUSTMENT);
        adjustments.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let changes = self.watches.iter_mut().map(|watch| watch.next().boxed());
            let changed = futures_util::future::select_all(changes);
            let is_time = tokio::select! {
                _ = adjustments.tick() => true,
                _ = changed => false,
            };
            if is_time { self.flow.adjust() } else { self.load() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use rules::About;

    fn schema(name: &str, precedence: i64, level: &str, user: &str) -> SchemaConfig {
        SchemaConfig::read(&json!({
            "metadata": {"name": name, "uid": name},
            "spec": {
                "matchingPrecedence": precedence,
                "priorityLevelConfiguration": {"name": level},
                "distinguisherMethod": {"type": "ByUser"},
                "rules": [{
                    "subjects": [{"kind": "User", "user": {"name": user}}],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }],
            },
        }))
    }

    fn level(name: &str, shares: u32) -> LevelConfig {
        LevelConfig::read(&json!({
            "metadata": {"name": name, "uid": name},
            "spec": {"type": "Limited", "limited": {
                "nominalConcurrencyShares": shares,
                "limitResponse": {"type": "Queue", "queuing": {"queues": 2, "handSize": 1, "queueLengthLimit": 1}},
            }},
        }))
    }

    const GET: Digest<'static> = Digest { verb: "get", about: About::Path("/x") };

    fn snapshot() -> Snapshot {
        unreachable!("no resource is read")
    }

    #[test]
    fn the_first_schema_that_matches_decides_and_somebody_else_falls_through() {
        let flow = FlowControl::new(10);
        flow.apply(vec![schema("late", 9, "l", "u"), schema("early", 1, "l", "u")], vec![level("l", 5)]);
        let of = |user: &str| flow.classify(&User::new(user, ["g"]), &GET).map(|s| s.config.name.clone());
        assert_eq!(of("u").as_deref(), Some("early"));
        assert_eq!(of("v").as_deref(), Some(CATCH_ALL));
    }

    #[test]
    fn a_new_configuration_keeps_those_who_are_served() {
        let flow = FlowControl::new(4);
        let user = User::new("u", ["g"]);
        flow.apply(vec![schema("s", 1, "l", "u")], vec![level("l", 95)]);
        let found = flow.classify(&user, &GET).expect("a schema");
        let held: Vec<_> = (0..4).map(|_| flow.admit(&found, &user, &GET, None, false, snapshot)).collect();
        assert!(held.iter().all(|one| matches!(one, Admission::Seated(_))));
        assert!(matches!(flow.admit(&found, &user, &GET, None, false, snapshot), Admission::Queued(_)));
        flow.apply(vec![schema("other", 1, "l", "u")], vec![level("l", 95)]);
        let found = flow.classify(&user, &GET).expect("a schema");
        assert_eq!(found.config.name, "other");
        assert!(matches!(flow.admit(&found, &user, &GET, None, false, snapshot), Admission::Queued(_)));
        drop(held);
        assert!(matches!(flow.admit(&found, &user, &GET, None, false, snapshot), Admission::Seated(_)));
        assert!(flow.dump_levels().contains("l, 0, true, false, 0, 0, 4, 0\n"), "{}", flow.dump_levels());
    }

    #[tokio::test(start_paused = true)]
    async fn idle_levels_lend_their_seats() {
        let flow = FlowControl::new(100);
        let lending = LevelConfig::read(&json!({
            "metadata": {"name": "idle"},
            "spec": {"type": "Limited", "limited": {
                "nominalConcurrencyShares": 50, "lendablePercent": 100, "limitResponse": {"type": "Reject"},
            }},
        }));
        flow.apply(vec![schema("s", 1, "l", "u")], vec![level("l", 50), lending]);
        let user = User::new("u", ["g"]);
        let found = flow.classify(&user, &GET).expect("a schema");
        let held: Vec<_> = (0..60).map(|_| flow.admit(&found, &user, &GET, None, true, snapshot)).collect();
        let seated = || held.iter().filter(|one| matches!(one, Admission::Seated(_))).count();
        assert_eq!(seated(), 48);
        flow.adjust();
        let before = found.level.dump();
        assert!(before.limit >= 60 && before.waiting == 0, "{}", flow.dump_levels());
    }
}

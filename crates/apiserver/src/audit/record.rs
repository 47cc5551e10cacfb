//! The audit of one request: collects its data, and sends an event at each stage.

use super::event::{Event, Level, ObjectRef, ResponseStatus, Stage};
use super::objects::{self, Text};
use super::policy::Verdict;
use super::{Auditor, Written};
use crate::auth::{Action, User};
use crate::request::Target;
use ferrite_api::meta;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// As upstream: a longer user agent is cut off.
const MAX_USER_AGENT: usize = 1024;
/// Annotations of one event. More are dropped.
const MAX_ANNOTATIONS: usize = 1024;

/// The possible content of a response's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    NoObject,
    Status,
    Object,
}

/// The progress of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Its user is not known yet.
    Arrived,
    /// The first event was sent, and the last was not.
    Open,
    Complete,
}

/// The facts about a request that its first filters know.
pub(crate) struct Arrival<'a> {
    pub audit_id: String,
    pub request_uri: String,
    pub user_agent: &'a str,
    pub sources: Vec<IpAddr>,
    pub action: Action,
    /// None for a request that is about no resource.
    pub target: Option<&'a Target>,
}

/// The audit of one request. The last owner that drops it completes it, if nobody did before: a stream is audited to
/// its end, and so is a request whose client has left.
pub(crate) struct Record {
    auditor: Arc<Auditor>,
    verdict: OnceLock<Verdict>,
    action: Action,
    state: Mutex<State>,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record").field("action", &self.action).finish_non_exhaustive()
    }
}

struct State {
    event: Event,
    progress: Progress,
    /// Writes that somebody has to wait for.
    pending: Vec<Written>,
}

impl Record {
    pub fn new(auditor: Arc<Auditor>, arrival: Arrival<'_>) -> Self {
        let Arrival { audit_id, request_uri, user_agent, sources, action, target } = arrival;
        let object = target.map(|target| ObjectRef {
            resource: action.resource.clone(),
            namespace: action.namespace.clone(),
            name: action.name.clone(),
            group: action.group.clone(),
            version: target.version.clone(),
            subresource: action.subresource.clone(),
            ..ObjectRef::default()
        });
        let event = Event {
            level: Level::None,
            audit_id,
            request_uri,
            verb: action.verb.clone(),
            user: None,
            impersonated: None,
            constraint: None,
            sources,
            user_agent: shortened(user_agent),
            object,
            response: None,
            request_object: None,
            response_object: None,
            received: Timestamp::now(),
            annotations: BTreeMap::new(),
            truncated: false,
        };
        let state = Mutex::new(State { event, progress: Progress::Arrived, pending: Vec::new() });
        Self { auditor, verdict: OnceLock::new(), action, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn verdict(&self) -> Option<Verdict> {
        self.verdict.get().copied()
    }

    pub fn level(&self) -> Level {
        self.verdict().map_or(Level::None, |verdict| verdict.level)
    }

    fn omits_managed_fields(&self) -> bool {
        self.verdict().is_some_and(|verdict| verdict.omits_managed_fields)
    }

    /// Asks the policy about the request.
    pub fn evaluate(&self, user: Option<&Arc<User>>) -> Level {
        let verdict = self.auditor.evaluate(user.map(|user| &**user), &self.action);
        let verdict = *self.verdict.get_or_init(|| verdict);
        let mut state = self.state();
        state.event.level = verdict.level;
        state.event.user = user.cloned();
        verdict.level
    }

    /// The first event of a request that is audited. Resolves to true if it was stored.
    pub fn received(&self) -> Option<Written> {
        let mut state = self.state();
        state.progress = Progress::Open;
        let time = state.event.received;
        self.send(&state.event, Stage::RequestReceived, time)
    }

    fn send(&self, event: &Event, stage: Stage, time: Timestamp) -> Option<Written> {
        match self.verdict() {
            Some(verdict) if verdict.level > Level::None && !verdict.omits.contains(stage) => {
                self.auditor.send(event, stage, time)
            }
            _ => None,
        }
    }

    /// Returns true if the request is refused before its user is known, and is audited. It has one event
    /// only: that of its response.
    pub fn refuse(&self) -> bool {
        if self.state().progress != Progress::Arrived {
            return false;
        }
        self.state().progress = Progress::Complete;
        self.evaluate(None) > Level::None
    }

    /// The headers of a stream were made.
    pub fn started(&self) {
        self.stage(Stage::ResponseStarted);
    }

    fn stage(&self, stage: Stage) {
        let mut state = self.state();
        let written = self.send(&state.event, stage, Timestamp::now());
        state.pending.extend(written);
    }

    /// The last event of the request.
    pub fn complete(&self) {
        self.finish(Stage::ResponseComplete);
    }

    /// The last event of a request whose handler panicked.
    pub fn panicked(&self) {
        let message = "APIServer panic'd: a request handler panicked".to_owned();
        let (status, reason) = ("Failure".to_owned(), "InternalError".to_owned());
        self.state().event.response =
            Some(ResponseStatus { status, message, reason, details: None, code: 500 });
        self.finish(Stage::Panic);
    }

    fn finish(&self, stage: Stage) {
        {
            let mut state = self.state();
            if state.progress != Progress::Open {
                return;
            }
            state.progress = Progress::Complete;
            // As upstream: a response that was never begun counts as one.
            state.event.response.get_or_insert_with(|| ResponseStatus {
                status: "Success".into(),
                message: "Connection closed early".into(),
                code: 200,
                ..ResponseStatus::default()
            });
        }
        self.stage(stage);
    }

    /// Waits until all events so far are stored, where a backend has others wait for it.
    pub async fn written(&self) {
        let pending = std::mem::take(&mut self.state().pending);
        for written in pending {
            written.await;
        }
    }

    /// The writes that somebody has to wait for.
    pub fn take_pending(&self) -> Vec<Written> {
        std::mem::take(&mut self.state().pending)
    }

    /// Completes the audit of a request for whose response nobody waits.
    pub fn abandon(&self) {
        self.complete();
        for written in self.take_pending() {
            self.auditor.spawn(written);
        }
    }

    /// As upstream: the first value of a key stays.
    pub fn annotate(&self, key: &str, value: impl Into<String>) {
        let mut state = self.state();
        let annotations = &mut state.event.annotations;
        if annotations.len() < MAX_ANNOTATIONS {
            annotations.entry(key.to_owned()).or_insert_with(|| value.into());
        }
    }

    /// The user that the request is made as, and the mode that allows it.
    pub fn impersonates(&self, user: &Arc<User>, constraint: Option<&'static str>) {
        let mut state = self.state();
        let event = &mut state.event;
        event.impersonated = Some(Arc::clone(user));
        event.constraint = constraint;
    }

    /// The object that the request has sent. `complete` sets the defaults, as upstream's decoder does.
    pub fn request_object(&self, object: &Value, complete: impl FnOnce(&mut Value)) {
        let text = (self.level() >= Level::Request).then(|| {
            let mut object = object.clone();
            complete(&mut object);
            objects::of_value(object, self.omits_managed_fields())
        });
        let mut state = self.state();
        let event = &mut state.event;
        let reference = event.object.get_or_insert_default();
        for (field, value) in [
            (&mut reference.namespace, meta::namespace(object)),
            (&mut reference.name, meta::name(object)),
            (&mut reference.uid, meta::str(object, "uid")),
            (&mut reference.resource_version, meta::str(object, "resourceVersion")),
        ] {
            if field.is_empty() {
                value.clone_into(field);
            }
        }
        event.set_request_object(text.unwrap_or_default());
    }

    /// A request's object that has no metadata: options of a delete.
    pub fn request_options(&self, options: &Value) {
        if self.level() >= Level::Request {
            let mut options = options.clone();
            // As upstream, whose options have no version of their own here.
            options["kind"] = "DeleteOptions".into();
            options["apiVersion"] = "meta.k8s.io/__internal".into();
            let text = objects::of_value(options, false);
            self.state().event.set_request_object(text);
        }
    }

    pub fn request_patch(&self, patch: &[u8]) {
        if self.level() >= Level::Request {
            let text = objects::of_patch(patch);
            self.state().event.set_request_object(text);
        }
    }

    /// The response, with its body if that is known as a whole.
    pub fn response(&self, code: u16, media_type: &str, body: Option<&[u8]>, holds: Holds) {
        let status = body.and_then(|body| objects::status_of(media_type, body));
        let has_object = holds == Holds::Object || (holds == Holds::Status && status.is_some());
        let wants_object = has_object && self.level() == Level::RequestResponse;
        let text = match body {
            Some(body) if wants_object => objects::of_bytes(media_type, body, self.omits_managed_fields()),
            _ => Text::None,
        };
        let mut state = self.state();
        let event = &mut state.event;
        if let Some(status) = status {
            event.response = Some(status);
        }
        event.response.get_or_insert_default().code = code;
        event.set_response_object(text);
    }

    /// The body of a response that came in pieces.
    pub fn response_object(&self, media_type: &str, body: Option<&[u8]>) {
        let text = match body {
            Some(body) => objects::of_bytes(media_type, body, self.omits_managed_fields()),
            None => Text::TooLarge,
        };
        self.state().event.set_response_object(text);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Event {
    fn set_request_object(&mut self, text: Text) {
        self.truncated |= text == Text::TooLarge;
        if let Text::Object(text) = text {
            self.request_object = Some(text);
        }
    }

    fn set_response_object(&mut self, text: Text) {
        self.truncated |= text == Text::TooLarge;
        if let Text::Object(text) = text {
            self.response_object = Some(text);
        }
    }
}

fn shortened(user_agent: &str) -> String {
    match user_agent.len() > MAX_USER_AGENT {
        false => user_agent.to_owned(),
        true => {
            let cut = (0..=MAX_USER_AGENT).rev().find(|at| user_agent.is_char_boundary(*at)).unwrap_or(0);
            format!("{}...TRUNCATED", &user_agent[..cut])
        }
    }
}

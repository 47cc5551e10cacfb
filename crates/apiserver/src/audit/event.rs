//! Audit events and how they are written.

use crate::auth::User;
use ferrite_json::{Value, write_text};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;

/// The amount of detail in an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    None,
    Metadata,
    Request,
    RequestResponse,
}

impl Level {
    pub const ALL: [Self; 4] = [Self::None, Self::Metadata, Self::Request, Self::RequestResponse];

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Metadata => "Metadata",
            Self::Request => "Request",
            Self::RequestResponse => "RequestResponse",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }
}

/// When in the life of a request an event is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    RequestReceived,
    /// The headers of a stream were made, or the request was refused before its user was known.
    ResponseStarted,
    ResponseComplete,
    Panic,
}

impl Stage {
    pub const ALL: [Self; 4] =
        [Self::RequestReceived, Self::ResponseStarted, Self::ResponseComplete, Self::Panic];

    pub fn name(self) -> &'static str {
        match self {
            Self::RequestReceived => "RequestReceived",
            Self::ResponseStarted => "ResponseStarted",
            Self::ResponseComplete => "ResponseComplete",
            Self::Panic => "Panic",
        }
    }
}

/// The object that a request is about. Empty texts are left out.
#[derive(Debug, Clone, Default)]
pub(super) struct ObjectRef {
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub group: String,
    pub version: String,
    pub resource_version: String,
    pub subresource: String,
}

/// The fields of a Status that events have. Empty ones are left out.
#[derive(Debug, Clone, Default)]
pub(super) struct ResponseStatus {
    pub status: String,
    pub message: String,
    pub reason: String,
    pub details: Option<Value>,
    pub code: u16,
}

/// Everything that is known of a request so far.
#[derive(Debug)]
pub(super) struct Event {
    pub level: Level,
    pub audit_id: String,
    pub request_uri: String,
    pub verb: String,
    pub user: Option<Arc<User>>,
    pub impersonated: Option<Arc<User>>,
    /// The mode of constrained impersonation.
    pub constraint: Option<&'static str>,
    pub sources: Vec<IpAddr>,
    pub user_agent: String,
    pub object: Option<ObjectRef>,
    pub response: Option<ResponseStatus>,
    /// JSON texts.
    pub request_object: Option<Arc<str>>,
    pub response_object: Option<Arc<str>>,
    pub received: Timestamp,
    pub annotations: BTreeMap<String, String>,
    /// True if an object was too large to keep.
    pub truncated: bool,
}

/// The beginning of every event as it is in the log. Events in a list do not have it.
const TYPE_META: &[u8] = br#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","#;

/// Writes the members of a JSON object.
struct Members<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl<'a> Members<'a> {
    fn open(out: &'a mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, first: true }
    }

    fn key(&mut self, key: &str) -> &mut Vec<u8> {
        if !std::mem::take(&mut self.first) {
            self.out.push(b',');
        }
        write_text(key, self.out);
        self.out.push(b':');
        self.out
    }

    fn text(&mut self, key: &str, text: &str) {
        write_text(text, self.key(key));
    }

    fn text_if(&mut self, key: &str, text: &str) {
        if !text.is_empty() {
            self.text(key, text);
        }
    }

    fn texts(&mut self, key: &str, texts: impl Iterator<Item = impl AsRef<str>>) {
        let mut texts = texts.peekable();
        if texts.peek().is_none() {
            return;
        }
        let out = self.key(key);
        let mut before = b'[';
        for text in texts {
            out.push(std::mem::replace(&mut before, b','));
            write_text(text.as_ref(), out);
        }
        out.push(b']');
    }

    fn close(self) {
        self.out.push(b'}');
    }
}

fn write_user(user: Option<&User>, out: &mut Vec<u8>) {
    let mut members = Members::open(out);
    if let Some(user) = user {
        members.text_if("username", &user.name);
        members.text_if("uid", &user.uid);
        members.texts("groups", user.groups.iter());
        if !user.extra.is_empty() {
            let mut extra = Members::open(members.key("extra"));
            for (key, values) in &user.extra {
                if values.is_empty() {
                    extra.key(key).extend_from_slice(b"[]");
                }
                extra.texts(key, values.iter());
            }
            extra.close();
        }
    }
    members.close();
}

impl ObjectRef {
    fn write(&self, out: &mut Vec<u8>) {
        let mut members = Members::open(out);
        for (key, text) in [
            ("resource", &self.resource),
            ("namespace", &self.namespace),
            ("name", &self.name),
            ("uid", &self.uid),
            ("apiGroup", &self.group),
            ("apiVersion", &self.version),
            ("resourceVersion", &self.resource_version),
            ("subresource", &self.subresource),
        ] {
            members.text_if(key, text);
        }
        members.close();
    }
}

impl ResponseStatus {
    fn write(&self, out: &mut Vec<u8>) {
        let mut members = Members::open(out);
        members.key("metadata").extend_from_slice(b"{}");
        members.text_if("status", &self.status);
        members.text_if("message", &self.message);
        members.text_if("reason", &self.reason);
        if let Some(details) = &self.details {
            details.write_to(members.key("details"));
        }
        if self.code != 0 {
            members.key("code").extend_from_slice(self.code.to_string().as_bytes());
        }
        members.close();
    }
}

/// A time with microseconds, as upstream writes it.
fn micro_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

/// The annotation of an event whose objects were removed because they are too large.
const TRUNCATED: &str = "audit.k8s.io/truncated";

impl Event {
    /// The event as one line of JSON. Without objects if they are too large for a backend.
    pub fn to_json(&self, stage: Stage, time: Timestamp, with_objects: bool) -> Vec<u8> {
        let objects = [&self.request_object, &self.response_object];
        let lengths: usize = objects.into_iter().flatten().map(|text| text.len()).sum();
        let mut line = Vec::with_capacity(1024 + if with_objects { lengths } else { 0 });
        line.extend_from_slice(TYPE_META);
        let mut members = Members { out: &mut line, first: true };
        members.text("level", self.level.name());
        members.text("auditID", &self.audit_id);
        members.text("stage", stage.name());
        members.text("requestURI", &self.request_uri);
        members.text("verb", &self.verb);
        write_user(self.user.as_deref(), members.key("user"));
        if let Some(user) = &self.impersonated {
            write_user(Some(user), members.key("impersonatedUser"));
        }
        if let Some(constraint) = self.constraint {
            let mut metadata = Members::open(members.key("authenticationMetadata"));
            metadata.text("impersonationConstraint", &format!("impersonate:{constraint}"));
            metadata.close();
        }
        members.texts("sourceIPs", self.sources.iter().map(ToString::to_string));
        members.text_if("userAgent", &self.user_agent);
        if let Some(object) = &self.object {
            object.write(members.key("objectRef"));
        }
        if let Some(response) = &self.response {
            response.write(members.key("responseStatus"));
        }
        if with_objects {
            for (key, object) in ["requestObject", "responseObject"].into_iter().zip(objects) {
                if let Some(text) = object {
                    members.key(key).extend_from_slice(text.as_bytes());
                }
            }
        }
        members.text("requestReceivedTimestamp", &micro_time(self.received));
        members.text("stageTimestamp", &micro_time(time));
        let truncated = self.truncated || !with_objects;
        if truncated || !self.annotations.is_empty() {
            let mut annotations = Members::open(members.key("annotations"));
            if truncated && !self.annotations.contains_key(TRUNCATED) {
                annotations.text(TRUNCATED, "true");
            }
            for (key, value) in &self.annotations {
                annotations.text(key, value);
            }
            annotations.close();
        }
        members.close();
        line.push(b'\n');
        line
    }

    /// The event as a line of upstream's old format.
    pub fn to_legacy(&self, stage: Stage) -> String {
        let quoted = |list: &[String]| {
            let list: Vec<String> = list.iter().map(|entry| format!("{entry:?}")).collect();
            list.join(",")
        };
        let user = self.user.as_deref().filter(|user| !user.name.is_empty());
        let groups = user.filter(|user| !user.groups.is_empty()).map(|user| quoted(&user.groups));
        let namespace = self.object.as_ref().map(|object| object.namespace.as_str());
        let response = self.response.as_ref().map(|response| response.code.to_string());
        let mut line = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            line,
            "{} AUDIT: id={:?} stage={:?} ip={:?} method={:?} user={:?} groups={:?} as={:?} asgroups={:?} user-agent={:?} namespace={:?} uri={:?} response=\"{}\"",
            self.received,
            self.audit_id,
            stage.name(),
            self.sources.first().map_or_else(|| "<unknown>".to_owned(), ToString::to_string),
            self.verb,
            user.map_or("<none>", |user| &user.name),
            groups.as_deref().unwrap_or("<none>"),
            self.impersonated.as_deref().map_or("<self>", |user| &user.name),
            self.impersonated.as_deref().map_or_else(|| "<lookup>".to_owned(), |user| quoted(&user.groups)),
            self.user_agent,
            namespace.filter(|namespace| !namespace.is_empty()).unwrap_or("<none>"),
            self.request_uri,
            response.as_deref().unwrap_or("<deferred>"),
        );
        line
    }
}

/// Several lines of [`Event::to_json`] as an EventList.
pub(super) fn to_list<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut list = br#"{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{},"items":["#.to_vec();
    for (index, line) in lines.enumerate() {
        if index > 0 {
            list.push(b',');
        }
        list.push(b'{');
        let members = line.strip_prefix(TYPE_META).unwrap_or_default();
        list.extend_from_slice(members.strip_suffix(b"\n").unwrap_or(members));
    }
    list.extend_from_slice(b"]}\n");
    list
}

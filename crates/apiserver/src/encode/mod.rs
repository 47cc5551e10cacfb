//! Answers in the representation the client asked for.

pub(crate) mod list;

use crate::http::{self, JSON, Response};
use crate::negotiate::{Format, Representation, Shape};
use crate::registry::stored::Written;
use crate::registry::{Event, EventType, FrameKey, stored};
use bytes::{BufMut, Bytes, BytesMut};
use ferrite_api::codec::{protobuf, yaml};
use ferrite_api::resource::{Column, DEFAULT_COLUMNS, Resource};
use ferrite_api::{Status, meta};
use ferrite_json::{Map, Value, json};
use ferrite_store::{Entry, Revision};
use jiff::Timestamp;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of the object that goes into a table's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum IncludeObject {
    None,
    #[default]
    Metadata,
    Object,
}

impl IncludeObject {
    pub fn parse(text: &str) -> Result<Self, Status> {
        match text {
            "" | "Metadata" => Ok(Self::Metadata),
            "None" => Ok(Self::None),
            "Object" => Ok(Self::Object),
            other => Err(Status::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {other:?}: must be 'Metadata', 'Object', 'None', or empty"
            ))),
        }
    }
}

fn meta_version(beta: bool) -> &'static str {
    if beta { "meta.k8s.io/v1beta1" } else { "meta.k8s.io/v1" }
}

/// One value in a plain representation.
pub(crate) fn value(code: u16, value: &Value, as_: Representation) -> Result<Response, Status> {
    Ok(http::answer(code, as_.format.media_type(), bytes(value, as_)?))
}

fn bytes(value: &Value, as_: Representation) -> Result<Vec<u8>, Status> {
    match as_.format {
        Format::Json if as_.pretty => ferrite_json::to_vec_pretty(value).map_err(Status::internal),
        Format::Json => ferrite_json::to_vec(value).map_err(Status::internal),
        Format::Yaml => yaml::encode(value).map(String::into_bytes).map_err(Status::internal),
        Format::Protobuf => protobuf::encode(value).map_err(Status::internal),
    }
}

/// One object, as table, metadata alone, or itself.
pub(crate) fn object(
    code: u16,
    resource: &Resource,
    object: &Value,
    as_: Representation,
    include: IncludeObject,
) -> Result<Response, Status> {
    match as_.shape {
        Shape::Table { beta } => {
            let metadata = match meta::str(object, "resourceVersion") {
                "" => json!({}),
                version => json!({"resourceVersion": version}),
            };
            let table = table(resource, [object].into_iter(), beta, include, metadata);
            value(code, &table, as_)
        }
        Shape::PartialObjectMetadata { beta } => value(code, &partial(resource, object, beta), as_),
        Shape::PartialObjectMetadataList { .. } => Err(match resource.custom {
            Some(_) => wrong_type("PartialObjectMetadataList", "not a list", "unstructured.Unstructured"),
            None => wrong_shape(
                "PartialObjectMetadataList",
                "not a list",
                &resource.group,
                object.get("kind").and_then(Value::as_str).unwrap_or(&resource.kind),
            ),
        }),
        Shape::AsIs | Shape::AggregatedDiscovery => value(code, object, as_),
    }
}

/// A written object: copied from the stored bytes if they have the requested representation.
pub(crate) fn written(
    code: u16,
    resource: &Resource,
    written: &Written,
    as_: Representation,
    include: IncludeObject,
) -> Result<Response, Status> {
    if copies_written(resource, as_)
        && let Some(json) = written.json(resource)
    {
        return Ok(http::answer(code, JSON, json));
    }
    object(code, resource, &written.object(resource), as_, include)
}

/// The refusal to show an object as a list or a list as an object, with the Go type it has upstream.
fn wrong_shape(asked: &str, is: &str, group: &str, kind: &str) -> Status {
    let package = crate::call::internal_package(group);
    wrong_type(asked, is, &format!("{package}.{kind}"))
}

fn wrong_type(asked: &str, is: &str, type_: &str) -> Status {
    let message = format!("you requested {asked}, but the requested object is {is} (*{type_})");
    Status::new(406, "NotAcceptable", message)
}

/// The refusal of a list as the metadata of one object.
fn one_for_many(resource: &Resource) -> Status {
    match resource.custom {
        Some(_) => wrong_type("PartialObjectMetadata", "a list", "unstructured.UnstructuredList"),
        None => wrong_shape("PartialObjectMetadata", "a list", &resource.group, &resource.list_kind()),
    }
}

fn not_acceptable() -> Status {
    Status::not_acceptable(crate::negotiate::ACCEPTED)
}

/// Returns true if the response consists of stored bytes, unchanged.
pub(crate) fn copies(resource: &Resource, as_: Representation) -> bool {
    as_.format == Format::Json && as_.shape == Shape::AsIs && !as_.pretty && resource.is_read_as_stored()
}

/// As [`copies`], for a response made of an object that was just stored.
pub(crate) fn copies_written(resource: &Resource, as_: Representation) -> bool {
    as_.format == Format::Json && as_.shape == Shape::AsIs && !as_.pretty && resource.is_written_as_served()
}

/// One stored object: copied when JSON is asked for.
pub(crate) fn entry(
    resource: &Resource,
    stored_entry: &Entry,
    as_: Representation,
    include: IncludeObject,
) -> Result<Response, Status> {
    if copies(resource, as_) {
        let mut out = BytesMut::new();
        stored::put_object(stored_entry, &mut out);
        return Ok(http::answer(200, JSON, out.freeze()));
    }
    let decoded =
        stored::decode(resource, stored_entry).ok_or_else(|| crate::registry::unreadable(resource, ""))?;
    object(200, resource, &decoded, as_, include)
}

/// A list of stored objects, made as a whole.
pub(crate) fn list(
    resource: &Resource,
    mut page: crate::registry::ListPage,
    as_: Representation,
    include: IncludeObject,
) -> Result<Response, Status> {
    let mut metadata = list_metadata(page.revision, page.continue_token.as_deref(), page.remaining);
    if as_.shape == Shape::AsIs {
        say_continue(resource, &mut metadata);
    }
    let objects = list::decoded(resource, &mut page);
    values(resource, objects, metadata, as_, include)
}

pub(crate) fn list_metadata(revision: Revision, token: Option<&str>, remaining: Option<usize>) -> Value {
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if let Some(token) = token {
        metadata["continue"] = token.into();
    }
    if let Some(remaining) = remaining {
        metadata["remainingItemCount"] = remaining.into();
    }
    metadata
}

/// As upstream: a list of a custom kind says that nothing follows.
pub(crate) fn say_continue(resource: &Resource, metadata: &mut Value) {
    if resource.custom.is_some() && metadata.get("continue").is_none() {
        metadata["continue"] = "".into();
    }
}

/// A list of decoded objects.
pub(crate) fn values(
    resource: &Resource,
    objects: Vec<Value>,
    metadata: Value,
    as_: Representation,
    include: IncludeObject,
) -> Result<Response, Status> {
    let listed = match as_.shape {
        Shape::Table { beta } => table(resource, objects.iter(), beta, include, metadata),
        Shape::PartialObjectMetadataList { beta } => {
            let items: Vec<Value> = objects.iter().map(|o| partial(resource, o, beta)).collect();
            // As upstream: a list of nothing has no items, not an empty list of them.
            let items = if items.is_empty() { Value::Null } else { items.into() };
            json!({
                "kind": "PartialObjectMetadataList",
                "apiVersion": meta_version(beta),
                "metadata": metadata,
                "items": items,
            })
        }
        Shape::PartialObjectMetadata { .. } => return Err(one_for_many(resource)),
        Shape::AsIs | Shape::AggregatedDiscovery => {
            let mut items = objects;
            items.iter_mut().for_each(|item| strip_type(resource, item));
            json!({
                "kind": resource.list_kind(),
                "apiVersion": resource.api_version(),
                "metadata": metadata,
                "items": items,
            })
        }
    };
    value(200, &listed, as_)
}

/// Items of a typed list carry no kind and no apiVersion, as upstream's. Those of custom kinds do.
fn strip_type(resource: &Resource, object: &mut Value) {
    if resource.custom.is_some() {
        return;
    }
    if let Some(map) = object.as_object_mut() {
        map.remove("kind");
        map.remove("apiVersion");
    }
}

fn partial(resource: &Resource, object: &Value, beta: bool) -> Value {
    let mut metadata = object.get("metadata").cloned().unwrap_or_else(|| json!({}));
    let hidden = resource.strategy.hidden_annotations();
    if !hidden.is_empty()
        && let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut)
    {
        for annotation in hidden {
            annotations.remove(annotation);
        }
        if annotations.is_empty()
            && let Some(metadata) = metadata.as_object_mut()
        {
            metadata.remove("annotations");
        }
    }
    json!({"kind": "PartialObjectMetadata", "apiVersion": meta_version(beta), "metadata": metadata})
}

/// True if metadata alone is made of stored bytes as they are.
fn copies_metadata(resource: &Resource) -> bool {
    resource.is_read_as_stored() && resource.strategy.hidden_annotations().is_empty()
}

fn table<'a>(
    resource: &Resource,
    objects: impl Iterator<Item = &'a Value>,
    beta: bool,
    include: IncludeObject,
    metadata: Value,
) -> Value {
    let columns = resource.strategy.columns();
    let rows: Vec<Value> = objects.map(|o| row(resource, o, beta, include)).collect();
    json!({
        "kind": "Table",
        "apiVersion": meta_version(beta),
        "metadata": metadata,
        "columnDefinitions": columns.iter().map(|c| column(resource, c)).collect::<Vec<_>>(),
        "rows": if rows.is_empty() && has_null_rows(resource) { Value::Null } else { rows.into() },
    })
}

/// As upstream: a table of no objects has no rows instead of an empty list of them, if the kind has no columns of its own.
fn has_null_rows(resource: &Resource) -> bool {
    let columns = resource.strategy.columns().iter().map(|column| &*column.name);
    resource.custom.is_none() && columns.eq(DEFAULT_COLUMNS.iter().map(|column| &*column.name))
}

fn column(resource: &Resource, column: &Column) -> Value {
    json!({
        "name": column.name,
        "type": column.type_,
        "format": column.format,
        "description": match &column.description {
            Some(given) => given.clone(),
            None => format!("{} of the {}", column.name, resource.singular),
        },
        "priority": column.priority,
    })
}

fn row(resource: &Resource, object: &Value, beta: bool, include: IncludeObject) -> Value {
    let mut row = Map::new();
    row.insert("cells", resource.strategy.cells(object, Timestamp::now()).into());
    if let Some(conditions) = resource.strategy.row_conditions(object) {
        row.insert("conditions", conditions);
    }
    match include {
        IncludeObject::None => {
            row.insert("object", Value::Null);
        }
        IncludeObject::Metadata => {
            row.insert("object", partial(resource, object, beta));
        }
        IncludeObject::Object => {
            row.insert("object", object.clone());
        }
    }
    Value::Object(row)
}

/// Frames of a watch in one representation.
pub(crate) struct WatchEncoder {
    resource: Arc<Resource>,
    as_: Representation,
    include: IncludeObject,
    /// True once the columns were sent: they are sent once per stream.
    columns_told: bool,
    /// Counts the frames of changes that were made here, not taken from another watcher.
    made: Arc<AtomicU64>,
}

impl WatchEncoder {
    pub fn new(
        resource: Arc<Resource>,
        as_: Representation,
        include: IncludeObject,
        made: Arc<AtomicU64>,
    ) -> Result<Self, Status> {
        if as_.format == Format::Yaml {
            return Err(Status::not_acceptable(crate::negotiate::WATCHED));
        }
        Ok(Self { resource, as_, include, columns_told: false, made })
    }

    pub fn content_type(&self) -> &'static str {
        match self.as_.format {
            Format::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
            _ => JSON,
        }
    }

    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// As upstream: an event has one object, which is no list. Such a watch ends with its first event.
    fn check_shape(&self) -> Result<(), Status> {
        match self.as_.shape {
            Shape::PartialObjectMetadataList { .. } => Err(Status::internal("an event is not a list")),
            _ => Ok(()),
        }
    }

    /// An object that was there before the watch.
    pub fn initial(&mut self, entry: &Entry) -> Result<Bytes, Status> {
        self.check_shape()?;
        let columns = self.tell_columns();
        self.stored(EventType::Added, entry, columns)
    }

    /// An event, in the frame that all watchers of this representation share.
    pub fn changed(&mut self, type_: EventType, event: &Event) -> Result<Bytes, Status> {
        self.check_shape()?;
        let columns = self.tell_columns();
        let key = FrameKey { type_, representation: self.as_, include: self.include, columns };
        event.frame(key, || {
            self.made.fetch_add(1, Ordering::Relaxed);
            let entry = event.entry(type_).ok_or_else(|| Status::internal("an event without an object"))?;
            self.stored(type_, &entry, columns)
        })
    }

    /// Returns true if the next table must contain its columns.
    fn tell_columns(&mut self) -> bool {
        matches!(self.as_.shape, Shape::Table { .. }) && !std::mem::replace(&mut self.columns_told, true)
    }

    fn stored(&self, type_: EventType, entry: &Entry, columns: bool) -> Result<Bytes, Status> {
        let type_ = type_.as_str();
        let copied = self.as_.format == Format::Json && self.resource.is_read_as_stored();
        if copied && matches!(self.as_.shape, Shape::AsIs | Shape::AggregatedDiscovery) {
            let mut out = BytesMut::with_capacity(entry.plain().len() + 96);
            out.put_slice(format!(r#"{{"type":"{type_}","object":"#).as_bytes());
            stored::put_object(entry, &mut out);
            out.put_slice(b"}\n");
            return Ok(out.freeze());
        }
        if copied
            && copies_metadata(&self.resource)
            && let Shape::PartialObjectMetadata { beta } = self.as_.shape
        {
            let mut out = BytesMut::new();
            out.put_slice(format!(r#"{{"type":"{type_}","object":"#).as_bytes());
            list::put_partial(entry, beta, &mut out);
            out.put_slice(b"}\n");
            return Ok(out.freeze());
        }
        let object = stored::decode(&self.resource, entry)
            .ok_or_else(|| crate::registry::unreadable(&self.resource, ""))?;
        self.value(type_, &object, columns)
    }

    pub fn bookmark(&mut self, revision: Revision, initial_events_end: bool) -> Result<Bytes, Status> {
        self.check_shape()?;
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if initial_events_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let mut object = json!({
            "kind": self.resource.kind,
            "apiVersion": self.resource.api_version(),
            "metadata": metadata,
        });
        if self.as_.format == Format::Json
            && let Some(type_) = self.resource.schema
        {
            // A typed object writes its mandatory parts even when they are empty.
            ferrite_api::codec::normalise(type_, &mut object);
        }
        let columns = self.tell_columns();
        self.value("BOOKMARK", &object, columns)
    }

    pub fn error(&self, status: &Status) -> Result<Bytes, Status> {
        self.frame("ERROR", &status.to_value())
    }

    fn value(&self, type_: &str, object: &Value, columns: bool) -> Result<Bytes, Status> {
        match self.as_.shape {
            Shape::Table { beta } => {
                let version = meta::str(object, "resourceVersion");
                let mut table = table(
                    &self.resource,
                    [object].into_iter(),
                    beta,
                    self.include,
                    json!({"resourceVersion": version}),
                );
                if !columns {
                    table["columnDefinitions"] = Value::Null;
                }
                self.frame(type_, &table)
            }
            Shape::PartialObjectMetadata { beta } | Shape::PartialObjectMetadataList { beta } => {
                self.frame(type_, &partial(&self.resource, object, beta))
            }
            _ => self.frame(type_, object),
        }
    }

    fn frame(&self, type_: &str, object: &Value) -> Result<Bytes, Status> {
        let mut out = BytesMut::new();
        match self.as_.format {
            Format::Protobuf => {
                let inner = protobuf::encode(object).map_err(Status::internal)?;
                let event = protobuf::encode_watch_event(type_, &inner);
                let framed = protobuf::frame(&event)
                    .ok_or_else(|| Status::internal("an event is too large for its frame"))?;
                out.put_slice(&framed);
            }
            _ => {
                let event = json!({"type": type_, "object": object});
                out.put_slice(&ferrite_json::to_vec(&event).map_err(Status::internal)?);
                out.put_u8(b'\n');
            }
        }
        Ok(out.freeze())
    }
}

//! Lists, made piece by piece: the memory of a list does not grow with the number of objects.

use super::{IncludeObject, column, list_metadata, meta_version, partial, row, strip_type};
use crate::negotiate::{Format, Representation, Shape};
use crate::registry::{Items, ListPage, stored};
use bytes::{BufMut, Bytes, BytesMut};
use ferrite_api::Status;
use ferrite_api::codec::protobuf;
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, TypeRef};
use ferrite_json::Value;
use ferrite_store::Entry;
use std::sync::Arc;

/// About the size of a piece, and of one read for it.
pub(crate) const PIECE: usize = 128 << 10;
/// The largest list that is made as a whole.
const WHOLE: usize = 4 << 20;
/// Most reads for one piece if few objects are selected; then the piece is sent.
const MAX_READS: usize = 8;

/// The type of an object's metadata alone.
const PARTIAL: &str = "meta.v1.PartialObjectMetadata";

/// A list on its way out.
pub(crate) struct Pieces {
    resource: Arc<Resource>,
    include: IncludeObject,
    form: Form,
    items: Items,
    messages: Messages,
    head: Option<Bytes>,
    tail: &'static [u8],
    first: bool,
    done: bool,
}

/// The encoding of an item.
#[derive(Clone, Copy)]
enum Form {
    /// The stored bytes behind their beginning, which is that long.
    Copied {
        beginning: usize,
    },
    Json,
    /// The stored metadata, copied.
    CopiedMetadata {
        beta: bool,
    },
    Metadata {
        beta: bool,
    },
    Row {
        beta: bool,
    },
    /// The object within the row is the stored metadata, copied.
    RowOverMetadata {
        beta: bool,
    },
    Protobuf(TypeRef),
}

impl Pieces {
    /// The representation of a list that is sent in pieces. None for one that is made as a whole: YAML and indented
    /// JSON are for people. A list that is too large for them, and for the server's memory, is not indented.
    pub async fn representation(
        page: &ListPage,
        as_: Representation,
    ) -> Result<Option<Representation>, Status> {
        if as_.format != Format::Yaml && !as_.pretty {
            return Ok(Some(as_));
        }
        if !is_larger(page, WHOLE).await {
            return Ok(None);
        }
        match as_.format {
            Format::Yaml => {
                let most = WHOLE >> 20;
                Err(Status::bad_request(format!(
                    "a list of more than {most} MiB is not served as YAML; ask for JSON, or for pages (limit)"
                )))
            }
            _ => Ok(Some(Representation { pretty: false, ..as_ })),
        }
    }

    pub async fn new(
        resource: &Arc<Resource>,
        page: ListPage,
        as_: Representation,
        include: IncludeObject,
    ) -> Result<Self, Status> {
        let copies = resource.is_read_as_stored();
        let form = match (as_.format, as_.shape) {
            (_, Shape::PartialObjectMetadata { .. }) => return Err(super::one_for_many(resource)),
            (Format::Protobuf, Shape::Table { .. }) => return Err(super::not_acceptable()),
            (Format::Protobuf, Shape::PartialObjectMetadataList { .. }) => Form::Protobuf(named(PARTIAL)?),
            (Format::Protobuf, _) => Form::Protobuf(crate::call::type_of(&resource.gvk())?),
            (_, Shape::Table { beta })
                if include == IncludeObject::Metadata
                    && resource.custom.is_none()
                    && super::copies_metadata(resource) =>
            {
                Form::RowOverMetadata { beta }
            }
            (_, Shape::Table { beta }) => Form::Row { beta },
            (_, Shape::PartialObjectMetadataList { beta }) if super::copies_metadata(resource) => {
                Form::CopiedMetadata { beta }
            }
            (_, Shape::PartialObjectMetadataList { beta }) => Form::Metadata { beta },
            _ if copies => Form::Copied { beginning: stored::beginning(resource) },
            _ => Form::Json,
        };
        let mut metadata = list_metadata(page.revision, page.continue_token.as_deref(), page.remaining);
        if as_.shape == Shape::AsIs {
            super::say_continue(resource, &mut metadata);
        }
        let mut pieces = Self {
            resource: Arc::clone(resource),
            include,
            form,
            items: page.items,
            messages: Messages::default(),
            head: None,
            tail: b"]}",
            first: true,
            done: false,
        };
        pieces.head = Some(match form {
            Form::Protobuf(type_) => {
                pieces.tail = ENVELOPE_TAIL;
                pieces.protobuf_head(type_, &metadata, as_.shape).await?
            }
            _ => pieces.json_head(&metadata).into(),
        });
        Ok(pieces)
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    /// The next piece; it may be empty if none of the examined objects is selected.
    pub fn next(&mut self) -> Option<Result<Bytes, Status>> {
        if self.done {
            return None;
        }
        let mut out = BytesMut::with_capacity(PIECE + PIECE / 8);
        if let Some(head) = self.head.take() {
            out.put_slice(&head);
        }
        for _ in 0..MAX_READS {
            for entry in self.items.take(PIECE).unwrap_or_default() {
                if let Err(status) = self.put(&entry, &mut out) {
                    self.done = true;
                    return Some(Err(status));
                }
            }
            if out.len() >= PIECE || self.items.is_done() {
                break;
            }
        }
        if self.items.is_done() {
            out.put_slice(self.tail());
            self.done = true;
        }
        Some(Ok(out.freeze()))
    }

    fn tail(&self) -> &'static [u8] {
        // As upstream: such a list of nothing has no items, not an empty list of them.
        if self.first && self.opens_late() { b"null}" } else { self.tail }
    }

    /// True if the first item opens the list: without any, there is no list.
    fn opens_late(&self) -> bool {
        match self.form {
            Form::Metadata { .. } | Form::CopiedMetadata { .. } => true,
            Form::Row { .. } | Form::RowOverMetadata { .. } => super::has_null_rows(&self.resource),
            _ => false,
        }
    }

    fn put(&mut self, entry: &Entry, out: &mut BytesMut) -> Result<(), Status> {
        if let Form::Protobuf(type_) = self.form {
            if let Some(item) = self.messages.encode(&self.resource, type_, entry)? {
                out.put_u8(ITEMS);
                put_varint(out, item.len());
                out.put_slice(item);
            }
            return Ok(());
        }
        let value = match self.form {
            Form::Copied { .. } | Form::CopiedMetadata { .. } => None,
            Form::RowOverMetadata { .. } => match stored::decode_without_managers(&self.resource, entry) {
                Some(object) => Some(object),
                None => return Ok(()),
            },
            _ => match stored::decode(&self.resource, entry) {
                Some(object) => Some(object),
                None => return Ok(()),
            },
        };
        if !std::mem::take(&mut self.first) {
            out.put_u8(b',');
        } else if self.opens_late() {
            out.put_u8(b'[');
        }
        match (self.form, value) {
            (Form::Copied { beginning }, _) => stored::put_item(beginning, entry, out),
            (Form::CopiedMetadata { beta }, _) => put_partial(entry, beta, out),
            (Form::Metadata { beta }, Some(object)) => {
                put_json(&partial(&self.resource, &object, beta), out)?
            }
            (Form::RowOverMetadata { beta }, Some(object)) => {
                let row = row(&self.resource, &object, beta, IncludeObject::None);
                put_row(&row, entry, beta, out)?;
            }
            (Form::Row { beta }, Some(object)) => {
                put_json(&row(&self.resource, &object, beta, self.include), out)?;
            }
            (_, Some(mut object)) => {
                strip_type(&self.resource, &mut object);
                put_json(&object, out)?;
            }
            (_, None) => {}
        }
        Ok(())
    }

    fn json_head(&self, metadata: &Value) -> String {
        let (kind, version) = match self.form {
            Form::Row { beta } | Form::RowOverMetadata { beta } => {
                ("Table".to_owned(), meta_version(beta).to_owned())
            }
            Form::Metadata { beta } | Form::CopiedMetadata { beta } => {
                ("PartialObjectMetadataList".to_owned(), meta_version(beta).to_owned())
            }
            _ => (self.resource.list_kind().into_owned(), self.resource.api_version()),
        };
        let items = match self.form {
            Form::Row { .. } | Form::RowOverMetadata { .. } => {
                let columns = self.resource.strategy.columns();
                let columns: Vec<Value> = columns.iter().map(|c| column(&self.resource, c)).collect();
                format!(r#""columnDefinitions":{},"rows":"#, Value::from(columns))
            }
            _ => r#""items":"#.to_owned(),
        };
        let open = if self.opens_late() { "" } else { "[" };
        format!(r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},{items}{open}"#)
    }

    /// The envelope tells the length of what it holds, so the items are measured before the first is sent.
    /// Measuring is encoding: a list costs twice the work, but never more memory than an item.
    async fn protobuf_head(
        &mut self,
        type_: TypeRef,
        metadata: &Value,
        shape: Shape,
    ) -> Result<Bytes, Status> {
        let (version, kind) = match shape {
            Shape::PartialObjectMetadataList { beta } => {
                (meta_version(beta).to_owned(), "PartialObjectMetadataList".to_owned())
            }
            _ => (self.resource.api_version(), format!("{}List", self.resource.kind)),
        };
        let list_meta =
            protobuf::encode_message(named("meta.v1.ListMeta")?, metadata).map_err(Status::internal)?;
        let mut raw = BytesMut::new();
        raw.put_u8(METADATA);
        put_varint(&mut raw, list_meta.len());
        raw.put_slice(&list_meta);
        let mut length = raw.len();
        let mut items = self.items.clone();
        while let Some(entries) = items.take(PIECE) {
            for entry in entries {
                let message = self.messages.encode(&self.resource, type_, &entry)?;
                let Some(size) = message.map(<[u8]>::len) else { continue };
                length += 1 + varint_size(size) + size;
            }
            // Others have their turn.
            tokio::task::yield_now().await;
        }
        let empty = protobuf::wrap(&version, &kind, b"");
        let beginning = empty.len() - ENVELOPE_TAIL.len() - 1;
        let mut head = BytesMut::from(&empty[..beginning]);
        put_varint(&mut head, length);
        head.put_slice(&raw);
        Ok(head.freeze())
    }
}

/// Makes protobuf messages of stored objects.
#[derive(Default)]
struct Messages {
    encoder: protobuf::Encoder,
    /// The object with its resource version, as JSON.
    text: BytesMut,
}

impl Messages {
    /// A stored object, or its metadata alone, as a message of `type_`. `None` if it cannot be read.
    fn encode(
        &mut self,
        resource: &Resource,
        type_: TypeRef,
        entry: &Entry,
    ) -> Result<Option<&[u8]>, Status> {
        let is_partial = type_.name == PARTIAL;
        self.text.clear();
        if is_partial && super::copies_metadata(resource) {
            put_partial(entry, false, &mut self.text);
        } else if !is_partial && resource.is_read_as_stored() {
            stored::put_object(entry, &mut self.text);
        }
        // Text that this server has not written may have another form.
        if self.text.is_empty() || self.encoder.encode(type_, &self.text).is_err() {
            let Some(mut object) = stored::decode(resource, entry) else { return Ok(None) };
            if is_partial {
                object = partial(resource, &object, false);
            }
            self.text.clear();
            put_json(&object, &mut self.text)?;
            self.encoder.encode(type_, &self.text).map_err(Status::internal)?;
        }
        Ok(Some(self.encoder.message()))
    }
}

/// Returns true if the objects of a page have more bytes together.
async fn is_larger(page: &ListPage, most: usize) -> bool {
    let (mut items, mut seen) = (page.items.clone(), 0);
    while let Some(entries) = items.take(PIECE) {
        seen += entries.iter().map(|entry| entry.plain().len()).sum::<usize>();
        if seen > most {
            return true;
        }
        // Others have their turn.
        tokio::task::yield_now().await;
    }
    false
}

/// Tags of the fields `metadata` and `items`, which every list has at the same place.
const METADATA: u8 = 1 << 3 | 2;
const ITEMS: u8 = 2 << 3 | 2;
/// The bytes behind the object in an envelope: an empty content encoding and content type.
const ENVELOPE_TAIL: &[u8] = &[3 << 3 | 2, 0, 4 << 3 | 2, 0];

fn named(name: &str) -> Result<TypeRef, Status> {
    schema::named(name).ok_or_else(|| Status::internal(format!("no schema for {name}")))
}

fn put_json(value: &Value, out: &mut BytesMut) -> Result<(), Status> {
    ferrite_json::to_writer(out.writer(), value).map_err(Status::internal)
}

/// A row of a table, whose object is the stored metadata.
fn put_row(row: &Value, entry: &Entry, beta: bool, out: &mut BytesMut) -> Result<(), Status> {
    let members = row.as_object().into_iter().flat_map(ferrite_json::Map::iter);
    out.put_u8(b'{');
    for (key, value) in members.filter(|(key, _)| *key != "object") {
        out.put_slice(format!(r#""{key}":"#).as_bytes());
        put_json(value, out)?;
        out.put_u8(b',');
    }
    out.put_slice(br#""object":"#);
    put_partial(entry, beta, out);
    out.put_u8(b'}');
    Ok(())
}

/// The stored metadata as an object of its own.
pub(super) fn put_partial(entry: &Entry, beta: bool, out: &mut BytesMut) {
    let version = meta_version(beta);
    let head = format!(r#"{{"kind":"PartialObjectMetadata","apiVersion":"{version}","metadata":"#);
    out.put_slice(head.as_bytes());
    stored::put_metadata(entry, out);
    out.put_u8(b'}');
}

fn varint_size(number: usize) -> usize {
    (usize::BITS - (number | 1).leading_zeros()).div_ceil(7) as usize
}

fn put_varint(out: &mut BytesMut, mut number: usize) {
    while number > 0x7f {
        out.put_u8((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.put_u8(number as u8);
}

/// The page's objects, decoded, for a representation that is made as a whole.
pub(super) fn decoded(resource: &Resource, page: &mut ListPage) -> Vec<Value> {
    let mut objects = Vec::new();
    while let Some(entries) = page.items.take(PIECE) {
        objects.extend(entries.iter().filter_map(|entry| stored::decode(resource, entry)));
    }
    objects
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_written_as_measured() {
        for number in [0, 1, 127, 128, 16_383, 16_384, 3 << 20, u32::MAX as usize] {
            let mut out = BytesMut::new();
            put_varint(&mut out, number);
            assert_eq!(out.len(), varint_size(number), "{number}");
        }
    }
}

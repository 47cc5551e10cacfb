//! The one description of every built-in type, which decoding, protobuf, patches and apply all read.
//!
//! The table is `schema/types.tsv`, made by `cargo run -p xtask -- schema` from upstream's facts and compiled
//! into static data: a lookup neither parses nor allocates.

use crate::gvk::Gvk;

mod slots;
#[cfg(test)]
mod tests;

mod tables {
    use super::{Field, Kind, Merge, Patch, Presence, Slot, Type, TypeRef, Wire};
    include!(concat!(env!("OUT_DIR"), "/schema_tables.rs"));
}

/// A type of the table. Types are static: compare them by address or by name.
pub type TypeRef = &'static Type;

/// A struct of the API.
pub struct Type {
    /// Short name, unique in the table: `core.v1.PodSpec`.
    pub name: &'static str,
    /// The struct is owned and replaced as a whole by server-side apply.
    pub atomic: bool,
    /// Sorted by JSON name. Inlined Go structs are flattened, as in JSON.
    pub fields: &'static [Field],
    /// Places of fields by their names, for [`Type::field`].
    slots: &'static [u8],
    /// Places of the fields that are written even when they are absent.
    written: &'static [u8],
    /// The protobuf message: sorted by tag, inlined structs nested.
    pub wire: &'static [Wire],
}

/// A field of a struct.
#[derive(Debug)]
pub struct Field {
    /// The JSON name.
    pub name: &'static str,
    /// The name as managed fields have it: `f:spec`.
    pub key: &'static str,
    pub kind: Kind,
    pub presence: Presence,
    /// Required by the OpenAPI document.
    pub required: bool,
    /// The merge rule of server-side apply for the field (`listType`, `mapType`).
    pub merge: Merge,
    /// Keys of a list of [`Merge::Keyed`].
    pub keys: &'static [&'static str],
    /// The rule of a strategic merge patch for the field.
    pub patch: Patch,
    /// The OpenAPI default as JSON text; empty when there is none.
    pub default: &'static str,
    /// Where the field stands in the declaration of its struct, whose order Go prints.
    pub declared: u16,
    /// The type as Go prints it, if [`Field::kind`] alone does not determine it; empty elsewhere.
    pub go: &'static str,
    /// The embedded structs on the way to the field, as Go's errors name them: `VolumeSource`.
    pub embedded: &'static str,
}

/// The type of a value.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    String,
    Bool,
    Int32,
    Int64,
    Double,
    /// Base64 in JSON.
    Bytes,
    /// A string or a number in JSON, kept as a string.
    Quantity,
    IntOrString,
    /// RFC 3339 with seconds.
    Time,
    /// RFC 3339 with microseconds.
    MicroTime,
    /// Go's duration text (`1h2m`).
    Duration,
    /// Any JSON, held as bytes in protobuf (RawExtension, JSON, FieldsV1).
    Raw,
    /// A list of strings that protobuf wraps in a message of its own.
    Strings,
    Struct(TypeRef),
    List(&'static Kind),
    Map(&'static Kind),
    /// A schema or a list of schemas (`items` of a CRD's schema).
    SchemaOrArray(TypeRef),
    /// A schema or a boolean.
    SchemaOrBool(TypeRef),
    /// A schema or a list of property names.
    SchemaOrStrings(TypeRef),
}

/// The meaning of absent and zero for a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// A pointer in Go: absent and zero differ, and absent is not written.
    Pointer,
    /// A pointer that JSON writes as `null` when it is absent.
    Nullable,
    /// A value whose zero is not written in JSON.
    OmitEmpty,
    /// A value that is always written: `0`, `""`, `{}`, or `null` for lists, maps and times.
    Always,
}

impl Presence {
    /// Absent and zero differ.
    pub fn is_pointer(self) -> bool {
        matches!(self, Self::Pointer | Self::Nullable)
    }
}

/// The merge rule of server-side apply for a list, map or struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merge {
    /// Lists are atomic, maps and structs granular.
    Default,
    /// A struct whose fields are owned one by one, though its type says otherwise.
    Granular,
    Atomic,
    /// A list of scalars, each owned on its own.
    Set,
    /// A list of objects identified by [`Field::keys`].
    Keyed,
}

/// Upstream's `patchStrategy` and `patchMergeKey`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patch {
    pub merge: bool,
    pub replace: bool,
    pub retain_keys: bool,
    /// Empty when the field has none.
    pub merge_key: &'static str,
}

/// One entry of a protobuf message.
#[derive(Debug)]
pub struct Wire {
    pub tag: u32,
    pub slot: Slot,
}

/// The content of a protobuf tag.
#[derive(Debug)]
pub enum Slot {
    /// Index into [`Type::fields`].
    Field(u16),
    /// An inlined struct: a nested message whose fields are the owner's in JSON.
    Inline(&'static [Wire]),
}

impl Type {
    /// A struct has no more fields than this.
    pub const MOST_FIELDS: usize = u8::MAX as usize;

    /// The field of this JSON name; names are case-sensitive.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.get(self.place(name)?)
    }

    /// The place of the field of this JSON name among [`Type::fields`].
    pub fn place(&self, name: &str) -> Option<usize> {
        let mut at = slots::first(name.as_bytes(), self.slots.len());
        loop {
            let place = usize::from(self.slots[at]);
            // There are more slots than fields, and the one of a name that is none is empty.
            if self.fields.get(place)?.name == name {
                return Some(place);
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// The fields that are written even when they are absent.
    pub fn written(&self) -> impl Iterator<Item = &'static Field> {
        let fields = self.fields;
        self.written.iter().map(move |at| &fields[usize::from(*at)])
    }

    /// The Go name without its package: `PodSpec`.
    pub fn go_name(&self) -> &'static str {
        self.name.rsplit('.').next().unwrap_or(self.name)
    }

    /// The Go name with the package as Go prints it in errors: `v1.PodSpec`.
    pub fn go_qualified(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, rest)| rest)
    }
}

// The graph of types is cyclic (a JSON schema holds schemas), so a derived `Debug` would not end.
impl std::fmt::Debug for Type {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Type({})", self.name)
    }
}

impl PartialEq for Type {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Type {}

/// Kinds that exist in every group and version.
const EVERYWHERE: &[&str] = &[
    "CreateOptions",
    "DeleteOptions",
    "GetOptions",
    "ListOptions",
    "PatchOptions",
    "UpdateOptions",
    "WatchEvent",
];

/// The type of a built-in kind, of its list, or of a kind that every group has (`DeleteOptions` …).
pub fn kind(group: &str, version: &str, kind: &str) -> Option<TypeRef> {
    let find = |group, version| {
        let at = tables::KINDS.binary_search_by(|(name, _)| name.cmp(&(group, version, kind))).ok()?;
        tables::KINDS.get(at).map(|(_, type_)| *type_)
    };
    find(group, version).or_else(|| if EVERYWHERE.contains(&kind) { find("meta.k8s.io", "v1") } else { None })
}

/// [`kind`] for a [`Gvk`].
pub fn of(gvk: &Gvk) -> Option<TypeRef> {
    kind(&gvk.group, &gvk.version, &gvk.kind)
}

/// [`kind`] for the spelling in an object: `apps/v1`, `Deployment`.
pub fn of_api_version(api_version: &str, kind_name: &str) -> Option<TypeRef> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    kind(group, version, kind_name)
}

/// A type by its short name: `core.v1.PodSpec`.
pub fn named(name: &str) -> Option<TypeRef> {
    let at = tables::TYPES.binary_search_by(|t| t.name.cmp(name)).ok()?;
    tables::TYPES.get(at).copied()
}

/// Every type of the table, by name.
pub fn types() -> impl Iterator<Item = TypeRef> {
    tables::TYPES.iter().copied()
}

/// Every kind of the table as `((group, version, kind), type)`.
pub fn kinds() -> impl Iterator<Item = ((&'static str, &'static str, &'static str), TypeRef)> {
    tables::KINDS.iter().copied()
}

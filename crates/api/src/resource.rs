//! A resource as data: names, scope, subresources, and the strategy in which its kind differs from others.
//!
//! The server has one generic implementation of create, get, list, watch, update, patch and delete.
//! [`Strategy`] has the additions of a kind; the default methods are those of a kind without specialities.

use crate::codec::{DecodeError, Decoded};
use crate::custom::Custom;
use crate::field::{FieldError, FieldErrors};
use crate::gvk::{Gvk, Gvr};
use crate::kinds::common::access::{clear_status, keep};
use crate::schema::TypeRef;
use ferrite_json::Value;
use jiff::Timestamp;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Tells if objects live in a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Namespaced,
    Cluster,
}

/// One resource in one version. Compiled-in rows borrow, rows made at run time own.
#[derive(Clone)]
pub struct Resource {
    pub group: Cow<'static, str>,
    pub version: Cow<'static, str>,
    pub kind: Cow<'static, str>,
    /// The type of its objects; none when only the run time knows.
    pub schema: Option<TypeRef>,
    pub plural: Cow<'static, str>,
    pub singular: Cow<'static, str>,
    pub short_names: Cow<'static, [Cow<'static, str>]>,
    pub categories: Cow<'static, [Cow<'static, str>]>,
    pub scope: Scope,
    /// In discovery's order (sorted).
    pub verbs: Cow<'static, [&'static str]>,
    pub subresources: Cow<'static, [Subresource]>,
    /// True if the version is served by default. Beta and alpha versions are not.
    pub on_by_default: bool,
    /// The form in which objects are stored, where it is another version's than this.
    pub storage: Option<Storage>,
    pub strategy: Arc<dyn Strategy>,
    /// Deviations of the generic code of verbs and storage for the resource.
    pub hooks: Hooks,
    /// The kind that a CustomResourceDefinition describes; none of a built-in one.
    pub custom: Option<Custom>,
}

/// Deviations of the generic code for a resource, in upstream's words. Most resources have none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hooks {
    /// Where the store keeps the objects below `/registry/`; none for the plural name.
    pub storage_prefix: Option<&'static str>,
    /// The warning that every use of the resource brings.
    pub deprecation: Option<Cow<'static, str>>,
    /// Objects go by themselves after the time that the server keeps events.
    pub ttl: bool,
    /// The reservation that is made before an object is created or changed, and recorded with it.
    pub begin_create: Option<Reservation>,
    /// The handler that answers in place of the store.
    pub connect: Option<Connect>,
    /// The feature gate without which the resource is not served.
    pub gate: Option<&'static str>,
}

/// Something of which each is one object's alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reservation {
    /// Cluster addresses and ports on the nodes.
    AddressesAndPorts,
}

/// The handler of a resource that is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connect {
    /// The server compares and answers.
    Review,
    /// The object changes another.
    Binding,
    /// The health of the components.
    ComponentStatus,
}

/// The conversion for storing a version as another one: two versions of a kind share their objects.
///
/// The conversions set `apiVersion` and `kind` too. They are total: a field that one form lacks is kept in
/// annotations if upstream does so, else it is lost.
#[derive(Debug, Clone, Copy)]
pub struct Storage {
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
    /// The resource under whose name the objects are kept.
    pub plural: &'static str,
    /// From the version of the row to the stored form.
    pub to_storage: fn(&mut Value),
    /// From the stored form to the version of the row.
    pub from_storage: fn(&mut Value),
}

/// A subresource as discovery lists it. `kind` differs from the parent's where the body does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subresource {
    pub name: &'static str,
    pub verbs: &'static [&'static str],
    /// Group, version and kind of the body when it is not the parent's.
    pub body: Option<(&'static str, &'static str, &'static str)>,
}

impl Resource {
    pub fn gvk(&self) -> Gvk {
        Gvk::new(&*self.group, &*self.version, &*self.kind)
    }

    pub fn gvr(&self) -> Gvr {
        Gvr::new(&*self.group, &*self.version, &*self.plural)
    }

    pub fn api_version(&self) -> String {
        crate::gvk::api_version(&self.group, &self.version)
    }

    pub fn is_namespaced(&self) -> bool {
        self.scope == Scope::Namespaced
    }

    /// Group, version and kind of the stored form.
    pub fn storage_gvk(&self) -> Gvk {
        match (&self.storage, &self.custom) {
            (Some(s), _) => Gvk::new(s.group, s.version, s.kind),
            (None, Some(custom)) => Gvk::new(&*self.group, &*custom.storage().name, &*self.kind),
            (None, None) => self.gvk(),
        }
    }

    /// Group, version and name of the resource whose objects these are in the store.
    pub fn storage_gvr(&self) -> Gvr {
        match (&self.storage, &self.custom) {
            (Some(s), _) => Gvr::new(s.group, s.version, s.plural),
            (None, Some(custom)) => Gvr::new(&*self.group, &*custom.storage().name, &*self.plural),
            (None, None) => self.gvr(),
        }
    }

    /// Brings an object of this version to the stored form.
    pub fn to_storage(&self, object: &mut Value) {
        if let Some(storage) = self.storage {
            (storage.to_storage)(object);
        }
        if let Some(custom) = &self.custom {
            custom.to_storage(object);
        }
    }

    /// Is an object written as it is answered?
    pub fn is_written_as_served(&self) -> bool {
        self.storage.is_none() && self.custom.as_ref().is_none_or(Custom::is_storage)
    }

    /// Is a stored object answered as it is? One of a custom kind is not: its schema may have changed since.
    pub fn is_read_as_stored(&self) -> bool {
        self.storage.is_none() && self.custom.is_none()
    }

    /// The kind of a list of these.
    pub fn list_kind(&self) -> Cow<'_, str> {
        match &self.custom {
            Some(custom) => Cow::Borrowed(&custom.kind.list_kind),
            None => Cow::Owned(format!("{}List", self.kind)),
        }
    }

    /// Brings an object that a patch has made under its type: the same checks as for one that a client sends.
    pub fn conform(&self, object: Value) -> Result<Decoded, DecodeError> {
        match (&self.custom, self.schema) {
            (Some(custom), _) => custom.conform(object),
            (None, Some(type_)) => crate::codec::json::conform(type_, &object),
            (None, None) => Ok(Decoded { value: object, strict: Vec::new() }),
        }
    }

    /// Brings a stored object to this version.
    pub fn from_storage(&self, object: &mut Value) {
        if let Some(storage) = self.storage {
            (storage.from_storage)(object);
        }
        if let Some(custom) = &self.custom {
            custom.from_storage(object);
        }
    }

    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|s| s.name == name)
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resource({}/{} {})", self.group, self.version, self.plural)
    }
}

/// A column of the server-side table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: Cow<'static, str>,
    /// `string`, `integer`, `date` …
    pub type_: Cow<'static, str>,
    /// `name` for the column that names the object, else empty.
    pub format: Cow<'static, str>,
    /// 0 is always shown; higher only with `-o wide`.
    pub priority: i32,
    /// The column's description in a definition; none for a built-in column.
    pub description: Option<String>,
}

impl Column {
    /// A column of a built-in kind.
    pub const fn new(name: &'static str, type_: &'static str, format: &'static str, priority: i32) -> Self {
        Self {
            name: Cow::Borrowed(name),
            type_: Cow::Borrowed(type_),
            format: Cow::Borrowed(format),
            priority,
            description: None,
        }
    }
}

/// The effect of deleting an object of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// The object goes at once (unless finalizers hold it).
    Immediate,
    /// The object is marked and stays until the agent that owns it deletes it with a grace period of zero.
    Graceful { seconds: i64 },
}

/// The writer of a kind's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusUse {
    /// There is none, or the kind's own rules say.
    Own,
    /// Only its subresource, which may change metadata with it.
    WithMetadata,
    /// Only its subresource, which changes nothing else.
    Alone,
}

/// The metadata checks of a kind's own validation of an update. Each check that finds an error reports it,
/// so an error may appear twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetadataUse {
    /// Nothing, and of a new object neither: the server alone looks, after the kind.
    Nothing,
    /// Of a new object everything, of a change nothing.
    New,
    /// The change.
    Change,
    /// The metadata as that of a new object.
    Content,
    /// As [`MetadataUse::Content`], twice.
    ContentTwice,
    /// The change, and the metadata as that of a new object.
    Everything,
}

impl MetadataUse {
    /// The number of times that the metadata are validated as those of a new object.
    pub fn content(self) -> usize {
        match self {
            Self::Nothing | Self::New | Self::Change => 0,
            Self::Content | Self::Everything => 1,
            Self::ContentTwice => 2,
        }
    }

    /// Is the change validated?
    pub fn change(self) -> bool {
        matches!(self, Self::Change | Self::Everything)
    }
}

/// The differences of a kind from others. All methods work on the versioned object as JSON.
pub trait Strategy: Send + Sync + 'static {
    /// Fills defaults. Runs on every object that is decoded or read, so it must be idempotent.
    fn default(&self, _object: &mut Value) {}

    /// Returns the reason if an object cannot be converted to upstream's internal form.
    fn conversion_problem(&self, _object: &Value) -> Option<String> {
        None
    }

    /// Marks lists that a client has sent empty where upstream refuses those, and not their absence. Nothing else can tell
    /// the two apart.
    fn mark_sent_empty(&self, _object: &mut Value) {}

    /// The writer of the kind's status. The methods below apply it to writes, unless the kind has rules of
    /// its own.
    fn status_use(&self) -> StatusUse {
        StatusUse::Own
    }

    /// Before the object is created: drops fields that a client may not set (status) and normalises.
    fn prepare_create(&self, object: &mut Value) {
        if self.status_use() != StatusUse::Own {
            clear_status(object);
        }
    }

    /// After [`Strategy::prepare_create`], if all labels of the object are defaults: adds those that depend on what was
    /// prepared.
    fn complete_default_labels(&self, _object: &mut Value) {}

    /// The place of the pod's spec in an object that is a pod or makes pods, as a JSON pointer.
    fn pod_spec(&self) -> Option<&'static str> {
        None
    }

    /// Before an update of the main resource: keeps what only subresources may change. Generation is bumped
    /// by the server when [`Strategy::generation_fields`] differ.
    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if self.status_use() != StatusUse::Own {
            keep(new, old, "status");
        }
    }

    /// Before an update of `status`: everything but status and the parts of metadata that may change there
    /// is taken from `old`.
    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        match self.status_use() {
            StatusUse::WithMetadata => keep(new, old, "spec"),
            StatusUse::Alone | StatusUse::Own => keep_all_but_status(new, old),
        }
    }

    /// Fields (`spec`, `metadata.labels`) whose change bumps `metadata.generation`; empty for kinds without generation.
    fn generation_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// Does the kind count its generations?
    fn has_generation(&self) -> bool {
        !self.generation_fields().is_empty()
    }

    /// Is a change one that counts?
    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        self.generation_fields().iter().any(|field| {
            let pointer = format!("/{}", field.replace('.', "/"));
            new.pointer(&pointer) != old.pointer(&pointer)
        })
    }

    /// A new object has generation 1; else it has none until the first change that counts.
    fn starts_generation(&self) -> bool {
        true
    }

    /// Validates a new object. Metadata has been validated by the server.
    fn validate(&self, _object: &Value) -> FieldErrors {
        Vec::new()
    }

    /// Validates the change from `old` to `new`; includes the checks of [`Strategy::validate`].
    fn validate_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        self.validate(new)
    }

    /// As [`Strategy::validate_update`], with the warnings that the validation itself finds.
    fn validate_change(&self, new: &Value, old: &Value, _warnings: &mut Vec<String>) -> FieldErrors {
        self.validate_update(new, old)
    }

    /// Returns true if an update may be acknowledged before it is durable: a heartbeat that is repeated within seconds, and
    /// need not cost a disk write of its own.
    fn is_heartbeat(&self, _new: &Value, _old: &Value) -> bool {
        false
    }

    /// The metadata checks of upstream's validation of the kind, beside those that the server makes for
    /// every kind.
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Change
    }

    /// As [`Strategy::metadata_use`], for an update of the status.
    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Change
    }

    /// Does the kind's validation know upstream's own finalizers, and refuse others that have no domain?
    fn knows_finalizers(&self) -> bool {
        true
    }

    fn validate_status_update(&self, _new: &Value, _old: &Value) -> FieldErrors {
        Vec::new()
    }

    /// Validates `metadata.name`; answers upstream's complaints. Most kinds take a DNS-1123 subdomain.
    fn validate_name(&self, name: &str) -> Vec<String> {
        crate::meta_validation::dns1123_subdomain(name)
    }

    /// Before and while it is validated, an update of a subresource other than `status` that has a body of
    /// the kind itself (`approval`, `ephemeralcontainers`, `resize`): keeps fields that do not belong to
    /// the subresource.
    fn prepare_subresource_update(&self, _subresource: &str, _new: &mut Value, _old: &Value) {}

    /// Validates an update of such a subresource.
    fn validate_subresource_update(&self, _subresource: &str, _new: &Value, _old: &Value) -> FieldErrors {
        Vec::new()
    }

    /// The errors of any patch (but an apply) that leads to `new`, whatever it changes.
    fn validate_patch(&self, _new: &Value) -> FieldErrors {
        Vec::new()
    }

    /// The annotations that stand for fields of upstream's internal form. Tables and metadata alone are made of that
    /// form, and leave the annotations out.
    fn hidden_annotations(&self) -> &'static [&'static str] {
        &[]
    }

    /// The refusal of a field selector that names an unknown field of a kind that lists its fields.
    fn unknown_field(&self, field: &str) -> String {
        format!("field label not supported: {field}")
    }

    /// Warnings for the client about a valid new object (deprecated fields and the like).
    fn warnings(&self, _object: &Value) -> Vec<String> {
        Vec::new()
    }

    /// Warnings about a valid object that is new: [`Strategy::warnings`], and those that nobody repeats.
    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        self.warnings(object)
    }

    /// Warnings about a valid change. As upstream's workloads: warnings are not repeated while the
    /// specification stays.
    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        let generation = |object: &Value| object.pointer("/metadata/generation").cloned();
        if self.has_generation() && generation(new) == generation(old) {
            return Vec::new();
        }
        self.warnings(new)
    }

    /// Returns true if the server appends a random suffix to `metadata.generateName`; else that is the
    /// name.
    fn supports_generate_name(&self) -> bool {
        true
    }

    /// The fields a field selector may name, `metadata.name` and `metadata.namespace` excluded.
    fn selectable_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// [`Strategy::selectable_fields`], of a custom kind those that its definition names.
    fn fields(&self) -> Vec<&str> {
        self.selectable_fields().to_vec()
    }

    /// The value of one of [`Strategy::fields`]; empty when unset.
    fn selectable_value(&self, _object: &Value, _field: &str) -> String {
        String::new()
    }

    fn columns(&self) -> &[Column] {
        DEFAULT_COLUMNS
    }

    /// One cell per column.
    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        vec![crate::meta::name(object).into(), crate::meta::str(object, "creationTimestamp").into()]
    }

    /// The conditions of an object's row in a table; none for most kinds.
    fn row_conditions(&self, _object: &Value) -> Option<Value> {
        None
    }

    /// `requested` is the grace period of the delete options, if any.
    fn deletion(&self, _object: &Value, _requested: Option<i64>) -> Deletion {
        Deletion::Immediate
    }

    /// Turns an object whose deletion is requested for the first time into the object to store instead of
    /// removing it. `now` is the time as the API writes it. False leaves it to [`Strategy::deletion`].
    fn begin_deletion(&self, _object: &mut Value, _now: &str) -> bool {
        false
    }

    /// Returns true if dependents are orphaned when the client sets no policy: upstream's default is
    /// background.
    fn orphans_by_default(&self) -> bool {
        false
    }

    /// Returns false if the kind's `status` is not shown as a table.
    fn status_has_table(&self) -> bool {
        true
    }

    /// Returns false if objects of the kind own nothing: a policy for dependents has no effect.
    fn has_dependents(&self) -> bool {
        true
    }

    /// The warning for a delete that sets no policy for dependents.
    fn deletion_warning(&self) -> Option<&'static str> {
        None
    }

    /// The label that the object's namespace must have (with the value `true`) for this write, and the error if it has
    /// it not. `old` is none of a new object.
    fn needed_namespace_label(
        &self,
        _new: &Value,
        _old: Option<&Value>,
        _subresource: Option<&str>,
    ) -> Option<(&'static str, FieldError)> {
        None
    }

    /// Selectable fields whose value is the text at the same path of the stored object. They are selected by without
    /// parsing the object.
    fn text_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// Selectable fields by which the store finds watches, as upstream's trigger functions. Their texts are in the stored
    /// object at the same path.
    fn trigger_fields(&self) -> &'static [&'static str] {
        &[]
    }

    /// Fields that a write through this part of the object cannot set, so that nobody owns them by it, as upstream's reset
    /// fields. None for the usual ones.
    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        match subresource {
            Some("status") if self.status_use() == StatusUse::Alone => Some(&["spec", "metadata"]),
            Some("status") => Some(&["spec"]),
            _ => None,
        }
    }

    /// Finalizers in the specification hold an object as those in its metadata do.
    fn has_spec_finalizers(&self) -> bool {
        false
    }

    /// Changes an object that finalizers in its specification hold, to show that it goes.
    fn begin_finalization(&self, _object: &mut Value) {}

    /// Why an object of this name is never deleted by itself, if so.
    fn undeletable(&self, _name: &str) -> Option<&'static str> {
        None
    }

    /// The kind checks the preconditions of a delete itself, and words their failure in its own way.
    fn checks_preconditions_itself(&self) -> bool {
        false
    }

    /// A delete answers the object as it was, not a Status.
    fn returns_deleted(&self) -> bool {
        false
    }

    /// A PUT to a name that does not exist creates it.
    fn create_on_update(&self) -> bool {
        false
    }

    /// An update without resourceVersion is taken as "whatever is stored".
    fn unconditional_update(&self) -> bool {
        true
    }
}

/// Columns of a kind that has no printer of its own.
pub const DEFAULT_COLUMNS: &[Column] =
    &[Column::new("Name", "string", "name", 0), Column::new("Created At", "date", "", 0)];

/// Upstream's descriptions of the two columns that most custom kinds have.
pub const NAMED: &str = "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names";
pub const CREATED: &str = "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";

/// Fields of the metadata that a write of the status leaves as they were sent: a change of the second and third is refused.
const SENT_WITH_STATUS: [&str; 4] = ["managedFields", "uid", "deletionGracePeriodSeconds", "resourceVersion"];

/// Everything of `new` but `status` and some metadata becomes that of `old`.
pub fn keep_all_but_status(new: &mut Value, old: &Value) {
    let status = new.get("status").cloned();
    let sent = SENT_WITH_STATUS.map(|key| (key, new["metadata"].get(key).cloned()));
    *new = old.clone();
    if let Some(map) = new.as_object_mut() {
        match status {
            Some(status) => map.insert("status", status),
            None => map.remove("status"),
        };
    }
    let metadata = crate::meta::metadata_mut(new);
    for (key, value) in sent {
        match value {
            Some(value) => metadata.insert(key, value),
            None => metadata.remove(key),
        };
    }
}

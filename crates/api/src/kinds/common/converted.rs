//! A version that is stored as another one behaves as that one does: objects are converted, treated, and
//! converted back.

use crate::field::{FieldError, FieldErrors};
use crate::resource::{Column, MetadataUse, Storage, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

/// The strategy of a version whose objects are stored in the form `inner` knows.
pub(in crate::kinds) struct Converted<S> {
    pub inner: S,
    pub storage: Storage,
    /// The defaults of this version itself.
    pub default: fn(&mut Value),
    /// The annotations of this version that stand for fields of the stored one.
    pub hidden: &'static [&'static str],
}

impl<S> Converted<S> {
    fn stored(&self, object: &Value) -> Value {
        let mut stored = object.clone();
        (self.storage.to_storage)(&mut stored);
        stored
    }

    fn change(&self, object: &mut Value, with: impl FnOnce(&mut Value)) {
        (self.storage.to_storage)(object);
        with(object);
        (self.storage.from_storage)(object);
    }
}

impl<S: Strategy> Strategy for Converted<S> {
    fn default(&self, object: &mut Value) {
        (self.default)(object);
        // The stored version fills in the fields that this version leaves open.
        self.change(object, |stored| self.inner.default(stored));
    }

    fn hidden_annotations(&self) -> &'static [&'static str] {
        self.hidden
    }

    fn prepare_create(&self, object: &mut Value) {
        self.change(object, |stored| self.inner.prepare_create(stored));
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        let old = self.stored(old);
        self.change(new, |stored| self.inner.prepare_update(stored, &old));
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        let old = self.stored(old);
        self.change(new, |stored| self.inner.prepare_status_update(stored, &old));
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        self.inner.generation_fields()
    }

    fn metadata_use(&self) -> MetadataUse {
        self.inner.metadata_use()
    }

    fn status_metadata_use(&self) -> MetadataUse {
        self.inner.status_metadata_use()
    }

    fn knows_finalizers(&self) -> bool {
        self.inner.knows_finalizers()
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        self.inner.validate(&self.stored(object))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        self.inner.validate_update(&self.stored(new), &self.stored(old))
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        self.inner.validate_status_update(&self.stored(new), &self.stored(old))
    }

    fn needed_namespace_label(
        &self,
        new: &Value,
        old: Option<&Value>,
        subresource: Option<&str>,
    ) -> Option<(&'static str, FieldError)> {
        let old = old.map(|old| self.stored(old));
        self.inner.needed_namespace_label(&self.stored(new), old.as_ref(), subresource)
    }

    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        self.inner.reset_fields(subresource)
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        self.inner.validate_name(name)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        self.inner.warnings(&self.stored(object))
    }

    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        self.inner.warnings_on_update(&self.stored(new), &self.stored(old))
    }

    fn supports_generate_name(&self) -> bool {
        self.inner.supports_generate_name()
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        self.inner.selectable_fields()
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        self.inner.selectable_value(&self.stored(object), field)
    }

    fn returns_deleted(&self) -> bool {
        self.inner.returns_deleted()
    }

    fn columns(&self) -> &[Column] {
        self.inner.columns()
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        self.inner.cells(&self.stored(object), now)
    }

    fn create_on_update(&self) -> bool {
        self.inner.create_on_update()
    }

    fn unconditional_update(&self) -> bool {
        self.inner.unconditional_update()
    }
}

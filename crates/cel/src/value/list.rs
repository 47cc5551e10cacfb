//! Lists.

use std::sync::Arc;

use super::Value;
use crate::error::EvalError;
use crate::schema::{ListType, Schema};

/// A list: items of a JSON array with the schema of the array, or values that an expression made.
#[derive(Clone, Debug)]
pub struct List<'a> {
    items: Items<'a>,
    /// The schema of the array that the list comes from: sets and maps are compared and joined by their keys.
    schema: Option<&'a Schema>,
}

#[derive(Clone, Debug)]
enum Items<'a> {
    Json(&'a [ferrite_json::Value]),
    Shared(Arc<Vec<Value<'a>>>),
}

impl<'a> List<'a> {
    pub fn new(items: Vec<Value<'a>>) -> Self {
        Self { items: Items::Shared(Arc::new(items)), schema: None }
    }

    pub fn from_json(items: &'a [ferrite_json::Value], schema: Option<&'a Schema>) -> Self {
        Self { items: Items::Json(items), schema }
    }

    /// The list with the semantics of `other`.
    pub(crate) fn with_schema_of(mut self, other: &Self) -> Self {
        self.schema = other.schema;
        self
    }

    pub fn len(&self) -> usize {
        match &self.items {
            Items::Json(items) => items.len(),
            Items::Shared(items) => items.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        match &self.items {
            Items::Json(items) => items.get(index).map(|item| self.adapt(item)),
            Items::Shared(items) => items.get(index).cloned(),
        }
    }

    /// As [`List::get`], with the error of an item that does not fit its schema.
    pub(crate) fn try_get(&self, index: usize) -> Option<Result<Value<'a>, EvalError>> {
        match &self.items {
            Items::Json(items) => items
                .get(index)
                .map(|item| Value::from_json(item, self.schema.and_then(|schema| schema.items.as_deref()))),
            Items::Shared(items) => items.get(index).cloned().map(Ok),
        }
    }

    fn adapt(&self, item: &'a ferrite_json::Value) -> Value<'a> {
        Value::from_json_or_null(item, self.schema.and_then(|schema| schema.items.as_deref()))
    }

    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    pub(crate) fn is_typed(&self) -> bool {
        self.schema.is_some()
    }

    pub(crate) fn list_type(&self) -> ListType {
        self.schema.map_or(ListType::Atomic, |schema| schema.list_type)
    }

    /// The keys of a list of type map.
    pub(crate) fn map_keys(&self) -> &'a [String] {
        self.schema.map_or(&[], |schema| &schema.list_map_keys)
    }

    /// Appends the items of `other`, in place if nobody else holds this list.
    pub(crate) fn append(mut self, other: &Self) -> Self {
        let len = other.len();
        match &mut self.items {
            Items::Shared(items) => match Arc::get_mut(items) {
                Some(items) => items.extend(other.iter()),
                None => {
                    let mut copy = Vec::with_capacity((items.len() + len).max(4));
                    copy.extend(items.iter().cloned());
                    copy.extend(other.iter());
                    *items = Arc::new(copy);
                }
            },
            Items::Json(_) => {
                let mut items: Vec<Value<'a>> = self.iter().collect();
                items.extend(other.iter());
                self.items = Items::Shared(Arc::new(items));
            }
        }
        self
    }
}

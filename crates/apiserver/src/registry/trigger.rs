//! The field by which a commit finds a watch among the others of its resource, as upstream's trigger functions.

use super::Selectors;
use super::text::{place_of, text_in};
use ferrite_api::resource::Resource;
use ferrite_store::{Entry, IndexedField, Key, Trigger};

const NAME: &str = "metadata.name";

/// The narrowest trigger of a watch. None for one that selects by nothing that the store can find it by.
pub(super) fn of(resource: &Resource, selectors: &Selectors) -> Option<Trigger> {
    if let Some(name) = selectors.exact(NAME) {
        return Some(Trigger { field: NAME, value: name.into(), read: name_of });
    }
    let (field, value) = exact_field(resource, selectors)?;
    Some(Trigger { field, value: value.into(), read: text_of })
}

/// The first field that the store reads and that the selectors demand a value of.
pub(super) fn exact_field<'a>(
    resource: &Resource,
    selectors: &'a Selectors,
) -> Option<(&'static str, &'a str)> {
    let fields = resource.strategy.trigger_fields().iter();
    fields.filter_map(|field| Some((*field, selectors.exact(field)?))).next()
}

/// The fields by which the store finds objects of a kind, as it finds watches.
pub(super) fn indexed_fields(resource: &Resource) -> impl Iterator<Item = IndexedField> {
    let prefix = super::stored::prefix_in(resource, None).into_bytes();
    let fields = resource.strategy.trigger_fields().iter();
    fields.map(move |field| IndexedField { prefix: prefix.clone(), field, read: text_of })
}

/// The name that a key ends with.
fn name_of<'a>(_: &str, key: &'a Key, _: &'a Entry) -> Option<&'a [u8]> {
    key.as_bytes().rsplit(|byte| *byte == b'/').next()
}

/// The text of the one trigger field of a kind, which the entry remembers the place of.
fn text_of<'a>(field: &str, _: &'a Key, entry: &'a Entry) -> Option<&'a [u8]> {
    let value = entry.plain();
    let place = match entry.field_place() {
        Some(place) => place,
        None => {
            let place = place_of(value, field)?;
            entry.note_field(place);
            place
        }
    };
    text_in(value, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_room_for_the_place_of_one_field() {
        let kinds = ferrite_api::kinds::built_in();
        assert!(kinds.iter().all(|kind| kind.strategy.trigger_fields().len() < 2));
    }

    #[test]
    fn a_field_is_sought_once() {
        let key = Key::from("/registry/pods/default/a");
        for (value, text) in [(r#"{"spec":{"nodeName":"n1"}}"#, &b"n1"[..]), ("{}", b"")] {
            let entry = Entry {
                value: bytes::Bytes::from_static(value.as_bytes()),
                created: ferrite_store::Revision(1),
                modified: ferrite_store::Revision(1),
                version: 1,
                lease: ferrite_store::LeaseId::NONE,
                plain: ferrite_store::Plain::default(),
            };
            assert_eq!(entry.field_place(), None);
            assert_eq!(text_of("spec.nodeName", &key, &entry), Some(text));
            assert!(entry.field_place().is_some());
            assert_eq!(text_of("spec.nodeName", &key, &entry), Some(text));
        }
    }
}

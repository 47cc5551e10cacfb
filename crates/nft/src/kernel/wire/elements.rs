//! Messages that add or delete elements.

use super::super::ExpiringElement;
use super::{CREATE, DEL_ELEMENT, Messages, NESTED, NEW_ELEMENT, Open, REQUEST, SUBSYSTEM};
use crate::{Element, SetId, Value, Verdict};

/// An attribute with a list of elements must stay below 64 KiB: the kernel's length field has 16 bits. The list ends
/// after the element that exceeds this, and no element has a KiB.
const ELEMENTS_BYTES: usize = 63 * 1024;
/// The room that an element takes, more or less.
const ELEMENT_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementChange {
    Add,
    Delete,
}

impl Messages {
    /// Makes room for as many elements at once. Memory that is not written costs nothing.
    pub fn reserve_elements(&mut self, count: usize) {
        self.out.reserve(count.saturating_mul(ELEMENT_BYTES));
    }

    /// Writes elements; neighbours of one set share messages.
    pub fn elements<S: SetId>(&mut self, change: ElementChange, elements: &[Element<S>]) {
        let mut list = ElementList::new(self, change);
        elements.iter().for_each(|element| list.push(element));
        list.finish();
    }
}

/// Writes elements into as few messages as they fit: neighbours of one set share messages.
pub struct ElementList<'a, S> {
    messages: &'a mut Messages,
    change: ElementChange,
    /// The set of the message that is being written, and the list in it.
    open: Option<(S, Open)>,
}

impl<'a, S: SetId> ElementList<'a, S> {
    pub fn new(messages: &'a mut Messages, change: ElementChange) -> Self {
        Self { messages, change, open: None }
    }

    pub fn push(&mut self, element: &Element<S>) {
        let change = self.change;
        self.write(element.set, |m| {
            m.nest(1, |m| m.attribute(1, element.key.first()));
            if let Some(last) = element.key.last() {
                m.nest(10, |m| m.attribute(1, last));
            }
            if change == ElementChange::Delete {
                return;
            }
            match &element.value {
                Value::Member => {}
                Value::Bytes(bytes) => m.nest(2, |m| m.attribute(1, bytes)),
                Value::Goto(chain) => m.nest(2, |m| m.verdict(&Verdict::Goto(chain.clone()))),
            }
            if let Some(text) = &element.comment {
                m.comment(6, text);
            }
        });
    }

    /// An element of a set whose elements expire, with the time it still has.
    pub fn push_expiring(&mut self, element: &ExpiringElement<S>) {
        self.write(element.set, |m| {
            m.nest(1, |m| m.attribute(1, &element.key));
            m.nest(2, |m| m.attribute(1, &element.value));
            m.attribute(4, &element.milliseconds.to_be_bytes());
        });
    }

    fn write(&mut self, set: S, element: impl FnOnce(&mut Messages)) {
        if self.open.as_ref().is_none_or(|(open, _)| *open != set) {
            self.end_message();
            let (kind, flags) = match self.change {
                ElementChange::Add => (NEW_ELEMENT, CREATE),
                ElementChange::Delete => (DEL_ELEMENT, 0),
            };
            let family = self.messages.family;
            self.messages.start(SUBSYSTEM << 8 | u16::from(kind), REQUEST | flags, family, 0);
            self.messages.table_name();
            self.messages.text(2, set.shape().name);
            self.open = Some((set, self.messages.open(3 | NESTED)));
        }
        self.messages.nest(1, element);
        if self
            .open
            .as_ref()
            .is_some_and(|(_, list)| self.messages.out.len() - list.position() > ELEMENTS_BYTES)
        {
            self.end_message();
        }
    }

    fn end_message(&mut self) {
        if let Some((_, list)) = self.open.take() {
            self.messages.close(&list);
            self.messages.finish();
        }
    }

    pub fn finish(mut self) {
        self.end_message();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bytes, Field, Key, SetShape, TableFamily};
    use ferrite_netlink::{Attributes, messages};

    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Set {
        A,
        B,
    }

    impl SetId for Set {
        const ALL: &'static [Self] = &[Self::A, Self::B];

        fn shape(self) -> SetShape {
            SetShape::map(if self == Self::A { "a" } else { "b" }, &[Field::Number], &[Field::Number])
        }
    }

    #[test]
    fn messages_are_few_and_no_list_is_too_long() {
        let element = |set, number: u32| Element {
            set,
            key: Key::new(&[&number.to_ne_bytes()]),
            value: Value::Bytes(Bytes::from(number.to_ne_bytes())),
            comment: Some("a comment of the longest kind that the kernel takes ".repeat(3)),
        };
        let elements: Vec<_> =
            (0..3000).map(|n| element(Set::A, n)).chain((0..10).map(|n| element(Set::B, n))).collect();
        let mut all = Messages::new(TableFamily::Ipv4, "t", 1);
        all.elements(ElementChange::Add, &elements);
        let mut seen = Vec::new();
        let mut lists = 0;
        for message in messages(all.out.bytes()) {
            let body = message.attributes(4);
            let list = body.get(3).unwrap();
            assert!(list.len() + 4 < 1 << 16, "{}", list.len());
            lists += 1;
            for (_, element) in body.nested(3).unwrap().iter() {
                let key = Attributes::new(element).nested(1).and_then(|key| key.get(1)).unwrap();
                seen.push((body.get(2).unwrap().to_vec(), key.to_vec()));
            }
        }
        let want: Vec<_> = elements
            .iter()
            .map(|e| ([e.set.shape().name.as_bytes(), &[0]].concat(), e.key.first().to_vec()))
            .collect();
        assert_eq!(seen, want);
        let bytes = all.out.len();
        assert!(lists <= bytes / ELEMENTS_BYTES + 2, "{lists} messages for {bytes} bytes");
    }
}

//! Finds values in the text of stored objects, which is not parsed: it is as this server writes it, or is not understood.

use ferrite_json::scan;
use ferrite_store::FieldPlace;

/// The place of the value at a path of a stored object, which is found without parsing the rest. None if the object is not
/// as this server writes it.
pub(super) fn place_of(value: &[u8], path: &str) -> Option<FieldPlace> {
    let mut rest = value;
    for part in path.split('.') {
        match member(rest, part.as_bytes())? {
            Some(found) => rest = found,
            None => return Some(FieldPlace::Absent),
        }
    }
    Some(FieldPlace::At(value.len() - rest.len()))
}

/// The text at a place; empty where there is none. None if it is no text, or has escapes.
pub(super) fn text_in(value: &[u8], place: FieldPlace) -> Option<&[u8]> {
    let FieldPlace::At(at) = place else { return Some(b"") };
    let rest = value.get(at..)?;
    match rest.first()? {
        b'"' => string(rest).map(|(text, _)| text).filter(|text| !text.contains(&b'\\')),
        b'n' => Some(b""),
        _ => None,
    }
}

/// The text between the quotes at the beginning, and the rest.
fn string(value: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = scan::string_end(value, 0)?;
    Some((&value[1..end - 1], &value[end..]))
}

/// The value of a member of the object at the beginning, with all that follows. None within if there is no such member,
/// or nothing but null.
pub(super) fn member<'a>(object: &'a [u8], name: &[u8]) -> Option<Option<&'a [u8]>> {
    if object.first() == Some(&b'n') {
        return Some(None);
    }
    let mut rest = object.strip_prefix(b"{")?;
    if rest.first() == Some(&b'}') {
        return Some(None);
    }
    loop {
        let (key, after) = string(rest)?;
        let value = after.strip_prefix(b":")?;
        if key == name {
            return Some(Some(value));
        }
        let after = &value[scan::value_end(value, 0)?..];
        match after.first()? {
            b',' => rest = &after[1..],
            b'}' => return Some(None),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use proptest::prelude::*;

    fn text_at<'a>(value: &'a [u8], path: &str) -> Option<&'a [u8]> {
        text_in(value, place_of(value, path)?)
    }

    #[test]
    fn finds_a_text_without_parsing_the_rest() {
        let rows: [(&[u8], Option<&[u8]>); 9] = [
            (br#"{"kind":"Pod","spec":{"nodeName":"n1"}}"#, Some(b"n1")),
            (
                br#"{"metadata":{"nodeName":"no","a":["]}\"",{}]},"spec":{"x":1,"nodeName":"n2","y":2}}"#,
                Some(b"n2"),
            ),
            (br#"{"spec":{"a":{"nodeName":"no"}}}"#, Some(b"")),
            (br#"{"spec":null}"#, Some(b"")),
            (br#"{"spec":{"nodeName":null}}"#, Some(b"")),
            (br#"{}"#, Some(b"")),
            (br#"{"spec":{"nodeName":"a\u0062"}}"#, None),
            (br#"{"spec":{"nodeName":7}}"#, None),
            (b"k8s\0pod", None),
        ];
        for (value, expected) in rows {
            assert_eq!(text_at(value, "spec.nodeName"), expected, "{}", String::from_utf8_lossy(value));
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_parser(node in "[a-z\"\\\\]{0,4}", label in "\\PC{0,6}", number in any::<i32>(), has in any::<bool>()) {
            let mut pod = json!({
                "kind": "Pod", "metadata": {"name": "x", "labels": {"l": label, "m": [label, {"n": null}]}},
                "spec": {"a": number, "b": [number, true], "c": {"nodeName": label}}, "status": {"nodeName": label},
            });
            if has {
                pod["spec"]["nodeName"] = node.as_str().into();
            }
            let text = pod.to_string();
            let found = text_at(text.as_bytes(), "spec.nodeName");
            let expected = if has { node.as_str() } else { "" };
            match expected.contains(['"', '\\']) {
                true => prop_assert_eq!(found, None),
                false => prop_assert_eq!(found, Some(expected.as_bytes())),
            }
        }

        #[test]
        fn never_panics(value in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = text_at(&value, "spec.nodeName");
            let mut object = b"{\"spec\":{".to_vec();
            object.extend(value);
            let _ = text_at(&object, "spec.nodeName");
        }
    }
}

use super::decode;

#[test]
fn queries_are_decoded() {
    for (raw, expected) in [("a%20b", "a b"), ("a+b", "a b"), ("%zz", "%zz"), ("%", "%"), ("%C3%BC", "ü")] {
        assert_eq!(decode(raw), expected);
    }
}

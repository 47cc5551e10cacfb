//! The meaning of a token's claims.

use ferrite_json::Value;

/// The token of an `Authorization` header. None when the header carries no bearer token: another scheme, or
/// nothing between the first two spaces. Such a request counts as anonymous, as upstream.
pub(crate) fn bearer(header: &http::HeaderValue) -> Option<&str> {
    let mut parts = header.to_str().ok()?.trim().splitn(3, ' ');
    let scheme = parts.next()?;
    let token = parts.next().filter(|token| !token.is_empty())?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

/// Checks a token's validity period.
pub(crate) fn in_time(claims: &Value, now: i64) -> Result<(), &'static str> {
    let time = |key: &str| claims.get(key).and_then(Value::as_i64);
    if time("exp").is_none_or(|t| now >= t) {
        return Err("service account token has expired");
    }
    if time("nbf").is_some_and(|t| t > now + 60) {
        return Err("service account token is not valid yet");
    }
    Ok(())
}

/// The entries of `wanted` that are among the token's audiences.
pub(crate) fn audiences<'a>(claims: &Value, wanted: &[&'a str]) -> Vec<&'a str> {
    let given: Vec<&str> = match &claims["aud"] {
        Value::String(one) => vec![one],
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    wanted.iter().copied().filter(|w| given.contains(w)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_token_is_a_token() {
        let rows = [
            ("Bearer x", Some("x")),
            ("bearer x", Some("x")),
            (" Bearer x ", Some("x")),
            ("Bearer x y", Some("x")),
            ("Bearer  x", None),
            ("Bearer", None),
            ("Bearer ", None),
            ("Basic eDp5", None),
            ("", None),
        ];
        for (header, expected) in rows {
            let header = http::HeaderValue::from_static(header);
            assert_eq!(bearer(&header), expected, "{header:?}");
        }
    }
}

//! What the claims of a token mean.

use ferrite_json::Value;

/// Whether a token's time is now, or why it is not.
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

/// Whether a token is meant for one of `wanted`.
pub(crate) fn audiences<'a>(claims: &Value, wanted: &[&'a str]) -> Vec<&'a str> {
    let given: Vec<&str> = match &claims["aud"] {
        Value::String(one) => vec![one],
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    wanted.iter().copied().filter(|w| given.contains(w)).collect()
}

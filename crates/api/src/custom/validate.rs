//! Validation of values by a schema, in the words of upstream's OpenAPI validator.
//!
//! An update ratchets: a part that did not change is not complained about.

use super::format;
use super::schema::{Additional, Checks, ListType, Schema, Type};
use crate::field::{FieldError, FieldErrors, Path, Problem};
use ferrite_json::{Text, Value};
use std::collections::{HashMap, HashSet};

/// The errors of a value at `path`. `old` is the value before an update.
pub fn value(value: &Value, old: Option<&Value>, schema: &Schema, path: &Path) -> FieldErrors {
    let walk = Walk { base: path };
    walk.check(value, old, schema, "").errors
}

/// The errors of a schema, and a measure of how far a value matched it: of alternatives that all fail, the
/// closest is reported.
#[derive(Default)]
struct Found {
    errors: FieldErrors,
    matches: usize,
}

impl Found {
    fn merge(&mut self, other: Self) {
        self.errors.extend(other.errors);
        self.matches += other.matches;
    }
}

struct Walk<'a> {
    base: &'a Path,
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
        // A whole number that no integer holds is read as one with a fraction.
        Value::Number(number) if number.as_i64().is_none() => "number",
        Value::Number(_) => "integer",
    }
}

/// The format that a value has by itself. Texts and lists have none, and go by their types alone.
fn format_of(value: &Value) -> Option<&'static str> {
    match type_of(value) {
        "null" | "string" | "array" => None,
        "integer" => Some("int64"),
        "number" => Some("float64"),
        _ => Some(""),
    }
}

fn whole(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number.fract() == 0.0 && number.abs() < 9.007_199_254_740_992e15)
}

impl Walk<'_> {
    fn path(&self, at: &str) -> Path {
        match at.trim_start_matches('.') {
            "" => self.base.clone(),
            at => self.base.child(at),
        }
    }

    fn invalid(&self, at: &str, value: impl Into<Value>, why: String) -> FieldError {
        FieldError::invalid(&self.path(at), value, why)
    }

    fn wrong_type(&self, at: &str, wanted: &str, found: &str) -> FieldError {
        FieldError {
            path: self.path(at),
            problem: Problem::TypeInvalid(found.into()),
            detail: format!("{at} in body must be of type {wanted}: {found:?}"),
            rendered: None,
        }
    }

    fn check(&self, value: &Value, old: Option<&Value>, schema: &Schema, at: &str) -> Found {
        let mut found = Found::default();
        if old == Some(value) {
            return found;
        }
        let checks = schema.checks.as_deref();
        let format = checks.map_or("", |checks| &*checks.format);
        self.check_type(value, schema, format, at, &mut found);
        if value.is_null() {
            if let Some(checks) = checks {
                self.check_enum(value, checks, at, &mut found);
            }
            return found;
        }
        if let Some(checks) = checks {
            self.check_junctors(value, old, checks, at, &mut found);
            match value {
                Value::String(text) => {
                    self.check_text(text, checks, at, &mut found);
                    self.check_format(text, schema, checks, at, &mut found);
                }
                Value::Number(_) => {
                    self.check_range(value, schema, format, at, &mut found);
                    self.check_number(value, checks, at, &mut found);
                }
                _ => {}
            }
        } else {
            self.check_range(value, schema, format, at, &mut found);
        }
        if let Value::Array(list) = value {
            self.check_items(list, old, schema, at, &mut found);
        }
        if let Some(checks) = checks {
            self.check_enum(value, checks, at, &mut found);
        }
        if value.is_object() {
            self.check_members(value, old, schema, at, &mut found);
        }
        found.matches += 1;
        found
    }

    fn check_type(&self, value: &Value, schema: &Schema, format: &str, at: &str, found: &mut Found) {
        let kind = type_of(value);
        let wanted = match (schema.int_or_string, schema.type_) {
            (true, _) => "integer,string",
            (false, Some(type_)) => type_.as_str(),
            (false, None) => return,
        };
        let fits = match value {
            Value::Null => schema.nullable,
            // As upstream: a text or a list is left to its format, unless a number is wanted.
            Value::String(_) | Value::Array(_)
                if !format.is_empty() && !matches!(schema.type_, Some(Type::Integer | Type::Number)) =>
            {
                true
            }
            _ if schema.int_or_string => {
                kind == "string" || kind == "integer" || kind == "number" && whole(value)
            }
            _ => match (schema.type_, kind) {
                (Some(Type::Integer), "number") => whole(value),
                (Some(Type::Number), "integer") => true,
                (Some(type_), kind) => type_.as_str() == kind,
                (None, _) => true,
            },
        };
        if fits {
            found.matches += 1;
        } else if let Some(is) = format_of(value).filter(|_| !format.is_empty()) {
            // As upstream: a type with a format is named by it.
            found.errors.push(self.wrong_type(at, format, is));
        } else {
            found.errors.push(self.wrong_type(at, wanted, kind));
        }
    }

    fn check_junctors(
        &self,
        value: &Value,
        old: Option<&Value>,
        checks: &Checks,
        at: &str,
        found: &mut Found,
    ) {
        // Go quotes the path.
        let plain = |why: String| FieldError::invalid(self.base, "", why);
        if !checks.any_of.is_empty() {
            let mut best: Option<Found> = None;
            let mut valid = None;
            for schema in &checks.any_of {
                let one = self.check(value, old, schema, at);
                if one.errors.is_empty() {
                    valid = Some(one);
                    break;
                }
                if best.as_ref().is_none_or(|best| one.matches > best.matches) {
                    best = Some(one);
                }
            }
            match (valid, best) {
                (Some(valid), _) => found.merge(valid),
                (None, best) => {
                    found.errors.push(plain(format!("{at:?} must validate at least one schema (anyOf)")));
                    found.merge(best.unwrap_or_default());
                }
            }
        }
        if !checks.one_of.is_empty() {
            let (mut valid, mut first, mut best) = (0, None, None::<Found>);
            for schema in &checks.one_of {
                let one = self.check(value, old, schema, at);
                if one.errors.is_empty() {
                    valid += 1;
                    best = None;
                    first = first.or(Some(one));
                } else if valid == 0 && best.as_ref().is_none_or(|best| one.matches > best.matches) {
                    best = Some(one);
                }
            }
            if valid == 1 {
                found.merge(first.unwrap_or_default());
            } else {
                let what = match valid {
                    0 => "Found none valid".to_owned(),
                    valid => format!("Found {valid} valid alternatives"),
                };
                found
                    .errors
                    .push(plain(format!("{at:?} must validate one and only one schema (oneOf). {what}")));
                found.merge(best.unwrap_or_default());
            }
        }
        if !checks.all_of.is_empty() {
            let mut valid = 0;
            for schema in &checks.all_of {
                let one = self.check(value, old, schema, at);
                valid += usize::from(one.errors.is_empty());
                found.merge(one);
            }
            if valid != checks.all_of.len() {
                let none = if valid == 0 { ". None validated" } else { "" };
                found.errors.push(plain(format!("{at:?} must validate all the schemas (allOf){none}")));
            }
        }
        if let Some(schema) = &checks.not
            && self.check(value, old, schema, at).errors.is_empty()
        {
            found.errors.push(plain(format!("{at:?} must not validate the schema (not)")));
        }
        found.matches += 1;
    }

    fn check_text(&self, text: &Text, checks: &Checks, at: &str, found: &mut Found) {
        let length = || text.chars().count() as i64;
        if let Some(most) = checks.max_length
            && length() > most
        {
            let most = usize::try_from(most).unwrap_or_default();
            return found.errors.push(FieldError::too_long(&self.path(at), most));
        }
        if let Some(least) = checks.min_length
            && length() < least
        {
            let why = format!("{at} in body should be at least {least} chars long");
            return found.errors.push(self.invalid(at, text.as_str(), why));
        }
        if let Some(pattern) = &checks.pattern
            && !pattern.is_match(text)
        {
            let why = format!("{at} in body should match '{}'", pattern.source());
            return found.errors.push(self.invalid(at, text.as_str(), why));
        }
        found.matches += 1;
    }

    fn check_format(&self, text: &Text, schema: &Schema, checks: &Checks, at: &str, found: &mut Found) {
        if schema.type_.is_some_and(|type_| type_ != Type::String) || schema.int_or_string {
            return;
        }
        if format::is_valid(&checks.format, text) == Some(false) {
            found.errors.push(FieldError {
                path: self.path(at),
                problem: Problem::TypeInvalid(text.as_str().into()),
                detail: format!("{at} in body must be of type {}: {:?}", checks.format, text.as_str()),
                rendered: None,
            });
        }
    }

    /// A number is one that its type and format can hold.
    fn check_range(&self, value: &Value, schema: &Schema, format: &str, at: &str, found: &mut Found) {
        let Some(number) = value.as_f64() else { return };
        let (fits, type_) = match (schema.type_, value.as_i64(), format) {
            // As Go reads a number of 32 bits: what rounds to more than the greatest one is out of range.
            (Some(Type::Number), _, "float") => ((number as f32).is_finite(), "number"),
            (Some(Type::Integer), Some(whole), "int32") => (i32::try_from(whole).is_ok(), "integer"),
            (Some(Type::Integer), None, "int32") => {
                (whole(value) && number.abs() <= f64::from(i32::MAX), "integer")
            }
            (Some(Type::Integer), None, _) => (whole(value), "integer"),
            _ => return,
        };
        if !fits {
            let form = match format {
                "" => "(default format)".into(),
                format => format!("with format {format}"),
            };
            let why = format!("Checked value must be of type {type_} {form} in {at}");
            found.errors.push(FieldError::invalid(self.base, "", why));
        }
    }

    fn check_number(&self, value: &Value, checks: &Checks, at: &str, found: &mut Found) {
        let Some(number) = value.as_f64() else { return };
        let integer = value.as_i64();
        // Bounds of whole numbers are compared and reported as whole numbers.
        let told = |bound: f64| match integer {
            Some(_) => go_number((bound as i64) as f64),
            None => go_number(bound),
        };
        let mut complain = |why: String| found.errors.push(self.invalid(at, value.clone(), why));
        if let Some(factor) = checks.multiple_of {
            if factor <= 0.0 {
                let why = format!("factor MultipleOf declared for {at} must be positive: {}", told(factor));
                complain(why);
            } else {
                let is_multiple = match integer {
                    Some(number) if factor.fract() == 0.0 => number % (factor as i64) == 0,
                    _ => {
                        let times = if factor < 1.0 { 1.0 / factor * number } else { number / factor };
                        whole(&times.into())
                    }
                };
                if !is_multiple {
                    complain(format!("{at} in body should be a multiple of {}", go_number(factor)));
                }
            }
        }
        if let Some(least) = checks.minimum {
            let least = if integer.is_some() { least.trunc() } else { least };
            if checks.exclusive_minimum && number <= least {
                complain(format!("{at} in body should be greater than {}", told(least)));
            } else if number < least {
                complain(format!("{at} in body should be greater than or equal to {}", told(least)));
            }
        }
        if let Some(most) = checks.maximum {
            let most = if integer.is_some() { most.trunc() } else { most };
            if checks.exclusive_maximum && number >= most {
                complain(format!("{at} in body should be less than {}", told(most)));
            } else if number > most {
                complain(format!("{at} in body should be less than or equal to {}", told(most)));
            }
        }
        found.matches += 1;
    }

    fn check_enum(&self, value: &Value, checks: &Checks, at: &str, found: &mut Found) {
        if checks.enumeration.is_empty() {
            return;
        }
        if checks.enumeration.contains(value) {
            found.matches += 1;
            return;
        }
        let supported = checks
            .enumeration
            .iter()
            .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
            .collect();
        found.errors.push(FieldError {
            path: self.path(at),
            problem: Problem::NotSupported { value: value.clone(), supported },
            detail: String::new(),
            rendered: None,
        });
    }

    fn check_items(&self, list: &[Value], old: Option<&Value>, schema: &Schema, at: &str, found: &mut Found) {
        if let Some(items) = &schema.items {
            let before = correlated(schema, old);
            for (index, item) in list.iter().enumerate() {
                let old = before.as_ref().and_then(|before| before.get(&identity(schema, item)).copied());
                found.merge(self.check(item, old, items, &format!("{at}[{index}]")));
            }
        }
        let Some(checks) = schema.checks.as_deref() else { return };
        let count = list.len() as i64;
        if let Some(least) = checks.min_items
            && count < least
        {
            let why = format!("{at} in body should have at least {least} items");
            found.errors.push(self.invalid(at, count, why));
        }
        if let Some(most) = checks.max_items
            && count > most
        {
            let most = usize::try_from(most).unwrap_or_default();
            found.errors.push(FieldError::too_many(&self.path(at), list.len(), most));
        }
        if checks.unique_items {
            let mut seen = HashSet::new();
            if !list.iter().all(|item| seen.insert(item.to_string())) {
                let why = format!("{at} in body shouldn't contain duplicates");
                found.errors.push(self.invalid(at, "", why));
            }
        }
        found.matches += 1;
    }

    fn check_members(
        &self,
        object: &Value,
        old: Option<&Value>,
        schema: &Schema,
        at: &str,
        found: &mut Found,
    ) {
        let Some(map) = object.as_object() else { return };
        let checks = schema.checks.as_deref();
        let count = map.len() as i64;
        if let Some(least) = checks.and_then(|checks| checks.min_properties)
            && count < least
        {
            let why = format!("{at} in body should have at least {least} properties");
            found.errors.push(self.invalid(at, count, why));
        }
        if let Some(most) = checks.and_then(|checks| checks.max_properties)
            && count > most
        {
            let most = usize::try_from(most).unwrap_or_default();
            found.errors.push(FieldError::too_many(&self.path(at), map.len(), most));
        }
        let old = old.and_then(Value::as_object);
        for (name, value) in map {
            let below = match (schema.property(name), &schema.additional) {
                (Some(below), _) => below,
                (None, Additional::Schema(below)) => below,
                (None, Additional::Allowed(false)) => {
                    let why = format!("{at}.{name} in body is a forbidden property");
                    found.errors.push(self.invalid(at, name.as_str(), why));
                    continue;
                }
                (None, _) => continue,
            };
            // As upstream: at the root, only the names of a map begin with a dot.
            let place = match (at.is_empty(), schema.property(name)) {
                (true, Some(_)) => name.to_string(),
                _ => format!("{at}.{name}"),
            };
            found.merge(self.check(value, old.and_then(|old| old.get(name)), below, &place));
        }
        for name in checks.map(|checks| &checks.required).into_iter().flatten() {
            if !map.contains_key(name) {
                found.errors.push(FieldError::required(&self.path(&format!("{at}.{name}")), ""));
            }
        }
        found.matches += 1;
    }
}

/// The keys of an item of a list of type map.
fn identity<'a>(schema: &Schema, item: &'a Value) -> Vec<Option<std::borrow::Cow<'a, str>>> {
    schema
        .keys
        .iter()
        .map(|key| {
            item.get(key.as_str()).map(|value| match value.as_str() {
                Some(text) => std::borrow::Cow::Borrowed(text),
                None => std::borrow::Cow::Owned(value.to_string()),
            })
        })
        .collect()
}

type Correlated<'a> = HashMap<Vec<Option<std::borrow::Cow<'a, str>>>, &'a Value>;

/// The items of an old list by their identity; none if they have none.
fn correlated<'a>(schema: &Schema, old: Option<&'a Value>) -> Option<Correlated<'a>> {
    let old = old?.as_array()?;
    (schema.list == ListType::Map).then(|| old.iter().map(|item| (identity(schema, item), item)).collect())
}

/// A number as Go's `%v` prints a float: whole ones without a point.
fn go_number(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e21 { format!("{number:.0}") } else { number.to_string() }
}

/// Items of sets and keys of maps are unique.
pub fn list_types(value: &Value, schema: &Schema, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    unique(value, schema, path, &mut errors);
    errors
}

fn unique(value: &Value, schema: &Schema, path: &Path, errors: &mut FieldErrors) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                match (schema.property(name), schema.additional_schema()) {
                    (Some(below), _) => unique(value, below, &path.child(name), errors),
                    (None, Some(below)) => unique(value, below, &path.key(name), errors),
                    (None, None) => {}
                }
            }
        }
        Value::Array(list) => {
            match schema.list {
                ListType::Atomic => {}
                ListType::Set => {
                    for index in repeated(list.iter().map(Value::to_string)) {
                        let item = list.get(index).cloned().unwrap_or_default();
                        errors.push(FieldError::duplicate(&path.index(index), item));
                    }
                }
                ListType::Map => unique_keys(list, schema, path, errors),
            }
            if let Some(items) = &schema.items {
                for (index, item) in list.iter().enumerate() {
                    unique(item, items, &path.index(index), errors);
                }
            }
        }
        _ => {}
    }
}

fn unique_keys(list: &[Value], schema: &Schema, path: &Path, errors: &mut FieldErrors) {
    let stranger = list.iter().position(|item| !item.is_null() && !item.is_object());
    if let Some(index) = stranger {
        let item = list.get(index).cloned().unwrap_or_default();
        errors.push(FieldError::invalid(
            &path.index(index),
            item,
            "must be an object for an array of list-type map",
        ));
        return;
    }
    let keys_of = |item: &Value| -> Value {
        let present =
            schema.keys.iter().filter_map(|key| Some((key.clone(), item.get(key.as_str())?.clone())));
        present.collect()
    };
    for index in repeated(list.iter().map(|item| keys_of(item).to_string())) {
        let keys = list.get(index).map(keys_of).unwrap_or_default();
        let keys = if keys.is_null() { Value::Object(ferrite_json::Map::new()) } else { keys };
        errors.push(FieldError::duplicate(&path.index(index), keys));
    }
}

/// The places where something comes the second time.
fn repeated(values: impl Iterator<Item = String>) -> Vec<usize> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut again = Vec::new();
    for (index, value) in values.enumerate() {
        let times = seen.entry(value).or_default();
        *times += 1;
        if *times == 2 {
            again.push(index);
        }
    }
    again
}

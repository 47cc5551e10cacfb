//! Quantities: amounts of resources such as `100m` and `1.5Gi`.

use std::any::Any;

use ferrite_quantity::{Format, Quantity as Amount};

use super::{Entry, NO_MATCH};
use crate::error::EvalError;
use crate::value::{Opaque, Value};

/// An amount of something. Equality and order are by amount, however it was written.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    amount: Amount,
    /// The power of ten that upstream's small form counts in; `None` where it uses its form for any size.
    scale: Option<i32>,
}

pub(super) const TABLE: &[Entry] = &[
    ("quantity", |_, args| match args {
        [Value::String(text)] => Quantity::parse(text).map(Value::opaque),
        _ => Err(NO_MATCH),
    }),
    ("isQuantity", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Quantity::parse(text).is_ok())),
        _ => Err(NO_MATCH),
    }),
    ("sign", |_, args| with(args, |quantity| Ok(Value::Int(quantity.amount.signum())))),
    ("isInteger", |_, args| with(args, |quantity| Ok(Value::Bool(quantity.integer().is_some())))),
    ("asInteger", |_, args| {
        let error = EvalError::text("cannot convert value to integer");
        with(args, |quantity| quantity.integer().map(Value::Int).ok_or(error))
    }),
    ("asApproximateFloat", |_, args| with(args, |quantity| Ok(Value::Double(quantity.amount.approximate())))),
    ("add", |_, args| combine(args, Amount::add_unbounded)),
    ("sub", |_, args| combine(args, Amount::sub_unbounded)),
];

fn with<'a>(
    args: &[Value<'a>],
    by: impl FnOnce(&Quantity) -> Result<Value<'a>, EvalError>,
) -> Result<Value<'a>, EvalError> {
    let [value] = args else { return Err(NO_MATCH) };
    by(value.downcast::<Quantity>().ok_or(NO_MATCH)?)
}

/// Adds or subtracts a quantity or a whole number.
fn combine<'a>(args: &[Value<'a>], by: fn(Amount, Amount) -> Amount) -> Result<Value<'a>, EvalError> {
    let [first, second] = args else { return Err(NO_MATCH) };
    let first = first.downcast::<Quantity>().ok_or(NO_MATCH)?;
    let second = match second {
        Value::Int(units) => {
            Quantity { amount: Amount::from_value(*units, Format::DecimalSi), scale: Some(0) }
        }
        other => *other.downcast::<Quantity>().ok_or(NO_MATCH)?,
    };
    let scale = match (first.amount.is_zero(), second.amount.is_zero()) {
        (_, true) => first.scale,
        (true, false) => second.scale,
        (false, false) => first.scale.zip(second.scale).map(|(first, second)| first.min(second)),
    };
    Ok(Value::opaque(Quantity { amount: by(first.amount, second.amount), scale }))
}

impl Quantity {
    /// Reads a quantity, by the API's rules.
    pub fn parse(text: &str) -> Result<Self, EvalError> {
        match Amount::parse_scaled(text) {
            Ok((amount, scale)) => Ok(Self { amount, scale }),
            Err(error) => Err(EvalError::Message(error.to_string().into())),
        }
    }

    /// The amount in whole units. As upstream: only of one that was written without a fraction, and small.
    fn integer(&self) -> Option<i64> {
        self.scale.filter(|scale| *scale >= 0)?;
        self.amount.truncated()
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.amount == other.amount
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.amount.cmp(&other.amount)
    }
}

impl Opaque for Quantity {
    fn type_name(&self) -> &'static str {
        "kubernetes.Quantity"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.amount.to_string()
    }
}

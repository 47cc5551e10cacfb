//! Selectors of devices: expressions over the variable `device`, as ResourceClaims and DeviceClasses have them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::error::{CompileError, EvalError};
use crate::eval::Limits;
use crate::functions::{Quantity, Semver};
use crate::program::{Activation, DeclaredSizes, Environment, Program};
use crate::schema::DeclType;
use crate::types::Type;
use crate::value::{Map, Value};
use crate::{Range, limits};

/// The level of the API whose libraries expressions can use.
const MINOR: u32 = 36;
/// The longest values of a device's fields.
const DOMAIN: i64 = 63;
const ATTRIBUTE: i64 = 64;
/// The most attributes and capacities of a device.
const ENTRIES: i64 = 32;

struct Compiler {
    environment: Environment,
    sizes: DeclaredSizes,
}

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    let nested = |value| DeclType::map_of(DeclType::map_of(value, ENTRIES), ENTRIES);
    let fields = [
        ("driver", DeclType::string_of(DOMAIN)),
        // Attributes are of any type; the longest are strings.
        ("attributes", nested(DeclType::string_of(ATTRIBUTE))),
        ("capacity", nested(DeclType::simple(Type::Any))),
        ("allowMultipleAllocations", DeclType::simple(Type::Bool)),
    ];
    let device = DeclType::object("kubernetes.DRADevice", fields.map(|(name, of)| (name.to_owned(), of)));
    Compiler {
        environment: Environment::kubernetes(MINOR).with_device(),
        sizes: DeclaredSizes::of_variables([("device".to_owned(), device)]),
    }
});

/// A selector that cannot be used. The messages are upstream's.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceSelectorError {
    #[error("program instantiation failed: {0}")]
    Program(EvalError),
    #[error("compilation failed: {0}")]
    Compile(CompileError),
    #[error("must evaluate to bool or the unknown type, not {0}")]
    Result(String),
}

/// A compiled selector.
#[derive(Debug, Clone)]
pub struct DeviceSelector(Program);

impl DeviceSelector {
    pub fn compile(expression: &str) -> Result<Self, DeviceSelectorError> {
        let compiler = &*COMPILER;
        let program = match compiler.environment.compile_sized(expression, &compiler.sizes) {
            Ok(program) => program,
            Err(CompileError::Program(error)) => return Err(DeviceSelectorError::Program(error)),
            Err(error) => return Err(DeviceSelectorError::Compile(error)),
        };
        match program.result_type() {
            Type::Bool | Type::Any => Ok(Self(program)),
            of => Err(DeviceSelectorError::Result(of.declared().to_string())),
        }
    }

    /// The least and the most that an evaluation costs.
    pub fn estimated_cost(&self) -> Option<Range> {
        self.0.estimated_cost()
    }

    /// Evaluates the selector, within the cost that one evaluation may have.
    pub fn matches(&self, device: &Device) -> Result<bool, EvalError> {
        let activation = Activation::new().with("device", device.0.clone());
        let result = self.0.evaluate(&activation, Limits::cost(limits::DEVICE_SELECTOR)).result?;
        result.as_bool().ok_or_else(|| {
            let of = result.type_name();
            EvalError::new(format!(
                "CEL result of type {of} could not be converted to bool: type conversion error from '{of}' to 'bool'"
            ))
        })
    }
}

/// An attribute of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute<'a> {
    Bool(bool),
    Int(i64),
    String(&'a str),
    /// A semantic version.
    Version(&'a str),
}

/// The value of the variable `device`.
#[derive(Debug, Clone)]
pub struct Device(Value<'static>);

impl Device {
    /// Attributes and capacities have names with or without a domain; without one they belong to the driver's domain.
    /// Fails if a version or a quantity cannot be read.
    pub fn new<'a>(
        driver: &str,
        allow_multiple_allocations: bool,
        attributes: impl IntoIterator<Item = (&'a str, Attribute<'a>)>,
        capacity: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, EvalError> {
        let mut domains = Domains::default();
        for (name, attribute) in attributes {
            let value = match attribute {
                Attribute::Bool(value) => Value::Bool(value),
                Attribute::Int(value) => Value::Int(value),
                Attribute::String(text) => Value::string(text),
                Attribute::Version(text) => {
                    let version = Semver::parse(text).map_err(|error| {
                        EvalError::new(format!("attribute {name}: parse semantic version: {error}"))
                    })?;
                    Value::opaque(version)
                }
            };
            domains.add(driver, name, value);
        }
        let attributes = domains.into_value();
        let mut domains = Domains::default();
        for (name, text) in capacity {
            domains.add(driver, name, Value::opaque(Quantity::parse(text)?));
        }
        Ok(Self(Value::Map(Map::new([
            (Value::from("driver"), Value::string(driver)),
            (Value::from("allowMultipleAllocations"), Value::Bool(allow_multiple_allocations)),
            (Value::from("attributes"), attributes),
            (Value::from("capacity"), domains.into_value()),
        ]))))
    }
}

/// Values by domain and identifier.
#[derive(Default)]
struct Domains(BTreeMap<String, Vec<(String, Value<'static>)>>);

impl Domains {
    fn add(&mut self, driver: &str, name: &str, value: Value<'static>) {
        let (domain, id) = name.split_once('/').unwrap_or((driver, name));
        self.0.entry(domain.to_owned()).or_default().push((id.to_owned(), value));
    }

    fn into_value(self) -> Value<'static> {
        let domains = self.0.into_iter().map(|(domain, values)| {
            let values = values.into_iter().map(|(id, value)| (Value::from(id), value));
            (Value::from(domain), Value::Map(Map::new(values)))
        });
        Value::Map(Map::nested(domains))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_sees_the_device() {
        let device = Device::new(
            "gpu.example.com",
            true,
            [
                ("model", Attribute::String("a100")),
                ("other.example.com/index", Attribute::Int(3)),
                ("healthy", Attribute::Bool(true)),
                ("gpu.example.com/driverVersion", Attribute::Version("1.10.0")),
            ],
            [("memory", "40Gi")],
        )
        .unwrap();
        let rows = [
            ("device.driver == 'gpu.example.com'", Some(true)),
            ("device.allowMultipleAllocations", Some(true)),
            ("device.attributes['gpu.example.com'].model == 'a100'", Some(true)),
            ("device.attributes['other.example.com'].index > 2", Some(true)),
            ("device.attributes['gpu.example.com'].healthy", Some(true)),
            ("device.attributes['gpu.example.com'].driverVersion.isGreaterThan(semver('1.9.0'))", Some(true)),
            ("device.capacity['gpu.example.com'].memory.compareTo(quantity('80Gi')) >= 0", Some(false)),
            // An unknown domain is an empty map, an unknown attribute an error.
            ("'index' in device.attributes['nobody.example.com']", Some(false)),
            ("'nobody.example.com' in device.attributes", Some(false)),
            ("has(device.attributes['nobody.example.com'].index)", Some(false)),
            ("device.attributes['gpu.example.com'].missing", None),
            // Not a bool after all.
            ("device.attributes['gpu.example.com'].model", None),
        ];
        for (expression, expected) in rows {
            let selector = DeviceSelector::compile(expression).unwrap();
            assert_eq!(selector.matches(&device).ok(), expected, "{expression}");
        }
    }

    #[test]
    fn costly_selectors_are_ended() {
        let all = "device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, \
                   device.attributes.all(d, device.attributes.all(e, a != 'x')))))";
        let names: Vec<String> = (0..32).map(|index| format!("d{index}.example.com/a")).collect();
        let attributes = names.iter().map(|name| (name.as_str(), Attribute::Int(1)));
        let device = Device::new("d.example.com", false, attributes, []).unwrap();
        let error = DeviceSelector::compile(all).unwrap().matches(&device).unwrap_err();
        assert!(error.to_string().contains("cost limit exceeded"), "{error}");
    }
}

//! Compiled selectors, kept between cycles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_cel::DeviceSelector;

use super::allocator::{Device, SelectorError, Selectors};

/// Compiled selectors that are kept. Cleared when full: classes have few, and claims come from few templates.
const KEPT: usize = 64;

type Compiled = Result<Arc<DeviceSelector>, String>;

/// Compiles each selector once, and evaluates it once for each device.
#[derive(Debug, Default)]
pub(crate) struct CompiledSelectors(Mutex<HashMap<Arc<str>, Compiled>>);

impl CompiledSelectors {
    fn get(&self, expression: &str) -> (Arc<str>, Compiled) {
        let mut compiled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((key, known)) = compiled.get_key_value(expression) {
            return (key.clone(), known.clone());
        }
        let key: Arc<str> = expression.into();
        let new = DeviceSelector::compile(expression).map(Arc::new).map_err(|error| error.to_string());
        if compiled.len() >= KEPT {
            compiled.clear();
        }
        compiled.insert(key.clone(), new.clone());
        (key, new)
    }
}

impl Selectors for CompiledSelectors {
    fn matches(&self, expression: &str, device: &Device) -> Result<bool, SelectorError> {
        if let Some(answer) = device.answer(expression) {
            return Ok(answer);
        }
        let (key, compiled) = self.get(expression);
        let selector = compiled.map_err(SelectorError::Compile)?;
        let value = device.selected.as_ref().map_err(|error| SelectorError::Evaluate(error.clone()))?;
        let answer = selector.matches(value).map_err(|error| SelectorError::Evaluate(error.to_string()))?;
        device.remember(key, answer);
        Ok(answer)
    }
}

//! Objects in the versions that other managers of fields wrote in, where a webhook converts between versions.
//!
//! To compare managers is a pure function that cannot wait. It notes the conversions that it lacks, and is repeated when
//! they are made.

use crate::extensions::{Converter, converts};
use ferrite_api::Status;
use ferrite_api::custom::Schema;
use ferrite_api::managed_fields::OtherVersions;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Repetitions of one operation. Each needs the results of the one before; one apply needs fewer than two for each
/// version that managers wrote in.
const ROUNDS: usize = 64;

/// The conversions of one write.
pub(crate) struct Conversions<'a> {
    resource: &'a Resource,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// An object, a version, and the object as of that version.
    made: Vec<(Value, String, Value)>,
    wanted: Vec<(Value, String)>,
}

impl std::fmt::Debug for Conversions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conversions").field("plural", &self.resource.plural).finish_non_exhaustive()
    }
}

impl<'a> Conversions<'a> {
    pub fn new(resource: &'a Resource) -> Self {
        Self { resource, state: Mutex::default() }
    }

    /// Returns true if a manager of the object wrote in another version, from which a webhook converts.
    pub fn concern(&self, object: &Value) -> bool {
        converts(self.resource) && {
            let own = self.resource.api_version();
            let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
            entries.into_iter().flatten().any(|entry| entry["apiVersion"] != *own)
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work until it lacks no conversion.
    pub async fn settle<T>(
        &self,
        converter: &Arc<Converter>,
        mut work: impl FnMut() -> T,
    ) -> Result<T, Status> {
        for _ in 0..ROUNDS {
            let done = work();
            let wanted = std::mem::take(&mut self.lock().wanted);
            if wanted.is_empty() {
                return Ok(done);
            }
            for (object, version) in wanted {
                let custom = self.resource.custom.as_ref();
                let target = custom.and_then(|custom| custom.in_version(&version));
                let from = object["apiVersion"].as_str().unwrap_or_default();
                let source = custom.and_then(|custom| custom.in_version(from));
                let (Some(source), Some(target)) = (source, target) else {
                    return Err(Status::internal(format!("{from} or {version} is no version of the kind")));
                };
                let converted = converter.convert(&source, &target, &object).await?;
                self.lock().made.push((object, version, converted));
            }
        }
        Err(Status::internal("managers of other versions need too many conversions"))
    }
}

impl OtherVersions for Conversions<'_> {
    fn convert(&self, object: &Value, api_version: &str) -> Option<Value> {
        let mut state = self.lock();
        let made = state.made.iter().find(|(from, to, _)| to == api_version && from == object);
        if let Some((_, _, converted)) = made {
            return Some(converted.clone());
        }
        let is_wanted = state.wanted.iter().any(|(from, to)| to == api_version && from == object);
        if !is_wanted {
            state.wanted.push((object.clone(), api_version.to_owned()));
        }
        None
    }

    fn schema(&self, api_version: &str) -> Option<&Schema> {
        self.resource.custom.as_ref()?.schema_of(api_version)
    }
}

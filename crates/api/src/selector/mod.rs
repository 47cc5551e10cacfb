//! Selectors: which objects a list, a watch or a controller means.

mod field;
mod label;
mod parse;

pub use field::{FieldSelector, FieldSelectorError, FieldTerm, check_field};
pub use label::{LabelSelector, Labels, Operator, Requirement, validate_label_selector};
pub use parse::SelectorError;

//! Limits and budgets of Kubernetes' uses of expressions.

/// The cost of one evaluation.
pub const PER_CALL: u64 = 1_000_000;
/// The cost of all rules that run for one object, one policy binding, or one mutation.
pub const RUNTIME_BUDGET: i64 = 10_000_000;
/// The cost of all match conditions of one webhook or one policy binding.
pub const MATCH_CONDITIONS_BUDGET: i64 = 2_500_000;
/// The estimated cost of one rule of a custom resource definition, or of the expression of its message.
pub const ESTIMATED_RULE: u64 = 10_000_000;
/// The estimated cost of all rules of a custom resource definition.
pub const ESTIMATED_DEFINITION: u64 = 100_000_000;
/// The cost of a device selector, estimated and at run time.
pub const DEVICE_SELECTOR: u64 = 1_000_000;
/// Bytes of a device selector.
pub const DEVICE_SELECTOR_LENGTH: usize = 10 * 1024;

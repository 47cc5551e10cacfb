//! The resourceclaim controller: makes the ResourceClaims that pods ask for by template, reserves allocated claims for
//! scheduled pods, and releases claims whose pods are done.

mod controller;
mod decide;
mod measures;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

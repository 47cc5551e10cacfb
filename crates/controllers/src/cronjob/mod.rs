//! Creates the Jobs of CronJobs when their time has come.

mod active;
mod controller;
mod decide;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

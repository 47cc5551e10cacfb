//! Creates the Jobs of CronJobs when their time has come.

mod active;
mod controller;
mod decide;
mod measures;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

//! `batch`.

pub(super) mod cronjob;
pub(super) mod job;
mod job_rules;
mod job_status;

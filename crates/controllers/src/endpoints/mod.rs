//! Publishes the endpoints of a Service: EndpointSlices, and Endpoints for older clients.

mod addresses;
mod legacy;
mod mirror;
mod slices;
mod watch;

pub(crate) use mirror::decide::CAPACITY as MIRROR_CAPACITY;
pub(crate) use slices::decide::CAPACITY as SLICE_CAPACITY;

pub(crate) use legacy::start as start_endpoints;
pub(crate) use mirror::controller::start as start_mirroring;
pub(crate) use slices::controller::start as start_slices;

const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
const HEADLESS: &str = "service.kubernetes.io/headless";

//! The device-taint-eviction controller: deletes pods that use a device with a NoExecute taint which their claim does not
//! tolerate, or no longer. Taints are those that drivers publish in ResourceSlices.

mod controller;
mod decide;

pub(crate) use controller::start;

//! Services get no external addresses beside those they already have.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::quota::amounts::list;
use ferrite_json::Value;

pub(super) struct DenyServiceExternalIPs;

impl Plugin for DenyServiceExternalIPs {
    fn name(&self) -> &'static str {
        "DenyServiceExternalIPs"
    }

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(service) = object.filter(|_| attributes.writes("services")) else { return Ok(()) };
        let nothing = Value::Null;
        let before = list(attributes.old.map_or(&nothing, |old| &old["spec"]), "externalIPs");
        if list(&service["spec"], "externalIPs").iter().all(|ip| before.contains(ip)) {
            return Ok(());
        }
        Err(attributes.forbid("Use of external IPs is denied by admission control."))
    }
}

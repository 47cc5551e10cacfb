//! Images are pulled for every container, so that only users who may pull an image can run it.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::Value;

pub(super) struct AlwaysPullImages;

impl Plugin for AlwaysPullImages {
    fn name(&self) -> &'static str {
        "AlwaysPullImages"
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        let pods = attributes.operation != Operation::Delete
            && (attributes.is("", "pods") || attributes.is_sub("", "pods", Some("ephemeralcontainers")));
        if !pods {
            return Ok(());
        }
        for kind in ["containers", "initContainers", "ephemeralContainers"] {
            for container in object["spec"].get_mut(kind).and_then(Value::as_array_mut).into_iter().flatten()
            {
                container["imagePullPolicy"] = "Always".into();
            }
        }
        let volumes = object["spec"].get_mut("volumes").and_then(Value::as_array_mut);
        for image in volumes.into_iter().flatten().filter_map(|v| v.get_mut("image")) {
            if image.is_object() {
                image["pullPolicy"] = "Always".into();
            }
        }
        Ok(())
    }
}

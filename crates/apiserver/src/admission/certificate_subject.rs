//! A certificate signing request says who made it; the server writes that, whatever the client wrote.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use serde_json::{Value, json};

pub(super) struct CertificateSubject;

impl Plugin for CertificateSubject {
    fn name(&self) -> &'static str {
        "CertificateSubject"
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates_in("certificates.k8s.io", "certificatesigningrequests") {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let user = attributes.user;
        for key in ["username", "uid", "groups", "extra"] {
            spec.remove(key);
        }
        spec.insert("username".into(), user.name.clone().into());
        if !user.uid.is_empty() {
            spec.insert("uid".into(), user.uid.clone().into());
        }
        spec.insert("groups".into(), user.groups.clone().into());
        if !user.extra.is_empty() {
            spec.insert("extra".into(), json!(user.extra));
        }
        Ok(())
    }
}

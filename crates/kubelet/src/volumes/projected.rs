//! projected volumes: files of several sources in one directory.

use super::content::{self, Selection};
use super::payload::{self, Payload, PayloadError};
use super::plugins::{SetUp, VolumePlugin};
use super::pod_certificate::Credentials;
use super::{ReadyVolume, SourceError};
use crate::pod::model;
use futures_util::FutureExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCertificateProjection};

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.projected.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.projected.as_ref().ok_or(SourceError::Unsupported)?;
    let SetUp { volumes, pod, id, now, .. } = request;
    let mode = payload::mode(source.default_mode, 0o644);
    let secured = Secured::of(&request, mode);
    let mut refresh_at: Option<Timestamp> = None;
    let mut all = Payload::new();
    for (index, part) in source.sources.iter().flatten().enumerate() {
        if let Some(s) = &part.config_map {
            let wanted = Selection { items: s.items.as_ref(), mode, optional: s.optional == Some(true) };
            all.extend(volumes.config_map(id, &s.name, wanted).await?);
        } else if let Some(s) = &part.secret {
            let wanted = Selection { items: s.items.as_ref(), mode, optional: s.optional == Some(true) };
            all.extend(volumes.secret(id, &s.name, wanted).await?);
        } else if let Some(s) = &part.downward_api {
            let items = s.items.as_deref().unwrap_or_default();
            all.extend(payload::from_fields(pod, items, mode, &volumes.limits)?);
        } else if let Some(s) = &part.service_account_token {
            let path = payload::checked(&s.path)?;
            if let Some(token) = volumes.tokens.get(pod, s, now).await? {
                refresh_at = earlier(refresh_at, token.refresh_at);
                all.insert(path, secured.file(token.text.into_bytes()));
            }
        } else if let Some(s) = &part.cluster_trust_bundle {
            let path = payload::checked(&s.path)?;
            all.insert(path, secured.file(volumes.trust_bundles.get(&id.uid, s).await?));
        } else if let Some(s) = &part.pod_certificate {
            let place = (request.volume.name.as_str(), index);
            let (credentials, look_at) = volumes.pod_certificates.get(pod, place, s, now).await?;
            refresh_at = earlier(refresh_at, look_at);
            all.extend(certificate_files(s, &credentials, &secured)?);
        }
    }
    let ready = content::write(request, "projected", true, all).await?;
    Ok(ReadyVolume { refresh_at, ..ready })
}

fn earlier(a: Option<Timestamp>, b: Timestamp) -> Option<Timestamp> {
    Some(a.map_or(b, |a| a.min(b)))
}

/// The files of a certificate, at the paths that the pod asks for.
fn certificate_files(
    wanted: &PodCertificateProjection,
    credentials: &Credentials,
    secured: &Secured,
) -> Result<Payload, PayloadError> {
    let Credentials { key, chain, .. } = credentials;
    let mut files = Payload::new();
    for (path, data) in [
        (&wanted.credential_bundle_path, format!("{key}{chain}")),
        (&wanted.key_path, key.clone()),
        (&wanted.certificate_chain_path, chain.clone()),
    ] {
        if let Some(path) = path.as_deref().filter(|path| !path.is_empty()) {
            files.insert(payload::checked(path)?, secured.file(data.into_bytes()));
        }
    }
    Ok(files)
}

/// Mode and owner of files with credentials. As upstream: where the pod runs as one user or has a group for its volumes,
/// only that user and that group read them.
struct Secured {
    mode: u32,
    user: Option<u32>,
}

impl Secured {
    fn of(request: &SetUp<'_>, mode: u32) -> Self {
        let user = single_user(request.pod);
        let is_owned = user.is_some() || request.group.is_some();
        Self { mode: if is_owned { 0o600 } else { mode }, user }
    }

    fn file(&self, data: Vec<u8>) -> payload::File {
        payload::File { user: self.user, ..payload::File::new(data, self.mode) }
    }
}

/// The user of all containers, if they have the same and it is known before they start.
fn single_user(pod: &Pod) -> Option<u32> {
    let spec = model::spec(pod);
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let mut users = spec.init_containers.iter().flatten().chain(&spec.containers).map(|container| {
        let own = container.security_context.as_ref().and_then(|context| context.run_as_user);
        own.or(of_pod)
    });
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn files_belong_to_the_one_user_of_a_pod() {
        let container = |user: Value| json!({"name": "c", "securityContext": {"runAsUser": user}});
        for (spec, expected) in [
            (json!({"containers": [{"name": "c"}]}), None),
            (json!({"containers": [container(json!(7))]}), Some(7)),
            (json!({"containers": [container(json!(7)), container(json!(8))]}), None),
            (json!({"containers": [container(json!(7)), {"name": "d"}]}), None),
            (
                json!({"containers": [container(json!(7)), {"name": "d"}], "securityContext": {"runAsUser": 7}}),
                Some(7),
            ),
            (json!({"containers": [container(json!(7))], "initContainers": [container(json!(0))]}), None),
        ] {
            let pod: Pod = ferrite_json::from_value(json!({ "spec": spec })).unwrap();
            assert_eq!(single_user(&pod), expected, "{spec}");
        }
    }
}

//! The image calls of the container runtime interface.

use std::collections::HashSet;
use std::sync::Arc;

use base64::Engine;
use ferrite_cri::v1::{
    AuthConfig, FilesystemIdentifier, FilesystemUsage, Image, ImageFsInfoResponse, ImageSpec,
    ImageStatusRequest, ImageStatusResponse, Int64Value, ListImagesRequest, ListImagesResponse,
    PullImageRequest, PullImageResponse, RemoveImageRequest, RemoveImageResponse, UInt64Value,
};
use ferrite_cri::{Code, Error, Result};

use super::pull::blocking;
use super::{
    Auth, Digest, ImageError, ImageRecord, ImageStore, Platform, Progress, Reference, RegistryConfig,
};
use crate::spec::Named;

/// The image half of a runtime: [`ferrite_cri::ImageService`] in all but the questions only the runtime
/// can answer (which images containers use, how much space containers take).
#[derive(Debug, Clone)]
pub struct Images {
    store: Arc<ImageStore>,
    registry: RegistryConfig,
}

impl Images {
    pub fn new(store: Arc<ImageStore>, registry: RegistryConfig) -> Self {
        Self { store, registry }
    }

    /// The store beneath.
    pub fn store(&self) -> &Arc<ImageStore> {
        &self.store
    }

    /// All images, or those the filter's reference or id means.
    pub async fn list_images(&self, request: ListImagesRequest) -> Result<ListImagesResponse> {
        let store = Arc::clone(&self.store);
        let wanted = request
            .filter
            .and_then(|filter| filter.image)
            .map(|spec| spec.image)
            .filter(|name| !name.is_empty());
        let records = blocking(move || match wanted {
            Some(name) => Ok(store.status(&name)?.into_iter().collect()),
            None => store.list(),
        });
        let records: Vec<ImageRecord> = records.await.map_err(to_cri)?;
        Ok(ListImagesResponse { images: records.into_iter().map(to_image).collect() })
    }

    /// One image, absent from the answer when the store does not have it.
    pub async fn image_status(&self, request: ImageStatusRequest) -> Result<ImageStatusResponse> {
        let name = name(request.image)?;
        let store = Arc::clone(&self.store);
        let record = blocking(move || store.status(&name)).await.map_err(to_cri)?;
        let mut info = std::collections::HashMap::new();
        if let (true, Some(record)) = (request.verbose, &record) {
            let details = serde_json::json!({
                "imageSpec": record.config,
                "chainIDs": record.chain_ids,
            });
            info.insert("info".to_owned(), details.to_string());
        }
        Ok(ImageStatusResponse { image: record.map(to_image), info: info.into_iter().collect() })
    }

    /// Pulls an image and answers with its id.
    pub async fn pull_image(&self, request: PullImageRequest) -> Result<PullImageResponse> {
        let reference: Reference = name(request.image)?.parse().map_err(to_cri)?;
        let auth = auth(request.auth, reference.registry())?;
        let progress: Progress = Arc::new(|event| tracing::trace!(?event, "pull"));
        let platform = Platform::host();
        let record =
            self.store.pull(&reference, auth, &platform, &self.registry, progress).await.map_err(to_cri)?;
        Ok(PullImageResponse { image_ref: record.id.to_string() })
    }

    /// Removes an image. `used` are the ids of images containers were made from.
    pub async fn remove_image(
        &self,
        request: RemoveImageRequest,
        used: HashSet<Digest>,
    ) -> Result<RemoveImageResponse> {
        let name = name(request.image)?;
        let store = Arc::clone(&self.store);
        blocking(move || store.remove(&name, &used)).await.map_err(to_cri)?;
        Ok(RemoveImageResponse {})
    }

    /// Disk usage of images. The runtime adds the usage of containers, unless both are on one filesystem.
    pub async fn image_fs_info(&self, now_nanos: i64) -> Result<ImageFsInfoResponse> {
        let store = Arc::clone(&self.store);
        let usage = blocking(move || store.usage()).await.map_err(to_cri)?;
        let filesystem = FilesystemUsage {
            timestamp: now_nanos,
            fs_id: Some(FilesystemIdentifier { mountpoint: self.store.root().display().to_string() }),
            used_bytes: Some(UInt64Value { value: usage.bytes }),
            inodes_used: Some(UInt64Value { value: usage.inodes }),
        };
        Ok(ImageFsInfoResponse { image_filesystems: vec![filesystem], container_filesystems: Vec::new() })
    }
}

fn name(spec: Option<ImageSpec>) -> Result<String> {
    spec.map(|spec| spec.image)
        .filter(|name| !name.is_empty())
        .ok_or_else(|| Error::invalid("the request names no image"))
}

/// The image as the kubelet wants it: a numeric user for `runAsNonRoot`, else the user's name.
fn to_image(record: ImageRecord) -> Image {
    let user = record.config.config().as_ref().and_then(|config| config.user().clone()).unwrap_or_default();
    let user = user.split(':').next().unwrap_or_default().to_owned();
    let (uid, username) = match Named::parse(&user) {
        Named::Number(value) => (Some(Int64Value { value: value.into() }), String::new()),
        Named::Name("") => (Some(Int64Value { value: 0 }), String::new()),
        Named::Name(_) | Named::OutOfRange => (None, user),
    };
    let id = record.id.to_string();
    Image {
        spec: Some(ImageSpec { image: id.clone(), ..Default::default() }),
        id,
        repo_tags: record.repo_tags,
        repo_digests: record.repo_digests,
        size: record.size,
        uid,
        username,
        pinned: record.pinned,
    }
}

/// Which of the forms of credentials the kubelet sent; none if they are for another registry.
fn auth(config: Option<AuthConfig>, registry: &str) -> Result<Auth> {
    let Some(config) = config else { return Ok(Auth::Anonymous) };
    if !config.server_address.is_empty() && !is_for(&config.server_address, registry) {
        return Ok(Auth::Anonymous);
    }
    // A client with an identity token sends a placeholder user name and no password.
    if !config.identity_token.is_empty() {
        return Ok(Auth::Identity(config.identity_token));
    }
    if !config.username.is_empty() {
        return Ok(Auth::Basic { username: config.username, password: config.password });
    }
    if !config.registry_token.is_empty() {
        return Ok(Auth::Bearer(config.registry_token));
    }
    if config.auth.is_empty() {
        return Ok(Auth::Anonymous);
    }
    let bad = || Error::invalid("the auth field is not the base64 form of user:password");
    let decoded = base64::engine::general_purpose::STANDARD.decode(&config.auth).map_err(|_| bad())?;
    let text = String::from_utf8(decoded).map_err(|_| bad())?;
    let (username, password) = text.split_once(':').ok_or_else(bad)?;
    Ok(Auth::Basic { username: username.to_owned(), password: password.trim_matches('\0').to_owned() })
}

/// `https://index.docker.io/v1/` is how the Docker Hub has always been written in credentials.
fn is_for(address: &str, registry: &str) -> bool {
    let host =
        address.split_once("://").map_or(address, |(_, rest)| rest).split('/').next().unwrap_or_default();
    let canonical = |host: &str| match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        other => other.to_owned(),
    };
    canonical(host) == canonical(registry)
}

/// The code for the kubelet, the chain of causes for the person.
pub(crate) fn to_cri(error: ImageError) -> Error {
    let code = match &error {
        ImageError::BadReference { .. } => Code::InvalidArgument,
        ImageError::NotFound(_) | ImageError::BuiltIn(_) | ImageError::NoPlatform { .. } => Code::NotFound,
        ImageError::Unauthorized { .. } => Code::PermissionDenied,
        ImageError::Unreachable { .. } => Code::Unavailable,
        ImageError::InUse(_) | ImageError::Pinned(_) => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    let mut message = error.to_string();
    if let Some(source) = std::error::Error::source(&error) {
        message = format!("{message}: {source}");
    }
    Error::new(code, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials() {
        let basic = |u: &str, p: &str| Auth::Basic { username: u.into(), password: p.into() };
        let rows = [
            (AuthConfig::default(), Some(Auth::Anonymous)),
            (
                AuthConfig { username: "u".into(), password: "p".into(), ..Default::default() },
                Some(basic("u", "p")),
            ),
            (AuthConfig { auth: "dTpwOng=".into(), ..Default::default() }, Some(basic("u", "p:x"))),
            (AuthConfig { auth: "!".into(), ..Default::default() }, None),
            (AuthConfig { registry_token: "t".into(), ..Default::default() }, Some(Auth::Bearer("t".into()))),
            (
                AuthConfig { identity_token: "t".into(), ..Default::default() },
                Some(Auth::Identity("t".into())),
            ),
            (
                AuthConfig {
                    username: "u".into(),
                    server_address: "other.example".into(),
                    ..Default::default()
                },
                Some(Auth::Anonymous),
            ),
            (
                AuthConfig {
                    username: "u".into(),
                    server_address: "https://index.docker.io/v1/".into(),
                    ..Default::default()
                },
                Some(basic("u", "")),
            ),
        ];
        for (config, want) in rows {
            assert_eq!(auth(Some(config.clone()), "docker.io").ok(), want, "{config:?}");
        }
        assert!(!format!("{:?}", basic("u", "secret")).contains("secret"));
    }
}

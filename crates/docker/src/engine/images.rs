//! Images: pulled, loaded, saved, named and removed.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use ferrite_cri::with_causes;
use ferrite_runtime::image::{
    Auth, Builtin, Digest, ImageError, ImageRecord, ImageStore, ImageView, Platform, Progress, Reference,
    RegistryConfig,
};
use serde_json::{Value, json};

use super::{Engine, EngineError, Result, blocking};
use crate::units;

/// An image under one of its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSummary {
    pub id: String,
    /// As docker shows it: `busybox`, `localhost:5000/x`; `<none>` without a name.
    pub repository: String,
    pub tag: String,
    pub digest: String,
    /// Nanoseconds since 1970.
    pub created: i64,
    pub size: u64,
    pub labels: std::collections::BTreeMap<String, String>,
    /// Its full name, for naming it again; empty without one.
    pub reference: String,
}

/// The result of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    pub id: String,
    /// Of the manifest the registry served.
    pub digest: String,
    /// True if the image was not here before under that name.
    pub new: bool,
    /// The complete name: `docker.io/library/busybox:latest`.
    pub name: String,
}

/// A step of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    Untagged(String),
    Deleted(String),
}

/// A name as docker shows it: without the registry and `library/` that are understood.
pub fn familiar(name: &str) -> String {
    let short = name.strip_prefix("docker.io/").unwrap_or(name);
    short.strip_prefix("library/").unwrap_or(short).to_owned()
}

fn parse(name: &str) -> Result<Reference> {
    name.parse().map_err(|_| EngineError::Invalid("invalid reference format".into()))
}

fn created(image: &ImageRecord) -> i64 {
    let time = image.config.created().as_deref().and_then(|text| text.parse::<jiff::Timestamp>().ok());
    time.and_then(|time| i64::try_from(time.as_nanosecond()).ok()).unwrap_or(0)
}

impl Engine {
    /// The store, in turn with other processes.
    async fn store(&self) -> Result<Arc<ImageStore>> {
        let root = self.paths.images();
        blocking(move || ImageStore::open_in_turn(root).map_err(Into::into)).await
    }

    fn view_images(&self) -> Result<ImageView> {
        Ok(ImageView::of(self.paths.images())?)
    }

    pub fn image(&self, name: &str) -> Result<ImageRecord> {
        self.view_images()?.find(name)?.ok_or_else(|| EngineError::NoSuchImage(name.to_owned()))
    }

    /// A name for the image of an id; the short id without one.
    pub fn image_name(&self, id: &str) -> String {
        self.view_images()
            .ok()
            .and_then(|view| view.find(id).ok().flatten())
            .and_then(|image| image.repo_tags.first().map(|tag| familiar(tag)))
            .unwrap_or_else(|| id.trim_start_matches("sha256:").chars().take(12).collect())
    }

    /// Every image, once for each of its names; the newest first.
    pub fn images(&self) -> Result<Vec<ImageSummary>> {
        let mut all = Vec::new();
        for image in self.view_images()?.list() {
            let labels = image
                .config
                .config()
                .as_ref()
                .and_then(|config| config.labels().clone())
                .unwrap_or_default()
                .into_iter()
                .collect();
            let digest_of = |repository: &str| {
                image
                    .repo_digests
                    .iter()
                    .find_map(|known| known.strip_prefix(repository)?.strip_prefix('@').map(str::to_owned))
            };
            let summary = |reference: &str, repository: &str, tag: &str| ImageSummary {
                id: image.id.to_string(),
                repository: familiar(repository),
                tag: tag.to_owned(),
                digest: digest_of(repository).unwrap_or_else(|| "<none>".into()),
                created: created(&image),
                size: image.size,
                labels: std::collections::BTreeMap::clone(&labels),
                reference: reference.to_owned(),
            };
            if image.repo_tags.is_empty() {
                let repository = image.repo_digests.first().and_then(|d| d.split('@').next());
                all.push(summary("", repository.unwrap_or("<none>"), "<none>"));
            }
            for tag in &image.repo_tags {
                let (repository, version) = tag.rsplit_once(':').unwrap_or((tag, "<none>"));
                all.push(summary(tag, repository, version));
            }
        }
        all.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| a.repository.cmp(&b.repository)));
        Ok(all)
    }

    /// Fetches an image from its registry.
    pub async fn pull(&self, name: &str, platform: Option<&str>, progress: Progress) -> Result<Pulled> {
        let reference = parse(name)?;
        let platform = match platform {
            None => Platform::host(),
            Some(text) => parse_platform(text)?,
        };
        let mut registry = RegistryConfig::default();
        registry
            .load(Path::new("/etc/ferrite/registries.yaml"), Path::new("/etc/containerd/certs.d"))
            .map_err(|error| EngineError::Internal(with_causes(&error)))?;
        let before = self.view_images()?.find(name)?.map(|image| image.id);
        let auth = credentials(reference.registry());
        let store = self.store().await?;
        if reference.is_built_in() {
            // Nothing to fetch: it is made from the running program.
            let store = Arc::clone(&store);
            blocking(move || Ok(store.add_builtin(&Builtin::tools()?)?)).await?;
        }
        let pulled = store.pull(&reference, auth, &platform, &registry, progress).await;
        drop(store);
        let image = pulled.map_err(|error| match error {
            ImageError::NotFound(_) => {
                EngineError::Internal(format!("manifest for {name} not found: manifest unknown"))
            }
            ImageError::Unauthorized { .. } => EngineError::Internal(format!(
                "pull access denied for {}, repository does not exist or may require authentication",
                familiar(&reference.name())
            )),
            other => other.into(),
        })?;
        self.note_image(&image.id.to_string(), "pull", &familiar(&reference.to_string()));
        let repository = format!("{}@", reference.name());
        let digest = image
            .repo_digests
            .iter()
            .find_map(|known| known.strip_prefix(&repository).map(str::to_owned))
            .unwrap_or_default();
        Ok(Pulled {
            id: image.id.to_string(),
            digest,
            new: before.as_ref() != Some(&image.id),
            name: reference.to_string(),
        })
    }

    /// Takes the images out of an archive; answers their names, or ids where they have none.
    pub async fn load(&self, archive: impl Read + Send + 'static) -> Result<Vec<String>> {
        let store = self.store().await?;
        let names = store.import(archive, Arc::new(|_| {})).await?;
        for name in &names {
            self.note_image(name, "load", &familiar(name));
        }
        Ok(names)
    }

    /// Writes an archive of images; one that is named by an id has no name in it.
    pub fn save_images(&self, names: &[String], out: impl Write) -> Result<()> {
        let view = self.view_images()?;
        let mut images: Vec<(Digest, Vec<String>)> = Vec::new();
        for name in names {
            let image = view.find(name)?.ok_or_else(|| EngineError::NoSuchImage(name.clone()))?;
            let tag = parse(name).ok().map(|r| r.to_string()).filter(|tag| image.repo_tags.contains(tag));
            let tag = tag.map(|tag| familiar(&tag));
            match images.iter_mut().find(|(id, _)| *id == image.id) {
                Some((_, tags)) => tags.extend(tag),
                None => images.push((image.id, tag.into_iter().collect())),
            }
        }
        Ok(view.save(&images, out)?)
    }

    pub async fn tag(&self, image: &str, name: &str) -> Result<()> {
        let reference = parse(name)?;
        if reference.digest().is_some() {
            return Err(EngineError::Invalid("refusing to create a tag with a digest reference".into()));
        }
        let id = self.image(image)?.id.to_string();
        let store = self.store().await?;
        blocking(move || store.tag(&id, &reference).map_err(Into::into)).await?;
        Ok(())
    }

    /// Removes a name, and with the last one the image.
    pub async fn remove_image(&self, name: &str, force: bool) -> Result<Vec<Removed>> {
        // Nobody may make a container of the image meanwhile.
        let _lock = self.registry_lock().await?;
        let image = self.image(name)?;
        let id = image.id.to_string();
        let tag = parse(name).ok().map(|r| r.to_string()).filter(|tag| image.repo_tags.contains(tag));
        let containers = self.list()?;
        let users: Vec<_> = containers.iter().filter(|view| view.container.image_id == id).collect();
        let last = match &tag {
            Some(_) => image.repo_tags.len() == 1,
            None => true,
        };
        let short: String = image.id.hex().chars().take(12).collect();
        if tag.is_none() && image.repo_tags.len() > 1 && !force {
            return Err(EngineError::Conflict(format!(
                "conflict: unable to delete {short} (must be forced) - image is referenced in multiple repositories"
            )));
        }
        if let (true, Some(user)) = (last, users.first()) {
            let container = &user.container.id[..12];
            let running = user.state.status.runs();
            if running || !force {
                let (how, kind) = if running {
                    ("cannot be forced", "running container")
                } else {
                    ("must be forced", "stopped container")
                };
                let what = if tag.is_some() {
                    format!(
                        "unable to remove repository reference {name:?} ({how}) - container {container} is using its \
                             referenced image {short}"
                    )
                } else {
                    format!("unable to delete {short} ({how}) - image is being used by {kind} {container}")
                };
                return Err(EngineError::Conflict(format!("conflict: {what}")));
            }
        }
        let used: HashSet<Digest> =
            containers.iter().filter_map(|view| view.container.image_id.parse().ok()).collect();
        let kept_by_container = last && !users.is_empty();
        let store = self.store().await?;
        let mut removed = Vec::new();
        let untagged: Vec<String> = match (&tag, last) {
            (Some(tag), false) => vec![tag.clone()],
            _ => image.repo_tags.clone(),
        };
        removed.extend(untagged.iter().map(|tag| Removed::Untagged(familiar(tag))));
        if last {
            removed.extend(image.repo_digests.iter().map(|digest| Removed::Untagged(familiar(digest))));
        }
        let target = tag.clone().filter(|_| !last).unwrap_or_else(|| id.clone());
        let chains = image.chain_ids.clone();
        let left = blocking(move || {
            if kept_by_container {
                // Forced: the names go, the layers stay for the containers.
                store.forget(&target, &used)?;
            } else {
                store.remove(&target, &used)?;
            }
            let left: HashSet<Digest> = store.list()?.into_iter().flat_map(|image| image.chain_ids).collect();
            Ok(left)
        })
        .await?;
        if last {
            removed.push(Removed::Deleted(id.clone()));
            let gone = chains.iter().rev().filter(|chain| !left.contains(chain) && !kept_by_container);
            removed.extend(gone.map(|chain| Removed::Deleted(chain.to_string())));
            self.note_image(&id, "delete", &id);
        } else {
            self.note_image(&id, "untag", &id);
        }
        Ok(removed)
    }

    /// `inspect` of an image.
    pub fn inspect_image(&self, name: &str) -> Result<Value> {
        let view = self.view_images()?;
        let image = view.find(name)?.ok_or_else(|| EngineError::NoSuchImage(name.to_owned()))?;
        let raw: Value = serde_json::from_slice(&view.config_bytes(&image.id)?).unwrap_or_default();
        let familiar_all = |names: &[String]| names.iter().map(|name| familiar(name)).collect::<Vec<_>>();
        Ok(json!({
            "Id": image.id.to_string(),
            "RepoTags": familiar_all(&image.repo_tags),
            "RepoDigests": familiar_all(&image.repo_digests),
            "Parent": "",
            "Comment": raw.get("comment").cloned().unwrap_or("".into()),
            "Created": raw.get("created").cloned().unwrap_or_else(|| units::rfc3339(0).into()),
            "Author": raw.get("author").cloned().unwrap_or("".into()),
            "Config": raw.get("config").cloned().unwrap_or(json!({})),
            "Architecture": raw.get("architecture").cloned().unwrap_or("".into()),
            "Os": raw.get("os").cloned().unwrap_or("".into()),
            "Size": image.size,
            "VirtualSize": image.size,
            "RootFS": {
                "Type": "layers",
                "Layers": raw.pointer("/rootfs/diff_ids").cloned().unwrap_or(json!([])),
            },
            "GraphDriver": {"Name": "overlay2", "Data": null},
            "Metadata": {"LastTagTime": units::rfc3339(0)},
        }))
    }
}

fn parse_platform(text: &str) -> Result<Platform> {
    let mut parts = text.split('/');
    let (os, architecture) = (parts.next().unwrap_or_default(), parts.next());
    let Some(architecture) = architecture.filter(|_| !os.is_empty()) else {
        return Err(EngineError::Invalid(format!(
            "{text:?} is an invalid component of a platform: want os/arch[/variant]"
        )));
    };
    let variant = parts.next().map(str::to_owned);
    Ok(Platform { os: os.to_owned(), architecture: architecture.to_owned(), variant })
}

/// The credentials that `docker login` saved for a registry.
fn credentials(registry: &str) -> Auth {
    let home = std::env::var_os("DOCKER_CONFIG")
        .map(std::path::PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".docker")));
    let Some(text) = home.and_then(|home| std::fs::read_to_string(home.join("config.json")).ok()) else {
        return Auth::Anonymous;
    };
    from_config(&text, registry).unwrap_or(Auth::Anonymous)
}

fn from_config(text: &str, registry: &str) -> Option<Auth> {
    let config: Value = serde_json::from_str(text).ok()?;
    let key = if registry == "docker.io" { "https://index.docker.io/v1/" } else { registry };
    let entry = config.get("auths")?.get(key)?;
    let token = |name: &str| entry.get(name).and_then(Value::as_str).filter(|token| !token.is_empty());
    if let Some(token) = token("identitytoken") {
        return Some(Auth::Identity(token.to_owned()));
    }
    if let Some(token) = token("registrytoken") {
        return Some(Auth::Bearer(token.to_owned()));
    }
    let encoded = entry.get("auth")?.as_str()?;
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    let (username, password) = text.split_once(':')?;
    Some(Auth::Basic { username: username.to_owned(), password: password.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, want) in [
            ("docker.io/library/busybox:latest", "busybox:latest"),
            ("docker.io/me/x:1", "me/x:1"),
            ("localhost:5000/x:1", "localhost:5000/x:1"),
        ] {
            assert_eq!(familiar(name), want);
        }
    }

    #[test]
    fn logins() {
        let text = r#"{"auths":{"r:5000":{"auth":"dXNlcjpzZWNyZXQ="}}}"#;
        let want = Auth::Basic { username: "user".into(), password: "secret".into() };
        assert_eq!(from_config(text, "r:5000"), Some(want));
        assert_eq!(from_config(text, "other"), None);
        let text = r#"{"auths":{"r:5000":{"auth":"eDo=","identitytoken":"t"}}}"#;
        assert_eq!(from_config(text, "r:5000"), Some(Auth::Identity("t".into())));
        assert_eq!(from_config("{", "r:5000"), None);
    }
}

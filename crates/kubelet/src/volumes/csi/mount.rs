//! Stages a volume on the node and publishes it for a pod.

use super::data::{self, Data, State};
use super::ledger::{Stage, VolumeId};
use super::wanted::{Lifecycle, Wanted};
use super::{Csi, CsiError, blocking, policy};
use crate::clock;
use crate::pod::model;
use crate::volumes::ReadyVolume;
use crate::volumes::ownership::{self, GroupChange};
use crate::volumes::plugins::{PersistentSetUp, SetUp};
use crate::volumes::stats::Measure;
use ferrite_client::csi::{attach_required, attachment_name};
use ferrite_client::{Api, message_of};
use ferrite_csi::v1::{NodePublishVolumeRequest, NodeStageVolumeRequest};
use ferrite_csi::{Driver, NodeCapabilities};
use ferrite_hostfs::mounts;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A pod's volumes are compared with the API so often, as upstream's kubelet syncs its pods: a claim that grew, a volume
/// that must be published again. A node may not watch claims.
const RESYNC: Duration = Duration::from_secs(60);
const PLUGIN_DIRECTORIES: u32 = 0o750;

/// Where one publication is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub target: PathBuf,
    /// The directory of the data file.
    pub data: PathBuf,
}

impl Csi {
    pub(super) fn place(&self, uid: &str, wanted: &Wanted) -> Place {
        let (paths, name) = (&self.shared.paths, &wanted.spec_name);
        match wanted.block {
            false => Place { target: paths.target(uid, name), data: paths.pod_volume(uid, name) },
            true => Place { target: paths.block_target(uid, name), data: paths.block_data(name) },
        }
    }

    pub(super) async fn set_up(
        &self,
        request: SetUp<'_>,
        wanted: &Wanted,
        persistent: Option<PersistentSetUp<'_>>,
    ) -> Result<ReadyVolume, CsiError> {
        let uid = &request.id.uid;
        let id = VolumeId::new(&wanted.driver, &wanted.handle);
        let driver = self.driver_object(&wanted.driver).await?;
        let driver = driver.as_ref();
        policy::check_lifecycle(&wanted.driver, driver, wanted.lifecycle)?;
        let attach = wanted.lifecycle == Lifecycle::Persistent && attach_required(driver);
        if wanted.lifecycle == Lifecycle::Persistent {
            self.with_ledger(|ledger| ledger.claim(&id, uid, attach));
        }
        let place = self.place(uid, wanted);
        let republish = driver.is_some_and(|driver| driver.spec.requires_republish == Some(true));
        let done = {
            let (place, uid, link) = (place.clone(), uid.clone(), self.link(uid, wanted));
            blocking(&place.data.clone(), move || is_published(&place, link.as_deref(), &uid)).await?
        };
        if !done {
            let context = if attach { self.attached(&id).await? } else { BTreeMap::new() };
            let service = self.shared.drivers.wait(&wanted.driver).await?;
            let _alone = self.exclusive(&id).await;
            let publication = Publication { csi: self, wanted, uid, place: &place, service, context, driver };
            publication.run(request, &id).await?;
            self.shared.republished.begin(uid, &wanted.spec_name, request.now);
        } else if republish {
            self.republish(request, wanted, &id, attach, driver)?;
        }
        if let Some(persistent) = persistent.filter(|_| wanted.grow_to.is_some()) {
            self.grow(request, wanted, &id, &place, persistent);
        }
        let resync = wanted.lifecycle == Lifecycle::Persistent || republish;
        Ok(ReadyVolume {
            read_only: wanted.read_only,
            block: wanted.block,
            settled: !resync,
            refresh_at: resync.then(|| clock::add(request.now, RESYNC)),
            measure: Some(Measure::Driver {
                driver: wanted.driver.clone(),
                handle: wanted.handle.clone(),
                staging: self.with_ledger(|ledger| ledger.stage_of(&id)).map(|stage| stage.path),
            }),
            ..ReadyVolume::writable(place.target)
        })
    }

    /// The CSIDriver object; drivers need not have one.
    async fn driver_object(&self, name: &str) -> Result<Option<CSIDriver>, CsiError> {
        let drivers = Api::<CSIDriver>::all(self.shared.client.clone());
        drivers
            .get_opt(name)
            .await
            .map_err(|e| CsiError::Api { what: format!("the CSIDriver {name:?}"), problem: message_of(&e) })
    }

    /// The pod's link to a published device.
    fn link(&self, uid: &str, wanted: &Wanted) -> Option<PathBuf> {
        wanted.block.then(|| self.shared.paths.pod_devices(uid).join(&wanted.spec_name))
    }

    /// The driver's inputs beside the volume itself: (context, secrets).
    async fn told(
        &self,
        wanted: &Wanted,
        driver: Option<&CSIDriver>,
        pod: &Pod,
        now: Timestamp,
    ) -> Result<(BTreeMap<String, String>, BTreeMap<String, String>), CsiError> {
        let mut context = wanted.attributes.clone();
        let mut secrets = self.secret(wanted.publish_secret.as_ref()).await?;
        if let Some(driver) = driver {
            if driver.spec.pod_info_on_mount == Some(true) {
                context.extend(policy::pod_info(pod, wanted.lifecycle));
            }
            let tokens = self.pod_tokens(driver, pod, now).await?;
            match driver.spec.service_account_token_in_secrets == Some(true) {
                true => secrets.extend(tokens),
                false => context.extend(tokens),
            }
        }
        Ok((context, secrets))
    }
}

/// Returns true if the volume was published for the pod and is still there. The target's own file system is
/// not asked: it may not answer.
fn is_published(place: &Place, link: Option<&Path>, uid: &str) -> io::Result<bool> {
    if let Some(link) = link {
        let linked = std::fs::read_link(link).is_ok_and(|to| to == place.target);
        return Ok(linked && place.target.ends_with(uid) && place.target.symlink_metadata().is_ok());
    }
    let published = data::read(&place.data)?.is_some_and(|data| data.state == Some(State::Published));
    Ok(published && mounts::is_mounted_at(&place.target)?)
}

/// One publication of a volume for a pod, while nobody else works on the volume.
pub(super) struct Publication<'a> {
    pub csi: &'a Csi,
    pub wanted: &'a Wanted,
    pub uid: &'a str,
    pub place: &'a Place,
    pub service: Driver,
    /// The publish context that the driver's controller returned when it attached the volume.
    pub context: BTreeMap<String, String>,
    pub driver: Option<&'a CSIDriver>,
}

impl Publication<'_> {
    async fn run(&self, request: SetUp<'_>, id: &VolumeId) -> Result<(), CsiError> {
        let wanted = self.wanted;
        let failed = |step| move |source| CsiError::Call { step, source };
        let able = self.service.capabilities().await.map_err(failed("NodeGetCapabilities"))?;
        let data = self.data();
        // Written before the driver is called: whatever comes of it can be undone.
        self.keep(&data).await?;
        let staging = match wanted.lifecycle {
            Lifecycle::Persistent => self.stage(id, &able, request.group).await?,
            Lifecycle::Ephemeral => None,
        };
        self.link().await?;
        let published =
            self.publish(&able, staging.as_deref(), request.group, request.pod, request.now).await;
        if let Err(error) = published {
            if matches!(&error, CsiError::Call { source, .. } if source.is_final()) {
                self.clean_target().await?;
                if !wanted.block {
                    self.keep(&Data { state: Some(State::Failed), ..data }).await?;
                }
            }
            return Err(error);
        }
        self.check_target().await?;
        if let Some(group) =
            request.group.filter(|_| !able.mount_group() && policy::applies_group(self.driver, wanted))
        {
            self.give_to(group, request.pod).await?;
        }
        if !wanted.block {
            self.keep(&Data { state: Some(State::Published), ..data }).await?;
        }
        Ok(())
    }

    fn data(&self) -> Data {
        let Wanted { driver, handle, .. } = self.wanted;
        Data {
            spec_name: self.wanted.spec_name.clone(),
            handle: handle.clone(),
            driver: driver.clone(),
            node: self.csi.shared.node_name.clone(),
            attachment: attachment_name(handle, driver, &self.csi.shared.node_name),
            lifecycle: self.wanted.lifecycle.name().to_owned(),
            state: None,
        }
    }

    async fn keep(&self, data: &Data) -> Result<(), CsiError> {
        let (dir, data) = (self.place.data.clone(), data.clone());
        blocking(&self.place.data, move || data::write(&dir, &data)).await
    }

    async fn stage(
        &self,
        id: &VolumeId,
        able: &NodeCapabilities,
        group: Option<u32>,
    ) -> Result<Option<PathBuf>, CsiError> {
        let paths = &self.csi.shared.paths;
        let stage = match self.wanted.block {
            false => Stage {
                path: paths.global_mount(&id.driver, &id.handle),
                data: paths.stage_directory(&id.driver, &id.handle),
            },
            true => Stage {
                path: paths.block_staging(&self.wanted.spec_name),
                data: paths.block_data(&self.wanted.spec_name),
            },
        };
        self.csi.with_ledger(|ledger| ledger.stage(id, stage.clone()));
        if !able.stage() {
            return Ok(None);
        }
        let data = match self.wanted.block {
            // The data of a device is that of its publications.
            true => self.data(),
            false => Data { driver: id.driver.clone(), handle: id.handle.clone(), ..Data::default() },
        };
        let (dir, path) = (stage.data.clone(), stage.path.clone());
        blocking(&stage.path, move || {
            data::write(&dir, &data)?;
            make_directory(&path)
        })
        .await?;
        let request = NodeStageVolumeRequest {
            volume_id: id.handle.clone(),
            publish_context: self.context.clone(),
            staging_target_path: text(&stage.path),
            volume_capability: Some(policy::capability(self.wanted, able, group)),
            secrets: self.csi.secret(self.wanted.stage_secret.as_ref()).await?,
            volume_context: self.wanted.attributes.clone(),
        };
        let staged = self.service.node_stage_volume(request).await;
        staged.map_err(|source| CsiError::Call { step: "NodeStageVolume", source })?;
        Ok(Some(stage.path))
    }

    pub(super) async fn publish(
        &self,
        able: &NodeCapabilities,
        staging: Option<&Path>,
        group: Option<u32>,
        pod: &Pod,
        now: Timestamp,
    ) -> Result<(), CsiError> {
        let (volume_context, secrets) = self.csi.told(self.wanted, self.driver, pod, now).await?;
        // The driver makes the target itself; its directory must be there.
        if let Some(above) = self.place.target.parent().map(Path::to_owned) {
            blocking(&self.place.target, move || make_directory(&above)).await?;
        }
        let request = NodePublishVolumeRequest {
            volume_id: self.wanted.handle.clone(),
            publish_context: self.context.clone(),
            staging_target_path: staging.map(text).unwrap_or_default(),
            target_path: text(&self.place.target),
            volume_capability: Some(policy::capability(self.wanted, able, group)),
            readonly: self.wanted.read_only,
            secrets,
            volume_context,
        };
        let published = self.service.node_publish_volume(request).await;
        published.map(drop).map_err(|source| CsiError::Call { step: "NodePublishVolume", source })
    }

    /// A pod's device is found through a link; it is there before the driver is called, so that the device is taken back.
    async fn link(&self) -> Result<(), CsiError> {
        let Some(link) = self.csi.link(self.uid, self.wanted) else { return Ok(()) };
        let target = self.place.target.clone();
        let path = link.clone();
        blocking(&path, move || {
            if let Some(above) = link.parent() {
                make_directory(above)?;
            }
            match std::os::unix::fs::symlink(&target, &link) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other,
            }
        })
        .await
    }

    /// A driver that says that it published has mounted something, or made a device.
    async fn check_target(&self) -> Result<(), CsiError> {
        let (target, block) = (self.place.target.clone(), self.wanted.block);
        let there = blocking(&self.place.target, move || {
            if !block {
                return mounts::is_mounted_at(&target);
            }
            use std::os::unix::fs::FileTypeExt;
            let kind = std::fs::symlink_metadata(&target)?.file_type();
            Ok(kind.is_block_device())
        });
        match there.await? {
            true => Ok(()),
            false => Err(CsiError::NothingMounted {
                driver: self.wanted.driver.clone(),
                handle: self.wanted.handle.clone(),
                path: self.place.target.clone(),
            }),
        }
    }

    /// Removes an empty target that a driver left when it refused.
    async fn clean_target(&self) -> Result<(), CsiError> {
        let target = self.place.target.clone();
        blocking(&self.place.target, move || super::unmount::remove_target(&target)).await
    }

    async fn give_to(&self, group: u32, pod: &Pod) -> Result<(), CsiError> {
        let context = model::spec(pod).security_context.as_ref();
        let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
        let change = GroupChange { group, only_on_mismatch: policy == Some("OnRootMismatch") };
        let target = self.place.target.clone();
        let given = tokio::task::spawn_blocking(move || ownership::apply(&target, change)).await;
        given
            .unwrap_or_else(|e| Err(io::Error::other(e)))
            .map_err(|source| CsiError::Group { handle: self.wanted.handle.clone(), source })
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(PLUGIN_DIRECTORIES).create(path)
}

pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

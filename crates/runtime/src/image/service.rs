//! The image store as the runtime and the kubelet see it.

use std::collections::HashSet;
use std::path::PathBuf;

use async_trait::async_trait;
use ferrite_cri::v1::{
    ImageFsInfoRequest, ImageFsInfoResponse, ImageStatusRequest, ImageStatusResponse, ListImagesRequest,
    ListImagesResponse, PullImageRequest, PullImageResponse, RemoveImageRequest, RemoveImageResponse,
};
use ferrite_cri::{ImageService, Result};

use super::cri::Images;
use crate::rootfs::{ImageConfigView, Rootfs, RootfsError};

#[async_trait]
impl ImageService for Images {
    async fn list_images(&self, request: ListImagesRequest) -> Result<ListImagesResponse> {
        Images::list_images(self, request).await
    }

    async fn image_status(&self, request: ImageStatusRequest) -> Result<ImageStatusResponse> {
        Images::image_status(self, request).await
    }

    async fn pull_image(&self, request: PullImageRequest) -> Result<PullImageResponse> {
        Images::pull_image(self, request).await
    }

    /// The runtime has refused the removal of an image that a container uses before it comes here.
    async fn remove_image(&self, request: RemoveImageRequest) -> Result<RemoveImageResponse> {
        Images::remove_image(self, request, HashSet::new()).await
    }

    async fn image_fs_info(&self, _request: ImageFsInfoRequest) -> Result<ImageFsInfoResponse> {
        let now = jiff::Timestamp::now().as_nanosecond();
        Images::image_fs_info(self, i64::try_from(now).unwrap_or(i64::MAX)).await
    }
}

impl Rootfs for Images {
    fn image(&self, reference_or_id: &str) -> std::result::Result<ImageConfigView, RootfsError> {
        let record = self
            .store()
            .image(reference_or_id)
            .ok_or_else(|| RootfsError::NotFound(reference_or_id.to_owned()))?;
        let id = record.id.to_string();
        let config = record.config.config().clone().unwrap_or_default();
        let list = |values: &Option<Vec<String>>| values.clone().unwrap_or_default();
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        Ok(ImageConfigView {
            reference: record.repo_digests.first().cloned().unwrap_or_else(|| id.clone()),
            id,
            env: list(config.env()),
            entrypoint: list(config.entrypoint()),
            cmd: list(config.cmd()),
            working_dir: text(config.working_dir()),
            user: text(config.user()),
            stop_signal: text(config.stop_signal()),
        })
    }

    fn lower_dirs(&self, id: &str) -> std::result::Result<Vec<PathBuf>, RootfsError> {
        let layers = self.store().lower_dirs(id);
        if layers.is_empty() {
            return Err(RootfsError::NotFound(id.to_owned()));
        }
        Ok(layers)
    }
}

//! Images are the image store's; the runtime only passes the calls on.

use async_trait::async_trait;
use ferrite_cri::v1::*;
use ferrite_cri::{Code, Error, ImageService, Result};

use super::Runtime;

#[async_trait]
impl ImageService for Runtime {
    async fn list_images(&self, request: ListImagesRequest) -> Result<ListImagesResponse> {
        self.inner.config.images.list_images(request).await
    }

    async fn image_status(&self, request: ImageStatusRequest) -> Result<ImageStatusResponse> {
        self.inner.config.images.image_status(request).await
    }

    async fn pull_image(&self, request: PullImageRequest) -> Result<PullImageResponse> {
        self.inner.config.images.pull_image(request).await
    }

    /// Refuses to take an image away under a container, even one that has ended.
    async fn remove_image(&self, request: RemoveImageRequest) -> Result<RemoveImageResponse> {
        let name = request.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        if let Ok(view) = self.inner.config.images.image(&name)
            && let Some(container) = self.inner.index.read().containers.values().find(|c| {
                let record = c.record();
                record.image_id == view.id || record.volume_images.contains(&view.id)
            })
        {
            let message = format!("image {name:?} is in use by container {}", container.id);
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        self.inner.config.images.remove_image(request).await
    }

    async fn image_fs_info(&self, request: ImageFsInfoRequest) -> Result<ImageFsInfoResponse> {
        let mut answer = self.inner.config.images.image_fs_info(request).await?;
        answer.container_filesystems = vec![self.inner.layers_usage().await?];
        Ok(answer)
    }
}

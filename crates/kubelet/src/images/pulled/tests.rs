use super::*;
use crate::images::credentials::Origin;
use crate::testing::FakeRuntime;
use ferrite_cri::v1::AuthConfig;
use std::path::PathBuf;

fn secret(namespace: &str, password: &str) -> Credential {
    let auth = AuthConfig { username: "u".into(), password: password.into(), ..AuthConfig::default() };
    let coordinates =
        Coordinates { namespace: namespace.into(), name: "pull".into(), uid: format!("uid-{namespace}") };
    Credential::new(auth, "", Origin::Secret(coordinates))
}

struct Node {
    dir: tempfile::TempDir,
    clock: Clock,
    runtime: FakeRuntime,
}

impl Node {
    fn new() -> Self {
        let clock = Clock::paused();
        Self { dir: tempfile::tempdir().unwrap(), clock, runtime: FakeRuntime::new(clock) }
    }

    fn open(&self) -> PulledImages {
        PulledImages::open(self.dir.path(), VerificationPolicy::default(), self.clock).unwrap()
    }

    fn files(&self, kind: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path().join("image_manager").join(kind)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

async fn may(images: &PulledImages, id: &str, offered: &[Credential]) -> bool {
    images.may_use("r.io/x:1", id, async || offered.to_vec()).await
}

#[tokio::test(start_paused = true)]
async fn a_secret_opens_an_image_for_those_who_have_it() {
    let node = Node::new();
    let images = node.open();
    assert!(may(&images, "id", &[]).await, "it is a preloaded image");
    let flight = images.begin("r.io/x:1").await.unwrap();
    assert!(!may(&images, "id", &[secret("a", "p")]).await, "the pull is under way");
    flight.succeeded("id", Some(&secret("a", "p"))).await;
    assert!(node.files("pulling").is_empty());
    for images in [images, node.open()] {
        assert!(may(&images, "id", &[secret("a", "p")]).await);
        assert!(!may(&images, "id", &[]).await);
        assert!(!may(&images, "id", &[secret("b", "other")]).await);
        assert!(may(&images, "id", &[secret("c", "p")]).await, "the same credentials in another secret");
        assert!(may(&images, "other", &[]).await, "another image is a preloaded one");
    }
    let images = node.open();
    assert!(
        may(&images, "id", &[secret("c", "changed")]).await,
        "the secret that was recorded has new content"
    );
    let flight = images.begin("r.io/x:1").await.unwrap();
    flight.succeeded("id", None).await;
    assert!(may(&images, "id", &[]).await, "the registry gave it to anybody");
    // A name of another repository may be one that the pod cannot read.
    assert!(!images.may_use("elsewhere.io/x:1", "id", async || vec![]).await);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_nobody_saw_the_end_of_opens_nothing() {
    let node = Node::new();
    let images = node.open();
    drop(images.begin("r.io/x:1").await.unwrap());
    assert!(!may(&images, "id", &[]).await);
    // Another pull that fails says nothing of the first one.
    images.begin("r.io/x:1").await.unwrap().failed().await;
    assert!(!may(&images, "id", &[]).await);
    assert_eq!(node.files("pulling").len(), 1);

    // The kubelet dies and finds the image.
    node.runtime.add_image("r.io/x:1");
    let images = node.open();
    assert!(!may(&images, "sha256:1", &[]).await, "before the runtime was asked");
    images.recover(&node.runtime).await;
    assert!(node.files("pulling").is_empty());
    assert_eq!(node.files("pulled").len(), 1);
    assert!(!may(&images, "sha256:1", &[secret("a", "p")]).await);
    let flight = images.begin("r.io/x:1").await.unwrap();
    flight.succeeded("sha256:1", Some(&secret("a", "p"))).await;
    assert!(may(&images, "sha256:1", &[secret("a", "p")]).await);
    assert!(!may(&images, "sha256:1", &[]).await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_leaves_nothing() {
    let node = Node::new();
    let images = node.open();
    let (one, two) = (images.begin("r.io/x:1").await.unwrap(), images.begin("r.io/x:1").await.unwrap());
    one.failed().await;
    assert!(!may(&images, "id", &[]).await, "another one is under way");
    two.failed().await;
    assert!(node.files("pulling").is_empty() && may(&images, "id", &[]).await);
}

#[tokio::test(start_paused = true)]
async fn records_go_with_their_images() {
    let node = Node::new();
    let images = node.open();
    for id in ["kept", "removed", "new"] {
        images.begin("r.io/x:1").await.unwrap().succeeded(id, Some(&secret("a", "p"))).await;
        if id == "removed" {
            tokio::time::advance(Duration::from_secs(10)).await;
        }
    }
    drop(images.begin("r.io/lost:1").await.unwrap());
    let present = HashSet::from(["kept".to_owned()]);
    images.prune(present.clone(), node.clock.now(), &node.runtime).await;
    assert_eq!(node.files("pulled").len(), 2, "a record of this second may be of an image that came since");
    assert!(!may(&images, "kept", &[]).await && !may(&images, "new", &[]).await);
    assert_eq!(node.files("pulling").len(), 1);
    tokio::time::advance(LOST_PULL + Duration::from_secs(1)).await;
    images.prune(present, node.clock.now(), &node.runtime).await;
    assert!(node.files("pulling").is_empty(), "no runtime is at it any more");
    assert_eq!(node.files("pulled").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_opens_nothing() {
    let node = Node::new();
    let images = node.open();
    images.begin("r.io/x:1").await.unwrap().succeeded("id", None).await;
    let file = node.files("pulled").remove(0);
    std::fs::write(&file, "{").unwrap();
    assert!(!may(&images, "id", &[]).await);
    images.begin("r.io/x:1").await.unwrap().succeeded("id", None).await;
    assert!(may(&images, "id", &[]).await, "a new pull repairs it");
}

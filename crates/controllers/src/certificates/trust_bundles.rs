//! Publishes the authorities of the API server's certificate as the ClusterTrustBundle of a signer.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_client::{Api, Informer, ListSelector, Object, ObjectKey, is_not_found};
use ferrite_component::metrics::{Counter, Family, registry};
use k8s_openapi::ClusterResourceScope;
use k8s_openapi::api::certificates::{v1alpha1, v1beta1};
use kube::api::{DeleteParams, PostParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "kube-apiserver-serving-clustertrustbundle-publisher-controller";
const SIGNER: &str = "kubernetes.io/kube-apiserver-serving";
const RETRY: Duration = Duration::from_secs(5);

pub(crate) fn start(context: &Context) {
    let Some(bundle) = context.config.root_ca.clone().filter(|bundle| !bundle.is_empty()) else { return };
    let own = context.clone();
    context.scope.spawn(async move {
        loop {
            match version(&own.reader).await {
                Ok(Some(Version::Beta)) => return publish::<v1beta1::ClusterTrustBundle>(&own, bundle),
                Ok(Some(Version::Alpha)) => return publish::<v1alpha1::ClusterTrustBundle>(&own, bundle),
                Ok(None) => {
                    tracing::info!(controller = NAME, "not started: the server serves no ClusterTrustBundles");
                    return;
                }
                Err(error) => {
                    tracing::warn!(controller = NAME, %error, "cannot find the version of ClusterTrustBundles");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    });
}

enum Version {
    Beta,
    Alpha,
}

/// The newest version in which the server has bundles.
async fn version(client: &kube::Client) -> Result<Option<Version>, SyncError> {
    for (name, version) in [("v1beta1", Version::Beta), ("v1alpha1", Version::Alpha)] {
        match client.list_api_group_resources(&format!("certificates.k8s.io/{name}")).await {
            Ok(list) if list.resources.iter().any(|resource| resource.name == "clustertrustbundles") => {
                return Ok(Some(version));
            }
            Ok(_) => {}
            Err(error) if is_not_found(&error) => {}
            Err(error) => return Err(error).during(|| "discover ClusterTrustBundles".to_owned()),
        }
    }
    Ok(None)
}

/// A bundle, of either version of the API.
trait Bundle: Object + kube::Resource<DynamicType = (), Scope = ClusterResourceScope> + Clone {
    fn new(name: &str, anchors: &str) -> Self;
    fn anchors(&mut self) -> &mut String;
}

macro_rules! bundle {
    ($version:ident) => {
        impl Bundle for $version::ClusterTrustBundle {
            fn new(name: &str, anchors: &str) -> Self {
                let mut bundle = Self::default();
                bundle.metadata.name = Some(name.to_owned());
                bundle.spec.signer_name = Some(SIGNER.to_owned());
                bundle.spec.trust_bundle = anchors.to_owned();
                bundle
            }

            fn anchors(&mut self) -> &mut String {
                &mut self.spec.trust_bundle
            }
        }
    };
}

bundle!(v1beta1);
bundle!(v1alpha1);

/// A write that brings the signer's bundles to what they should be.
#[derive(Debug, PartialEq)]
enum Step<K> {
    Create(Box<K>),
    Replace(Box<K>),
    /// An older bundle of the signer. As upstream, it goes at once.
    Delete(String),
}

fn publish<K: Bundle>(context: &Context, bundle: String) {
    let selector = ListSelector::fields(format!("spec.signerName={SIGNER}"));
    let bundles: Informer<K> = context.informers.get_selected(selector);
    let client = context.client.clone();
    let name = bundle_name(&bundle);
    let controller = context.controller(NAME);
    // There is one thing to do, whichever bundle changes; it must be done even if there are none.
    let only = ObjectKey::cluster(name.clone());
    controller.queue().add(only.clone());
    controller.watches(&bundles, move |_, queue| queue.add(only.clone())).run(move |_| {
        let existing = bundles.list();
        let steps = decide(existing.iter().map(|bundle| (**bundle).clone()).collect(), &name, &bundle);
        let api: Api<K> = Api::all(client.clone());
        async move {
            let result = act(&api, steps).await;
            let code = match &result {
                Ok(_) => 200,
                Err(SyncError::Api { error: kube::Error::Api(status), .. }) if status.code != 0 => {
                    status.code
                }
                Err(_) => 500,
            };
            SYNCS.with(&[&code.to_string()]).increment();
            result
        }
    });
}

static SYNCS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Number of syncs that occurred in cluster trust bundle publisher.";
    registry().counter("clustertrustbundle_publisher_sync_total", help, &["code"])
});

/// As upstream: a bundle has the signer's name and a hash of its content.
fn bundle_name(bundle: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bundle.as_bytes());
    let hash: String = hash.as_ref().iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("{}:{hash}", SIGNER.replace('/', ":"))
}

fn decide<K: Bundle>(existing: Vec<K>, name: &str, anchors: &str) -> Vec<Step<K>> {
    let (own, others): (Vec<K>, Vec<K>) =
        existing.into_iter().partition(|bundle| bundle.meta().name.as_deref() == Some(name));
    let mut steps = Vec::new();
    match own.into_iter().next() {
        None => steps.push(Step::Create(Box::new(K::new(name, anchors)))),
        Some(mut bundle) => {
            if bundle.anchors() != anchors {
                anchors.clone_into(bundle.anchors());
                steps.push(Step::Replace(Box::new(bundle)));
            }
        }
    }
    steps.extend(others.iter().filter_map(|bundle| bundle.meta().name.clone()).map(Step::Delete));
    steps
}

async fn act<K: Bundle>(api: &Api<K>, steps: Vec<Step<K>>) -> Result<Option<Duration>, SyncError> {
    for step in steps {
        match step {
            Step::Create(bundle) => {
                api.create(&PostParams::default(), &bundle)
                    .await
                    .during(|| "create the bundle".to_owned())?;
            }
            Step::Replace(bundle) => {
                let name = bundle.meta().name.clone().unwrap_or_default();
                let replaced = api.replace(&name, &PostParams::default(), &bundle).await;
                replaced.during(|| format!("replace {name}"))?;
            }
            Step::Delete(name) => match api.delete(&name, &DeleteParams::default()).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error).during(|| format!("delete {name}")),
            },
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1beta1::ClusterTrustBundle;

    #[test]
    fn one_bundle_is_kept_and_older_ones_go() {
        let name = bundle_name("PEM");
        assert_eq!(name, "kubernetes.io:kube-apiserver-serving:384fb9a44fabe158be2757b9");
        let own = ClusterTrustBundle::new(&name, "PEM");
        let other = ClusterTrustBundle::new("kubernetes.io:kube-apiserver-serving:old", "OLD");
        let spoiled = ClusterTrustBundle::new(&name, "SPOILED");
        let gone = Step::Delete("kubernetes.io:kube-apiserver-serving:old".to_owned());
        assert_eq!(decide(vec![], &name, "PEM"), [Step::Create(Box::new(own.clone()))]);
        assert_eq!(decide(vec![own.clone()], &name, "PEM"), []);
        assert_eq!(decide(vec![spoiled, other], &name, "PEM"), [Step::Replace(Box::new(own)), gone]);
    }
}

//! Terms of affinity and anti-affinity between pods, ready to be matched.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodAffinityTerm, WeightedPodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt};

use crate::framework::Store;
use crate::pod_info::PodInfo;

/// A required or preferred pod (anti-)affinity term, ready to be matched.
#[derive(Debug, Clone, PartialEq)]
pub struct AffinityTerm {
    pub selector: Option<Selector>,
    /// Namespaces whose pods it selects.
    pub namespaces: Vec<String>,
    /// It selects pods of all namespaces (an empty namespace selector).
    pub all_namespaces: bool,
    /// It selects pods of the namespaces with these labels, too.
    pub namespace_selector: Option<Selector>,
    pub topology_key: String,
    pub weight: i64,
}

fn selects_all(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
        && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

impl AffinityTerm {
    fn new(term: &PodAffinityTerm, weight: i64, pod: &Pod) -> Self {
        let own = pod.metadata.namespace.clone().unwrap_or_default();
        let mut namespaces = term.namespaces.clone().unwrap_or_default();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.push(own);
        }
        Self {
            selector: term.label_selector.clone().and_then(|selector| selector.try_into().ok()),
            namespaces,
            all_namespaces: term.namespace_selector.as_ref().is_some_and(selects_all),
            namespace_selector: term
                .namespace_selector
                .clone()
                .filter(|selector| !selects_all(selector))
                .and_then(|selector| selector.try_into().ok()),
            topology_key: term.topology_key.clone(),
            weight,
        }
    }

    /// True if the term is about `pod`. A term without a selector is about no pod.
    pub fn matches(&self, pod: &PodInfo, namespaces: &Namespaces<'_>) -> bool {
        self.selector.as_ref().is_some_and(|selector| selector.matches(pod.labels()))
            && self.looks_into(&pod.key.namespace, namespaces)
    }

    fn looks_into(&self, namespace: &str, namespaces: &Namespaces<'_>) -> bool {
        self.all_namespaces
            || self.namespaces.iter().any(|other| other == namespace)
            || self
                .namespace_selector
                .as_ref()
                .is_some_and(|selector| namespaces.match_labels(namespace, selector))
    }
}

/// The labels of namespaces, for terms that select namespaces by them. Each is read once.
#[derive(Debug)]
pub struct Namespaces<'a> {
    store: &'a Store<Namespace>,
    known: RefCell<HashMap<String, BTreeMap<String, String>>>,
}

impl<'a> Namespaces<'a> {
    pub fn new(store: &'a Store<Namespace>) -> Self {
        Self { store, known: RefCell::default() }
    }

    fn match_labels(&self, namespace: &str, selector: &Selector) -> bool {
        let mut known = self.known.borrow_mut();
        if !known.contains_key(namespace) {
            let found = self.store.get(&ObjectKey::cluster(namespace));
            let labels = found.and_then(|found| found.metadata.labels.clone()).unwrap_or_default();
            known.insert(namespace.to_owned(), labels);
        }
        known.get(namespace).is_some_and(|labels| selector.matches(labels))
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct AffinityTerms {
    pub required: Vec<AffinityTerm>,
    pub preferred: Vec<AffinityTerm>,
}

impl AffinityTerms {
    pub(crate) fn new(
        required: Option<&Vec<PodAffinityTerm>>,
        preferred: Option<&Vec<WeightedPodAffinityTerm>>,
        pod: &Pod,
    ) -> Self {
        Self {
            required: required.into_iter().flatten().map(|term| AffinityTerm::new(term, 0, pod)).collect(),
            preferred: preferred
                .into_iter()
                .flatten()
                .map(|term| AffinityTerm::new(&term.pod_affinity_term, term.weight.into(), pod))
                .collect(),
        }
    }
}

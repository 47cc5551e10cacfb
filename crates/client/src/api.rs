//! One resource of the API, typed.
//!
//! The methods and parameters are those of `kube::Api`. The difference is in the compiled code: requests
//! are sent as
//! bytes by code that does not depend on the kind, and [`Object`] decodes the response, so that a call adds no
//! decoder to the crate it stands in.

use std::marker::PhantomData;

use bytes::Bytes;
use ferrite_json::Value;
use k8s_openapi::NamespaceResourceScope;
use kube::Client;
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ListMeta, Request};

use crate::page::Page;
use crate::request::{invalid, send};
use crate::{Object, is_not_found};

/// The request for one page, of whole objects or of their metadata.
pub(crate) fn list_request(
    request: &Request,
    metadata_only: bool,
    params: &ListParams,
) -> Result<http::Request<Vec<u8>>, kube::Error> {
    if metadata_only { request.list_metadata(params) } else { request.list(params) }.map_err(invalid)
}

/// Reads and writes the objects of one kind, in one namespace or in all. Cloning is cheap.
#[derive(Clone)]
pub struct Api<K> {
    client: Client,
    request: Request,
    kind: PhantomData<fn() -> K>,
}

impl<K> std::fmt::Debug for Api<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("path", &self.request.url_path).finish_non_exhaustive()
    }
}

/// A page of objects.
#[derive(Debug)]
pub struct List<K> {
    pub metadata: ListMeta,
    pub items: Vec<K>,
}

impl<K: Object> Api<K> {
    fn new(client: Client, path: String) -> Self {
        Self { client, request: Request::new(path), kind: PhantomData }
    }

    /// The cluster-scoped objects, or those of all namespaces.
    pub fn all(client: Client) -> Self
    where
        K::DynamicType: Default,
    {
        Self::all_with(client, &K::DynamicType::default())
    }

    /// As [`all`](Api::all), for a kind that is known at run time.
    pub fn all_with(client: Client, kind: &K::DynamicType) -> Self {
        Self::new(client, K::url_path(kind, None))
    }

    /// The objects of one namespace.
    pub fn namespaced(client: Client, namespace: &str) -> Self
    where
        K: kube::Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Self::new(client, K::url_path(&K::DynamicType::default(), Some(namespace)))
    }

    /// As [`namespaced`](Api::namespaced), for a kind that is known at run time.
    pub fn namespaced_with(client: Client, namespace: &str, kind: &K::DynamicType) -> Self {
        Self::new(client, K::url_path(kind, Some(namespace)))
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    async fn object(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<K, kube::Error> {
        let body = send(&self.client, request.map_err(invalid)?).await?;
        Ok(K::decode(&body)?)
    }

    pub async fn get(&self, name: &str) -> Result<K, kube::Error> {
        let params = GetParams::default();
        let request = if K::METADATA_ONLY {
            self.request.get_metadata(name, &params)
        } else {
            self.request.get(name, &params)
        };
        self.object(request).await
    }

    /// The object, or nothing if the server has none of this name.
    pub async fn get_opt(&self, name: &str) -> Result<Option<K>, kube::Error> {
        match self.get(name).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One page. An item that does not have the form of its kind fails the call.
    pub async fn list(&self, params: &ListParams) -> Result<List<K>, kube::Error> {
        let request = list_request(&self.request, K::METADATA_ONLY, params)?;
        let body = send(&self.client, request).await?;
        let page = Page::parse(&body)?;
        let items =
            page.items.iter().map(|item| K::decode(item.get().as_bytes())).collect::<Result<_, _>>()?;
        Ok(List { metadata: page.metadata, items })
    }

    pub async fn create(&self, params: &PostParams, object: &K) -> Result<K, kube::Error> {
        self.object(self.request.create(params, object.encode()?)).await
    }

    pub async fn replace(&self, name: &str, params: &PostParams, object: &K) -> Result<K, kube::Error> {
        self.object(self.request.replace(name, params, object.encode()?)).await
    }

    pub async fn replace_status(
        &self,
        name: &str,
        params: &PostParams,
        object: &K,
    ) -> Result<K, kube::Error> {
        self.replace_subresource("status", name, params, object).await
    }

    pub async fn patch(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<K, kube::Error> {
        self.object(self.request.patch(name, params, patch)).await
    }

    pub async fn patch_status(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<K, kube::Error> {
        self.patch_subresource("status", name, params, patch).await
    }

    pub async fn patch_subresource(
        &self,
        subresource: &str,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<K, kube::Error> {
        self.object(self.request.patch_subresource(subresource, name, params, patch)).await
    }

    /// Asks for the deletion. The server answers with the object or with a `Status`: neither is of use to a
    /// caller that must watch for the end anyway.
    pub async fn delete(&self, name: &str, params: &DeleteParams) -> Result<(), kube::Error> {
        send(&self.client, self.request.delete(name, params).map_err(invalid)?).await.map(drop)
    }

    pub async fn delete_collection(
        &self,
        params: &DeleteParams,
        list: &ListParams,
    ) -> Result<(), kube::Error> {
        send(&self.client, self.request.delete_collection(params, list).map_err(invalid)?).await.map(drop)
    }

    pub async fn replace_subresource(
        &self,
        subresource: &str,
        name: &str,
        params: &PostParams,
        object: &K,
    ) -> Result<K, kube::Error> {
        self.object(self.request.replace_subresource(subresource, name, params, object.encode()?)).await
    }

    /// Posts `body` to a subresource of the object and returns the response's body, which has a form of its own.
    pub async fn create_subresource<S: Object>(
        &self,
        subresource: &str,
        name: &str,
        params: &PostParams,
        body: &S,
    ) -> Result<Bytes, kube::Error> {
        let request = self.request.create_subresource(subresource, name, params, body.encode()?);
        send(&self.client, request.map_err(invalid)?).await
    }
}

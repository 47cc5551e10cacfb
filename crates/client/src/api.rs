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
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

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

/// Bytes that a segment of a path may not have as they are. Names of roles have colons.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b':');

/// The name as one segment of a path. Names come from fields that anybody may write, such as owner references: a name must
/// not lead to another resource. As upstream, names that no object can have are refused.
pub fn path_segment(name: &str) -> Result<String, kube::Error> {
    let problem = match name {
        "." | ".." => Some(format!("may not be '{name}'")),
        _ => ['/', '%'].into_iter().find(|c| name.contains(*c)).map(|c| format!("may not contain '{c}'")),
    };
    match problem {
        Some(problem) => {
            let message = format!("invalid resource name {name:?}: [{problem}]");
            Err(invalid(kube::core::request::Error::Validation(message)))
        }
        None => Ok(utf8_percent_encode(name, ESCAPED).to_string()),
    }
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

    async fn body(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Bytes, kube::Error> {
        send(&self.client, request.map_err(invalid)?).await
    }

    async fn object(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<K, kube::Error> {
        Ok(K::decode(&self.body(request).await?)?)
    }

    pub async fn get(&self, name: &str) -> Result<K, kube::Error> {
        let (params, name) = (GetParams::default(), &path_segment(name)?);
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

    /// As [`create`](Api::create), for a caller that has no use for the created object: the response is not decoded.
    pub async fn create_unread(&self, params: &PostParams, object: &K) -> Result<(), kube::Error> {
        self.body(self.request.create(params, object.encode()?)).await.map(drop)
    }

    pub async fn replace(&self, name: &str, params: &PostParams, object: &K) -> Result<K, kube::Error> {
        self.object(self.request.replace(&path_segment(name)?, params, object.encode()?)).await
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
        self.object(self.request.patch(&path_segment(name)?, params, patch)).await
    }

    pub async fn patch_status(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<K, kube::Error> {
        self.patch_subresource("status", name, params, patch).await
    }

    /// As [`patch`](Api::patch), without decoding the response.
    pub async fn patch_unread(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<(), kube::Error> {
        self.body(self.request.patch(&path_segment(name)?, params, patch)).await.map(drop)
    }

    /// As [`patch_status`](Api::patch_status), without decoding the response.
    pub async fn patch_status_unread(
        &self,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<(), kube::Error> {
        self.body(self.request.patch_subresource("status", &path_segment(name)?, params, patch))
            .await
            .map(drop)
    }

    pub async fn patch_subresource(
        &self,
        subresource: &str,
        name: &str,
        params: &PatchParams,
        patch: &Patch<Value>,
    ) -> Result<K, kube::Error> {
        self.object(self.request.patch_subresource(subresource, &path_segment(name)?, params, patch)).await
    }

    /// Asks for the deletion. The server answers with the object or with a `Status`: neither is of use to a
    /// caller that must watch for the end anyway.
    pub async fn delete(&self, name: &str, params: &DeleteParams) -> Result<(), kube::Error> {
        send(&self.client, self.request.delete(&path_segment(name)?, params).map_err(invalid)?)
            .await
            .map(drop)
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
        self.object(self.request.replace_subresource(
            subresource,
            &path_segment(name)?,
            params,
            object.encode()?,
        ))
        .await
    }

    /// Posts `body` to a subresource of the object and returns the response's body, which has a form of its own.
    pub async fn create_subresource<S: Object>(
        &self,
        subresource: &str,
        name: &str,
        params: &PostParams,
        body: &S,
    ) -> Result<Bytes, kube::Error> {
        let name = &path_segment(name)?;
        let request = self.request.create_subresource(subresource, name, params, body.encode()?);
        send(&self.client, request.map_err(invalid)?).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_segment_of_a_path() {
        for (name, expected) in [
            ("web-1.example", Some("web-1.example")),
            ("system:node-proxier", Some("system:node-proxier")),
            ("p?follow=true", Some("p%3Ffollow%3Dtrue")),
            ("a b#c", Some("a%20b%23c")),
            ("é", Some("%C3%A9")),
            ("p:8080/proxy/", None),
            ("..", None),
            (".", None),
            ("a%2Fb", None),
        ] {
            assert_eq!(path_segment(name).ok().as_deref(), expected, "{name}");
        }
    }
}

//! Pages that parts of a component add to its port when they start.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

type Render = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A page: its type, and the function that makes its text of a query. It runs where it may take its time.
#[derive(Clone)]
pub(crate) struct Page {
    pub(crate) content_type: &'static str,
    pub(crate) render: Render,
}

/// The pages of a component beyond health, metrics and configuration, by path. Cloning is cheap and shares them.
#[derive(Clone, Default)]
pub struct Pages {
    pages: Arc<RwLock<BTreeMap<&'static str, Page>>>,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_set().entries(pages.keys()).finish()
    }
}

impl Pages {
    /// Adds a page. `render` gets the query, as it stands in the request.
    pub fn add(
        &self,
        path: &'static str,
        content_type: &'static str,
        render: impl Fn(&str) -> String + Send + Sync + 'static,
    ) {
        let page = Page { content_type, render: Arc::new(render) };
        self.pages.write().unwrap_or_else(PoisonError::into_inner).insert(path, page);
    }

    pub(crate) fn find(&self, path: &str) -> Option<Page> {
        self.pages.read().unwrap_or_else(PoisonError::into_inner).get(path).cloned()
    }

    /// The text of a page, as its port answers it.
    pub fn text(&self, path: &str, query: &str) -> Option<String> {
        self.find(path).map(|page| (page.render)(query))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_by_their_path() {
        let pages = Pages::default();
        pages.clone().add("/debug/x", "text/plain", |query| format!("asked for {query}"));
        assert_eq!(pages.text("/debug/x", "uid=1").as_deref(), Some("asked for uid=1"));
        assert_eq!(pages.text("/debug", ""), None);
    }
}

//! Tokens in files, which change while the server runs.

use super::credentials::{CredentialsError, read};
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// As upstream: a token is read again after this time.
const PERIOD: Duration = Duration::from_secs(60);

struct State {
    token: String,
    read_at: Instant,
}

struct Inner {
    path: PathBuf,
    state: Mutex<State>,
}

/// A token that a file has. Two of the same file are equal.
#[derive(Clone)]
pub(super) struct TokenFile(Arc<Inner>);

impl PartialEq for TokenFile {
    fn eq(&self, other: &Self) -> bool {
        self.0.path == other.0.path
    }
}

impl Eq for TokenFile {}

impl Hash for TokenFile {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.path.hash(state);
    }
}

fn text(path: &std::path::Path) -> Result<String, CredentialsError> {
    read(path).map(|text| text.trim().to_owned())
}

impl TokenFile {
    pub fn open(path: PathBuf) -> Result<Self, CredentialsError> {
        let state = State { token: text(&path)?, read_at: Instant::now() };
        Ok(Self(Arc::new(Inner { path, state: Mutex::new(state) })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token; none where the caller is to read the file before it asks again.
    fn fresh(&self, now: Instant) -> Option<String> {
        let mut state = self.lock();
        if now.duration_since(state.read_at) < PERIOD {
            return Some(state.token.clone());
        }
        // One caller reads; others go on with the token of before.
        state.read_at = now;
        None
    }

    /// The token. A file that cannot be read leaves the token of before.
    pub async fn token(&self) -> String {
        if let Some(token) = self.fresh(Instant::now()) {
            return token;
        }
        let inner = Arc::clone(&self.0);
        let anew = tokio::task::spawn_blocking(move || text(&inner.path)).await;
        let mut state = self.lock();
        match anew {
            Ok(Ok(token)) => state.token = token,
            Ok(Err(error)) => tracing::warn!(%error, "cannot read a token again"),
            Err(_) => {}
        }
        state.token.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_token_is_read_again_after_a_while() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("token");
        std::fs::write(&path, "first\n").expect("a file");
        let file = TokenFile::open(path.clone()).expect("a token");
        std::fs::write(&path, "second\n").expect("a file");
        assert_eq!(file.token().await, "first");
        tokio::time::advance(PERIOD).await;
        assert_eq!(file.token().await, "second");
        std::fs::remove_file(&path).expect("it is there");
        tokio::time::advance(PERIOD).await;
        assert_eq!(file.token().await, "second");
    }
}

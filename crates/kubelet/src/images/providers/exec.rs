//! A plugin run: the request on its standard input, the response on its standard output.

use super::accounts::AccountData;
use super::cache::CacheKeyType;
use super::config::{PluginConfig, duration};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

/// Time limit of a plugin, the same as upstream's.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Longest response a plugin may give.
const MAX_RESPONSE: u64 = 1 << 20;
/// Length of a plugin's error output that is logged.
const MAX_COMPLAINT: u64 = 2 << 10;

/// Credentials by the images they are for.
pub(super) type Credentials = Arc<BTreeMap<String, Auth>>;

#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Auth {
    #[serde(default)]
    pub username: String,
    #[serde(default)]
    pub password: String,
}

/// The request to a plugin.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request<'a> {
    kind: &'static str,
    api_version: &'a str,
    image: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_account_token: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    service_account_annotations: BTreeMap<String, String>,
}

impl<'a> Request<'a> {
    pub(super) fn new(api_version: &'a str, image: &'a str, account: Option<AccountData>) -> Self {
        let (token, annotations) =
            account.map_or((None, BTreeMap::new()), |account| (Some(account.token), account.annotations));
        Self {
            kind: "CredentialProviderRequest",
            api_version,
            image,
            service_account_token: token,
            service_account_annotations: annotations,
        }
    }
}

/// The response of a plugin.
#[derive(Clone)]
pub(super) struct Response {
    pub cache_key_type: CacheKeyType,
    /// `None` leaves it to the configuration.
    pub cache_duration: Option<Duration>,
    pub auth: Credentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wire {
    kind: String,
    #[serde(rename = "apiVersion")]
    _api_version: String,
    cache_key_type: CacheKeyType,
    cache_duration: Option<String>,
    auth: Option<BTreeMap<String, Auth>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Versioned {
    #[serde(default)]
    api_version: String,
}

/// The failure of a plugin. None of these contains the plugin's response: it may be half a secret.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExecError {
    #[error("error execing credential provider plugin {plugin} for image {image}")]
    Start {
        plugin: String,
        image: String,
        #[source]
        source: std::io::Error,
    },
    #[error("error execing credential provider plugin {plugin} for image {image}: {status}: {complaint}")]
    Failed { plugin: String, image: String, status: ExitStatus, complaint: String },
    #[error(
        "error execing credential provider plugin {plugin} for image {image}: it did not end within {TIME_LIMIT:?}"
    )]
    TimeOut { plugin: String, image: String },
    #[error("credential provider plugin {plugin} answered with more than {MAX_RESPONSE} bytes")]
    TooLong { plugin: String },
    #[error(
        "apiVersion from credential plugin response did not match expected apiVersion:{expected}, actual apiVersion:{actual}"
    )]
    Version { expected: String, actual: String },
    #[error("error decoding credential provider plugin response from stdout")]
    Decode,
}

/// Asks a plugin. It has the kubelet's environment and its own on top.
pub(super) async fn run(plugin: &PluginConfig, request: &Request<'_>) -> Result<Response, ExecError> {
    let (name, image) = (plugin.name.clone(), request.image.to_owned());
    let failed = |source| ExecError::Start { plugin: name.clone(), image: image.clone(), source };
    let text = ferrite_json::to_vec(request).map_err(|error| failed(error.into()))?;
    let mut command = Command::new(&plugin.program);
    command.args(&plugin.args).envs(plugin.env.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own: processes that it started can be ended with it.
    command.process_group(0).kill_on_drop(true);
    let mut child = command.spawn().map_err(failed)?;
    let mut group = Group(child.id());
    let ended = tokio::time::timeout(TIME_LIMIT, talk(&mut child, &text)).await;
    if ended.is_ok() {
        // Its number may be somebody else's by now.
        group.0 = None;
    }
    drop(group);
    let Ok(ended) = ended else {
        return Err(ExecError::TimeOut { plugin: name, image });
    };
    let (status, output, complaint) = ended.map_err(failed)?;
    if !status.success() {
        let mut complaint = String::from_utf8_lossy(&complaint).trim().to_owned();
        if let Some(token) = &request.service_account_token {
            complaint = complaint.replace(token.as_str(), "<token>");
        }
        return Err(ExecError::Failed { plugin: name, image, status, complaint });
    }
    if output.len() as u64 > MAX_RESPONSE {
        return Err(ExecError::TooLong { plugin: name });
    }
    decode(&output, &plugin.api_version)
}

/// The processes of a plugin that has not ended; they are ended with the value.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0.and_then(|pid| i32::try_from(pid).ok()) {
            // SAFETY: a signal. The group is named after a child of ours that nobody has waited for yet, so it
            // is still that one.
            unsafe { libc::kill(-leader, libc::SIGKILL) };
        }
    }
}

async fn talk(child: &mut Child, request: &[u8]) -> std::io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A plugin that knows its answer need not read the question.
            let _ = stdin.write_all(request).await;
        }
    };
    // One byte more than may be: that is how too much is noticed.
    let output = read(stdout, MAX_RESPONSE + 1);
    let complaint = read(stderr, MAX_COMPLAINT);
    let ((), output, complaint, status) = tokio::join!(write, output, complaint, child.wait());
    Ok((status?, output?, complaint?))
}

/// Reads up to `limit` bytes, and discards the rest.
async fn read(stream: Option<impl AsyncRead + Unpin>, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    if let Some(mut stream) = stream {
        (&mut stream).take(limit).read_to_end(&mut out).await?;
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    }
    Ok(out)
}

fn decode(output: &[u8], expected: &str) -> Result<Response, ExecError> {
    let Versioned { api_version: actual } =
        ferrite_json::from_slice(output).map_err(|_| ExecError::Decode)?;
    if actual != expected {
        return Err(ExecError::Version { expected: expected.to_owned(), actual });
    }
    let wire: Wire = ferrite_json::from_slice(output).map_err(|_| ExecError::Decode)?;
    if wire.kind != "CredentialProviderResponse" {
        return Err(ExecError::Decode);
    }
    // A time that is over before it begins is as good as none.
    let parse = |text: &String| duration::parse(text).map(duration::not_negative).ok_or(ExecError::Decode);
    Ok(Response {
        cache_key_type: wire.cache_key_type,
        cache_duration: wire.cache_duration.as_ref().map(parse).transpose()?,
        auth: Arc::new(wire.auth.unwrap_or_default()),
    })
}

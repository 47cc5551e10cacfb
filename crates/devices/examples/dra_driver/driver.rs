//! Prepares claims: one CDI file for each.

use ferrite_devices::dra::*;
use ferrite_devices::{Request, Response, Status, async_trait};
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

pub const NAME: &str = "dra.example.com";
/// The vendor and class of CDI devices.
const CDI_KIND: &str = "dra.example.com/claim";

#[derive(Clone)]
pub struct Driver {
    pub node: String,
    pub devices: usize,
    pub cdi: PathBuf,
}

impl Driver {
    async fn kubectl(&self, arguments: &[&str], input: &str) -> io::Result<String> {
        let mut child = Command::new("kubectl")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).await?;
        }
        let output = child.wait_with_output().await?;
        if !output.status.success() {
            return Err(io::Error::other(format!("kubectl {arguments:?}: {}", output.status)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Publishes one slice with all devices of the node.
    pub async fn publish(&self) -> io::Result<()> {
        let node = &self.node;
        let mut slice = format!(
            "apiVersion: resource.k8s.io/v1\nkind: ResourceSlice\nmetadata: {{name: {node}-{NAME}}}\nspec:\n  \
             driver: {NAME}\n  nodeName: {node}\n  pool: {{name: {node}, generation: 1, resourceSliceCount: 1}}\n  devices:\n"
        );
        for index in 0..self.devices {
            slice.push_str(&format!(
                "  - {{name: device-{index}, attributes: {{index: {{int: {index}}}}}}}\n"
            ));
        }
        self.kubectl(&["apply", "-f", "-"], &slice).await.map(drop)
    }

    /// Request, pool and name of each device of the claim, from its status.
    async fn allocated(&self, claim: &Claim) -> io::Result<Vec<(String, String, String)>> {
        let template = "jsonpath={range .status.allocation.devices.results[*]}{.driver} {.request} {.pool} {.device}{\"\\n\"}{end}";
        let arguments =
            ["get", "resourceclaim", &claim.name, "--namespace", &claim.namespace, "--output", template];
        let found = self.kubectl(&arguments, "").await?;
        let mut devices = Vec::new();
        for line in found.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            if let [NAME, request, pool, device] = words[..] {
                // A request of a list is named with its subrequest.
                let request = request.split('/').next().unwrap_or_default();
                devices.push((request.to_owned(), pool.to_owned(), device.to_owned()));
            }
        }
        Ok(devices)
    }

    fn file(&self, claim: &Claim) -> io::Result<PathBuf> {
        // The UID comes from the API: an identity and no path.
        let is_plain = claim.uid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        if claim.uid.is_empty() || !is_plain {
            return Err(io::Error::other("the claim's UID is no UID"));
        }
        Ok(self.cdi.join(format!("{NAME}-{}.json", claim.uid)))
    }

    async fn prepare(&self, claim: &Claim) -> io::Result<Vec<Device>> {
        let mut devices = Vec::new();
        let mut entries = Vec::new();
        for (request, pool, device) in self.allocated(claim).await? {
            let name = format!("{}-{request}-{device}", claim.uid);
            entries
                .push(format!(r#"{{"name":"{name}","containerEdits":{{"env":["DRA_DEVICE={device}"]}}}}"#));
            devices.push(Device {
                request_names: vec![request],
                pool_name: pool,
                device_name: device,
                cdi_device_ids: vec![format!("{CDI_KIND}={name}")],
                share_id: None,
            });
        }
        let file = self.file(claim)?;
        let text =
            format!(r#"{{"cdiVersion":"0.5.0","kind":"{CDI_KIND}","devices":[{}]}}"#, entries.join(","));
        // Readers never see half a file.
        let temporary = file.with_extension("tmp");
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, &file)?;
        println!("prepared {}", claim.name);
        Ok(devices)
    }
}

#[async_trait]
impl dra_plugin_server::DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut answer = NodePrepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let prepared = match self.prepare(&claim).await {
                Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
                Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error: error.to_string() },
            };
            answer.claims.insert(claim.uid, prepared);
        }
        Ok(Response::new(answer))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut answer = NodeUnprepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let removed = self.file(&claim).and_then(|file| match std::fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            });
            println!("unprepared {}", claim.name);
            let error = removed.err().map(|error| error.to_string()).unwrap_or_default();
            answer.claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(answer))
    }
}

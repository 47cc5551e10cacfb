//! Durable writes of pods.

use crate::client::{Client, PODS, Turn, pod, run as run_clients};
use crate::process::Server;
use crate::report::{less_is_better, more_is_better};
use ferrite_json::json;
use std::sync::Arc;

const CLIENTS: [usize; 2] = [1, 64];
/// Clients share connections, as those of one node do.
const CONNECTIONS: usize = 16;
/// Stands in a prepared body where each request says something new.
const NOTE: &str = "@note@";

/// A client's repeated request.
#[derive(Clone, Copy)]
enum Write {
    Create,
    Update,
    StatusPatch,
    Apply,
}

impl Write {
    const ALL: [Self; 4] = [Self::Create, Self::Update, Self::StatusPatch, Self::Apply];

    /// Its name on the command line.
    fn part(self) -> &'static str {
        match self {
            Self::Create => "creates",
            Self::Update => "updates",
            Self::StatusPatch => "patches",
            Self::Apply => "applies",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Create => "durable creates of pods",
            Self::Update => "durable updates of pods",
            Self::StatusPatch => "durable merge patches of pods' status",
            Self::Apply => "durable applies of pods",
        }
    }

    /// The name of the object that a client works on, which is its own.
    fn name(self, clients: usize, worker: usize) -> String {
        format!("{}-{clients}-{worker}", self.part())
    }

    /// Makes the objects to write to, and returns the body that a client sends.
    async fn prepare(self, client: &Client, name: &str) -> String {
        let path = format!("{PODS}/{name}");
        let mut fresh = pod(name);
        fresh["metadata"]["annotations"]["note"] = NOTE.into();
        match self {
            Self::Create => fresh["metadata"]["name"] = NOTE.into(),
            Self::StatusPatch => {
                assert_eq!(client.whole("POST", PODS, fresh.to_string()).await.0, 201);
                return json!({"status": {"phase": "Running", "message": NOTE}}).to_string();
            }
            Self::Update => {
                assert_eq!(client.whole("POST", PODS, fresh.to_string()).await.0, 201);
                fresh = ferrite_json::from_str(&client.text(&path).await).unwrap();
                fresh["metadata"].as_object_mut().unwrap().retain(|key, _| key != "resourceVersion");
            }
            Self::Apply => {}
        }
        fresh.to_string()
    }

    async fn once(self, client: Client, name: &str, body: &str, turn: Turn) {
        let path = format!("{PODS}/{name}");
        let body = body.replace(NOTE, &format!("{name}-{}", turn.number));
        let (code, _) = match self {
            Self::Create => client.whole("POST", PODS, body).await,
            Self::Update => client.whole("PUT", &path, body).await,
            Self::StatusPatch => {
                client.patch("application/merge-patch+json", &format!("{path}/status"), body).await
            }
            Self::Apply => {
                let path = format!("{path}?fieldManager=bench");
                client.patch("application/apply-patch+yaml", &path, body).await
            }
        };
        assert!(code == 200 || code == 201, "{code}");
    }
}

/// Runs the kinds of writes that are wanted.
pub async fn run(wanted: impl Fn(&str) -> bool) {
    let writes: Vec<Write> = Write::ALL.into_iter().filter(|write| wanted(write.part())).collect();
    if writes.is_empty() {
        return;
    }
    let servers = crate::servers().await;
    for write in writes {
        for clients in CLIENTS {
            let (mut rates, mut costs) = (Vec::new(), Vec::new());
            for server in &servers {
                let bodies = bodies(server, write, clients).await;
                let (connections, streams) = (clients.min(CONNECTIONS), clients.div_ceil(CONNECTIONS));
                let done = run_clients(server, connections, streams, move |client, turn| {
                    let bodies = Arc::clone(&bodies);
                    async move {
                        let name = write.name(clients, turn.worker);
                        write.once(client, &name, &bodies[turn.worker], turn).await;
                    }
                })
                .await;
                rates.push(done.per_second());
                costs.push(done.microseconds_of_processor());
            }
            let what = format!("{}, {clients} clients", write.what());
            more_is_better(&format!("{what} (/s)"), &rates);
            less_is_better(&format!("{what} (µs of processor)"), &costs);
        }
    }
}

async fn bodies(server: &Server, write: Write, clients: usize) -> Arc<Vec<String>> {
    let client = server.client().await;
    let mut bodies = Vec::new();
    for worker in 0..clients {
        bodies.push(write.prepare(&client, &write.name(clients, worker)).await);
    }
    Arc::new(bodies)
}

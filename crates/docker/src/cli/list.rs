//! `ps` and `images`.

use clap::Args;
use serde_json::{Value, json};

use super::table::{self, Columns};
use super::{Failure, Outcome, say};
use crate::engine::{Engine, ImageSummary, View};
use crate::ports;
use crate::record::Status;
use crate::units;

#[derive(Debug, Args)]
pub struct Ps {
    /// Show all containers (default shows just running)
    #[arg(short, long)]
    all: bool,
    /// Only display container IDs
    #[arg(short, long)]
    quiet: bool,
    /// Don't truncate output
    #[arg(long)]
    no_trunc: bool,
    /// Show the latest created container (includes all states)
    #[arg(short, long)]
    latest: bool,
    /// Show n last created containers (includes all states)
    #[arg(short = 'n', long, default_value_t = -1, allow_hyphen_values = true)]
    last: i64,
    /// Display total file sizes
    #[arg(short, long)]
    size: bool,
    /// Filter output based on conditions provided
    #[arg(short, long)]
    filter: Vec<String>,
    /// Pretty-print containers using a Go template
    #[arg(long)]
    format: Option<String>,
}

const PS: Columns = &[
    ("CONTAINER ID", "ID"),
    ("IMAGE", "Image"),
    ("COMMAND", "Command"),
    ("CREATED", "RunningFor"),
    ("STATUS", "Status"),
    ("PORTS", "Ports"),
    ("NAMES", "Names"),
];

const PS_SIZE: Columns = &[
    ("CONTAINER ID", "ID"),
    ("IMAGE", "Image"),
    ("COMMAND", "Command"),
    ("CREATED", "RunningFor"),
    ("STATUS", "Status"),
    ("PORTS", "Ports"),
    ("NAMES", "Names"),
    ("SIZE", "Size"),
];

const PS_HEADINGS: &[(&str, &str)] = &[
    ("ID", "CONTAINER ID"),
    ("Image", "IMAGE"),
    ("Command", "COMMAND"),
    ("CreatedAt", "CREATED AT"),
    ("RunningFor", "CREATED"),
    ("Status", "STATUS"),
    ("State", "STATE"),
    ("Ports", "PORTS"),
    ("Names", "NAMES"),
    ("Labels", "LABELS"),
    ("Mounts", "MOUNTS"),
    ("Networks", "NETWORKS"),
    ("Size", "SIZE"),
];

/// The STATUS column.
fn status(view: &View, now: i64) -> String {
    let state = &view.state;
    let ago = |moment: i64| units::human_duration((now - moment) / 1_000_000_000);
    match state.status {
        Status::Created => "Created".into(),
        Status::Running => format!("Up {}", ago(state.started_at)),
        Status::Paused => format!("Up {} (Paused)", ago(state.started_at)),
        Status::Restarting => format!("Restarting ({}) {} ago", state.exit_code, ago(state.finished_at)),
        Status::Exited => format!("Exited ({}) {} ago", state.exit_code, ago(state.finished_at)),
        Status::Dead => "Dead".into(),
    }
}

fn shorten(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    text.chars().take(length - 1).chain(['…']).collect()
}

fn row(engine: &Engine, view: &View, options: &Ps, now: i64) -> Value {
    let container = &view.container;
    let command = container.config.command().join(" ");
    let whole = options.no_trunc;
    let mounts: Vec<String> = container
        .mounts
        .iter()
        .map(
            |mount| {
                if mount.name.is_empty() { mount.source.display().to_string() } else { mount.name.clone() }
            },
        )
        .map(|name| if whole { name } else { shorten(&name, 15) })
        .collect();
    let labels: Vec<String> =
        container.config.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let exposed = if view.state.status.runs() { container.config.exposed.as_slice() } else { &[] };
    let size = if options.size {
        format!("{} (virtual {})", units::human_size(engine.written(&container.id)), {
            let image = engine.image(&container.image_id).map_or(0, |image| image.size);
            units::human_size(image + engine.written(&container.id))
        })
    } else {
        "0B".into()
    };
    json!({
        "ID": if whole { container.id.clone() } else { container.id.chars().take(12).collect() },
        "Image": container.config.image,
        "Command": format!("\"{}\"", if whole { command } else { shorten(&command, 20) }),
        "CreatedAt": units::created_at(container.created),
        "RunningFor": format!("{} ago", units::human_duration((now - container.created) / 1_000_000_000)),
        "Status": status(view, now),
        "State": view.state.status.name(),
        "Ports": ports::describe(&view.state.ports, exposed),
        "Names": container.name,
        "Labels": labels.join(","),
        "__labels": container.config.labels,
        "Mounts": mounts.join(","),
        "Networks": engine.network_names(container).join(","),
        "LocalVolumes": container.mounts.iter().filter(|mount| !mount.name.is_empty()).count().to_string(),
        "Size": size,
    })
}

pub(super) fn split_filters(filters: &[String], known: &[&str]) -> Result<Vec<(String, String)>, Failure> {
    filters
        .iter()
        .map(|filter| {
            let (key, value) = filter
                .split_once('=')
                .ok_or_else(|| Failure::from("bad format of filter (expected name=value)"))?;
            if !known.contains(&key) {
                return Err(format!("Error response from daemon: Invalid filter '{key}'").into());
            }
            Ok((key.to_owned(), value.to_owned()))
        })
        .collect()
}

pub(super) fn has_label(labels: &std::collections::BTreeMap<String, String>, wanted: &str) -> bool {
    match wanted.split_once('=') {
        Some((key, value)) => labels.get(key).is_some_and(|known| known == value),
        None => labels.contains_key(wanted),
    }
}

fn matches(view: &View, key: &str, value: &str, all: &[View]) -> bool {
    let container = &view.container;
    let created = |name: &str| {
        let named = |v: &&View| v.container.name == name || v.container.id.starts_with(name);
        all.iter().find(named).map(|view| view.container.created)
    };
    match key {
        "id" => container.id.starts_with(value),
        "name" => {
            container.name.contains(value.trim_start_matches(['^', '/']).trim_end_matches('$'))
                && (!value.starts_with('^')
                    || container.name.starts_with(value.trim_start_matches(['^', '/']).trim_end_matches('$')))
                && (!value.ends_with('$')
                    || container.name.ends_with(value.trim_start_matches(['^', '/']).trim_end_matches('$')))
        }
        "label" => has_label(&container.config.labels, value),
        "status" => view.state.status.name() == value,
        "exited" => view.state.status == Status::Exited && value.parse() == Ok(view.state.exit_code),
        "ancestor" => {
            let tagged =
                |name: &str| if name.contains(':') { name.to_owned() } else { format!("{name}:latest") };
            tagged(&container.config.image) == tagged(value)
                || container
                    .image_id
                    .trim_start_matches("sha256:")
                    .starts_with(value.trim_start_matches("sha256:"))
        }
        "network" => {
            container.host.network == value || container.networks.iter().any(|joined| joined.network == value)
        }
        "volume" => container.mounts.iter().any(|m| m.name == value || m.destination == value),
        "publish" | "expose" => container
            .config
            .exposed
            .iter()
            .any(|(port, protocol)| value == port.to_string() || value == format!("{port}/{protocol}")),
        "since" => created(value).is_some_and(|moment| container.created > moment),
        "before" => created(value).is_some_and(|moment| container.created < moment),
        _ => false,
    }
}

impl Ps {
    pub fn run(self, engine: &Engine) -> Outcome {
        const KNOWN: &[&str] = &[
            "id", "name", "label", "status", "exited", "ancestor", "network", "volume", "publish", "expose",
            "since", "before",
        ];
        let mut filters = split_filters(&self.filter, KNOWN)?;
        for (_, value) in filters.iter_mut().filter(|(key, _)| key == "network") {
            if let Ok(network) = engine.find_network(value)
                && network.driver == "bridge"
            {
                *value = network.id;
            }
        }
        let last = if self.latest { 1 } else { self.last };
        let by_state = filters.iter().any(|(key, _)| matches!(key.as_str(), "status" | "exited"));
        let all = engine.list()?;
        let mut views: Vec<&View> = all
            .iter()
            .filter(|view| {
                self.all
                    || last >= 0
                    || by_state
                    || view.state.status.runs()
                    || view.state.status == Status::Restarting
            })
            .filter(|view| {
                // Different keys all have to hold; of several values of one key any does.
                filters.iter().all(|(key, _)| {
                    filters.iter().filter(|(k, _)| k == key).any(|(_, value)| matches(view, key, value, &all))
                })
            })
            .collect();
        if let Ok(last) = usize::try_from(last) {
            views.truncate(last);
        }
        if self.quiet {
            for view in views {
                let id = &view.container.id;
                say(if self.no_trunc { id } else { &id[..12] })?;
            }
            return Ok(0);
        }
        let now = units::now();
        let rows: Vec<Value> = views.iter().map(|view| row(engine, view, &self, now)).collect();
        table::show(&rows, self.format.as_deref(), if self.size { PS_SIZE } else { PS }, PS_HEADINGS)?;
        Ok(0)
    }
}

#[derive(Debug, Args)]
pub struct Images {
    /// Show all images (default hides intermediate images)
    #[arg(short, long)]
    all: bool,
    /// Only show image IDs
    #[arg(short, long)]
    quiet: bool,
    /// Don't truncate output
    #[arg(long)]
    no_trunc: bool,
    /// Show digests
    #[arg(long)]
    digests: bool,
    /// Filter output based on conditions provided
    #[arg(short, long)]
    filter: Vec<String>,
    /// Pretty-print images using a Go template
    #[arg(long)]
    format: Option<String>,
    /// Only images of this repository or name
    repository: Option<String>,
}

const IMAGES: Columns = &[
    ("REPOSITORY", "Repository"),
    ("TAG", "Tag"),
    ("IMAGE ID", "ID"),
    ("CREATED", "CreatedSince"),
    ("SIZE", "Size"),
];

const IMAGES_DIGESTS: Columns = &[
    ("REPOSITORY", "Repository"),
    ("TAG", "Tag"),
    ("DIGEST", "Digest"),
    ("IMAGE ID", "ID"),
    ("CREATED", "CreatedSince"),
    ("SIZE", "Size"),
];

const IMAGE_HEADINGS: &[(&str, &str)] = &[
    ("Repository", "REPOSITORY"),
    ("Tag", "TAG"),
    ("Digest", "DIGEST"),
    ("ID", "IMAGE ID"),
    ("CreatedSince", "CREATED"),
    ("CreatedAt", "CREATED AT"),
    ("Size", "SIZE"),
];

fn image_matches(image: &ImageSummary, key: &str, value: &str, all: &[ImageSummary]) -> bool {
    let created = |name: &str| {
        let name = if name.contains(':') { name.to_owned() } else { format!("{name}:latest") };
        let named = |i: &&ImageSummary| format!("{}:{}", i.repository, i.tag) == name;
        all.iter().find(named).map(|image| image.created)
    };
    match key {
        "dangling" => (image.reference.is_empty()) == matches!(value, "true" | "1"),
        "label" => has_label(&image.labels, value),
        "reference" => {
            let full = format!("{}:{}", image.repository, image.tag);
            match value.split_once('*') {
                Some((before, after)) => {
                    let fits = |text: &str| text.starts_with(before) && text.ends_with(after);
                    fits(&full) || fits(&image.repository)
                }
                None => full == value || image.repository == value,
            }
        }
        "since" => created(value).is_some_and(|moment| image.created > moment),
        "before" => created(value).is_some_and(|moment| image.created < moment),
        _ => false,
    }
}

impl Images {
    pub fn run(self, engine: &Engine) -> Outcome {
        let filters = split_filters(&self.filter, &["dangling", "label", "reference", "since", "before"])?;
        let all = engine.images()?;
        let wanted = |image: &&ImageSummary| {
            let named = self.repository.as_ref().is_none_or(|name| match name.rsplit_once(':') {
                Some((repository, tag)) if !tag.contains('/') => {
                    image.repository == repository && image.tag == tag
                }
                _ => image.repository == *name,
            });
            named && filters.iter().all(|(key, value)| image_matches(image, key, value, &all))
        };
        let images: Vec<&ImageSummary> = all.iter().filter(wanted).collect();
        let id = |image: &ImageSummary| {
            if self.no_trunc {
                image.id.clone()
            } else {
                image.id.trim_start_matches("sha256:").chars().take(12).collect()
            }
        };
        if self.quiet {
            let mut seen = std::collections::BTreeSet::new();
            for image in images {
                if seen.insert(&image.id) {
                    say(&id(image))?;
                }
            }
            return Ok(0);
        }
        let now = units::now();
        let rows: Vec<Value> = images
            .iter()
            .map(|image| {
                let age = (now - image.created) / 1_000_000_000;
                json!({
                    "Repository": image.repository, "Tag": image.tag, "Digest": image.digest, "ID": id(image),
                    "CreatedSince": if image.created == 0 { "N/A".to_owned() } else { format!("{} ago", units::human_duration(age)) },
                    "CreatedAt": units::created_at(image.created),
                    "Size": units::human_size(image.size),
                    "VirtualSize": units::human_size(image.size),
                    "Containers": "N/A",
                    "__labels": image.labels,
                })
            })
            .collect();
        let columns = if self.digests { IMAGES_DIGESTS } else { IMAGES };
        table::show(&rows, self.format.as_deref(), columns, IMAGE_HEADINGS)?;
        Ok(0)
    }
}

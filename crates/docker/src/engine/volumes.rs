//! Volumes: directories that outlive containers.

use std::fs;
use std::path::PathBuf;

use super::{Engine, EngineError, Result};
use crate::names;

/// Where a volume's files are, below its directory.
const DATA: &str = "_data";

/// A volume by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub name: String,
    pub mountpoint: PathBuf,
}

impl Engine {
    fn volume(&self, name: &str) -> Volume {
        Volume { name: name.to_owned(), mountpoint: self.paths.volumes().join(name).join(DATA) }
    }

    /// Makes a volume unless it is there; answers whether it is new.
    pub fn create_volume(&self, name: &str) -> Result<(Volume, bool)> {
        if !names::is_valid(name) {
            return Err(EngineError::Invalid(format!(
                "create {name}: {name:?} includes invalid characters for a local volume name, only \
                 \"[a-zA-Z0-9][a-zA-Z0-9_.-]\" are allowed. If you intended to pass a host directory, use absolute path"
            )));
        }
        let volume = self.volume(name);
        let new = !volume.mountpoint.exists();
        fs::create_dir_all(&volume.mountpoint).map_err(EngineError::io(format!("create volume {name}")))?;
        Ok((volume, new))
    }

    pub fn volumes(&self) -> Result<Vec<Volume>> {
        let entries = fs::read_dir(self.paths.volumes()).map_err(EngineError::io("list volumes"))?;
        let mut all: Vec<Volume> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().map(|name| self.volume(name)))
            .filter(|volume| volume.mountpoint.exists())
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub fn find_volume(&self, name: &str) -> Result<Volume> {
        let volume = self.volume(name);
        if names::is_valid(name) && volume.mountpoint.exists() {
            Ok(volume)
        } else {
            Err(EngineError::NoSuchVolume(name.to_owned()))
        }
    }

    /// Removes a volume no container has.
    pub fn remove_volume(&self, name: &str) -> Result<()> {
        self.find_volume(name)?;
        let user = self.list()?.into_iter().find(|view| view.container.mounts.iter().any(|m| m.name == name));
        if let Some(view) = user {
            let id = view.container.id;
            return Err(EngineError::Conflict(format!("remove {name}: volume is in use - [{id}]")));
        }
        ferrite_hostfs::remove_tree(&self.paths.volumes().join(name))
            .map_err(EngineError::io(format!("remove volume {name}")))
    }
}

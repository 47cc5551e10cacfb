//! Which variant of a multi-platform image fits this machine.

use std::fmt;

use oci_spec::image::{Descriptor, ImageIndex};

use super::{Digest, ImageError};

/// An operating system and a processor, in the words images use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    pub variant: Option<String>,
}

impl Platform {
    /// The machine this program was built for.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", Some("v8")),
            "arm" => ("arm", Some("v7")),
            "powerpc64" => ("ppc64le", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: variant.map(Into::into) }
    }

    /// Rates how well a descriptor fits: `None` if it does not, lower is better.
    fn rank(&self, descriptor: &Descriptor) -> Option<u8> {
        let platform = descriptor.platform().as_ref()?;
        let matches =
            platform.os().to_string() == self.os && platform.architecture().to_string() == self.architecture;
        if !matches {
            return None;
        }
        match (platform.variant().as_deref(), self.variant.as_deref()) {
            (offered, wanted) if offered == wanted => Some(0),
            // No variant means the baseline of the architecture; v8 is the baseline of arm64.
            (None, _) | (Some("v8"), None) => Some(1),
            (Some(offered), Some(wanted)) if self.architecture == "arm" && offered < wanted => Some(2),
            _ => None,
        }
    }

    /// The digest of the variant in `index` that fits best.
    pub(crate) fn choose(&self, reference: &str, index: &ImageIndex) -> Result<Digest, ImageError> {
        let best = index
            .manifests()
            .iter()
            .filter_map(|descriptor| Some((self.rank(descriptor)?, descriptor)))
            .min_by_key(|(rank, _)| *rank);
        let only = match index.manifests().as_slice() {
            // An index of one manifest that names no platform is that manifest.
            [only] if only.platform().is_none() => Some(only),
            _ => None,
        };
        match best.map(|(_, descriptor)| descriptor).or(only) {
            Some(descriptor) => descriptor.digest().to_string().parse(),
            None => {
                let mut offered: Vec<String> = index
                    .manifests()
                    .iter()
                    .filter_map(|d| d.platform().as_ref())
                    .map(|p| format!("{}/{}", p.os(), p.architecture()))
                    .filter(|p| p != "unknown/unknown")
                    .take(32)
                    .collect();
                offered.dedup();
                Err(ImageError::NoPlatform {
                    reference: reference.to_owned(),
                    platform: self.to_string(),
                    offered: if offered.is_empty() { "nothing".into() } else { offered.join(", ") },
                })
            }
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(platforms: &[&str]) -> ImageIndex {
        let manifests: Vec<_> = platforms
            .iter()
            .enumerate()
            .map(|(n, platform)| {
                let mut descriptor = serde_json::json!({
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "digest": format!("sha256:{n:064}"), "size": 2,
                });
                let mut parts = platform.split('/');
                if let (Some(os), Some(arch)) = (parts.next(), parts.next()) {
                    descriptor["platform"] = serde_json::json!({"os": os, "architecture": arch});
                    if let Some(variant) = parts.next() {
                        descriptor["platform"]["variant"] = variant.into();
                    }
                }
                descriptor
            })
            .collect();
        serde_json::from_value(serde_json::json!({"schemaVersion": 2, "manifests": manifests})).unwrap()
    }

    #[test]
    fn choice() {
        let rows: &[(&str, &[&str], Option<usize>)] = &[
            ("linux/amd64", &["linux/arm64", "linux/amd64", "unknown/unknown"], Some(1)),
            ("linux/amd64", &["linux/arm64"], None),
            ("linux/amd64", &["windows/amd64"], None),
            ("linux/amd64", &["linux/amd64/v3", "linux/amd64"], Some(1)),
            ("linux/arm64/v8", &["linux/arm64"], Some(0)),
            ("linux/arm64/v8", &["linux/arm64", "linux/arm64/v8"], Some(1)),
            ("linux/arm/v7", &["linux/arm/v5", "linux/arm/v7"], Some(1)),
            ("linux/arm/v7", &["linux/arm/v6"], Some(0)),
            ("linux/amd64", &[""], Some(0)),
            ("linux/amd64", &["", ""], None),
            ("linux/amd64", &[], None),
        ];
        for (want, offered, expected) in rows {
            let parts: Vec<_> = want.split('/').collect();
            let platform = Platform {
                os: parts[0].into(),
                architecture: parts[1].into(),
                variant: parts.get(2).map(|v| (*v).into()),
            };
            let got = platform
                .choose("x", &index(offered))
                .ok()
                .map(|digest| digest.hex().parse::<usize>().unwrap());
            assert_eq!(got, *expected, "{want} of {offered:?}");
        }
    }
}

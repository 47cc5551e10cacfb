//! Values that a cluster has once for each IP family: addresses and ranges.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ferrite_nft::IpFamily;
use serde::{Deserialize, Serialize};

use crate::Cidr;

/// A value of one IP family.
pub trait OfFamily {
    fn family(&self) -> IpFamily;
}

impl OfFamily for IpAddr {
    fn family(&self) -> IpFamily {
        IpFamily::of(*self)
    }
}

impl OfFamily for Cidr {
    fn family(&self) -> IpFamily {
        Cidr::family(*self)
    }
}

/// One value for each IP family that is in use, the primary family's first. Never empty, never two of one family.
///
/// Its text is a list with a comma, as upstream's flags and files have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[serde(bound(
    serialize = "T: fmt::Display + Clone",
    deserialize = "T: OfFamily + FromStr + fmt::Display, T::Err: fmt::Display"
))]
pub struct PerFamily<T> {
    primary: T,
    secondary: Option<T>,
}

/// The addresses of a pod or a node.
pub type Addresses = PerFamily<IpAddr>;
/// The ranges of a node's pods, of all pods or of all Services.
pub type Cidrs = PerFamily<Cidr>;

/// Why values are not one for each family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FamiliesError {
    #[error("no address or range is given")]
    Empty,
    #[error("there may be one of IPv4 and one of IPv6, not {0:?}")]
    SameFamily(String),
    #[error("{0}")]
    Part(String),
}

impl<T: OfFamily> PerFamily<T> {
    /// Values of one family alone.
    pub fn single(value: T) -> Self {
        Self { primary: value, secondary: None }
    }

    /// The first value is the primary family's.
    pub fn new(values: impl IntoIterator<Item = T>) -> Result<Self, FamiliesError>
    where
        T: fmt::Display,
    {
        let mut values = values.into_iter();
        let primary = values.next().ok_or(FamiliesError::Empty)?;
        let secondary = values.next();
        let mut more = secondary.iter().filter(|second| second.family() == primary.family());
        if let Some(wrong) = more.next().map(ToString::to_string).or(values.next().map(|v| v.to_string())) {
            return Err(FamiliesError::SameFamily(format!("{primary},{wrong}")));
        }
        Ok(Self { primary, secondary })
    }

    pub fn primary(&self) -> &T {
        &self.primary
    }

    /// The value of a family, if it is in use.
    pub fn of(&self, family: IpFamily) -> Option<&T> {
        self.iter().find(|value| value.family() == family)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        std::iter::once(&self.primary).chain(&self.secondary)
    }

    /// The families in use, the primary one first.
    pub fn families(&self) -> Vec<IpFamily> {
        self.iter().map(OfFamily::family).collect()
    }

    /// Another value for each family; none if a family has none.
    pub fn try_map<U: OfFamily>(&self, with: impl Fn(&T) -> Option<U>) -> Option<PerFamily<U>> {
        let secondary = match &self.secondary {
            Some(value) => Some(with(value)?),
            None => None,
        };
        Some(PerFamily { primary: with(&self.primary)?, secondary })
    }
}

impl<T: fmt::Display> fmt::Display for PerFamily<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.primary)?;
        match &self.secondary {
            Some(value) => write!(f, ",{value}"),
            None => Ok(()),
        }
    }
}

impl<T> FromStr for PerFamily<T>
where
    T: OfFamily + FromStr + fmt::Display,
    T::Err: fmt::Display,
{
    type Err = FamiliesError;

    fn from_str(text: &str) -> Result<Self, FamiliesError> {
        let part = |text: &str| text.trim().parse().map_err(|e: T::Err| FamiliesError::Part(e.to_string()));
        let parts = text.split(',').filter(|part| !part.trim().is_empty()).map(part);
        Self::new(parts.collect::<Result<Vec<T>, _>>()?)
    }
}

impl<T> TryFrom<String> for PerFamily<T>
where
    T: OfFamily + FromStr + fmt::Display,
    T::Err: fmt::Display,
{
    type Error = FamiliesError;

    fn try_from(text: String) -> Result<Self, FamiliesError> {
        text.parse()
    }
}

impl<T: fmt::Display> From<PerFamily<T>> for String {
    fn from(values: PerFamily<T>) -> Self {
        values.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_for_each_family() {
        for (text, want) in [
            ("10.0.0.0/8", Some(vec![IpFamily::V4])),
            ("fd00::/8", Some(vec![IpFamily::V6])),
            ("10.0.0.0/8,fd00::/8", Some(vec![IpFamily::V4, IpFamily::V6])),
            ("fd00::/8,10.0.0.0/8", Some(vec![IpFamily::V6, IpFamily::V4])),
            ("", None),
            (",", None),
            ("10.0.0.0/8,11.0.0.0/8", None),
            ("10.0.0.0/8,fd00::/8,fd01::/16", None),
            ("10.0.0.0/8,x", None),
        ] {
            let parsed = text.parse::<Cidrs>();
            assert_eq!(parsed.as_ref().ok().map(PerFamily::families), want, "{text}");
            if let Ok(cidrs) = parsed {
                assert_eq!(cidrs.to_string(), text);
                let json = serde_json::to_string(&cidrs).unwrap();
                assert_eq!(serde_json::from_str::<Cidrs>(&json).unwrap(), cidrs);
            }
        }
        let both: Cidrs = "10.0.0.0/8, fd00::/8".parse().unwrap();
        let first: Addresses = both.try_map(|range| range.nth(1)).unwrap();
        assert_eq!(first.to_string(), "10.0.0.1,fd00::1");
        assert_eq!(first.of(IpFamily::V6).unwrap().to_string(), "fd00::1");
    }
}

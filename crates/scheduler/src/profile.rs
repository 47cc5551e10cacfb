//! Which plugins serve the pods that name a scheduler, at which extension points.

use std::collections::{BTreeMap, BTreeSet};

use crate::framework::{Plugin, PluginArgs};
use crate::plugins::PLUGINS;
use crate::snapshot::DEFAULT_SCHEDULER;

/// A point of a pod's way to a node at which plugins act.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExtensionPoint {
    PreEnqueue,
    QueueSort,
    PreFilter,
    Filter,
    PostFilter,
    PreScore,
    Score,
    Reserve,
    Permit,
    PreBind,
    Bind,
    PostBind,
}

impl ExtensionPoint {
    pub const ALL: &'static [Self] = &[
        Self::PreEnqueue,
        Self::QueueSort,
        Self::PreFilter,
        Self::Filter,
        Self::PostFilter,
        Self::PreScore,
        Self::Score,
        Self::Reserve,
        Self::Permit,
        Self::PreBind,
        Self::Bind,
        Self::PostBind,
    ];

    /// The point's name, as upstream spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreEnqueue => "PreEnqueue",
            Self::QueueSort => "QueueSort",
            Self::PreFilter => "PreFilter",
            Self::Filter => "Filter",
            Self::PostFilter => "PostFilter",
            Self::PreScore => "PreScore",
            Self::Score => "Score",
            Self::Reserve => "Reserve",
            Self::Permit => "Permit",
            Self::PreBind => "PreBind",
            Self::Bind => "Bind",
            Self::PostBind => "PostBind",
        }
    }

    /// True if the plugin takes part in the point.
    pub fn is_extended_by(self, plugin: &dyn Plugin) -> bool {
        match self {
            Self::PreEnqueue => plugin.pre_enqueue().is_some(),
            Self::QueueSort => plugin.queue_sort().is_some(),
            Self::PreFilter => plugin.pre_filter().is_some(),
            Self::Filter => plugin.filter().is_some(),
            Self::PostFilter => plugin.post_filter().is_some(),
            Self::PreScore => plugin.pre_score().is_some(),
            Self::Score => plugin.score().is_some(),
            Self::Reserve => plugin.reserve().is_some(),
            Self::Permit => plugin.permit().is_some(),
            Self::PreBind => plugin.pre_bind().is_some(),
            Self::Bind => plugin.bind().is_some(),
            Self::PostBind => plugin.post_bind().is_some(),
        }
    }
}

/// Plugins enabled and disabled at one extension point, or at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginSet {
    /// Names with the weight of their score; zero is a weight that was not given.
    pub enabled: Vec<(String, i64)>,
    /// Names; `*` disables all default plugins.
    pub disabled: Vec<String>,
}

impl PluginSet {
    fn disables(&self, name: &str) -> bool {
        self.disabled.iter().any(|disabled| disabled == name)
    }

    /// The defaults with `self` laid over them: a default that `self` enables again takes the weight that `self` gives and
    /// keeps its place.
    fn over(&self, defaults: &Self) -> Self {
        let mut disabled = self.disabled.clone();
        disabled.extend(defaults.disabled.iter().cloned());
        let merged = Self { enabled: Vec::new(), disabled };
        let mut replaced = BTreeSet::new();
        let mut enabled = Vec::new();
        if !merged.disables("*") {
            for default in defaults.enabled.iter().filter(|(name, _)| !merged.disables(name)) {
                // As upstream: of several entries with one name the last one counts.
                match self.enabled.iter().rposition(|(name, _)| *name == default.0) {
                    Some(index) => {
                        replaced.insert(index);
                        enabled.push(self.enabled[index].clone());
                    }
                    None => enabled.push(default.clone()),
                }
            }
        }
        let rest = self.enabled.iter().enumerate().filter(|(index, _)| !replaced.contains(index));
        enabled.extend(rest.map(|(_, plugin)| plugin.clone()));
        Self { enabled, ..merged }
    }
}

/// The plugin sets of a profile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginSets {
    /// For every extension point that a plugin takes part in.
    pub multi_point: PluginSet,
    pub points: BTreeMap<ExtensionPoint, PluginSet>,
}

impl PluginSets {
    /// The sets of the default profile.
    pub fn defaults() -> Self {
        let enabled = PLUGINS.iter().map(|entry| (entry.name.to_owned(), entry.weight)).collect();
        Self { multi_point: PluginSet { enabled, disabled: Vec::new() }, points: BTreeMap::new() }
    }

    /// The defaults with these sets laid over them.
    #[must_use]
    pub fn over_defaults(&self) -> Self {
        let defaults = Self::defaults();
        let none = PluginSet::default();
        Self {
            multi_point: self.multi_point.over(&defaults.multi_point),
            points: self.points.iter().map(|(point, set)| (*point, set.over(&none))).collect(),
        }
    }

    /// Every plugin that is enabled somewhere.
    pub fn names(&self) -> BTreeSet<&str> {
        let sets = std::iter::once(&self.multi_point).chain(self.points.values());
        sets.flat_map(|set| set.enabled.iter().map(|(name, _)| name.as_str())).collect()
    }

    /// The plugins of an extension point with their weights, in order. First come those that the point itself enables
    /// although all points do, because the point's order replaces the general one; then the others of all points; then the
    /// rest of the point's own.
    pub fn at(&self, point: ExtensionPoint, has_point: &dyn Fn(&str) -> bool) -> Vec<(&str, i64)> {
        static NONE: PluginSet = PluginSet { enabled: Vec::new(), disabled: Vec::new() };
        let own = self.points.get(&point).unwrap_or(&NONE);
        let is_own = |name: &str| own.enabled.iter().any(|(other, _)| other == name);
        let general: Vec<(&str, i64)> = if own.disables("*") {
            Vec::new()
        } else {
            let enabled = self.multi_point.enabled.iter().map(|(name, weight)| (name.as_str(), *weight));
            enabled.filter(|(name, _)| has_point(name) && !own.disables(name)).collect()
        };
        let is_general = |name: &str| general.iter().any(|(other, _)| *other == name);
        let own_plugins = own.enabled.iter().map(|(name, weight)| (name.as_str(), *weight));
        let overriding = own_plugins.clone().filter(|(name, _)| is_general(name));
        let rest = own_plugins.filter(|(name, _)| !is_general(name));
        overriding.chain(general.iter().copied().filter(|(name, _)| !is_own(name))).chain(rest).collect()
    }
}

/// A scheduler's name, its plugins and their arguments.
#[derive(Debug, Clone)]
pub struct Profile {
    pub scheduler_name: String,
    /// With the defaults in.
    pub plugins: PluginSets,
    pub args: BTreeMap<String, PluginArgs>,
    /// Percentage of nodes to score; zero is adaptive, `None` leaves it to the configuration of all profiles.
    pub percentage_of_nodes_to_score: Option<usize>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            scheduler_name: DEFAULT_SCHEDULER.to_owned(),
            plugins: PluginSets::defaults(),
            args: BTreeMap::new(),
            percentage_of_nodes_to_score: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(enabled: &[(&str, i64)], disabled: &[&str]) -> PluginSet {
        PluginSet {
            enabled: enabled.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect(),
            disabled: disabled.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    #[test]
    fn sets_are_laid_over_the_defaults() {
        let defaults = set(&[("A", 1), ("B", 2), ("C", 0)], &[]);
        for (what, custom, expected) in [
            ("nothing", set(&[], &[]), vec![("A", 1), ("B", 2), ("C", 0)]),
            ("one more", set(&[("D", 5)], &[]), vec![("A", 1), ("B", 2), ("C", 0), ("D", 5)]),
            ("one less", set(&[], &["B"]), vec![("A", 1), ("C", 0)]),
            ("another weight", set(&[("B", 9)], &[]), vec![("A", 1), ("B", 9), ("C", 0)]),
            ("another place", set(&[("A", 1)], &["A"]), vec![("B", 2), ("C", 0), ("A", 1)]),
            ("all others off", set(&[("C", 0), ("D", 1)], &["*"]), vec![("C", 0), ("D", 1)]),
        ] {
            assert_eq!(custom.over(&defaults).enabled, set(&expected, &[]).enabled, "{what}");
        }
    }

    #[test]
    fn a_point_of_its_own_overrides_all_points() {
        let general = set(&[("A", 1), ("B", 2), ("C", 3)], &[]);
        for (what, own, expected) in [
            ("nothing", set(&[], &[]), vec![("A", 1), ("C", 3)]),
            ("order and weight", set(&[("C", 7)], &[]), vec![("C", 7), ("A", 1)]),
            ("off", set(&[], &["A"]), vec![("C", 3)]),
            ("only its own", set(&[("D", 1)], &["*"]), vec![("D", 1)]),
            ("one more comes last", set(&[("D", 1), ("C", 3)], &[]), vec![("C", 3), ("A", 1), ("D", 1)]),
        ] {
            let sets =
                PluginSets { multi_point: general.clone(), points: [(ExtensionPoint::Filter, own)].into() };
            // B does not take part in the point.
            assert_eq!(sets.at(ExtensionPoint::Filter, &|name| name != "B"), expected, "{what}");
        }
    }
}

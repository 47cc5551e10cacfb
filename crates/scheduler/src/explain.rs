//! Says why a pod goes where it goes, or why it goes nowhere: every filter's verdict and every score, for every node.

use std::fmt;

use crate::cycle::{extend_scores, post_filter, score_all};
use crate::extender::Extender;
use crate::framework::{CycleState, FailedSearch, Framework, Nomination, Rejection};
use crate::framework::{Diagnosis, EXTENDER, RejectedBy};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// One node in the explanation.
#[derive(Debug, Clone, Default)]
pub struct NodeExplanation {
    pub name: String,
    /// Each plugin that rejects it, with its reasons; all of them, not only the first.
    pub rejections: Vec<(&'static str, String)>,
    /// Amounts of which the node has too little.
    pub shortages: Vec<String>,
    /// Each plugin's score; empty for a node that does not fit.
    pub scores: Vec<i64>,
    /// The weighted sum of the scores.
    pub total: i64,
}

/// Why a pod goes where it goes.
#[derive(Debug, Clone, Default)]
pub struct Explanation {
    pub pod: String,
    /// A plugin rejected the pod before any node was examined.
    pub refusal: Option<(&'static str, String)>,
    /// The plugins that score, with their weights.
    pub scorers: Vec<(&'static str, i64)>,
    pub nodes: Vec<NodeExplanation>,
    /// The outcome of preemption for a pod that fits nowhere.
    pub preemption: Option<String>,
    /// Extenders that did not answer.
    pub failures: Vec<String>,
}

/// Amounts by which the pod's requests exceed the node's free resources.
fn shortages(pod: &PodInfo, node: &NodeInfo) -> Vec<String> {
    let (wanted, used, has) = (&pod.requests, &node.requested, &node.allocatable);
    let mut found = Vec::new();
    let mut check = |name: &str, unit: &str, wanted: i64, used: i64, has: i64| {
        let free = has.saturating_sub(used);
        if wanted > 0 && wanted > free {
            found.push(format!("{name}: asks for {wanted}{unit}, {}{unit} of {has}{unit} free", free.max(0)));
        }
    };
    check("cpu", "m", wanted.milli_cpu, used.milli_cpu, has.milli_cpu);
    check("memory", "", wanted.memory, used.memory, has.memory);
    check("ephemeral-storage", "", wanted.ephemeral_storage, used.ephemeral_storage, has.ephemeral_storage);
    for (name, amount) in &wanted.scalar {
        let of = |resources: &crate::resources::Resources| resources.scalar.get(name).copied().unwrap_or(0);
        check(name, "", *amount, of(used), of(has));
    }
    found
}

/// Explains the result of a cycle for the pod. All nodes are examined, however many there are. Extenders are asked, as
/// in a cycle.
pub async fn explain(
    framework: &Framework,
    snapshot: &Snapshot,
    extenders: &[Extender],
    pod: &PodInfo,
) -> Explanation {
    let mut explanation = Explanation { pod: pod.key.to_string(), ..Explanation::default() };
    let mut state = CycleState::default();
    let (filters, failure) = framework.pre_filter(&mut state, pod, snapshot);
    let mut diagnosis = Diagnosis::default();
    if let Some(failure) = failure {
        explanation.refusal = Some((failure.by.plugin, failure.by.rejection.to_string()));
        diagnosis.others = Some(failure.by);
    }
    let mut feasible = Vec::new();
    for (position, node) in snapshot.nodes().iter().enumerate() {
        let mut row = NodeExplanation { name: node.name().to_owned(), ..NodeExplanation::default() };
        if explanation.refusal.is_none() {
            let is_left_out = filters.nodes.as_ref().is_some_and(|nodes| !nodes.contains(node.name()));
            if is_left_out {
                let plugin = filters.restricting.first().copied().unwrap_or_default();
                row.rejections.push((plugin, "the pod names other nodes".to_owned()));
                let rejection = Rejection::unresolvable("the pod names other nodes");
                diagnosis.reject(position, RejectedBy { plugin, rejection });
            }
            for (plugin, verdict) in filters.verdicts(&state, pod, node) {
                if let Err(rejection) = verdict {
                    row.rejections.push((plugin, rejection.to_string()));
                    if row.rejections.len() == 1 {
                        diagnosis.reject(position, RejectedBy { plugin, rejection });
                    }
                }
            }
            // Room that is kept for pods of equal or higher priority is not free.
            if row.rejections.is_empty()
                && let Err(by) = filters.filter_with_nominated(&state, pod, node)
            {
                row.rejections
                    .push((by.plugin, format!("{} (room is kept for nominated pods)", by.rejection)));
                diagnosis.reject(position, by);
            }
            if row.rejections.is_empty() {
                feasible.push(node.clone());
            } else {
                row.shortages = shortages(pod, node);
            }
        }
        explanation.nodes.push(row);
    }
    for extender in extenders.iter().filter(|extender| extender.is_interested(pod)) {
        if feasible.is_empty() {
            break;
        }
        let verdict = match extender.filter(pod, &feasible).await {
            Ok(verdict) => verdict,
            Err(error) => {
                explanation.failures.push(format!("extender {}: {error}", extender.name()));
                continue;
            }
        };
        let passes = |node: &NodeInfo| verdict.nodes.iter().any(|passed| passed.name() == node.name());
        for node in feasible.iter().filter(|node| !passes(node)) {
            let hopeless = verdict.unresolvable.get(node.name());
            let reason = hopeless.or_else(|| verdict.failed.get(node.name())).cloned();
            let reason = reason.unwrap_or_else(|| format!("left out by {}", extender.name()));
            if let Some(row) = explanation.nodes.iter_mut().find(|row| row.name == node.name()) {
                row.rejections.push((EXTENDER, reason.clone()));
            }
            // A node without a reason is none that removing pods could make fit.
            let is_resolvable = hopeless.is_none() && verdict.failed.contains_key(node.name());
            if let Some(position) = snapshot.position(node.name()).filter(|_| is_resolvable) {
                let rejection = Rejection::unschedulable(reason);
                diagnosis.reject(position, RejectedBy { plugin: EXTENDER, rejection });
            }
        }
        feasible = verdict.nodes;
    }
    if feasible.is_empty() {
        let search = FailedSearch {
            pod,
            snapshot,
            state: &state,
            filters: &filters,
            diagnosis: &diagnosis,
            extenders,
        };
        let outcome = post_filter(framework, search).await.answer;
        explanation.preemption = Some(match outcome.nomination {
            Nomination::Node(node) => {
                let victims: Vec<_> = outcome.victims.pods.iter().map(|pod| pod.key.to_string()).collect();
                format!("preemption: on {node}, by removing {}", victims.join(", "))
            }
            _ => outcome.message,
        });
        return explanation;
    }
    let scores = score_all(framework, snapshot, pod, &mut state, &feasible);
    explanation.scorers = scores.iter().map(|(plugin, weight, _)| (*plugin, *weight)).collect();
    let extra = match extenders.iter().any(Extender::is_prioritizer) {
        true => Some(extend_scores(extenders, pod, &feasible).await),
        false => None,
    };
    explanation.scorers.extend(extra.as_ref().map(|_| (EXTENDER, 1)));
    for (index, node) in feasible.iter().enumerate() {
        let Some(row) = explanation.nodes.iter_mut().find(|row| row.name == node.name()) else { continue };
        row.scores = scores.iter().map(|(_, _, scores)| scores[index]).collect();
        row.total = scores.iter().map(|(_, weight, scores)| weight * scores[index]).sum();
        if let Some(extra) = &extra {
            row.scores.push(extra[index]);
            row.total = row.total.saturating_add(extra[index]);
        }
    }
    explanation
}

impl Explanation {
    /// The nodes that fit, best first; equal ones are in the order of the snapshot.
    pub fn ranking(&self) -> Vec<&NodeExplanation> {
        if self.refusal.is_some() {
            return Vec::new();
        }
        let mut fitting: Vec<_> = self.nodes.iter().filter(|node| node.rejections.is_empty()).collect();
        fitting.sort_by_key(|node| std::cmp::Reverse(node.total));
        fitting
    }

    /// The nodes that the fewest plugins reject: the smallest change makes the pod fit there.
    fn nearest(&self) -> Vec<&NodeExplanation> {
        let least = self.nodes.iter().map(|node| node.rejections.len()).min().unwrap_or(0);
        self.nodes.iter().filter(|node| node.rejections.len() == least).collect()
    }
}

/// Columns as wide as their widest cell.
fn table(f: &mut fmt::Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}   "));
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for failure in &self.failures {
            writeln!(f, "{failure}")?;
        }
        if let Some((plugin, reason)) = &self.refusal {
            writeln!(f, "{} fits nowhere: {plugin} rejects it: {reason}", self.pod)?;
        } else {
            let mut rows = vec![vec!["NODE".to_owned(), "FITS".to_owned(), "TOTAL".to_owned()]];
            rows[0].extend(self.scorers.iter().map(|(plugin, weight)| format!("{plugin}×{weight}")));
            for node in &self.nodes {
                let mut row = vec![node.name.clone()];
                if node.rejections.is_empty() {
                    row.extend(["yes".to_owned(), node.total.to_string()]);
                    row.extend(node.scores.iter().map(ToString::to_string));
                } else {
                    let reasons =
                        node.rejections.iter().map(|(plugin, reason)| format!("{plugin}: {reason}"));
                    row.push(format!("no: {}", reasons.collect::<Vec<_>>().join("; ")));
                }
                rows.push(row);
            }
            table(f, &rows)?;
        }
        match self.ranking().as_slice() {
            [] => {
                if self.refusal.is_none() && !self.nodes.is_empty() {
                    writeln!(f, "\n{} fits nowhere. The smallest changes that would help:", self.pod)?;
                    for node in self.nearest() {
                        let plugins: Vec<_> = node.rejections.iter().map(|(plugin, _)| *plugin).collect();
                        let mut needs = node.shortages.clone();
                        let others =
                            node.rejections.iter().filter(|(plugin, _)| *plugin != "NodeResourcesFit");
                        needs.extend(others.map(|(_, reason)| reason.clone()));
                        writeln!(f, "  {}: {} ({})", node.name, needs.join("; "), plugins.join(", "))?;
                    }
                }
                if let Some(preemption) = self.preemption.as_deref().filter(|text| !text.is_empty()) {
                    writeln!(f, "{preemption}")?;
                }
                Ok(())
            }
            [only] => writeln!(f, "\n{} goes to {}, the only node that fits.", self.pod, only.name),
            [best, second, ..] if best.total == second.total => {
                let equal = self.ranking().iter().filter(|node| node.total == best.total).count();
                writeln!(
                    f,
                    "\n{} goes to one of {equal} nodes with {} points, by chance.",
                    self.pod, best.total
                )
            }
            [best, second, ..] => writeln!(
                f,
                "\n{} goes to {} with {} points, {} more than {}.",
                self.pod,
                best.name,
                best.total,
                best.total - second.total,
                second.name
            ),
        }
    }
}

#[cfg(test)]
mod tests;

//! Decides which volumes to attach to a node and which to detach from it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

/// A volume that pods of the node want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WantedVolume {
    pub driver: String,
    pub handle: String,
    /// The PersistentVolume's name.
    pub volume: String,
    /// Several nodes may have it at the same time.
    pub shared: bool,
    /// Other nodes that have it, or are about to.
    pub elsewhere: BTreeSet<String>,
}

/// A VolumeAttachment of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attachment {
    pub object: String,
    pub attached: bool,
    pub deleting: bool,
    /// Why the driver could not attach or detach it.
    pub problem: Option<String>,
}

/// The known state of one node. Volumes are named as in its status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeState {
    /// Nothing of this node is known any more.
    pub gone: bool,
    pub ready: bool,
    pub out_of_service: bool,
    /// Time alone forces no volume off a node.
    pub patient: bool,
    pub in_use: BTreeSet<String>,
    /// `status.volumesAttached`.
    pub reported: BTreeSet<String>,
    pub wanted: BTreeMap<String, WantedVolume>,
    pub attachments: BTreeMap<String, Attachment>,
    /// Since when each volume is wanted by nobody.
    pub unwanted_since: BTreeMap<String, Timestamp>,
    pub now: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Make an attachment.
    Attach { name: String },
    /// Delete the attachment.
    Detach { name: String, object: String, forced: bool },
    /// Say that the volume is on other nodes and cannot be here.
    MultiAttach { name: String, nodes: Vec<String> },
    /// Say why the driver could not attach.
    Failed { name: String, problem: String },
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Decision {
    /// The value that `status.volumesAttached` must have before the actions start; `None` if it has it
    /// already.
    pub report: Option<BTreeSet<String>>,
    pub actions: Vec<Action>,
    /// Volumes that nobody wants, from now or from earlier.
    pub unwanted_since: BTreeMap<String, Timestamp>,
    /// Delay of the next sync if nothing happens before.
    pub wake: Option<Duration>,
}

/// A volume is taken from a node that does not answer after this, as upstream.
pub(super) const FORCE_AFTER: Duration = Duration::from_secs(6 * 60);

pub(super) fn decide(state: &NodeState) -> Decision {
    let mut decision = Decision::default();
    let mut report: BTreeSet<String> = BTreeSet::new();
    for (name, attachment) in &state.attachments {
        if state.wanted.contains_key(name) {
            if attachment.attached && !attachment.deleting {
                report.insert(name.clone());
            } else if let Some(problem) = attachment.problem.clone().filter(|_| !attachment.deleting) {
                decision.actions.push(Action::Failed { name: name.clone(), problem });
            }
            continue;
        }
        let since = *state.unwanted_since.get(name).unwrap_or(&state.now);
        decision.unwanted_since.insert(name.clone(), since);
        let waited = Duration::try_from(state.now.duration_since(since)).unwrap_or_default();
        let mounted = state.in_use.contains(name) && !state.gone;
        let overdue = waited >= FORCE_AFTER && !state.ready && !state.patient;
        let forced = mounted && (overdue || state.out_of_service);
        if attachment.deleting {
            continue;
        }
        if mounted && !forced {
            if attachment.attached {
                report.insert(name.clone());
            }
            let left = FORCE_AFTER.saturating_sub(waited);
            // A node that is ready is woken by its status.
            if !state.ready && !state.patient {
                decision.wake = Some(decision.wake.map_or(left, |wake| wake.min(left)));
            }
            continue;
        }
        let object = attachment.object.clone();
        decision.actions.push(Action::Detach { name: name.clone(), object, forced });
    }
    for (name, wanted) in &state.wanted {
        if state.attachments.contains_key(name) || state.gone {
            continue;
        }
        if !wanted.shared && !wanted.elsewhere.is_empty() {
            let nodes = wanted.elsewhere.iter().cloned().collect();
            decision.actions.push(Action::MultiAttach { name: name.clone(), nodes });
        } else {
            decision.actions.push(Action::Attach { name: name.clone() });
        }
    }
    // Volumes of other plugins in the status are not ours to remove.
    let others = state.reported.iter().filter(|name| !name.starts_with(ferrite_client::csi::PLUGIN));
    report.extend(others.cloned());
    if !state.gone && report != state.reported {
        decision.report = Some(report);
    }
    decision
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: &str = "kubernetes.io/csi/d^h";

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn wanted(shared: bool, elsewhere: &[&str]) -> BTreeMap<String, WantedVolume> {
        let volume = WantedVolume {
            driver: "d".into(),
            handle: "h".into(),
            volume: "pv".into(),
            shared,
            elsewhere: elsewhere.iter().map(|node| (*node).to_owned()).collect(),
        };
        [(V.to_owned(), volume)].into()
    }

    fn attachment(attached: bool, deleting: bool) -> BTreeMap<String, Attachment> {
        let one = Attachment { object: "csi-1".into(), attached, deleting, problem: None };
        [(V.to_owned(), one)].into()
    }

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    fn base() -> NodeState {
        NodeState { ready: true, now: at(1000), ..NodeState::default() }
    }

    #[test]
    fn volumes_are_attached_reported_and_detached_when_they_are_let_go() {
        let attach = Action::Attach { name: V.into() };
        let detach = |forced| Action::Detach { name: V.into(), object: "csi-1".into(), forced };
        /// A name, the state of the node, the new `volumesAttached` if it changes, and the actions.
        type Row = (&'static str, NodeState, Option<BTreeSet<String>>, Vec<Action>);
        let rows: Vec<Row> = vec![
            ("nothing", base(), None, vec![]),
            (
                "a pod wants it",
                NodeState { wanted: wanted(false, &[]), ..base() },
                None,
                vec![attach.clone()],
            ),
            (
                "the driver is at work",
                NodeState { wanted: wanted(false, &[]), attachments: attachment(false, false), ..base() },
                None,
                vec![],
            ),
            (
                "attached",
                NodeState { wanted: wanted(false, &[]), attachments: attachment(true, false), ..base() },
                Some(names(&[V])),
                vec![],
            ),
            (
                "attached and reported",
                NodeState {
                    wanted: wanted(false, &[]),
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    ..base()
                },
                None,
                vec![],
            ),
            (
                "wanted again while it is detached: first it goes",
                NodeState {
                    wanted: wanted(false, &[]),
                    attachments: attachment(true, true),
                    reported: names(&[V]),
                    ..base()
                },
                Some(names(&[])),
                vec![],
            ),
            (
                "nobody wants it, but it is mounted",
                NodeState {
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    in_use: names(&[V]),
                    ..base()
                },
                None,
                vec![],
            ),
            (
                "unmounted: reported as gone before it is detached",
                NodeState { attachments: attachment(true, false), reported: names(&[V]), ..base() },
                Some(names(&[])),
                vec![detach(false)],
            ),
            (
                "mounted on a node that does not answer, not long enough",
                NodeState {
                    ready: false,
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    in_use: names(&[V]),
                    unwanted_since: [(V.to_owned(), at(1000 - 300))].into(),
                    ..base()
                },
                None,
                vec![],
            ),
            (
                "long enough",
                NodeState {
                    ready: false,
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    in_use: names(&[V]),
                    unwanted_since: [(V.to_owned(), at(1000 - 360))].into(),
                    ..base()
                },
                Some(names(&[])),
                vec![detach(true)],
            ),
            (
                "a ready node is believed for ever",
                NodeState {
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    in_use: names(&[V]),
                    unwanted_since: [(V.to_owned(), at(0))].into(),
                    ..base()
                },
                None,
                vec![],
            ),
            (
                "out of service",
                NodeState {
                    out_of_service: true,
                    attachments: attachment(true, false),
                    reported: names(&[V]),
                    in_use: names(&[V]),
                    ..base()
                },
                Some(names(&[])),
                vec![detach(true)],
            ),
            (
                "a node that is gone",
                NodeState {
                    gone: true,
                    ready: false,
                    attachments: attachment(true, false),
                    in_use: names(&[V]),
                    ..base()
                },
                None,
                vec![detach(false)],
            ),
            (
                "on another node",
                NodeState { wanted: wanted(false, &["other"]), ..base() },
                None,
                vec![Action::MultiAttach { name: V.into(), nodes: vec!["other".into()] }],
            ),
            (
                "on another node, and shared",
                NodeState { wanted: wanted(true, &["other"]), ..base() },
                None,
                vec![attach],
            ),
            (
                "volumes of others stay in the status",
                NodeState { reported: names(&["example.com/x", V]), ..base() },
                Some(names(&["example.com/x"])),
                vec![],
            ),
        ];
        for (what, state, report, actions) in rows {
            let decision = decide(&state);
            assert_eq!((decision.report, decision.actions), (report, actions), "{what}");
        }
    }

    #[test]
    fn a_silent_node_is_looked_at_again_when_its_time_is_over() {
        let state = NodeState {
            ready: false,
            attachments: attachment(true, false),
            reported: names(&[V]),
            in_use: names(&[V]),
            unwanted_since: [(V.to_owned(), at(1000 - 300))].into(),
            ..base()
        };
        let decision = decide(&state);
        assert_eq!(decision.wake, Some(Duration::from_secs(60)));
        assert_eq!(decision.unwanted_since, state.unwanted_since, "the clock is not set back");
    }

    #[test]
    fn what_the_driver_says_is_passed_on() {
        let mut attachments = attachment(false, false);
        attachments.get_mut(V).unwrap().problem = Some("no room".into());
        let decision = decide(&NodeState { wanted: wanted(false, &[]), attachments, ..base() });
        assert_eq!(decision.actions, [Action::Failed { name: V.into(), problem: "no room".into() }]);
    }
}

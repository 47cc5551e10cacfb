//! Reads FlowSchemas and PriorityLevelConfigurations.

use super::queues::{Kind, Queuing};
use super::rules::{Rule, list};
use super::shares::Share;
use ferrite_api::meta;
use ferrite_json::Value;

/// The schema and the level that are there even if nobody stores them.
pub(super) const CATCH_ALL: &str = "catch-all";
pub(super) const EXEMPT: &str = "exempt";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Distinguisher {
    /// All requests of the schema are one flow.
    None,
    ByUser,
    ByNamespace,
}

/// A FlowSchema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SchemaConfig {
    pub name: String,
    pub uid: String,
    pub precedence: i64,
    pub level: String,
    pub distinguisher: Distinguisher,
    pub rules: Vec<Rule>,
}

/// A PriorityLevelConfiguration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LevelConfig {
    pub name: String,
    pub uid: String,
    pub kind: Kind,
    pub share: Share,
}

fn text(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn number(value: &Value, pointer: &str) -> Option<u32> {
    value.pointer(pointer).and_then(Value::as_i64).map(|n| u32::try_from(n).unwrap_or(0))
}

impl SchemaConfig {
    pub fn read(value: &Value) -> Self {
        Self {
            name: meta::name(value).to_owned(),
            uid: text(value, "/metadata/uid"),
            precedence: value.pointer("/spec/matchingPrecedence").and_then(Value::as_i64).unwrap_or(1000),
            level: text(value, "/spec/priorityLevelConfiguration/name"),
            distinguisher: match text(value, "/spec/distinguisherMethod/type").as_str() {
                "ByUser" => Distinguisher::ByUser,
                "ByNamespace" => Distinguisher::ByNamespace,
                _ => Distinguisher::None,
            },
            rules: value
                .get("spec")
                .map_or(&[][..], |spec| list(spec, "rules"))
                .iter()
                .map(Rule::read)
                .collect(),
        }
    }
}

impl LevelConfig {
    pub fn read(value: &Value) -> Self {
        let exempt = text(value, "/spec/type") == "Exempt";
        let at = if exempt { "/spec/exempt" } else { "/spec/limited" };
        let share = Share {
            exempt,
            shares: number(value, &format!("{at}/nominalConcurrencyShares")).unwrap_or(if exempt {
                0
            } else {
                30
            }),
            lendable_percent: number(value, &format!("{at}/lendablePercent")).unwrap_or(0),
            borrowing_percent: number(value, &format!("{at}/borrowingLimitPercent")),
        };
        let queuing = |key: &str, default: usize| {
            let given = number(value, &format!("/spec/limited/limitResponse/queuing/{key}"));
            given.map_or(default, |given| given as usize).max(1)
        };
        let kind = match (exempt, text(value, "/spec/limited/limitResponse/type").as_str()) {
            (true, _) => Kind::Exempt,
            (false, "Queue") => {
                let queues = queuing("queues", 64);
                let hand = queuing("handSize", 8).min(queues);
                Kind::Queuing(Queuing { queues, hand, length: queuing("queueLengthLimit", 50) })
            }
            (false, _) => Kind::Rejecting,
        };
        Self { name: meta::name(value).to_owned(), uid: text(value, "/metadata/uid"), kind, share }
    }

    /// A mandatory level that is not stored.
    fn mandatory(name: &str) -> Self {
        let exempt = name == EXEMPT;
        let share = Share {
            exempt,
            shares: if exempt { 0 } else { 5 },
            lendable_percent: 0,
            borrowing_percent: None,
        };
        let kind = if exempt { Kind::Exempt } else { Kind::Rejecting };
        Self { name: name.to_owned(), uid: String::new(), kind, share }
    }
}

/// Schemas in the order in which they are tried, without those whose level does not exist, and levels by name. The
/// mandatory levels are always among them.
pub(super) fn arranged(
    schemas: Vec<SchemaConfig>,
    mut levels: Vec<LevelConfig>,
) -> (Vec<SchemaConfig>, Vec<LevelConfig>) {
    for name in [CATCH_ALL, EXEMPT] {
        if !levels.iter().any(|level| level.name == name) {
            levels.push(LevelConfig::mandatory(name));
        }
    }
    levels.sort_by(|a, b| a.name.cmp(&b.name));
    let exists = |schema: &SchemaConfig| levels.iter().any(|level| level.name == schema.level);
    let mut schemas: Vec<_> = schemas.into_iter().filter(exists).collect();
    schemas.sort_by(|a, b| (a.precedence, &a.name).cmp(&(b.precedence, &b.name)));
    (schemas, levels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn schema(name: &str, precedence: i64, level: &str) -> SchemaConfig {
        SchemaConfig::read(&json!({
            "metadata": {"name": name, "uid": "u"},
            "spec": {"matchingPrecedence": precedence, "priorityLevelConfiguration": {"name": level}},
        }))
    }

    #[test]
    fn levels_are_read_with_their_queues_and_shares() {
        let level = LevelConfig::read(&json!({
            "metadata": {"name": "l", "uid": "u"},
            "spec": {"type": "Limited", "limited": {
                "nominalConcurrencyShares": 20, "lendablePercent": 50, "borrowingLimitPercent": 10,
                "limitResponse": {"type": "Queue", "queuing": {"queues": 4, "handSize": 9, "queueLengthLimit": 7}},
            }},
        }));
        assert_eq!(level.kind, Kind::Queuing(Queuing { queues: 4, hand: 4, length: 7 }));
        let share = Share { shares: 20, lendable_percent: 50, borrowing_percent: Some(10), exempt: false };
        assert_eq!(level.share, share);
        let exempt = LevelConfig::read(&json!({"metadata": {"name": "e"}, "spec": {"type": "Exempt"}}));
        assert_eq!((exempt.kind, exempt.share.shares), (Kind::Exempt, 0));
    }

    #[test]
    fn schemas_are_tried_by_precedence_and_name_and_need_their_level() {
        let all = vec![
            schema("b", 5, EXEMPT),
            schema("a", 5, EXEMPT),
            schema("z", 1, CATCH_ALL),
            schema("x", 0, "?"),
        ];
        let (schemas, levels) = arranged(all, Vec::new());
        assert_eq!(schemas.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["z", "a", "b"]);
        assert_eq!(levels.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), [CATCH_ALL, EXEMPT]);
    }
}

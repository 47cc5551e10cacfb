use ferrite_json::json;

use super::*;

fn pod(name: &str, priority: i32, gates: &[&str]) -> Arc<PodInfo> {
    let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
    let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"},
        "spec": {"containers": [], "priority": priority, "schedulingGates": gates}}));
    Arc::new(PodInfo::new(&pod.unwrap()))
}

/// Gates hold pods back; `Other` helps those that a plugin named "X" did not reject.
struct Policy;

impl QueuePolicy for Policy {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), &'static str> {
        if pod.placement.is_gated { Err("SchedulingGates") } else { Ok(()) }
    }

    fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey {
        SortKey { rank: -i64::from(pod.priority), then: queued }
    }

    fn queueing_hint(&self, _: &PodInfo, rejected_by: &[&'static str], _: &ClusterEvent) -> bool {
        rejected_by != ["X"] && rejected_by != ["SchedulingGates"]
    }
}

fn queue() -> (Queue, Instant) {
    let queue = Queue::new(Box::new(Policy), BackoffLimits::default());
    let now = queue.epoch;
    (queue, now)
}

fn pop(queue: &mut Queue, now: Instant) -> Option<String> {
    queue.pop(now).map(|popped| popped.pod.key.name.to_string())
}

#[test]
fn priority_then_age() {
    let (mut queue, now) = queue();
    for (name, priority, second) in [("old", 0, 0), ("young", 0, 1), ("high", 5, 2)] {
        queue.set(pod(name, priority, &[]), now + Duration::from_secs(second));
    }
    let later = now + Duration::from_secs(9);
    let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, later)).collect();
    assert_eq!(order, ["high", "old", "young"]);
}

#[test]
fn a_rejected_pod_waits_for_a_helpful_event_and_its_back_off() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.give_back(popped, vec!["X"], now);
    queue.on_event(ClusterEvent::Other, now);
    assert_eq!(queue.lengths(), (0, 0, 1), "the event does not help");

    queue.set(pod("b", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.give_back(popped, vec!["NodeResourcesFit"], now);
    assert_eq!(queue.lengths(), (0, 0, 2));
    queue.on_event(ClusterEvent::Other, now);
    assert_eq!(queue.lengths(), (0, 1, 1), "its back-off of one second runs");
    assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
    queue.set(pod("c", -1, &[]), now);
    assert_eq!(pop(&mut queue, now).as_deref(), Some("c"), "active pods come first, whatever their priority");
    assert_eq!(pop(&mut queue, now).as_deref(), Some("b"), "an idle cycle takes pods that back off");
}

#[test]
fn pods_count_for_the_plugins_that_rejected_them_until_their_next_attempt() {
    let of_profile = |name: &str, gates: &[&str]| {
        let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
        let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"},
            "spec": {"containers": [], "schedulerName": "counted", "schedulingGates": gates}}));
        Arc::new(PodInfo::new(&pod.unwrap()))
    };
    let counts = || {
        let gauge = |plugin: &str| measures::unschedulable_pods(plugin, "counted");
        [gauge("X"), gauge("NodeResourcesFit"), gauge("SchedulingGates")]
    };
    let (mut queue, now) = queue();
    queue.set(of_profile("a", &[]), now);
    queue.set(of_profile("gated", &["g"]), now);
    assert_eq!(counts(), [0, 0, 1]);
    let popped = queue.pop(now).unwrap();
    queue.give_back(popped, vec!["X", "NodeResourcesFit"], now);
    assert_eq!(counts(), [1, 1, 1], "a pod counts for each plugin");
    queue.on_event(ClusterEvent::Other, now);
    assert_eq!((queue.lengths(), counts()), ((0, 1, 1), [1, 1, 1]), "also while it backs off");
    let popped = queue.pop(now).unwrap();
    assert_eq!(counts(), [0, 0, 1]);
    queue.give_back(popped, vec!["X"], now);
    queue.set(of_profile("gated", &[]), now);
    assert_eq!(pop(&mut queue, now).as_deref(), Some("gated"));
    assert_eq!(counts(), [1, 0, 0]);
    queue.remove(&of_profile("a", &[]).key);
    assert_eq!(counts(), [0, 0, 0]);
}

#[test]
fn after_an_error_the_whole_back_off_passes() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.give_back(popped, Vec::new(), now);
    assert_eq!(queue.lengths(), (0, 1, 0));
    assert_eq!(pop(&mut queue, now), None);
    assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
    assert_eq!(pop(&mut queue, now + Duration::from_secs(1)).as_deref(), Some("a"));
}

#[test]
fn pods_that_back_off_are_taken_by_window_then_by_priority() {
    let (mut queue, now) = queue();
    for (name, priority) in [("low", 0), ("high", 5)] {
        queue.set(pod(name, priority, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["NodeResourcesFit"], now);
    }
    queue.on_event(ClusterEvent::Other, now);
    let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, now)).collect();
    assert_eq!(order, ["high", "low"]);
}

#[test]
fn a_held_pod_waits_for_its_release() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    let key = popped.pod.key.clone();
    queue.hold(key.clone());
    queue.give_back(popped, vec!["NodeResourcesFit"], now);
    queue.release(&key, false, now);
    assert_eq!(queue.lengths(), (0, 0, 1), "nothing helped it");
    queue.hold(key.clone());
    queue.on_event(ClusterEvent::Other, now);
    assert_eq!(queue.lengths(), (0, 0, 1), "held");
    let parked: Vec<_> = queue.unschedulable.keys().copied().collect();
    queue.on_event(ClusterEvent::Other, now);
    assert!(queue.unschedulable.keys().eq(&parked), "helped once is enough");
    queue.release(&key, false, now);
    assert_eq!(queue.lengths(), (0, 1, 0), "the event is not lost");

    let popped = queue.pop(now).unwrap();
    queue.hold(key.clone());
    queue.give_back(popped, vec!["X"], now);
    queue.release(&key, true, now);
    assert_eq!(queue.lengths(), (0, 1, 0), "tried again although nothing helped");
}

#[test]
fn events_during_the_cycle_are_not_missed() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.on_event(ClusterEvent::Other, now);
    queue.give_back(popped, vec!["NodeResourcesFit"], now);
    assert_eq!(queue.lengths(), (0, 1, 0));
    assert!(queue.events.is_empty(), "nothing is in flight any more");
}

#[test]
fn back_off_doubles_to_ten_seconds() {
    let mut failures = Failures::default();
    let mut next = |step: fn(Failures) -> Failures| {
        failures = step(failures);
        BackoffLimits::default().after(failures).as_secs()
    };
    let rejected: Vec<_> = (1..7).map(|_| next(Failures::after_rejection)).collect();
    assert_eq!(rejected, [1, 2, 4, 8, 10, 10]);
    let failed: Vec<_> = (1..4).map(|_| next(Failures::after_error)).collect();
    assert_eq!(failed, [1, 2, 4], "errors are counted by themselves");
    assert_eq!(next(Failures::after_rejection), 10, "an error does not forgive rejections");
    assert_eq!(next(Failures::after_error), 1, "a rejection forgives errors");
}

#[test]
fn forgotten_pods_are_tried_again_after_a_while() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.give_back(popped, vec!["X"], now);
    assert_eq!(pop(&mut queue, now + LONGEST_WAIT).as_deref(), Some("a"));
}

#[test]
fn gates_hold_a_pod_until_they_are_gone() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &["g"]), now);
    queue.on_event(ClusterEvent::Other, now);
    assert_eq!(pop(&mut queue, now + LONGEST_WAIT), None);
    queue.set(pod("a", 0, &[]), now);
    assert_eq!(pop(&mut queue, now).as_deref(), Some("a"));
}

#[test]
fn changes_and_deletions_reach_pods_in_every_part() {
    let (mut queue, now) = queue();
    queue.set(pod("a", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.set(pod("a", 7, &[]), now);
    queue.give_back(popped, vec!["X"], now);
    assert_eq!(queue.lengths(), (0, 1, 0), "it changed while in flight");
    queue.remove(&ObjectKey::new("ns", "a"));
    assert_eq!(queue.lengths(), (0, 0, 0));

    queue.set(pod("b", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.remove(&popped.pod.key.clone());
    queue.give_back(popped, vec!["X"], now);
    assert_eq!(queue.lengths(), (0, 0, 0), "deleted while in flight");
}

/// The end of an attempt.
type End = fn(&mut Queue, Popped, Instant);

/// As [`pod`], with a UID.
fn instance(name: &str, uid: &str) -> Arc<PodInfo> {
    let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": uid}, "spec": {"containers": []}});
    Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()))
}

#[test]
fn a_pod_made_anew_while_its_predecessor_is_in_flight_is_queued() {
    let key = ObjectKey::new("ns", "a");
    let ends: [(&str, End); 3] = [
        ("bound", |queue, popped, now| {
            queue.done(&popped.pod.key, now);
        }),
        ("rejected", |queue, popped, now| queue.give_back(popped, vec!["X"], now)),
        ("failed", |queue, popped, now| queue.give_back(popped, Vec::new(), now)),
    ];
    for (what, end) in ends {
        for is_deletion_seen in [true, false] {
            let (mut queue, now) = queue();
            queue.set(instance("a", "1"), now);
            let popped = queue.pop(now).unwrap();
            queue.set(instance("a", "1"), now);
            if is_deletion_seen {
                queue.remove(&key);
            }
            queue.set(instance("a", "2"), now);
            assert!(queue.is_gone(&key), "{what}");
            end(&mut queue, popped, now);
            let successor = queue.pop(now).unwrap_or_else(|| panic!("{what}"));
            assert_eq!((successor.pod.uid.as_deref(), successor.attempts), (Some("2"), 1), "{what}");
            // The successor is deleted, too.
            queue.remove(&key);
            end(&mut queue, successor, now);
            assert_eq!(queue.lengths(), (0, 0, 0), "{what}");
        }
    }
}

#[test]
fn a_bound_pod_does_not_come_back() {
    let (mut queue, now) = queue();
    queue.set(instance("a", "1"), now);
    let popped = queue.pop(now).unwrap();
    queue.set(instance("a", "1"), now);
    queue.done(&popped.pod.key, now);
    assert_eq!(queue.lengths(), (0, 0, 0));
}

#[test]
fn a_pod_that_was_tried_comes_after_those_that_wait() {
    let (mut queue, now) = queue();
    let at = |second: u64| now + Duration::from_secs(second);
    queue.set(pod("old", 0, &[]), now);
    let popped = queue.pop(now).unwrap();
    queue.set(pod("young", 0, &[]), at(1));
    queue.give_back(popped, vec!["NodeResourcesFit"], at(2));
    queue.on_event(ClusterEvent::Other, at(60));
    let order: Vec<_> = std::iter::from_fn(|| queue.pop(at(60))).collect();
    let names: Vec<_> = order.iter().map(|popped| popped.pod.key.name.as_str()).collect();
    assert_eq!(names, ["young", "old"]);
    assert_eq!(order[1].since, now, "metrics count from its first attempt");
}

#[test]
fn the_time_behind_a_gate_does_not_count() {
    let (mut queue, now) = queue();
    let later = now + Duration::from_secs(60);
    queue.set(pod("a", 0, &["g"]), now);
    queue.set(pod("a", 0, &[]), later);
    assert_eq!(queue.pop(later).unwrap().since, later);
}

#[test]
fn the_longest_wait_has_a_lower_limit() {
    let seconds = Duration::from_secs;
    for (given, expected) in [(seconds(0), seconds(30)), (seconds(90), seconds(90))] {
        let (queue, now) = queue();
        let mut queue = queue.with_longest_wait(given);
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["X"], now);
        assert_eq!(queue.next_due(), Some(now + expected));
    }
}

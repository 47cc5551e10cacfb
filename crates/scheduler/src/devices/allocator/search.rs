//! Tries combinations of devices, one device after the other, until one meets all requests.
//!
//! The way down and back is a stack of [`Frame`]s on the heap: a pod's author decides how many devices are asked for.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

use super::inventory::{Device, DeviceId};
use super::pools::Pool;
use super::request::{Alternative, ClaimPlan, Wanted, is_selectable};
use super::{AllocationError, Allocator, Amounts, RESULTS_MAX, RequestProblem, add_to, capacity, key_of};

/// Devices that are examined before the clock is read again.
const STRIDE: u32 = 64;

/// The devices of one claim.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub devices: Vec<Chosen<'a>>,
    /// The alternative that was taken for each request.
    pub alternatives: Vec<usize>,
}

/// A device that was chosen for a request.
#[derive(Debug, Clone)]
pub(super) struct Chosen<'a> {
    pub device: &'a Device,
    pub request: usize,
    pub alternative: usize,
    /// The identity of the share, for a device that several claims may have.
    pub share_id: Option<String>,
    pub consumed: Amounts,
}

/// The device that is looked for: one of the devices of a request of a claim.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    claim: usize,
    request: usize,
    alternative: Option<usize>,
    device: usize,
    /// The first candidate to try. Within a request the order of devices does not matter, so later ones follow.
    start: usize,
}

enum Frame {
    /// A request with subrequests.
    Alternatives { place: Place, tried: usize, all_too_many: bool },
    /// A device of a request, with the candidate that was taken for it.
    Device { place: Place, next: usize, taken: Option<Taken> },
}

/// The changes that took a device, to be undone.
struct Taken {
    candidate: usize,
    has_counters: bool,
    is_marked: bool,
    consumed: Option<Amounts>,
}

enum Step {
    /// Look for the device at this place.
    Down(Place),
    /// Try the next candidate for the device of the last frame.
    Try,
    /// The last frame failed. `too_many` is the claim that would have had more devices than it can hold.
    Back { too_many: Option<usize> },
}

/// A device that the node can use, and its pool.
struct Candidate<'a> {
    device: &'a Device,
    pool: usize,
}

/// Counters by set and name.
type Counters = BTreeMap<String, Amounts>;

/// The shares of a device that the search gives out.
#[derive(Default)]
struct Shares {
    count: usize,
    consumed: Amounts,
}

struct Search<'s, 'a> {
    allocator: &'s Allocator<'s>,
    node: &'s Node,
    plans: &'s [ClaimPlan<'a>],
    pools: &'a [Pool],
    candidates: Vec<Candidate<'a>>,
    constraints: Vec<Vec<super::constraint::Constraint<'a>>>,
    /// Answers of [`is_selectable`] by claim, request, alternative and candidate.
    selectable: HashMap<(usize, usize, usize, usize), bool>,
    /// Counters of each pool: those that are left, when first needed, and those that the search takes of them.
    available: Vec<Option<Counters>>,
    consumed: Vec<Counters>,
    /// The claims that get the device.
    taken: HashMap<&'a DeviceId, Vec<usize>>,
    shares: HashMap<&'a DeviceId, Shares>,
    found: Vec<Vec<Chosen<'a>>>,
    examined: u32,
}

/// The first combination that works; `None` if there is none.
pub(super) fn search<'a>(
    allocator: &Allocator<'_>,
    node: &Node,
    plans: &[ClaimPlan<'a>],
    pools: &'a [Pool],
) -> Result<Option<Vec<Found<'a>>>, AllocationError> {
    let candidates = pools
        .iter()
        .enumerate()
        .flat_map(|(pool, of)| of.devices().map(move |device| Candidate { device, pool }))
        .collect();
    let mut search = Search {
        allocator,
        node,
        plans,
        pools,
        candidates,
        constraints: plans.iter().map(|plan| plan.constraints.clone()).collect(),
        selectable: HashMap::new(),
        available: pools.iter().map(|_| None).collect(),
        consumed: vec![Counters::new(); pools.len()],
        taken: HashMap::new(),
        shares: HashMap::new(),
        found: plans.iter().map(|_| Vec::new()).collect(),
        examined: 0,
    };
    let Some(frames) = search.run()? else { return Ok(None) };
    let mut alternatives: Vec<Vec<usize>> = plans.iter().map(|plan| vec![0; plan.requests.len()]).collect();
    for frame in frames {
        if let Frame::Alternatives { place, tried, .. } = frame {
            alternatives[place.claim][place.request] = tried;
        }
    }
    let found = search.found.into_iter().zip(alternatives);
    Ok(Some(found.map(|(devices, alternatives)| Found { devices, alternatives }).collect()))
}

impl<'a> Search<'_, 'a> {
    fn run(&mut self) -> Result<Option<Vec<Frame>>, AllocationError> {
        let mut frames: Vec<Frame> = Vec::new();
        let mut step = Step::Down(Place::default());
        loop {
            step = match step {
                Step::Down(place) => match self.down(place, &mut frames) {
                    Some(step) => step,
                    None => return Ok(Some(frames)),
                },
                Step::Try => self.try_next(&mut frames)?,
                Step::Back { too_many } => match self.back(&mut frames, too_many) {
                    Some(step) => step,
                    None => return Ok(None),
                },
            };
        }
    }

    /// `None` if everything has its devices.
    fn down(&mut self, place: Place, frames: &mut Vec<Frame>) -> Option<Step> {
        let plan = self.plans.get(place.claim)?;
        let Some(request) = plan.requests.get(place.request) else {
            return Some(Step::Down(Place { claim: place.claim + 1, ..Place::default() }));
        };
        let Some(alternative) = place.alternative else {
            if request.has_subrequests {
                frames.push(Frame::Alternatives { place, tried: 0, all_too_many: true });
            }
            return Some(Step::Down(Place { alternative: Some(0), ..place }));
        };
        let wanted = &request.alternatives[alternative].wanted;
        if matches!(wanted, Wanted::All(devices) if devices.is_empty()) {
            return Some(Step::Back { too_many: None });
        }
        if place.device >= wanted.count() {
            let next = Place { claim: place.claim, request: place.request + 1, ..Place::default() };
            return Some(Step::Down(next));
        }
        let total = self.found[place.claim].len().saturating_add(wanted.count() - place.device);
        if total > RESULTS_MAX {
            return Some(Step::Back { too_many: Some(place.claim) });
        }
        frames.push(Frame::Device { place, next: place.start, taken: None });
        Some(Step::Try)
    }

    /// Takes the next candidate that suits the device of the last frame.
    fn try_next(&mut self, frames: &mut Vec<Frame>) -> Result<Step, AllocationError> {
        let Some(Frame::Device { place, next, taken }) = frames.last_mut() else {
            return Ok(Step::Back { too_many: None });
        };
        let (at, plans) = (*place, self.plans);
        let plan = &plans[at.claim];
        let alternative = &plan.requests[at.request].alternatives[at.alternative.unwrap_or(0)];
        if let Wanted::All(devices) = &alternative.wanted {
            // The order does not matter: there is one candidate for each device.
            let candidate = devices[at.device];
            *next = self.candidates.len();
            self.examine()?;
            let Some(done) = self.take(at, alternative, candidate)? else {
                frames.pop();
                return Ok(Step::Back { too_many: None });
            };
            *taken = Some(done);
            return Ok(Step::Down(Place { device: at.device + 1, start: 0, ..at }));
        }
        while *next < self.candidates.len() {
            let candidate = *next;
            *next += 1;
            self.examine()?;
            if self.is_suitable(at, alternative, candidate)?
                && let Some(done) = self.take(at, alternative, candidate)?
            {
                *taken = Some(done);
                return Ok(Step::Down(Place { device: at.device + 1, start: candidate + 1, ..at }));
            }
        }
        frames.pop();
        Ok(Step::Back { too_many: None })
    }

    /// Undoes the last frame, and says where to go on. `None` if nothing is left to try.
    fn back(&mut self, frames: &mut Vec<Frame>, too_many: Option<usize>) -> Option<Step> {
        match frames.last_mut()? {
            Frame::Device { place, taken, .. } => {
                let place = *place;
                if let Some(taken) = taken.take() {
                    self.untake(place, taken);
                }
                // Another device does not help a claim that asks for too many. Other claims may have fewer then.
                if too_many == Some(place.claim) {
                    frames.pop();
                    return Some(Step::Back { too_many });
                }
                Some(Step::Try).filter(|_| !self.wants_all(place)).or_else(|| {
                    frames.pop();
                    Some(Step::Back { too_many: None })
                })
            }
            Frame::Alternatives { place, tried, all_too_many } => {
                let place = *place;
                *all_too_many &= too_many == Some(place.claim);
                *tried += 1;
                if *tried < self.plans[place.claim].requests[place.request].alternatives.len() {
                    return Some(Step::Down(Place { alternative: Some(*tried), ..place }));
                }
                let too_many = all_too_many.then_some(place.claim);
                frames.pop();
                Some(Step::Back { too_many })
            }
        }
    }

    fn wants_all(&self, place: Place) -> bool {
        let request = &self.plans[place.claim].requests[place.request];
        matches!(request.alternatives[place.alternative.unwrap_or(0)].wanted, Wanted::All(_))
    }

    fn examine(&mut self) -> Result<(), AllocationError> {
        self.examined = self.examined.wrapping_add(1);
        if self.examined % STRIDE == 1 && (self.allocator.is_over)() {
            return Err(AllocationError::OutOfTime);
        }
        Ok(())
    }

    fn is_in_use(&self, id: &DeviceId) -> bool {
        self.allocator.allocated.devices.contains(id)
            || self.taken.get(id).is_some_and(|claims| !claims.is_empty())
    }

    fn is_taken_for(&self, id: &DeviceId, claim: usize) -> bool {
        self.taken.get(id).is_some_and(|claims| claims.contains(&claim))
    }

    fn has_room(&self, alternative: &Alternative<'_>, device: &Device) -> bool {
        let allocated = self.allocator.allocated.shared.get(&device.id);
        let own = self.shares.get(&device.id).map(|shares| &shares.consumed);
        let taken: Vec<&Amounts> = allocated.into_iter().chain(own).collect();
        capacity::has_room(device, &alternative.requested, &taken)
    }

    /// The checks that do not depend on other devices of the claim, cheap ones first.
    fn is_suitable(
        &mut self,
        place: Place,
        alternative: &Alternative<'_>,
        candidate: usize,
    ) -> Result<bool, AllocationError> {
        let device = self.candidates[candidate].device;
        let is_in_use = if alternative.is_admin {
            self.is_taken_for(&device.id, place.claim)
        } else {
            self.is_in_use(&device.id)
        };
        if is_in_use {
            return Ok(false);
        }
        let key = (place.claim, place.request, place.alternative.unwrap_or(0), candidate);
        let is_selected = match self.selectable.get(&key) {
            Some(known) => *known,
            None => {
                if (self.allocator.is_over)() {
                    return Err(AllocationError::OutOfTime);
                }
                let claim = self.plans[place.claim].claim;
                let answer = is_selectable(self.allocator, self.node, claim, alternative, device)?;
                self.selectable.insert(key, answer);
                answer
            }
        };
        Ok(is_selected && self.has_room(alternative, device))
    }

    /// Takes the device, if nothing that was chosen before stands against it.
    fn take(
        &mut self,
        place: Place,
        alternative: &Alternative<'_>,
        candidate: usize,
    ) -> Result<Option<Taken>, AllocationError> {
        let device = self.candidates[candidate].device;
        let is_shared = device.allows_multiple();
        let is_in_use = if alternative.is_admin {
            !is_shared && self.is_taken_for(&device.id, place.claim)
        } else {
            self.is_in_use(&device.id)
        };
        if is_in_use || !tolerates_all(alternative.tolerations, device.spec().taints.as_ref()) {
            return Ok(None);
        }
        // The first share took the counters for all that follow.
        let has_shares = is_shared
            && (self.allocator.allocated.shared.contains_key(&device.id)
                || self.shares.contains_key(&device.id));
        let has_counters = !device.consumes.is_empty() && !has_shares;
        if has_counters && !self.take_counters(candidate) {
            return Ok(None);
        }
        let mut added = 0;
        for constraint in &mut self.constraints[place.claim] {
            if !constraint.add(&alternative.reference, device) {
                break;
            }
            added += 1;
        }
        if added < self.constraints[place.claim].len() {
            for constraint in self.constraints[place.claim][..added].iter_mut().rev() {
                constraint.remove(&alternative.reference);
            }
            if has_counters {
                self.give_counters_back(candidate);
            }
            if matches!(alternative.wanted, Wanted::All(_)) {
                // As upstream: a claim on all devices that its own constraint excludes is a mistake.
                let request = alternative.reference.rsplit('/').next().unwrap_or_default().to_owned();
                let claim = key_of(self.plans[place.claim].claim);
                let problem = RequestProblem::Constraint(device.id.clone());
                return Err(AllocationError::Request { claim, request, problem });
            }
            return Ok(None);
        }
        if !self.has_room(alternative, device) {
            for constraint in self.constraints[place.claim].iter_mut().rev() {
                constraint.remove(&alternative.reference);
            }
            if has_counters {
                self.give_counters_back(candidate);
            }
            return Ok(None);
        }
        if !is_shared {
            self.taken.entry(&device.id).or_default().push(place.claim);
        }
        let consumed = is_shared.then(|| capacity::consumed(&alternative.requested, &device.capacity));
        if let Some(consumed) = &consumed {
            let shares = self.shares.entry(&device.id).or_default();
            shares.count += 1;
            for (name, amount) in consumed {
                add_to(&mut shares.consumed, name, *amount);
            }
        }
        self.found[place.claim].push(Chosen {
            device,
            request: place.request,
            alternative: place.alternative.unwrap_or(0),
            share_id: is_shared.then(|| (self.allocator.new_share_id)()),
            consumed: consumed.clone().unwrap_or_default(),
        });
        Ok(Some(Taken { candidate, has_counters, is_marked: !is_shared, consumed }))
    }

    /// Undoes [`take`](Self::take).
    fn untake(&mut self, place: Place, taken: Taken) {
        let device = self.candidates[taken.candidate].device;
        let request = &self.plans[place.claim].requests[place.request];
        let reference = &request.alternatives[place.alternative.unwrap_or(0)].reference;
        self.found[place.claim].pop();
        if let Some(consumed) = &taken.consumed
            && let Some(shares) = self.shares.get_mut(&device.id)
        {
            shares.count -= 1;
            for (name, amount) in consumed {
                if let Some(held) = shares.consumed.get_mut(name) {
                    *held = *held - *amount;
                }
            }
            if shares.count == 0 {
                self.shares.remove(&device.id);
            }
        }
        if taken.is_marked
            && let Some(claims) = self.taken.get_mut(&device.id)
            && let Some(position) = claims.iter().rposition(|claim| *claim == place.claim)
        {
            claims.remove(position);
        }
        for constraint in self.constraints[place.claim].iter_mut().rev() {
            constraint.remove(reference);
        }
        if taken.has_counters {
            self.give_counters_back(taken.candidate);
        }
    }

    /// Takes the device's counters. False, and no change, if the pool has too few left.
    fn take_counters(&mut self, candidate: usize) -> bool {
        let Candidate { device, pool } = self.candidates[candidate];
        let (pools, allocated) = (self.pools, self.allocator.allocated);
        let available = self.available[pool].get_or_insert_with(|| pools[pool].available(allocated));
        let consumed = &mut self.consumed[pool];
        for (set, amounts) in &device.consumes {
            let held = consumed.entry(set.clone()).or_default();
            for (name, amount) in amounts {
                add_to(held, name, *amount);
            }
        }
        let suffices = available.iter().all(|(set, left)| {
            let held = consumed.get(set);
            left.iter().all(|(name, left)| {
                held.and_then(|held| held.get(name)).map_or(!left.is_negative(), |held| held <= left)
            })
        });
        if !suffices {
            self.give_counters_back(candidate);
        }
        suffices
    }

    fn give_counters_back(&mut self, candidate: usize) {
        let Candidate { device, pool } = self.candidates[candidate];
        for (set, amounts) in &device.consumes {
            let Some(held) = self.consumed[pool].get_mut(set) else { continue };
            for (name, amount) in amounts {
                if let Some(held) = held.get_mut(name) {
                    *held = *held - *amount;
                }
            }
        }
    }
}

/// True if every taint that keeps pods away is tolerated. Effects that are not known are ignored.
fn tolerates_all(tolerations: Option<&Vec<DeviceToleration>>, taints: Option<&Vec<DeviceTaint>>) -> bool {
    let effective = |taint: &&DeviceTaint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    taints.into_iter().flatten().filter(effective).all(|taint| {
        tolerations.into_iter().flatten().any(|toleration| crate::devices::tolerates(toleration, taint))
    })
}

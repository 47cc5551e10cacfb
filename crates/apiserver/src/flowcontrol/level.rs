//! One priority level: its seats, and the requests that wait for one.

use super::demand::Smoothed;
use super::measures::{FlowMeasures, LevelMeasures};
use super::queues::{Arrival, Kind, Place, Position, Queues, Reason, Request};
use super::retry_after::RetryAfter;
use super::shares::{Bounds, Share};
use ::http::HeaderValue;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Hands the seat to the request that waits for it.
struct Ticket {
    seat: oneshot::Sender<Seat>,
    flow: Arc<FlowMeasures>,
}

pub(crate) struct Level {
    pub name: String,
    pub uid: HeaderValue,
    pub(super) share: Share,
    measures: LevelMeasures,
    state: Mutex<State>,
}

struct State {
    queues: Queues<Ticket>,
    bounds: Bounds,
    demand: Smoothed,
    retry_after: RetryAfter,
}

/// The right of a request to be served, until it is dropped.
pub(crate) struct Seat {
    level: Arc<Level>,
    flow: Arc<FlowMeasures>,
    /// None while the request has stepped aside.
    place: Mutex<Option<Place>>,
    seats: u32,
}

/// A request in a queue. It leaves the queue when this is dropped.
pub(crate) struct Queued {
    level: Arc<Level>,
    flow: Arc<FlowMeasures>,
    position: Position,
    seats: u32,
    since: Instant,
    seat: oneshot::Receiver<Seat>,
}

pub(crate) enum Admission {
    Seated(Seat),
    Queued(Queued),
    Refused,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A level as it is configured.
pub(super) struct Settings {
    pub name: String,
    pub uid: HeaderValue,
    pub kind: Kind,
    pub share: Share,
    pub bounds: Bounds,
}

impl Level {
    /// A level with the queues of the one that it replaces, if there is one.
    pub(super) fn new(settings: Settings, now: Instant) -> Arc<Self> {
        let limit = settings.bounds.initial();
        let level = Self {
            measures: LevelMeasures::new(&settings.name),
            name: settings.name,
            uid: settings.uid,
            share: settings.share,
            state: Mutex::new(State {
                queues: Queues::new(settings.kind, limit, now),
                bounds: settings.bounds,
                demand: Smoothed::default(),
                retry_after: RetryAfter::default(),
            }),
        };
        level.measures.configured(&settings.bounds, limit);
        Arc::new(level)
    }

    /// True if the level can take these settings over without losing its queues.
    pub(super) fn is_of(&self, settings: &Settings) -> bool {
        self.name == settings.name && self.uid == settings.uid && self.share == settings.share
    }

    pub(super) fn configure(self: &Arc<Self>, kind: Kind, bounds: Bounds, now: Instant) {
        let served = {
            let mut state = lock(&self.state);
            let limit = match state.bounds == bounds {
                true => state.queues.limit(),
                false => bounds.initial(),
            };
            state.bounds = bounds;
            self.measures.configured(&bounds, limit);
            state.queues.configure(kind, limit, now)
        };
        self.seat(served);
    }

    /// The widest that one request can be.
    pub(super) fn widest(&self) -> u32 {
        let state = lock(&self.state);
        let nominal = state.bounds.nominal;
        let hand = match state.queues.kind() {
            Kind::Queuing(queuing) => u32::try_from(queuing.hand).unwrap_or(u32::MAX).max(1),
            Kind::Exempt | Kind::Rejecting => 1,
        };
        (nominal * 15).div_ceil(100).min(nominal / hand).max(1)
    }

    /// Takes a request in.
    pub(super) fn admit(self: &Arc<Self>, request: Request, flow: &Arc<FlowMeasures>) -> Admission {
        let now = Instant::now();
        let (sender, receiver) = oneshot::channel();
        let (arrival, served) = {
            let mut state = lock(&self.state);
            let ticket = || Ticket { seat: sender, flow: Arc::clone(flow) };
            let arrival = state.queues.arrive(request, now, ticket);
            let served = match arrival {
                Arrival::Waits(_) => state.queues.dispatch(now),
                Arrival::Served(_) | Arrival::Refused(_) => Vec::new(),
            };
            self.measures.note(&state.queues);
            (arrival, served)
        };
        self.seat(served);
        match arrival {
            Arrival::Served(place) => {
                flow.waited(Duration::ZERO, true);
                Admission::Seated(Seat::new(self, flow, place))
            }
            Arrival::Waits(position) => {
                flow.queued(request.seats, 1);
                let (level, flow) = (Arc::clone(self), Arc::clone(flow));
                let (seats, since) = (request.seats, now);
                Admission::Queued(Queued { level, flow, position, seats, since, seat: receiver })
            }
            Arrival::Refused(reason) => {
                flow.refused(reason);
                Admission::Refused
            }
        }
    }

    /// Gives seats to requests that waited. Without the lock: the seat of one that left is dropped, and takes it.
    fn seat(self: &Arc<Self>, served: Vec<(Ticket, Place)>) {
        for (ticket, place) in served {
            drop(ticket.seat.send(Seat::new(self, &ticket.flow, place)));
        }
    }

    fn leave(self: &Arc<Self>, place: &Place) {
        let served = {
            let mut state = lock(&self.state);
            let served = state.queues.leave(place, Instant::now());
            self.measures.note(&state.queues);
            served
        };
        self.seat(served);
    }

    /// Counts a refusal, and says after how many seconds the client may try again.
    pub(super) fn retry_after(&self, second: u64) -> u64 {
        lock(&self.state).retry_after.refuse(second)
    }

    /// The demand since the last call, with the level's bounds.
    pub(super) fn claim(&self, now: Instant) -> super::shares::Claim {
        let mut state = lock(&self.state);
        let observed = state.queues.take_demand(now);
        state.demand.add(observed);
        let claim = super::shares::Claim {
            exempt: self.share.exempt,
            bounds: state.bounds,
            most: state.demand.most,
            smoothed: state.demand.smoothed,
        };
        self.measures.adjusted(&state.demand, claim.target());
        claim
    }

    pub(super) fn set_limit(self: &Arc<Self>, limit: u32, now: Instant) {
        let served = {
            let mut state = lock(&self.state);
            let kind = state.queues.kind();
            self.measures.limited(limit);
            state.queues.configure(kind, limit, now)
        };
        self.seat(served);
    }

    /// The level's state, for debugging.
    pub(super) fn dump(&self) -> Dump {
        let state = lock(&self.state);
        let queues = &state.queues;
        Dump {
            name: self.name.clone(),
            exempt: self.share.exempt,
            limit: queues.limit(),
            executing: queues.executing(),
            seats: queues.seats(),
            waiting: queues.waiting(),
            queues: queues.lengths().collect(),
        }
    }
}

/// The state of a level at one moment.
pub(super) struct Dump {
    pub name: String,
    pub exempt: bool,
    pub limit: u32,
    pub executing: usize,
    pub seats: u32,
    pub waiting: usize,
    /// The requests that wait and that are served, by queue.
    pub queues: Vec<(usize, usize)>,
}

impl Seat {
    fn new(level: &Arc<Level>, flow: &Arc<FlowMeasures>, place: Place) -> Self {
        flow.serving(place.seats, 1);
        let seats = place.seats;
        Self { level: Arc::clone(level), flow: Arc::clone(flow), place: Mutex::new(Some(place)), seats }
    }

    /// Gives the seat up for a while, as when the client has to send more.
    pub fn step_aside(&self) {
        let place = lock(&self.place).take();
        if let Some(place) = place {
            self.level.leave(&place);
        }
    }

    /// Takes a seat again, and waits for one if there is none, before all requests that wait for their first. False if
    /// `patience` ends first.
    pub async fn step_in(&self, patience: Duration) -> bool {
        if lock(&self.place).is_some() {
            return true;
        }
        let (sender, receiver) = oneshot::channel();
        let ticket = || Ticket { seat: sender, flow: Arc::clone(&self.flow) };
        let place = lock(&self.level.state).queues.come_back(self.seats, Instant::now(), ticket);
        let place = match place {
            Some(place) => Some(place),
            None => match tokio::time::timeout(patience, receiver).await {
                // Its place becomes this one's.
                Ok(Ok(seat)) => lock(&seat.place).take(),
                Ok(Err(_)) | Err(_) => None,
            },
        };
        let is_seated = place.is_some();
        *lock(&self.place) = place;
        is_seated
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let place = self.place.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.flow.serving(self.seats, -1);
        if let Some(place) = place {
            self.flow.served(place.started.elapsed());
            self.level.leave(&place);
        }
    }
}

impl Queued {
    /// Waits for a seat until `deadline`.
    pub async fn seat(mut self, deadline: tokio::time::Instant) -> Result<Seat, Reason> {
        let seat = tokio::time::timeout_at(deadline, &mut self.seat).await;
        match seat {
            Ok(Ok(seat)) => {
                self.flow.waited(self.since.elapsed(), true);
                Ok(seat)
            }
            Ok(Err(_)) | Err(_) => {
                self.flow.waited(self.since.elapsed(), false);
                self.flow.refused(Reason::TimedOut);
                Err(Reason::TimedOut)
            }
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.flow.queued(self.seats, -1);
        let mut state = lock(&self.level.state);
        // The ticket is dropped after the lock: it may be the last to know a seat.
        let ticket = state.queues.give_up(self.position, Instant::now());
        self.level.measures.note(&state.queues);
        drop(state);
        drop(ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::super::queues::Queuing;
    use super::*;
    use futures_util::FutureExt;

    fn level(seats: u32, queuing: Queuing) -> Arc<Level> {
        let share = Share { shares: 1, ..Share::default() };
        let settings = Settings {
            name: "test".to_owned(),
            uid: HeaderValue::from_static("u"),
            kind: Kind::Queuing(queuing),
            share,
            bounds: Bounds { nominal: seats, lower: seats, upper: seats },
        };
        Level::new(settings, Instant::now())
    }

    fn request() -> Request {
        Request { flow: 1, seats: 1, patient: false }
    }

    const QUEUING: Queuing = Queuing { queues: 4, hand: 2, length: 2 };
    const PATIENCE: Duration = Duration::from_secs(1);

    fn soon() -> tokio::time::Instant {
        tokio::time::Instant::now() + Duration::from_secs(5)
    }

    #[tokio::test(start_paused = true)]
    async fn a_seat_goes_to_the_next_request() {
        let (level, flow) = (level(1, QUEUING), Arc::new(FlowMeasures::new("test", "flow")));
        let Admission::Seated(seat) = level.admit(request(), &flow) else { panic!("a seat is free") };
        let Admission::Queued(queued) = level.admit(request(), &flow) else { panic!("no seat is free") };
        let waiting = queued.seat(soon());
        tokio::pin!(waiting);
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        drop(seat);
        let seat = waiting.await.expect("the seat of the first");
        let Admission::Queued(late) = level.admit(request(), &flow) else { panic!("no seat is free") };
        assert!(matches!(late.seat(soon()).await, Err(Reason::TimedOut)));
        drop(seat);
        assert!(matches!(level.admit(request(), &flow), Admission::Seated(_)), "nothing is left behind");
        let dump = level.dump();
        assert_eq!((dump.executing, dump.seats, dump.waiting), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_seat_for_one_who_left_is_passed_on() {
        let (level, flow) = (level(1, QUEUING), Arc::new(FlowMeasures::new("test", "flow")));
        let Admission::Seated(seat) = level.admit(request(), &flow) else { panic!("a seat is free") };
        let Admission::Queued(gone) = level.admit(request(), &flow) else { panic!("no seat is free") };
        let Admission::Queued(next) = level.admit(request(), &flow) else { panic!("no seat is free") };
        // The seat is handed over before the one that waited for it leaves.
        drop(seat);
        drop(gone);
        next.seat(soon()).await.expect("the seat is passed on");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_steps_aside_lets_others_in() {
        let (level, flow) = (level(1, QUEUING), Arc::new(FlowMeasures::new("test", "flow")));
        let Admission::Seated(slow) = level.admit(request(), &flow) else { panic!("a seat is free") };
        slow.step_aside();
        let Admission::Seated(quick) = level.admit(request(), &flow) else { panic!("the seat is free") };
        assert!(!slow.step_in(PATIENCE).await, "the seat is taken");
        drop(quick);
        assert!(slow.step_in(PATIENCE).await && slow.step_in(PATIENCE).await);
        drop(slow);
        assert_eq!(level.dump().seats, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_comes_back_is_served_before_those_that_wait() {
        let (level, flow) = (level(1, QUEUING), Arc::new(FlowMeasures::new("test", "flow")));
        let Admission::Seated(slow) = level.admit(request(), &flow) else { panic!("a seat is free") };
        let Admission::Queued(first) = level.admit(request(), &flow) else { panic!("no seat is free") };
        let Admission::Queued(second) = level.admit(request(), &flow) else { panic!("no seat is free") };
        slow.step_aside();
        let first = first.seat(soon()).await.expect("the seat that was given up");
        let second = second.seat(soon());
        tokio::pin!(second);
        let back = async {
            assert!(slow.step_in(PATIENCE).await, "it waits for a seat");
            assert!((&mut second).now_or_never().is_none(), "the other one still waits");
            drop(slow);
        };
        let leaves = async {
            tokio::task::yield_now().await;
            drop(first);
        };
        tokio::join!(back, leaves);
        second.await.expect("the seat of the one that came back");
    }
}

//! The seats of one priority level and the queues before them.
//!
//! This is fair queuing: time is counted in seat-seconds that each active queue has been given (`progress`). A request is
//! served from the queue whose next request would end first if every active queue got the same share of the seats. A flow is
//! dealt a few queues by its hash, and each of its requests joins the one with the least waiting work, so that a flow with
//! many requests fills its own queues and leaves those of others short.
//!
//! Nothing here waits or knows the time: the caller says what happened and when, and gets the tickets that
//! are served.

use super::demand::Demand;
use std::collections::VecDeque;
use std::time::Instant;

/// Upstream's guess of how long a request takes, in seconds, before it is known.
const EXPECTED_SECONDS: f64 = 0.003;

/// The queuing of requests for which a level has no seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Queuing {
    pub queues: usize,
    /// The queues that one flow may use.
    pub hand: usize,
    /// The longest that a queue may be.
    pub length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Everybody is served at once.
    Exempt,
    /// A request that finds no seat is refused.
    Rejecting,
    Queuing(Queuing),
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    ConcurrencyLimit,
    QueueFull,
    TimedOut,
}

impl Reason {
    /// In upstream's words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ConcurrencyLimit => "concurrency-limit",
            Self::QueueFull => "queue-full",
            Self::TimedOut => "time-out",
        }
    }
}

/// The seats of a request that is being served.
#[derive(Debug)]
pub(super) struct Place {
    queue: Option<usize>,
    pub seats: u32,
    pub started: Instant,
}

/// Where a request waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    queue: usize,
    number: u64,
}

#[derive(Debug)]
pub(super) enum Arrival {
    Served(Place),
    Waits(Position),
    Refused(Reason),
}

/// A request as it arrives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub flow: u64,
    pub seats: u32,
    /// Waits however long the queue is.
    pub patient: bool,
}

struct Waiting<T> {
    number: u64,
    seats: u32,
    /// The progress when it arrived: it cannot have been served before.
    arrived: f64,
    ticket: T,
}

struct Queue<T> {
    waiting: VecDeque<Waiting<T>>,
    waiting_seats: u32,
    executing: usize,
    /// The progress at which its next request starts.
    next: f64,
}

impl<T> Queue<T> {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.executing == 0
    }

    /// A queue that did not use its share does not save it up.
    fn catch_up(&mut self) {
        if let Some(first) = self.waiting.front() {
            self.next = self.next.max(first.arrived);
        }
    }
}

pub(super) struct Queues<T> {
    kind: Kind,
    /// The seats there are.
    limit: u32,
    queues: Vec<Queue<T>>,
    active: usize,
    progress: f64,
    at: Instant,
    executing: usize,
    seats: u32,
    waiting: usize,
    waiting_seats: u32,
    /// Requests that come back and wait for their seats, with the number of these. They are served before all others.
    returning: VecDeque<(u32, T)>,
    arrivals: u64,
    /// The queue that was served last; among equals, those behind it come first.
    last: usize,
    demand: Demand,
}

fn work(seats: u32) -> f64 {
    f64::from(seats) * EXPECTED_SECONDS
}

/// Deals `hand` different queues of `deck` by a hash.
fn deal(mut hash: u64, deck: usize, hand: usize) -> Vec<usize> {
    let mut taken: Vec<usize> = Vec::with_capacity(hand);
    let mut dealt = Vec::with_capacity(hand);
    for left in ((deck - hand.min(deck) + 1)..=deck).rev() {
        let mut card = (hash % left as u64) as usize;
        hash /= left as u64;
        // The card is counted among those that are left.
        for other in &taken {
            card += usize::from(card >= *other);
        }
        taken.insert(taken.partition_point(|other| *other < card), card);
        dealt.push(card);
    }
    dealt
}

impl<T> Queues<T> {
    pub fn new(kind: Kind, limit: u32, now: Instant) -> Self {
        let mut queues = Self {
            kind,
            limit,
            queues: Vec::new(),
            active: 0,
            progress: 0.0,
            at: now,
            executing: 0,
            seats: 0,
            waiting: 0,
            waiting_seats: 0,
            returning: VecDeque::new(),
            arrivals: 0,
            last: 0,
            demand: Demand::new(now),
        };
        queues.arrange();
        queues
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn limit(&self) -> u32 {
        self.limit
    }

    pub fn executing(&self) -> usize {
        self.executing
    }

    pub fn seats(&self) -> u32 {
        self.seats
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    pub fn progress(&self) -> f64 {
        self.progress
    }

    /// The requests that wait and are served, queue by queue.
    pub fn lengths(&self) -> impl Iterator<Item = (usize, usize)> {
        self.queues.iter().map(|queue| (queue.waiting.len(), queue.executing))
    }

    /// The demand since this was last asked for.
    pub fn take_demand(&mut self, now: Instant) -> super::demand::Observed {
        self.demand.take(now)
    }

    /// Changes kind and seats. Returns the requests that are served now.
    pub fn configure(&mut self, kind: Kind, limit: u32, now: Instant) -> Vec<(T, Place)> {
        self.advance(now);
        self.kind = kind;
        self.limit = limit;
        self.arrange();
        self.dispatch(now)
    }

    /// Makes queues that are missing, and drops those at the end that nobody needs.
    fn arrange(&mut self) {
        let wanted = match self.kind {
            Kind::Queuing(queuing) => queuing.queues,
            Kind::Exempt | Kind::Rejecting => 0,
        };
        while self.queues.len() > wanted && self.queues.last().is_some_and(Queue::is_idle) {
            self.queues.pop();
        }
        while self.queues.len() < wanted {
            let queue =
                Queue { waiting: VecDeque::new(), waiting_seats: 0, executing: 0, next: self.progress };
            self.queues.push(queue);
        }
    }

    /// Brings the progress up to now.
    fn advance(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        if self.active > 0 {
            let busy = (self.seats + self.waiting_seats).min(self.limit);
            self.progress += elapsed * f64::from(busy) / self.active as f64;
        }
    }

    fn note_demand(&mut self, now: Instant) {
        self.demand.set(self.seats + self.waiting_seats, now);
    }

    fn fits(&self, seats: u32) -> bool {
        match self.kind {
            Kind::Exempt => true,
            // One that needs more than there is gets all there is.
            _ if seats > self.limit => self.executing == 0,
            _ => self.seats + seats <= self.limit,
        }
    }

    fn occupy(&mut self, queue: Option<usize>, seats: u32, now: Instant) -> Place {
        self.executing += 1;
        self.seats += seats;
        if let Some(queue) = queue.and_then(|index| self.queues.get_mut(index)) {
            queue.executing += 1;
            queue.next += work(seats);
        }
        self.note_demand(now);
        Place { queue, seats, started: now }
    }

    /// Takes a request in. The ticket is kept only if it waits.
    pub fn arrive(&mut self, request: Request, now: Instant, ticket: impl FnOnce() -> T) -> Arrival {
        self.advance(now);
        let queuing = match self.kind {
            Kind::Queuing(queuing) => queuing,
            Kind::Exempt => return Arrival::Served(self.occupy(None, request.seats, now)),
            Kind::Rejecting => {
                return match self.fits(request.seats) {
                    true => Arrival::Served(self.occupy(None, request.seats, now)),
                    false => Arrival::Refused(Reason::ConcurrencyLimit),
                };
            }
        };
        let index = self.choose(request.flow, queuing);
        let is_first = self.waiting == 0 && self.returning.is_empty();
        let (fits, progress) = (is_first && self.fits(request.seats), self.progress);
        let queue = &mut self.queues[index];
        if !fits && self.seats >= self.limit && queue.waiting.len() >= queuing.length && !request.patient {
            return Arrival::Refused(Reason::QueueFull);
        }
        if queue.is_idle() {
            queue.next = progress;
            self.active += 1;
        }
        if fits {
            return Arrival::Served(self.occupy(Some(index), request.seats, now));
        }
        let number = self.arrivals;
        queue.waiting.push_back(Waiting {
            number,
            seats: request.seats,
            arrived: progress,
            ticket: ticket(),
        });
        queue.waiting_seats += request.seats;
        queue.catch_up();
        self.waiting += 1;
        self.waiting_seats += request.seats;
        self.note_demand(now);
        Arrival::Waits(Position { queue: index, number })
    }

    /// The queue of the flow's hand with the least waiting work.
    fn choose(&mut self, flow: u64, queuing: Queuing) -> usize {
        let hand = deal(flow, queuing.queues.min(self.queues.len()), queuing.hand);
        // Another card comes first each time, lest flows with common cards favour them.
        let offset = self.arrivals as usize % hand.len().max(1);
        self.arrivals += 1;
        let (before, after) = hand.split_at(offset);
        let in_turn = after.iter().chain(before).copied();
        in_turn.min_by_key(|index| self.queues[*index].waiting_seats).unwrap_or_default()
    }

    /// Serves waiting requests while there are seats.
    pub fn dispatch(&mut self, now: Instant) -> Vec<(T, Place)> {
        let mut served = Vec::new();
        while let Some((seats, _)) = self.returning.front()
            && self.fits(*seats)
            && let Some((seats, ticket)) = self.returning.pop_front()
        {
            served.push((ticket, self.occupy(None, seats, now)));
        }
        while self.returning.is_empty() && self.waiting > 0 && self.seats < self.limit {
            let count = self.queues.len();
            let in_turn = (1..=count).map(|step| (self.last + step) % count);
            let ends = in_turn.filter_map(|index| {
                let queue = &self.queues[index];
                queue.waiting.front().map(|first| (index, queue.next + work(first.seats), first.seats))
            });
            let Some((index, _, seats)) = ends.min_by(|a, b| a.1.total_cmp(&b.1)) else { break };
            if !self.fits(seats) {
                break;
            }
            let queue = &mut self.queues[index];
            let Some(first) = queue.waiting.pop_front() else { break };
            queue.waiting_seats -= seats;
            self.waiting -= 1;
            self.waiting_seats -= seats;
            self.last = index;
            let place = self.occupy(Some(index), seats, now);
            self.queues[index].catch_up();
            served.push((first.ticket, place));
        }
        served
    }

    /// Ends a request. Returns those that are served in its stead.
    pub fn leave(&mut self, place: &Place, now: Instant) -> Vec<(T, Place)> {
        self.advance(now);
        self.executing -= 1;
        self.seats -= place.seats;
        if let Some(queue) = place.queue.and_then(|index| self.queues.get_mut(index)) {
            queue.executing -= 1;
            let took = now.saturating_duration_since(place.started).as_secs_f64();
            queue.next += f64::from(place.seats) * (took - EXPECTED_SECONDS);
            queue.catch_up();
            self.active -= usize::from(queue.is_idle());
        }
        self.note_demand(now);
        let served = self.dispatch(now);
        self.arrange();
        served
    }

    /// Seats a request that gave its seats up for a while. If there are none for it, it waits before all others: it
    /// has waited for its turn already.
    pub fn come_back(&mut self, seats: u32, now: Instant, ticket: impl FnOnce() -> T) -> Option<Place> {
        self.advance(now);
        if self.returning.is_empty() && self.fits(seats) {
            return Some(self.occupy(None, seats, now));
        }
        self.returning.push_back((seats, ticket()));
        None
    }

    /// Takes a waiting request out. None if it does not wait any more.
    pub fn give_up(&mut self, position: Position, now: Instant) -> Option<T> {
        self.advance(now);
        let queue = self.queues.get_mut(position.queue)?;
        let index = queue.waiting.iter().position(|one| one.number == position.number)?;
        let gone = queue.waiting.remove(index)?;
        queue.waiting_seats -= gone.seats;
        queue.catch_up();
        self.waiting -= 1;
        self.waiting_seats -= gone.seats;
        self.active -= usize::from(queue.is_idle());
        self.note_demand(now);
        self.arrange();
        Some(gone.ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::time::Duration;

    const QUEUING: Kind = Kind::Queuing(Queuing { queues: 8, hand: 2, length: 3 });

    fn one(flow: u64) -> Request {
        Request { flow, seats: 1, patient: false }
    }

    #[test]
    fn hands_are_of_different_queues_and_cover_the_deck() {
        let mut seen = [0; 8];
        for hash in 0..3000_u64 {
            let hand = deal(hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), 8, 3);
            assert_eq!(hand.len(), 3);
            assert!(hand[0] != hand[1] && hand[1] != hand[2] && hand[0] != hand[2], "{hand:?}");
            hand.iter().for_each(|card| seen[*card] += 1);
        }
        assert!(seen.iter().all(|count| (900..1400).contains(count)), "{seen:?}");
        assert_eq!(deal(7, 2, 5).len(), 2, "no more cards than there are");
    }

    #[test]
    fn an_exempt_level_serves_everybody() {
        let now = Instant::now();
        let mut queues: Queues<()> = Queues::new(Kind::Exempt, 0, now);
        for _ in 0..1000 {
            assert!(matches!(queues.arrive(one(1), now, || ()), Arrival::Served(_)));
        }
        assert_eq!(queues.executing(), 1000);
    }

    #[test]
    fn a_rejecting_level_refuses_when_its_seats_are_taken() {
        let now = Instant::now();
        let mut queues: Queues<()> = Queues::new(Kind::Rejecting, 2, now);
        let Arrival::Served(first) = queues.arrive(one(1), now, || ()) else { panic!("a seat is free") };
        assert!(matches!(queues.arrive(one(1), now, || ()), Arrival::Served(_)));
        let refused = queues.arrive(one(1), now, || ());
        assert!(matches!(refused, Arrival::Refused(Reason::ConcurrencyLimit)), "{refused:?}");
        queues.leave(&first, now);
        assert!(matches!(queues.arrive(one(1), now, || ()), Arrival::Served(_)));
    }

    #[test]
    fn a_full_queue_refuses_but_the_patient_wait() {
        let now = Instant::now();
        let mut queues = Queues::new(QUEUING, 1, now);
        assert!(matches!(queues.arrive(one(5), now, || 0), Arrival::Served(_)));
        let outcomes: Vec<_> = (1..10).map(|ticket| queues.arrive(one(5), now, || ticket)).collect();
        let waiting = outcomes.iter().filter(|o| matches!(o, Arrival::Waits(_))).count();
        assert_eq!(waiting, 6, "two queues of three: {outcomes:?}");
        assert!(matches!(outcomes.last(), Some(Arrival::Refused(Reason::QueueFull))));
        let patient = queues.arrive(Request { patient: true, ..one(5) }, now, || 99);
        assert!(matches!(patient, Arrival::Waits(_)), "{patient:?}");
    }

    #[test]
    fn a_wide_request_waits_for_its_seats_and_one_wider_than_all_gets_all() {
        let now = Instant::now();
        let mut queues = Queues::new(QUEUING, 4, now);
        let Arrival::Served(narrow) = queues.arrive(one(1), now, || "narrow") else {
            panic!("a seat is free")
        };
        let wide = queues.arrive(Request { seats: 4, ..one(2) }, now, || "wide");
        assert!(matches!(wide, Arrival::Waits(_)), "{wide:?}");
        assert!(matches!(queues.arrive(one(3), now, || "later"), Arrival::Waits(_)), "nobody overtakes");
        let served = queues.leave(&narrow, now);
        assert_eq!(served.iter().map(|s| s.0).collect::<Vec<_>>(), ["later"], "the shortest first");
        let served = queues.leave(&served[0].1, now);
        assert_eq!(served.iter().map(|s| s.0).collect::<Vec<_>>(), ["wide"]);
        queues.leave(&served[0].1, now);
        let all = queues.arrive(Request { seats: 9, ..one(2) }, now, || "all");
        assert!(matches!(all, Arrival::Served(_)), "{all:?}");
    }

    #[test]
    fn one_that_gives_up_makes_room_and_counts_no_more() {
        let now = Instant::now();
        let mut queues = Queues::new(QUEUING, 1, now);
        let Arrival::Served(first) = queues.arrive(one(1), now, || 0) else { panic!("a seat is free") };
        let Arrival::Waits(position) = queues.arrive(one(1), now, || 1) else { panic!("no seat is free") };
        assert_eq!(queues.give_up(position, now), Some(1));
        assert_eq!(queues.give_up(position, now), None, "only once");
        assert!(queues.leave(&first, now).is_empty());
        assert_eq!((queues.executing(), queues.waiting(), queues.seats(), queues.active), (0, 0, 0, 0));
    }

    #[test]
    fn fewer_queues_wait_until_the_others_are_empty() {
        let now = Instant::now();
        let mut queues = Queues::new(QUEUING, 1, now);
        let Arrival::Served(first) = queues.arrive(one(1), now, || 0) else { panic!("a seat is free") };
        for ticket in 1..20 {
            queues.arrive(one(ticket), now, || ticket);
        }
        let waiting = queues.waiting();
        let served = queues.configure(Kind::Rejecting, 1, now);
        assert!(served.is_empty() && queues.waiting() == waiting, "nobody is lost");
        let mut places = vec![first];
        let mut count = 0;
        while let Some(place) = places.pop() {
            places.extend(queues.leave(&place, now).into_iter().map(|(_, place)| place));
            count += 1;
        }
        assert_eq!(count, waiting + 1);
        assert_eq!((queues.queues.len(), queues.active), (0, 0));
    }

    /// Two flows that always have requests waiting share the seats, however many requests one of them has.
    #[test]
    fn greedy_flows_do_not_starve_others() {
        let start = Instant::now();
        let mut queues = Queues::new(Kind::Queuing(Queuing { queues: 64, hand: 4, length: 50 }), 4, start);
        let mut served: HashMap<u64, usize> = HashMap::new();
        let mut running: VecDeque<(u64, Place)> = VecDeque::new();
        // The greedy flow has 20 requests for each one of the modest flow.
        let (greedy, modest) = (0x1234_5678, 0x9ABC_DEF0_1111);
        let mut now = start;
        for turn in 0..4000 {
            let flow = if turn % 21 == 0 { modest } else { greedy };
            match queues.arrive(one(flow), now, || flow) {
                Arrival::Served(place) => running.push_back((flow, place)),
                Arrival::Waits(_) | Arrival::Refused(_) => {}
            }
            if turn % 4 == 0 {
                now += Duration::from_millis(3);
                if let Some((flow, place)) = running.pop_front() {
                    *served.entry(flow).or_default() += 1;
                    running.extend(queues.leave(&place, now));
                }
            }
        }
        // The modest flow asks for less than its share: all of it is served except requests that still
        // wait.
        assert!(served[&modest] >= 4000 / 21 - 10, "{served:?}");
        assert!(served[&greedy] > 500, "{served:?}");
    }
}

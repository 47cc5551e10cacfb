//! Clients of the API: informers, indexers, workqueues, expectations, events, leader election.

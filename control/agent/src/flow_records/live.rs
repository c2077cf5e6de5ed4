//! Counts that the records of open connections have told so far. The thread that makes records owns it.

use std::collections::HashMap;
use std::time::Duration;

use penstock_admin::types::Traffic;
use penstock_dataplane::conntrack::{self, State, Timestamp};

use super::record::RecordedCounts;

/// The last record of each open connection that had one.
#[derive(Debug, Default)]
pub(super) struct LiveConnections {
    recorded: HashMap<u64, LastRecord>,
    /// Number of the walk of the table that runs, or ran last.
    walk: u32,
    /// After how many walks more that have not seen it a connection is forgotten.
    patience: u32,
}

/// A walk does not see a connection that has expired. The sweep that frees its entry comes within some ten seconds, and later
/// if workers are busy.
const SWEPT_WITHIN: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
struct LastRecord {
    /// When it was opened: another one may have the same addresses and ports later.
    begun: Option<Timestamp>,
    state: State,
    /// As they stood in the table.
    raw: [conntrack::Traffic; 2],
    /// All in all: the table's counts wrap.
    total: [Traffic; 2],
    walk: u32,
}

/// A connection as a record sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    /// [`ConnTable::connection_id`](conntrack::ConnTable::connection_id).
    pub(super) id: u64,
    pub(super) begun: Option<Timestamp>,
    pub(super) state: State,
    pub(super) traffic: [conntrack::Traffic; 2],
}

impl LiveConnections {
    pub(super) fn new(interval: Duration) -> Self {
        let patience = SWEPT_WITHIN.as_millis().div_ceil(interval.as_millis().max(1));
        Self { patience: patience.try_into().unwrap_or(u32::MAX), ..Self::default() }
    }

    /// A connection of an earlier daemon, which has recorded what it has sent so far.
    pub(super) fn found(&mut self, connection: Counted) {
        self.note(connection, connection.traffic.map(extended));
    }

    /// The counts of an open connection since it was opened, and since its last record.
    pub(super) fn interval(&mut self, connection: Counted) -> RecordedCounts {
        let (total, since) = self.advance(connection);
        self.note(connection, total);
        counts(total, since)
    }

    /// The same, unless its last record says as much already.
    pub(super) fn news(&mut self, connection: Counted) -> Option<RecordedCounts> {
        let last = self.recorded.get(&connection.id).filter(|last| last.begun == connection.begun);
        let is_known = last.is_some_and(|last| last.state == connection.state && last.raw == connection.traffic);
        (!is_known).then(|| self.interval(connection))
    }

    pub(super) fn end(&mut self, connection: Counted) -> RecordedCounts {
        let (total, since) = self.advance(connection);
        if self.recorded.get(&connection.id).is_some_and(|last| last.begun == connection.begun) {
            self.recorded.remove(&connection.id);
        }
        counts(total, since)
    }

    pub(super) fn begin_walk(&mut self) {
        self.walk += 1;
    }

    /// It has ended: what was not seen for long has ended, and the record of that was lost.
    pub(super) fn end_walk(&mut self) {
        let (walk, patience) = (self.walk, self.patience);
        self.recorded.retain(|_, last| walk - last.walk <= patience);
    }

    fn advance(&self, Counted { id, begun, traffic, .. }: Counted) -> ([Traffic; 2], [Traffic; 2]) {
        let last = self.recorded.get(&id).filter(|last| last.begun == begun);
        let (raw, mut total) = last.map_or_else(Default::default, |last| (last.raw, last.total));
        let since = [0, 1].map(|direction| since(raw[direction], traffic[direction]));
        for (total, since) in total.iter_mut().zip(since) {
            *total += since;
        }
        (total, since)
    }

    fn note(&mut self, Counted { id, begun, state, traffic }: Counted, total: [Traffic; 2]) {
        self.recorded.insert(id, LastRecord { begun, state, raw: traffic, total, walk: self.walk });
    }
}

fn counts([sent, received]: [Traffic; 2], [sent_since, received_since]: [Traffic; 2]) -> RecordedCounts {
    RecordedCounts { sent, received, sent_since, received_since }
}

fn extended(conntrack::Traffic { packets, bytes }: conntrack::Traffic) -> Traffic {
    Traffic { packets, bytes }
}

/// The difference of two readings of the table's counts, which wrap ([`conntrack::Traffic`]).
fn since(before: conntrack::Traffic, now: conntrack::Traffic) -> Traffic {
    let modulo = |bits: u32, before: u64, now: u64| now.wrapping_sub(before) & ((1 << bits) - 1);
    Traffic {
        packets: modulo(conntrack::Traffic::PACKET_BITS, before.packets, now.packets),
        bytes: modulo(conntrack::Traffic::BYTE_BITS, before.bytes, now.bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(begun: u64, packets: u64, bytes: u64) -> Counted {
        let traffic = [conntrack::Traffic { packets, bytes }, conntrack::Traffic::default()];
        Counted { id: 7, begun: Some(Timestamp::from_millis(begun)), state: State::Assured, traffic }
    }

    fn sent(counts: RecordedCounts) -> ((u64, u64), (u64, u64)) {
        ((counts.sent.packets, counts.sent.bytes), (counts.sent_since.packets, counts.sent_since.bytes))
    }

    #[test]
    fn what_records_say_since_the_last_one_adds_up_to_the_total() {
        let mut live = LiveConnections::default();
        assert_eq!(sent(live.interval(counted(1, 3, 300))), ((3, 300), (3, 300)));
        assert_eq!(sent(live.interval(counted(1, 3, 300))), ((3, 300), (0, 0)), "idle since then");
        assert_eq!(live.news(counted(1, 3, 300)), None);
        assert_eq!(sent(live.news(counted(1, 5, 700)).unwrap()), ((5, 700), (2, 400)));
        let revoked = Counted { state: State::Revoked, ..counted(1, 5, 700) };
        assert_eq!(live.news(revoked).map(sent), Some(((5, 700), (0, 0))), "another state is news");
        assert_eq!(sent(live.end(counted(1, 6, 800))), ((6, 800), (1, 100)));
        assert_eq!(sent(live.end(counted(2, 6, 800))), ((6, 800), (6, 800)), "the next of the same name");
    }

    #[test]
    fn totals_go_on_where_the_tables_counts_wrap() {
        let mut live = LiveConnections::default();
        let (packets, bytes) = ((1 << 32) - 1, (1 << 42) - 10);
        live.interval(counted(1, packets, bytes));
        assert_eq!(sent(live.interval(counted(1, 1, 20))), ((packets + 2, bytes + 30), (2, 30)));
    }

    #[test]
    fn what_an_earlier_daemon_recorded_is_in_the_total_alone() {
        let mut live = LiveConnections::default();
        let found = |packets, bytes| Counted { begun: None, ..counted(1, packets, bytes) };
        live.found(found(10, 1000));
        assert_eq!(sent(live.end(found(11, 1100))), ((11, 1100), (1, 100)));
    }

    #[test]
    fn an_expired_connection_is_remembered_until_it_is_swept() {
        let mut live = LiveConnections::new(Duration::from_secs(1));
        live.begin_walk();
        live.interval(counted(1, 3, 300));
        live.end_walk();
        for _ in 0..30 {
            live.begin_walk();
            live.end_walk();
        }
        assert_eq!(sent(live.end(counted(1, 3, 300))), ((3, 300), (0, 0)));
    }

    #[test]
    fn connections_that_a_walk_does_not_see_are_forgotten() {
        let mut live = LiveConnections::default();
        for expected in [1, 1, 0] {
            live.begin_walk();
            if expected > 0 {
                live.interval(counted(1, 1, 1));
            }
            live.end_walk();
            assert_eq!(live.recorded.len(), expected);
        }
    }
}

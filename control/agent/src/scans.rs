//! Scans of the connection table for admin API and metrics: one at a time, however many clients ask.
//!
//! A scan of a full table keeps a core busy for tens of milliseconds. Clients that ask for state counts share the last
//! scan; lists differ per client and queue.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::conntrack::{ConnTable, SctpState, State, TcpState, Timestamp};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

/// How long state counts are reused. A scrape would not see faster changes either.
const SHARED_FOR: Duration = Duration::from_millis(500);
/// How long a scan waits for the one before it.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) type StateCounts = BTreeMap<&'static str, u64>;
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct TableCounts {
    pub(super) by_state: StateCounts,
}

type TimedCounts = (Instant, Arc<TableCounts>);

#[derive(Clone, Debug)]
pub(super) struct TableScans {
    permit: Arc<Semaphore>,
    counted: Arc<Mutex<Option<TimedCounts>>>,
    /// How long state counts are reused.
    shared: Duration,
}

#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection table is busy with other requests; try again later")]
pub(super) struct ScansBusy;

impl Default for TableScans {
    fn default() -> Self {
        Self { permit: Arc::new(Semaphore::new(1)), counted: Arc::default(), shared: SHARED_FOR }
    }
}

impl TableScans {
    /// Runs `scan` on a blocking thread when no other scan runs.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        scan: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ScansBusy> {
        let permit = timeout(QUEUE_TIMEOUT, Arc::clone(&self.permit).acquire_owned()).await.map_err(|_| ScansBusy)?;
        let permit = permit.map_err(|_| ScansBusy)?;
        let scanned = spawn_blocking(move || {
            let result = scan();
            // Not before: the client may have disconnected, and the scan still runs.
            drop(permit);
            result
        });
        scanned.await.map_err(|_| ScansBusy)
    }

    /// How many connections there are, by state.
    pub(super) async fn counts(&self, table: &Arc<ConnTable>) -> Result<Arc<TableCounts>, ScansBusy> {
        let table = Arc::clone(table);
        self.shared(move || count(&table)).await
    }

    async fn shared(&self, scan: impl FnOnce() -> TableCounts + Send + 'static) -> Result<Arc<TableCounts>, ScansBusy> {
        let mut counted = timeout(QUEUE_TIMEOUT, self.counted.lock()).await.map_err(|_| ScansBusy)?;
        if let Some((at, known)) = &*counted
            && at.elapsed() < self.shared
        {
            return Ok(Arc::clone(known));
        }
        let fresh = Arc::new(self.run(scan).await?);
        *counted = Some((Instant::now(), Arc::clone(&fresh)));
        Ok(fresh)
    }
}

fn count(table: &ConnTable) -> TableCounts {
    let by_state: StateCounts = all_states().map(|state: State| (state.name(), 0)).collect();
    let mut counts = TableCounts { by_state };
    for connection in table.iter(Timestamp::now()) {
        *counts.by_state.entry(connection.state.name()).or_default() += 1;
    }
    counts
}

/// Every state that a connection can be in, of any protocol.
pub(super) fn all_states() -> impl Iterator<Item = State> {
    let tcp = TcpState::ALL.into_iter().map(State::Tcp);
    tcp.chain(SctpState::ALL.into_iter().map(State::Sctp)).chain([
        State::Unreplied,
        State::Replied,
        State::Assured,
        State::Revoked,
    ])
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::runtime::Builder;

    use super::*;

    /// Counts how many scans run at once and how many ran in total.
    #[derive(Clone, Default)]
    struct ScanCounter(Arc<[AtomicUsize; 3]>);

    impl ScanCounter {
        fn scan(&self) -> TableCounts {
            let [now, most, all] = &*self.0;
            most.fetch_max(1 + now.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            now.fetch_sub(1, Ordering::SeqCst);
            let by_state = StateCounts::from([("ESTABLISHED", 1 + all.fetch_add(1, Ordering::SeqCst) as u64)]);
            TableCounts { by_state }
        }

        fn most_and_all(&self) -> (usize, usize) {
            (self.0[1].load(Ordering::SeqCst), self.0[2].load(Ordering::SeqCst))
        }
    }

    #[test]
    fn concurrent_counts_share_a_scan_and_lists_take_turns() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            // So that nothing expires on a busy machine.
            let scans = TableScans { shared: Duration::from_secs(3600), ..TableScans::default() };
            let counter = ScanCounter::default();
            let numbers = |_| {
                let (scans, counter) = (scans.clone(), counter.clone());
                tokio::spawn(async move { scans.shared(move || counter.scan()).await.unwrap().by_state["ESTABLISHED"] })
            };
            for asked in (0..100).map(numbers).collect::<Vec<_>>() {
                assert_eq!(asked.await.unwrap(), 1);
            }
            assert_eq!(counter.most_and_all(), (1, 1));
            let list = |_| {
                let (scans, counter) = (scans.clone(), counter.clone());
                tokio::spawn(async move { scans.run(move || counter.scan()).await.is_ok() })
            };
            for listed in (0..10).map(list).collect::<Vec<_>>() {
                assert!(listed.await.unwrap());
            }
            assert_eq!(counter.most_and_all(), (1, 11), "one at a time");
        });
    }

    #[test]
    fn a_cancelled_scan_blocks_others_until_it_ends() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (scans, counter) = (TableScans::default(), ScanCounter::default());
            for _ in 0..5 {
                let scanned = counter.clone();
                let asked = scans.shared(move || scanned.scan());
                // Cancelled right after it has started.
                let _ = timeout(Duration::from_millis(1), asked).await;
            }
            let scanned = counter.clone();
            scans.run(move || scanned.scan()).await.unwrap();
            assert_eq!(counter.most_and_all().0, 1, "never two at once");
        });
    }
}

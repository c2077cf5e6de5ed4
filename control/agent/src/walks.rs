//! Walks through the connection table for those who look in: one at a time, however many ask.
//!
//! A walk over a full table keeps a core busy for tens of milliseconds. Whoever asks for the numbers of connections shares
//! the walk of whoever asked before; lists differ, and wait for their turn.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::conntrack::{ConnTable, SctpState, State, TcpState, Timestamp};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

/// How long numbers are given to others. What comes and goes faster is not seen by scraping either.
const SHARED: Duration = Duration::from_millis(500);
/// How long a turn is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connections by state.
pub(super) type ByState = BTreeMap<&'static str, u64>;
/// Those of one moment.
type Counted = (Instant, Arc<ByState>);

/// Where all walks are asked for.
#[derive(Clone, Debug)]
pub(super) struct Walks {
    turn: Arc<Semaphore>,
    counted: Arc<Mutex<Option<Counted>>>,
    /// How long numbers are given to others who ask.
    shared: Duration,
}

/// There were too many before.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection table is gone through for others; ask again later")]
pub(super) struct Busy;

impl Default for Walks {
    fn default() -> Self {
        Self { turn: Arc::new(Semaphore::new(1)), counted: Arc::default(), shared: SHARED }
    }
}

impl Walks {
    /// Does this on a thread that may take long, when no other does.
    pub(super) async fn run<T: Send + 'static>(&self, walk: impl FnOnce() -> T + Send + 'static) -> Result<T, Busy> {
        let turn = timeout(PATIENCE, Arc::clone(&self.turn).acquire_owned()).await.map_err(|_| Busy)?;
        let turn = turn.map_err(|_| Busy)?;
        let walked = spawn_blocking(move || {
            let result = walk();
            // Not before: whoever asked may be gone, and the walk goes on.
            drop(turn);
            result
        });
        walked.await.map_err(|_| Busy)
    }

    /// How many connections there are in each state.
    pub(super) async fn by_state(&self, table: &Arc<ConnTable>) -> Result<Arc<ByState>, Busy> {
        let table = Arc::clone(table);
        self.shared(move || count(&table)).await
    }

    async fn shared(&self, walk: impl FnOnce() -> ByState + Send + 'static) -> Result<Arc<ByState>, Busy> {
        let mut counted = timeout(PATIENCE, self.counted.lock()).await.map_err(|_| Busy)?;
        if let Some((at, known)) = &*counted
            && at.elapsed() < self.shared
        {
            return Ok(Arc::clone(known));
        }
        let fresh = Arc::new(self.run(walk).await?);
        *counted = Some((Instant::now(), Arc::clone(&fresh)));
        Ok(fresh)
    }
}

fn count(table: &ConnTable) -> ByState {
    let mut by_state: ByState = all_states().map(|state: State| (state.name(), 0)).collect();
    for connection in table.iter(Timestamp::now()) {
        *by_state.entry(connection.state.name()).or_default() += 1;
    }
    by_state
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

    /// Says how many walks run at once and how many there were.
    #[derive(Clone, Default)]
    struct Watch(Arc<[AtomicUsize; 3]>);

    impl Watch {
        fn walk(&self) -> ByState {
            let [now, most, all] = &*self.0;
            most.fetch_max(1 + now.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(5));
            now.fetch_sub(1, Ordering::SeqCst);
            ByState::from([("ESTABLISHED", 1 + all.fetch_add(1, Ordering::SeqCst) as u64)])
        }

        fn most_and_all(&self) -> (usize, usize) {
            (self.0[1].load(Ordering::SeqCst), self.0[2].load(Ordering::SeqCst))
        }
    }

    #[test]
    fn whoever_asks_for_numbers_at_the_same_time_shares_one_walk_and_lists_take_turns() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            // So that nothing becomes too old by a busy machine.
            let walks = Walks { shared: Duration::from_secs(3600), ..Walks::default() };
            let watch = Watch::default();
            let numbers = |_| {
                let (walks, watch) = (walks.clone(), watch.clone());
                tokio::spawn(async move { walks.shared(move || watch.walk()).await.unwrap()["ESTABLISHED"] })
            };
            for asked in (0..100).map(numbers).collect::<Vec<_>>() {
                assert_eq!(asked.await.unwrap(), 1);
            }
            assert_eq!(watch.most_and_all(), (1, 1));
            let list = |_| {
                let (walks, watch) = (walks.clone(), watch.clone());
                tokio::spawn(async move { walks.run(move || watch.walk()).await.is_ok() })
            };
            for listed in (0..10).map(list).collect::<Vec<_>>() {
                assert!(listed.await.unwrap());
            }
            assert_eq!(watch.most_and_all(), (1, 11), "one at a time");
        });
    }

    #[test]
    fn a_walk_of_somebody_who_has_gone_keeps_its_turn_until_it_ends() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (walks, watch) = (Walks::default(), Watch::default());
            for _ in 0..5 {
                let walked = watch.clone();
                let asked = walks.shared(move || walked.walk());
                // Given up as soon as it has begun.
                let _ = timeout(Duration::from_millis(1), asked).await;
            }
            let walked = watch.clone();
            walks.run(move || walked.walk()).await.unwrap();
            assert_eq!(watch.most_and_all().0, 1, "never two at once");
        });
    }
}

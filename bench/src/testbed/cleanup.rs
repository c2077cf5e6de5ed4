//! Cleanup that also runs when a signal ends the process.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

type Task = Box<dyn FnOnce() + Send>;

/// Pending cleanup tasks, in the order of registration.
struct Pending {
    next: u64,
    tasks: BTreeMap<u64, Task>,
    /// A signal is ending the process; no new guard may be made.
    ending: bool,
}

static PENDING: Mutex<Pending> = Mutex::new(Pending { next: 0, tasks: BTreeMap::new(), ending: false });
static HANDLER: Once = Once::new();

/// Runs its task exactly once: when it is dropped, or when a signal ends the process.
///
/// On a signal the tasks of all guards run in reverse order of registration, on a separate thread.
#[must_use = "dropping a guard runs its task at once"]
pub struct CleanupGuard {
    id: u64,
}

impl CleanupGuard {
    /// Registers `task`. It may run on another thread and must not wait for a thread that makes guards.
    pub fn new(task: impl FnOnce() + Send + 'static) -> Self {
        HANDLER.call_once(handle_signals);
        let mut pending = pending();
        if pending.ending {
            drop(pending);
            task();
            // The signal thread is about to end the process; block until then.
            loop {
                std::thread::park();
            }
        }
        let id = pending.next;
        pending.next += 1;
        pending.tasks.insert(id, Box::new(task));
        Self { id }
    }
}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        let task = pending().tasks.remove(&self.id);
        if let Some(task) = task {
            task();
        }
    }
}

fn pending() -> MutexGuard<'static, Pending> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle_signals() {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).expect("these signals can be handled");
    std::thread::Builder::new()
        .name("cleanup".into())
        .spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            loop {
                let mut pending = pending();
                pending.ending = true;
                let Some((_, task)) = pending.tasks.pop_last() else { break };
                drop(pending);
                task();
            }
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        })
        .expect("a thread can be started");
}

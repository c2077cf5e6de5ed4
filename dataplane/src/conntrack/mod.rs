//! The connection table: one for all workers, fixed in size, without locks.

//! The threads that move packets: one a core, each with the queues of its ports.

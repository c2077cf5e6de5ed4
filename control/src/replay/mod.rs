//! Replay: packets of a capture through the workers' own pipeline, with the time that the capture tells.

pub mod capture;

//! Captures with their expected verdicts.

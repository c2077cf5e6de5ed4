//! A node with an API server: a real one if `KUBEBUILDER_ASSETS` names its directory, otherwise the small one. Pods are
//! network namespaces, packets are real, and the daemon's input is written by plain API calls.

mod away;
mod churn;
mod enforced;
mod epochs;
mod fixture;
mod killed;
mod rollout;
mod scale;
mod stale;
mod startup_taint;
mod stream;

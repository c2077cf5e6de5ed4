//! A node under an API server: the real one where `KUBEBUILDER_ASSETS` names its folder, else the small one. Pods are
//! network namespaces, packets are real, and all that the daemon is told comes by plain API calls.

mod away;
mod churn;
mod enforced;
mod killed;
mod scale;
mod stream;
mod world;

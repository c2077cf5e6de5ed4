//! Following an API server: a real one if `KUBEBUILDER_ASSETS` names its directory, otherwise the small one in this
//! process, which can also inject faults.

mod events;
mod faults;
mod follower;
mod following;
mod objects;
mod peers;
mod services;

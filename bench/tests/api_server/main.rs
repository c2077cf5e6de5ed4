//! Following an API server: the real one where `KUBEBUILDER_ASSETS` names its folder, else the small one in this
//! process, which can also be made to fail.

mod faults;
mod follower;
mod following;
mod objects;

//! The real daemon on real veths: every test builds a node of its own in network namespaces, starts
//! `penstock run` in it and sends packets. Needs root and a built `penstock`.

mod bad_input;
mod capture;
mod connections;
mod dashboards;
mod differential;
mod domain_names;
mod early_fragments;
mod filters;
mod first_start;
mod flow_records;
mod forwarding;
mod frames;
mod host_routing;
mod lifecycle;
mod limits;
mod new_pods;
mod no_policy;
mod operation;
mod pod_limits;
mod policy;
mod privileges;
mod rules;
mod transfer;
mod trial;

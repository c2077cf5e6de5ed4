//! Tells the daemon a new pod's addresses, and waits until the pod's policy is in effect.

use std::net::IpAddr;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use penstock_admin::client::{Client, ClientError};
use penstock_admin::types::{NewPod, NewPodState};
use serde_json::Value;

/// How long until a daemon is asked again that does not answer, such as one that is just being replaced.
const AGAIN: Duration = Duration::from_millis(100);

/// Waits for at most `limit`. `veths`: the node's ends of the pod's veths. The pod's interface is closed meanwhile, and stays so if the time is over: the pod then starts without
/// a network, and gets it once its policy is in effect. What is missing goes to standard error, which runtimes log.
pub(crate) fn wait(socket: &Path, limit: Duration, result: &Value, veths: &[String]) {
    let until = Instant::now() + limit;
    let arguments = std::env::var("CNI_ARGS").unwrap_or_default();
    let Some((namespace, name)) = pod(&arguments) else { return };
    let (addresses, mut interfaces) = (addresses(result), veths.to_vec());
    // Without a daemon there is nothing to wait for.
    if limit.is_zero() || addresses.is_empty() || !socket.exists() {
        return;
    }
    let Ok(client) = Client::new(socket) else { return };
    let mut awaits = String::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            eprintln!("penstock-cni: {namespace}/{name} starts before its policy is in effect: {awaits}");
            return;
        }
        let wait_ms = u64::try_from(left.as_millis()).unwrap_or(NewPod::LONGEST_WAIT).min(NewPod::LONGEST_WAIT);
        let new = NewPod {
            namespace: namespace.into(),
            name: name.into(),
            addresses: addresses.clone(),
            interfaces: interfaces.clone(),
            wait_ms,
        };
        match client.post::<NewPodState>("/v1/pods", &new) {
            Ok(NewPodState { awaits: None }) => return,
            Ok(NewPodState { awaits: Some(what) }) => awaits = what,
            // It has ended.
            Err(ClientError::NoDaemon { .. }) if !socket.exists() => return,
            // A daemon of an earlier version takes no interfaces.
            Err(ClientError::Rejected(error)) if !interfaces.is_empty() => {
                interfaces.clear();
                awaits = error;
            }
            Err(error) => {
                awaits = error.to_string();
                sleep(AGAIN.min(left));
            }
        }
    }
}

/// Namespace and name of the pod: Kubernetes' runtimes give them in `CNI_ARGS`, as `KEY=VALUE` with semicolons between
/// (<https://github.com/containernetworking/cni/blob/main/CONVENTIONS.md>).
fn pod(arguments: &str) -> Option<(&str, &str)> {
    let value = |key| arguments.split(';').find_map(|pair| pair.split_once('=').filter(|(name, _)| *name == key));
    let some = |key| value(key).map(|(_, value)| value).filter(|value| !value.is_empty());
    Some((some("K8S_POD_NAMESPACE")?, some("K8S_POD_NAME")?))
}

/// The pod's addresses in a result of the plugins before.
fn addresses(result: &Value) -> Vec<IpAddr> {
    let addresses = result["ips"].as_array().into_iter().flatten().filter_map(|one| one["address"].as_str());
    addresses.filter_map(|address| address.split('/').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_runtimes_arguments_name_the_pod() {
        for (arguments, expected) in [
            ("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=x", Some(("shop", "web-0"))),
            ("K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop", Some(("shop", "web-0"))),
            ("K8S_POD_NAME=web-0", None),
            ("K8S_POD_NAME=;K8S_POD_NAMESPACE=shop", None),
            ("K8S_POD_NAME;;=", None),
            ("", None),
        ] {
            assert_eq!(pod(arguments), expected, "{arguments}");
        }
    }

    #[test]
    fn addresses_of_both_families_are_read_from_the_result() {
        let result =
            json!({ "ips": [{ "address": "10.244.1.5/24" }, { "address": "fd00::5/64" }, { "address": "none" }, {}] });
        assert_eq!(addresses(&result), ["10.244.1.5".parse::<IpAddr>().unwrap(), "fd00::5".parse().unwrap()]);
        assert!(addresses(&Value::Null).is_empty());
    }
}

//! A cluster by its API server: pods of Penstock are found by their labels, and commands run in them by `pods/exec`.
//!
//! The connection of a command is a WebSocket with the subprotocols v5 and v4.channel.k8s.io (KEP-4006), of which Kubernetes
//! 1.20 has v4. It begins as a GET, so the server asks for `get` on pods/exec, and from Kubernetes 1.35 on for `create`, too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{ApiResource, AttachParams, DynamicObject, GroupVersionKind, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use penstock_admin::printable::with_causes;

use super::cluster::{Cluster, ClusterError, Daemon, Fleet, Missing, PodName, PodPlace, Problem, Running, Target};

/// How long a connection to the API server may take.
const CONNECT: Duration = Duration::from_secs(10);
const PAGE: u32 = 500;
/// Bytes that are kept of an output until they are read.
const BUFFER: usize = 1 << 16;
/// ClusterNetworkPolicies: group, kind and versions, as a daemon follows them.
const CLUSTER_POLICIES: (&str, &str, [&str; 2]) =
    ("policy.networking.k8s.io", "ClusterNetworkPolicy", ["v1alpha2", "v1beta1"]);

/// Where the cluster is, and which pods of it are Penstock's.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Cluster options")]
pub(super) struct ClusterArgs {
    /// The namespace that Penstock runs in
    #[arg(short, long, global = true, value_name = "NAMESPACE", default_value = "kube-system")]
    namespace: String,
    /// The labels of Penstock's pods
    #[arg(short = 'l', long, global = true, value_name = "LABELS", default_value = "app.kubernetes.io/name=penstock")]
    selector: String,
    /// The container of these pods that the daemon runs in
    #[arg(short, long, global = true, value_name = "NAME", default_value = "penstock")]
    container: String,
    /// Ask this node alone; can be given several times
    #[arg(long, global = true, value_name = "NODE")]
    node: Vec<String>,
    /// The kubeconfig to use, in place of those that KUBECONFIG names, or ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig to use
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The user to be for this command, if the API server allows it
    #[arg(long = "as", global = true, value_name = "USER")]
    impersonate: Option<String>,
    /// A group to be in for this command, with --as; can be given several times
    #[arg(long = "as-group", global = true, value_name = "GROUP", requires = "impersonate")]
    impersonate_group: Vec<String>,
}

pub(super) struct ApiCluster {
    client: Client,
    args: ClusterArgs,
}

impl ApiCluster {
    /// Reads the kubeconfig. Does not connect yet.
    ///
    /// # Errors
    /// There is none, or it has errors.
    pub(super) async fn new(args: ClusterArgs) -> Result<Self, ClusterError> {
        let mut config = configuration(&args).await?;
        config.connect_timeout = Some(CONNECT);
        // Answers have their own timeout, and captures none.
        config.read_timeout = None;
        let users = args.impersonate.iter().map(|user| ("--as", "impersonate-user", user));
        let groups = args.impersonate_group.iter().map(|group| ("--as-group", "impersonate-group", group));
        for (option, header, name) in users.chain(groups) {
            let value = HeaderValue::from_str(name);
            let value = value.map_err(|_| ClusterError::BadInput(format!("{option} {name:?}: not a name")))?;
            config.headers.push((HeaderName::from_static(header), value));
        }
        let client = Client::try_from(config).map_err(|error| {
            ClusterError::BadInput(format!(
                "kubeconfig: its TLS settings or credentials cannot be used: {}",
                with_causes(&error)
            ))
        })?;
        Ok(Self { client, args })
    }

    fn own_pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.args.namespace)
    }

    /// The nodes that a pod of Penstock is expected on, or why they are not known.
    async fn nodes(&self) -> Result<BTreeSet<String>, String> {
        let mut names = BTreeSet::new();
        let nodes = pages(&Api::<Node>::all(self.client.clone()), ListParams::default()).await;
        for node in nodes.map_err(|error| short(&error))? {
            if node.labels().get("kubernetes.io/os").is_none_or(|system| system == "linux") {
                names.insert(node.name_any());
            }
        }
        Ok(names)
    }

    /// The greatest version of these ClusterNetworkPolicies; `None` if the server serves none.
    async fn cluster_policy_version(&self, name: Option<&str>) -> Result<Option<u64>, ClusterError> {
        let (group, kind, versions) = CLUSTER_POLICIES;
        for version in versions {
            let resource = ApiResource::from_gvk_with_plural(
                &GroupVersionKind::gvk(group, version, kind),
                "clusternetworkpolicies",
            );
            let api = Api::<DynamicObject>::all_with(self.client.clone(), &resource);
            let found = match name {
                Some(name) => api.get_metadata(name).await.map(|object| vec![object.metadata]),
                None => pages_of_metadata(&api).await,
            };
            match found {
                Ok(found) => return Ok(Some(found.iter().map(version_of).max().unwrap_or(0))),
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => {
                    let verb = if name.is_some() { "get" } else { "list" };
                    return Err(refused(
                        &error,
                        verb,
                        "clusternetworkpolicies.policy.networking.k8s.io",
                        "the cluster",
                    ));
                }
            }
        }
        Ok(None)
    }
}

impl Cluster for ApiCluster {
    async fn daemons(&self) -> Result<Fleet, ClusterError> {
        let ClusterArgs { namespace, selector, node: wanted, .. } = &self.args;
        let pods = pages(&self.own_pods(), ListParams::default().labels(selector)).await;
        let pods = pods.map_err(|error| refused(&error, "list", "pods", namespace))?;
        if pods.is_empty() {
            return Err(ClusterError::BadInput(format!(
                "no pod with {selector} in namespace {namespace}: say where Penstock runs with --namespace and --selector"
            )));
        }
        let (nodes, note) = match self.nodes().await {
            Ok(nodes) => (nodes, None),
            Err(why) => {
                let note = format!("nodes without a pod of Penstock are not known ({why}): this needs list on nodes");
                (BTreeSet::new(), Some(note))
            }
        };
        fleet(&pods, &nodes, wanted, note)
    }

    async fn exec(&self, daemon: &Daemon, command: Vec<String>, with_input: bool) -> Result<Running, Problem> {
        let params = AttachParams::default()
            .container(&self.args.container)
            .stdin(with_input)
            .max_stdout_buf_size(BUFFER)
            .max_stdin_buf_size(BUFFER);
        let started = self.own_pods().exec(&daemon.pod, command, &params).await;
        let mut attached = started.map_err(|error| self.not_started(daemon, &error))?;
        let (Some(stdout), Some(stderr), Some(status)) = (attached.stdout(), attached.stderr(), attached.take_status())
        else {
            return Err(Problem::Unreachable("the client gives no output".to_owned()));
        };
        let stdin = attached.stdin().map(|stdin| Box::pin(stdin) as _);
        let pod = daemon.pod.clone();
        let status = async move {
            let status = status.await;
            drop(attached);
            exit_code(status, &pod)
        };
        Ok(Running { stdin, stdout: Box::pin(stdout), stderr: Box::pin(stderr), status: Box::pin(status) })
    }

    async fn pod(&self, PodName { namespace, name }: &PodName) -> Result<PodPlace, ClusterError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = pods.get_opt(name).await.map_err(|error| refused(&error, "get", "pods", namespace))?;
        let pod = found.ok_or_else(|| {
            ClusterError::BadInput(format!(
                "pod {namespace}/{name}: there is none; see kubectl get pods -n {namespace}"
            ))
        })?;
        let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
        let Some(node) = spec.node_name else {
            let line = format!("pod {namespace}/{name}: is on no node yet; wait until it is scheduled");
            return Err(ClusterError::BadInput(line));
        };
        let addresses = status.pod_ips.unwrap_or_default().into_iter().map(|address| address.ip);
        Ok(PodPlace {
            node,
            addresses: addresses.chain(status.pod_ip).filter_map(|text| text.parse().ok()).fold(
                Vec::new(),
                |mut known, address| {
                    if !known.contains(&address) {
                        known.push(address);
                    }
                    known
                },
            ),
            host_network: spec.host_network.unwrap_or(false),
        })
    }

    async fn versions(&self, target: &Target) -> Result<BTreeMap<String, u64>, ClusterError> {
        let none = || ClusterError::BadInput(format!("{target}: there is none; apply it first, or correct its name"));
        let (resource, version) = match target {
            Target::NetworkPolicy(PodName { namespace, name }) => {
                let api: Api<NetworkPolicy> = Api::namespaced(self.client.clone(), namespace);
                let found = api.get_metadata_opt(name).await;
                let found =
                    found.map_err(|error| refused(&error, "get", "networkpolicies.networking.k8s.io", namespace));
                ("networkpolicies", version_of(&found?.ok_or_else(none)?.metadata))
            }
            Target::ClusterNetworkPolicy(name) => {
                ("clusternetworkpolicies", self.cluster_policy_version(Some(name)).await?.ok_or_else(none)?)
            }
            Target::Pod(PodName { namespace, name }) => {
                let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
                let found = api.get_metadata_opt(name).await;
                let found = found.map_err(|error| refused(&error, "get", "pods", namespace))?;
                ("pods", version_of(&found.ok_or_else(none)?.metadata))
            }
            Target::AllPolicies => {
                let api: Api<NetworkPolicy> = Api::all(self.client.clone());
                let found = pages_of_metadata(&api).await;
                let found = found
                    .map_err(|error| refused(&error, "list", "networkpolicies.networking.k8s.io", "the cluster"))?;
                let version = found.iter().map(version_of).max().unwrap_or(0);
                let of_cluster = self.cluster_policy_version(None).await?;
                let all = [("networkpolicies", version), ("clusternetworkpolicies", of_cluster.unwrap_or(0))];
                return Ok(all.into_iter().filter(|(_, version)| *version > 0).map(owned).collect());
            }
        };
        Ok(BTreeMap::from([owned((resource, version))]))
    }
}

fn owned((resource, version): (&str, u64)) -> (String, u64) {
    (resource.to_owned(), version)
}

impl ApiCluster {
    fn not_started(&self, daemon: &Daemon, error: &kube::Error) -> Problem {
        let pod = &daemon.pod;
        match error {
            kube::Error::Api(status) if status.code == 403 => Problem::Forbidden(format!(
                "running commands in pods is forbidden ({}): needs create and get on pods/exec in {}, as configs/kubernetes/kubectl gives",
                status.message, self.args.namespace
            )),
            kube::Error::Api(status) if status.code == 404 => {
                Problem::NotRunning(format!("pod {pod} has just gone ({}); ask again", status.message))
            }
            kube::Error::Api(status) if status.code == 400 => {
                Problem::Refused(format!("pod {pod}: {}; name its container with --container", status.message))
            }
            error => Problem::Unreachable(format!(
                "cannot run a command in pod {pod} ({}); see whether its node is Ready, and the API server reaches its kubelet",
                short(error)
            )),
        }
    }
}

async fn configuration(args: &ClusterArgs) -> Result<Config, ClusterError> {
    let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
    let wrong = |file: &str, error: &dyn std::error::Error| {
        ClusterError::BadInput(format!(
            "kubeconfig {file}: {}; correct it, or give another with --kubeconfig or KUBECONFIG, and its context with --context",
            with_causes(error)
        ))
    };
    let (kubeconfig, name) = match &args.kubeconfig {
        Some(path) => (Kubeconfig::read_from(path), path.display().to_string()),
        None => {
            let name = std::env::var("KUBECONFIG").ok().filter(|name| !name.is_empty());
            (Kubeconfig::read(), name.unwrap_or_else(|| "~/.kube/config".to_owned()))
        }
    };
    match kubeconfig {
        Ok(kubeconfig) => {
            Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| wrong(&name, &error))
        }
        // In a pod, as kubectl does.
        Err(error) => match Config::incluster() {
            Ok(config) if args.kubeconfig.is_none() && args.context.is_none() => Ok(config),
            _ => Err(wrong(&name, &error)),
        },
    }
}

/// The daemon of each node, and the nodes without one to ask.
fn fleet(
    pods: &[Pod],
    nodes: &BTreeSet<String>,
    wanted: &[String],
    note: Option<String>,
) -> Result<Fleet, ClusterError> {
    let mut by_node = BTreeMap::<&str, Vec<&Pod>>::new();
    for pod in pods {
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            by_node.entry(node).or_default().push(pod);
        }
    }
    for node in nodes {
        by_node.entry(node).or_default();
    }
    if let Some(unknown) = wanted.iter().find(|node| !by_node.contains_key(node.as_str())) {
        let known: Vec<&str> = by_node.keys().copied().collect();
        return Err(ClusterError::BadInput(format!("--node {unknown}: no such node; there are {}", known.join(", "))));
    }
    let mut fleet = Fleet { note: note.filter(|_| wanted.is_empty()), ..Fleet::default() };
    for (node, pods) in by_node {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == node) {
            continue;
        }
        match choose(&pods) {
            Ok(pod) => fleet.daemons.push(Daemon { node: node.to_owned(), pod: pod.name_any() }),
            Err(problem) => {
                let pod = pods.first().map(|pod| pod.name_any());
                fleet.missing.push(Missing::new(node, pod.as_deref(), &problem));
            }
        }
    }
    Ok(fleet)
}

/// The pod that answers for a node. While one daemon takes over from another both containers see the socket of the one that
/// serves; the one that stays is asked.
fn choose<'a>(pods: &[&'a Pod]) -> Result<&'a Pod, Problem> {
    let is_running = |pod: &Pod| {
        let containers = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
        containers.is_some_and(|all| all.iter().any(|one| one.state.as_ref().is_some_and(|it| it.running.is_some())))
    };
    let rank = |pod: &&&Pod| (pod.metadata.deletion_timestamp.is_none(), std::cmp::Reverse(pod.name_any()));
    match pods.iter().filter(|pod| is_running(pod)).max_by_key(rank) {
        Some(pod) => Ok(pod),
        None => Err(pods.first().map_or(Problem::NoPod, |pod| not_running(pod))),
    }
}

fn not_running(pod: &Pod) -> Problem {
    let status = pod.status.clone().unwrap_or_default();
    let waiting = |state: &k8s_openapi::api::core::v1::ContainerStatus| {
        let state = state.state.as_ref()?;
        let waiting = state.waiting.as_ref().and_then(|waiting| waiting.reason.clone());
        waiting.or_else(|| state.terminated.as_ref()?.reason.clone())
    };
    let containers = status.init_container_statuses.into_iter().chain(status.container_statuses).flatten();
    let reasons: Vec<String> =
        containers.filter_map(|state| Some(format!("{}: {}", state.name, waiting(&state)?))).collect();
    let phase = status.phase.unwrap_or_else(|| "unknown".to_owned());
    let detail = if reasons.is_empty() { phase } else { format!("{phase}; {}", reasons.join(", ")) };
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    Problem::NotRunning(format!("pod {name} does not run ({detail}); see kubectl describe pod -n {namespace} {name}"))
}

/// The exit code from the status that ends a command (`remotecommand.NonZeroExitCodeReason` in Kubernetes).
fn exit_code(status: Option<Status>, pod: &str) -> Result<i32, Problem> {
    let Some(status) = status else {
        return Err(Problem::Unreachable(format!("the connection to pod {pod} broke off; ask again")));
    };
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let message = status.message.unwrap_or_default();
    let causes = status.details.and_then(|details| details.causes).unwrap_or_default();
    let code = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"));
    match code.and_then(|cause| cause.message.as_deref()?.parse().ok()) {
        Some(code) => Ok(code),
        None if message.contains("executable file not found") || message.contains("no such file") => Err(
            Problem::NotRunning(format!("pod {pod} has no penstock ({message}); name its container with --container")),
        ),
        None => Err(Problem::NotRunning(format!("pod {pod}: {message}; see whether its container runs"))),
    }
}

async fn pages<K>(api: &Api<K>, mut params: ListParams) -> Result<Vec<K>, kube::Error>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    params = params.limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list(&params).await?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}

type ObjectMeta = k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

async fn pages_of_metadata<K>(api: &Api<K>) -> Result<Vec<ObjectMeta>, kube::Error>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let mut params = ListParams::default().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list_metadata(&params).await?;
        all.extend(page.items.into_iter().map(|object| object.metadata));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}

/// An object's resourceVersion. Those of etcd are numbers, which grow (KEP-5504).
fn version_of(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Why the API server did not do it.
fn refused(error: &kube::Error, verb: &str, resource: &str, place: &str) -> ClusterError {
    match error {
        kube::Error::Api(status) if status.code == 403 => ClusterError::BadInput(format!(
            "{resource}: forbidden ({}): needs {verb} on {resource} in {place}, as configs/kubernetes/kubectl gives",
            status.message
        )),
        kube::Error::Api(status) if status.code == 401 => ClusterError::BadInput(format!(
            "the API server does not accept the credentials ({}); renew those of the kubeconfig",
            status.message
        )),
        error => ClusterError::Failed(format!("the API server cannot be asked for {resource}: {}", short(error))),
    }
}

fn short(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        error => with_causes(error),
    }
}

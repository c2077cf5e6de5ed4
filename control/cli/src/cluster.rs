//! The cluster that a command's manifests describe.

use std::path::{Path, PathBuf};

use penstock_admin::printable::Printable;
use penstock_dataplane::policy::RuleScope;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::ObjectChange;
use penstock_policy::render::tables::PodScope;
use penstock_policy::staging::PolicyReading;
use penstock_sources::convert;
use penstock_sources::manifest::{Manifests, Options, UnknownFields, read_manifests};

use super::Failure;

/// Options of the commands that read manifests.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct ManifestArgs {
    /// Manifests, YAML or JSON: files, directories (*.yaml, *.yml, *.json in them), or - for standard input
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub(super) manifests: Vec<PathBuf>,
    /// The namespace of objects that name none, as of kubectl and helm
    #[arg(long = "namespace", value_name = "NAME", default_value = "default")]
    default_namespace: String,
    /// Also read extensions/v1beta1 policies and namespaces' DefaultDeny annotation, with their own semantics
    #[arg(long)]
    v1beta1: bool,
    /// A flow that a rule allows on one side is allowed on the other side too
    #[arg(long)]
    cluster_wide: bool,
    /// Count staged policies as promoted (the annotations policy.penstock.dev/staged, staged-for and staged-delete); without
    /// this they are left out
    #[arg(long)]
    staged: bool,
}

impl ManifestArgs {
    pub(super) fn options(&self, unknown_fields: UnknownFields) -> Options {
        let settings = convert::ConversionSettings { v1beta1: self.v1beta1, domain_names: true };
        Options { settings, unknown_fields, of_deployments: false, namespace: self.default_namespace.clone() }
    }

    /// Whether a rule's action is honoured cluster-wide.
    pub(super) fn reach(&self) -> RuleScope {
        if self.cluster_wide { RuleScope::ClusterWide } else { RuleScope::BothSides }
    }

    pub(super) fn read(&self, unknown_fields: UnknownFields) -> Result<Manifests, Failure> {
        self.read_as(&self.options(unknown_fields))
    }

    /// Reads manifests that may be of a folder that a cluster is deployed from: workloads stand for their pods.
    pub(super) fn read_deployments(&self, unknown_fields: UnknownFields) -> Result<Manifests, Failure> {
        self.read_as(&Options { of_deployments: true, ..self.options(unknown_fields) })
    }

    fn read_as(&self, options: &Options) -> Result<Manifests, Failure> {
        let manifests = read_manifests(&self.manifests, options)
            .map_err(|errors| Failure::BadInput(errors.0.iter().map(ToString::to_string).collect()))?;
        if manifests.documents.is_empty() && !manifests.ignored.iter().any(|ignored| ignored.is_policy) {
            let paths: Vec<String> = self.manifests.iter().map(|path| path.display().to_string()).collect();
            let others = manifests.ignored.len() + manifests.passed_over.len();
            return Err(Failure::bad_input(format_args!(
                "{}: no object that policy is about, and {others} others: name files with namespaces, pods or what makes \
                 them, Services, or policies",
                paths.join(", ")
            )));
        }
        Ok(manifests)
    }

    /// The policy of the manifests, for the pods in scope.
    pub(super) fn engine(&self, scope: PodScope) -> Result<Engine, Failure> {
        let mut manifests = self.read_deployments(UnknownFields::Refuse)?;
        say_what_stands_in(&manifests);
        derive_endpoint_slices(&mut manifests);
        let engine = self.engine_of(&manifests, scope);
        self.say_staged(&engine);
        Ok(engine)
    }

    /// Reads the manifests. Where they have no EndpointSlices, derives them, and says so.
    pub(super) fn read_with_slices(&self) -> Result<Manifests, Failure> {
        let mut manifests = self.read(UnknownFields::Refuse)?;
        derive_endpoint_slices(&mut manifests);
        Ok(manifests)
    }

    pub(super) fn engine_of(&self, manifests: &Manifests, scope: PodScope) -> Engine {
        let reading = if self.staged { PolicyReading::Promoted } else { PolicyReading::InForce };
        let mut engine = Engine::reading(EngineSettings { scope, reach: self.reach() }, reading);
        engine.apply(manifests.objects().map(ObjectChange::Set));
        engine
    }

    /// Says how many staged policies are left out, or which do not mean what their author may think; and how many rules have
    /// domain names.
    pub(super) fn say_staged(&self, engine: &Engine) {
        match engine.staged().filter(|policy| policy.is_staged()).count() {
            0 => {}
            _ if self.staged => {}
            1 => eprintln!("penstock: left out 1 staged policy; --staged counts it as promoted"),
            count => eprintln!("penstock: left out {count} staged policies; --staged counts them as promoted"),
        }
        if self.staged {
            engine.staged_problems().iter().for_each(|problem| eprintln!("penstock: {}", Printable(problem)));
        }
        match engine.rules_by_name() {
            0 => {}
            count => {
                let rules = if count == 1 { "1 rule has".to_owned() } else { format!("{count} rules have") };
                eprintln!(
                    "penstock: {rules} domainNames, which match nothing here: only DNS answers to a pod say what they are"
                );
            }
        }
    }

    pub(super) fn reads_v1beta1(&self) -> bool {
        self.v1beta1
    }

    pub(super) fn use_standard_input(&self) -> bool {
        self.manifests.iter().any(|path| path == Path::new("-"))
    }
}

/// Says which workloads stand for their pods, and what is passed over, a line each.
pub(super) fn say_what_stands_in(manifests: &Manifests) {
    let workloads = manifests.workloads();
    let some = |count: usize, names: &mut dyn Iterator<Item = String>| {
        let shown: Vec<String> = names.take(3).collect();
        let more = if count > shown.len() { format!(" and {} more", count - shown.len()) } else { String::new() };
        shown.join(", ") + &more
    };
    if !workloads.is_empty() {
        let mut names = workloads.iter().map(|(kind, key)| match *kind {
            "Pod" => format!("{key} (a Pod without a status)"),
            kind => format!("{key} (a {kind}'s pods)"),
        });
        eprintln!("penstock: stand for their pods, with addresses of their own: {}", some(workloads.len(), &mut names));
    }
    if !manifests.passed_over.is_empty() {
        let mut names = manifests.passed_over.iter().map(ToString::to_string);
        eprintln!(
            "penstock: passed over, no object or a workload that was read before: {}",
            some(manifests.passed_over.len(), &mut names)
        );
    }
}

/// Derives EndpointSlices where the manifests have none, and says so.
pub(super) fn derive_endpoint_slices(manifests: &mut Manifests) {
    let derived = manifests.derive_endpoint_slices();
    if derived > 0 {
        let services = if derived == 1 { "1 Service".to_owned() } else { format!("{derived} Services") };
        eprintln!("penstock: no EndpointSlices: derived those of {services} from selectors and ready pods");
    }
}

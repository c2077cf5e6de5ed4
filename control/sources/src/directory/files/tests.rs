use proptest::prelude::*;

use super::*;

fn pod(name: &str, address: &str) -> String {
    format!("{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, status: {{podIPs: [{{ip: {address}}}]}}}}\n---\n")
}

fn set(files: &mut Files, path: &str, pods: &[(&str, &str)]) {
    files.set(
        Path::new(path),
        Ok(pods.iter().map(|(name, address)| pod(name, address)).collect()),
        Written::Whole,
        Instant::now(),
    );
}

/// `+name address` and `-name`, in order; of namespaces with their labels.
fn reported(batch: &DirectoryChanges) -> Vec<String> {
    let describe = |change: &ObjectChange| match change {
        ObjectChange::Set(Object::Pod(pod)) => format!("+{} {}", pod.key.name, pod.addresses[0]),
        ObjectChange::Set(Object::Namespace(namespace)) => format!("+{} {:?}", namespace.name, namespace.labels),
        ObjectChange::Delete(ObjectRef::Pod(key)) => format!("-{}", key.name),
        ObjectChange::Delete(ObjectRef::Namespace(name)) => format!("-{name}"),
        other => panic!("{other:?}"),
    };
    batch.changes.iter().map(describe).collect()
}

/// With the namespace that the pods are in.
fn files() -> Files {
    let mut files = Files::new(Options::default());
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: default}}";
    files.set(Path::new("default.yaml"), Ok(namespace.to_owned()), Written::Whole, Instant::now());
    files.update(Instant::now());
    files
}

#[test]
fn an_undefined_namespace_exists_while_objects_use_it() {
    let mut files = Files::new(Options::default());
    let named = r#"+default {"kubernetes.io/metadata.name": "default"}"#;
    set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
    assert_eq!(reported(&files.update(Instant::now())), [named, "+x 10.0.0.1"]);
    let defined = "{apiVersion: v1, kind: Namespace, metadata: {name: default, labels: {a: b}}}";
    files.set(Path::new("b.yaml"), Ok(defined.to_owned()), Written::Whole, Instant::now());
    let labelled = r#"+default {"a": "b", "kubernetes.io/metadata.name": "default"}"#;
    assert_eq!(reported(&files.update(Instant::now())), [labelled]);
    files.remove(Path::new("b.yaml"));
    assert_eq!(reported(&files.update(Instant::now())), [named], "its own labels go, the namespace stays");
    files.remove(Path::new("a.yaml"));
    assert_eq!(reported(&files.update(Instant::now())), ["-default", "-x"]);
}

#[test]
fn only_differences_are_reported() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1"), ("y", "10.0.0.2")]);
    assert_eq!(reported(&files.update(Instant::now())), ["+x 10.0.0.1", "+y 10.0.0.2"]);
    set(&mut files, "a.yaml", &[("y", "10.0.0.3"), ("z", "10.0.0.4"), ("x", "10.0.0.1")]);
    assert_eq!(reported(&files.update(Instant::now())), ["+y 10.0.0.3", "+z 10.0.0.4"]);
    set(&mut files, "a.yaml", &[("z", "10.0.0.4")]);
    assert_eq!(reported(&files.update(Instant::now())), ["-x", "-y"]);
    assert!(files.update(Instant::now()).is_empty());
    files.remove(Path::new("a.yaml"));
    assert_eq!(reported(&files.update(Instant::now())), ["-z"]);
    assert_eq!(files.objects().count(), 1);
}

#[test]
fn a_broken_file_keeps_its_last_objects_reported_once() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
    set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
    files.update(Instant::now());
    let broken = || Ok(format!("{}{}", pod("x", "10.0.0.9"), pod("z", "10.0.0.999")));
    files.set(Path::new("a.yaml"), broken(), Written::Whole, Instant::now());
    set(&mut files, "b.yaml", &[("y", "10.0.0.3")]);
    let batch = files.update(Instant::now());
    assert_eq!(reported(&batch), ["+y 10.0.0.3"], "one file's error does not stop the other");
    assert_eq!(batch.problems.len(), 1);
    assert!(batch.problems[0].to_string().starts_with("a.yaml:3: Pod default/z: status.podIPs[0].ip: "));
    files.set(Path::new("a.yaml"), broken(), Written::Whole, Instant::now());
    assert!(files.update(Instant::now()).is_empty(), "the same error is not reported again");
    files.set(Path::new("a.yaml"), Ok("a: [".to_owned()), Written::Whole, Instant::now());
    let batch = files.update(Instant::now());
    assert!(matches!(&batch.problems[..], [error] if error.to_string().contains("YAML")), "{batch:?}");
    set(&mut files, "a.yaml", &[("x", "10.0.0.9")]);
    let batch = files.update(Instant::now());
    assert_eq!((reported(&batch), batch.fixed), (vec!["+x 10.0.0.9".to_owned()], vec![PathBuf::from("a.yaml")]));
}

#[test]
fn a_file_that_was_never_valid_adds_and_removes_nothing() {
    let mut files = files();
    files.set(Path::new("a.yaml"), Ok("kind: Pod".to_owned()), Written::Whole, Instant::now());
    assert_eq!(files.update(Instant::now()).problems.len(), 1);
    files.remove(Path::new("a.yaml"));
    let batch = files.update(Instant::now());
    assert_eq!((batch.changes.len(), batch.refused, batch.fixed), (0, 0, vec![PathBuf::from("a.yaml")]));
}

#[test]
fn a_file_that_loses_all_objects_keeps_them_until_deleted() {
    let emptied = ["", "# nothing", "---\n---\n", "{apiVersion: v1, kind: List, items: []}"];
    for (text, written) in emptied.into_iter().flat_map(|text| [(text, Written::InPlace), (text, Written::Whole)]) {
        let (mut files, now) = (files(), Instant::now());
        let path = Path::new("a.yaml");
        files.set(path, Ok(text.to_owned()), written, now);
        assert_eq!(files.update(now).refused, 0, "it never had any");
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        files.update(now);
        files.set(path, Ok(text.to_owned()), written, now);
        let batch = files.update(now);
        assert_eq!((reported(&batch).len(), batch.refused), (0, 1), "{text:?} {written:?}");
        assert!(files.update(now + 2 * STABLE).changes.is_empty(), "however long it stays so");
        files.remove(path);
        assert_eq!(reported(&files.update(now)), ["-x"]);
    }
}

/// The policies in effect that close pods, and the other objects but the namespace.
fn closed_and_read(files: &Files) -> (Vec<String>, Vec<String>) {
    let names = files.objects().map(Object::reference).filter(|name| *name != ObjectRef::Namespace("default".into()));
    let (closing, others): (Vec<_>, Vec<_>) = names.partition(|name| unread_manifest(name).is_some());
    let texts = |names: Vec<ObjectRef>| names.iter().map(ToString::to_string).collect();
    (texts(closing), texts(others))
}

#[test]
fn a_first_start_closes_what_refused_files_may_be_about() {
    let policy = |api: &str, kind: &str, meta: &str, spec: &str| {
        format!("{{apiVersion: {api}, kind: {kind}, metadata: {{{meta}}}, spec: {spec}}}\n---\n")
    };
    let (v1, shop, bad) = ("networking.k8s.io/v1", "name: p, namespace: shop", "{podSelektor: {}}");
    let in_shop = &["NetworkPolicy shop/unread:b.yaml"][..];
    let in_default = &["NetworkPolicy default/unread:b.yaml"][..];
    let everywhere = &["ClusterNetworkPolicy unread:b.yaml"][..];
    let cases = [
        (policy(v1, "NetworkPolicy", shop, bad), in_shop),
        (policy(v1, "NetworkPolcy", shop, "{}"), in_shop),
        (policy(v1, "NetworkPolicy", "name: p", bad), in_default),
        (policy("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", "name: p", bad), everywhere),
        (policy("policy.networking.k8s.io/v1alpha1", "AdminNetworkPolicy", "name: p", "{}"), everywhere),
        (policy(v1, "Something", shop, "{}"), everywhere),
        ("a: [".to_owned(), everywhere),
        (pod("z", "10.0.0.999"), in_default),
        (pod("x", "10.0.0.2"), in_default),
        (pod("z", "10.0.0.1"), in_default),
    ];
    for (text, closed) in cases {
        let mut files = files();
        set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
        files.update(Instant::now());
        files.set(Path::new("b.yaml"), Ok(pod("y", "10.0.0.3") + &text), Written::Whole, Instant::now());
        assert_eq!(files.update(Instant::now()).refused, 1, "{text}");
        files.close_unread();
        let (closing, mut others) = closed_and_read(&files);
        others.retain(|name| name.starts_with("Pod"));
        // Text that is no YAML has no part that can be read.
        let read = if text == "a: [" { &["Pod default/x"][..] } else { &["Pod default/x", "Pod default/y"] };
        assert_eq!(
            (closing, others),
            (closed.iter().map(ToString::to_string).collect(), read.iter().map(ToString::to_string).collect()),
            "{text}"
        );
        assert!(files.update(Instant::now()).changes.is_empty(), "it stays so: {text}");
        set(&mut files, "b.yaml", &[("w", "10.0.0.4")]);
        assert_eq!(files.update(Instant::now()).refused, 0);
        assert_eq!(closed_and_read(&files).0, [""; 0], "corrected: {text}");
    }
}

#[test]
fn an_object_moves_between_files_in_either_order_of_saves() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1"), ("y", "10.0.0.2")]);
    files.update(Instant::now());
    set(&mut files, "b.yaml", &[("x", "10.0.0.1")]);
    let batch = files.update(Instant::now());
    assert!(batch.changes.is_empty(), "{batch:?}");
    let problem = batch.problems[0].to_string();
    assert_eq!(problem, "b.yaml:1: Pod default/x: is defined twice, also at a.yaml:1: remove one, or rename it");
    set(&mut files, "a.yaml", &[("y", "10.0.0.2")]);
    let batch = files.update(Instant::now());
    assert!(batch.changes.is_empty() && batch.problems.is_empty(), "it is the same object: {batch:?}");
    assert_eq!(batch.fixed, [PathBuf::from("b.yaml")]);
    files.remove(Path::new("b.yaml"));
    assert_eq!(reported(&files.update(Instant::now())), ["-x"]);
}

#[test]
fn two_pods_exchange_their_addresses_over_two_saves() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
    set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
    files.update(Instant::now());
    set(&mut files, "a.yaml", &[("x", "10.0.0.2")]);
    let batch = files.update(Instant::now());
    assert!(batch.changes.is_empty());
    assert_eq!(
        batch.problems[0].to_string(),
        "a.yaml:1: Pod default/x: address 10.0.0.2 is also that of Pod default/y at b.yaml:1: give each pod its own"
    );
    set(&mut files, "b.yaml", &[("y", "10.0.0.1")]);
    assert_eq!(reported(&files.update(Instant::now())), ["+x 10.0.0.2", "+y 10.0.0.1"]);
}

#[test]
fn a_fallback_can_force_another_file_to_fall_back() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
    set(&mut files, "b.yaml", &[("y", "10.0.0.2")]);
    files.update(Instant::now());
    // b takes the address that a leaves; but a also repeats a name within itself, so it does not leave it.
    set(&mut files, "a.yaml", &[("x", "10.0.0.3"), ("x", "10.0.0.4")]);
    set(&mut files, "b.yaml", &[("y", "10.0.0.1")]);
    let batch = files.update(Instant::now());
    assert!(batch.changes.is_empty(), "{batch:?}");
    assert_eq!(batch.problems.len(), 2);
    assert_eq!(files.objects().count(), 3);
}

/// The number of a name, the last part of an address, and a label's value.
type SavedPod = (usize, u8, u8);

/// A file's number, and the pods that a save leaves in it; `None`: the file is gone.
fn any_save() -> impl Strategy<Value = (usize, Option<Vec<SavedPod>>)> {
    let pods = prop::collection::vec((0..3usize, 1..4u8, 0..2u8), 1..3);
    (0..3usize, prop_oneof![8 => pods.prop_map(Some), 1 => Just(None)])
}

proptest! {
    #[test]
    fn conflicts_never_count_and_files_do_once_they_agree(
        saves in prop::collection::vec((any_save(), any::<bool>()), 1..30)
    ) {
        let text = |pods: &[SavedPod]| -> String {
            pods.iter().map(|(name, address, label)| {
                format!(
                    "{{apiVersion: v1, kind: Pod, metadata: {{namespace: n{}, name: {}, labels: {{l: '{label}'}}}}, \
                     status: {{podIPs: [{{ip: 10.0.0.{address}}}]}}}}\n---\n",
                    name % 2,
                    ["x", "y", "z"][*name]
                )
            }).collect()
        };
        let paths = ["a.yaml", "b.yaml", "c.yaml"].map(Path::new);
        let mut files = Files::new(Options::default());
        let mut followed: BTreeMap<ObjectRef, Object> = BTreeMap::new();
        let mut saved: [Vec<SavedPod>; 3] = Default::default();
        for ((file, pods), is_updated) in saves {
            match &pods {
                Some(pods) => files.set(paths[file], Ok(text(pods)), Written::Whole, Instant::now()),
                None => files.remove(paths[file]),
            }
            saved[file] = pods.unwrap_or_default();
            if !is_updated {
                continue;
            }
            for change in files.update(Instant::now()).changes {
                match change {
                    ObjectChange::Set(object) => followed.insert(object.reference(), object),
                    ObjectChange::Delete(name) => followed.remove(&name),
                };
            }
            let in_force: BTreeMap<_, _> = files.objects().map(|object| (object.reference(), object.clone())).collect();
            prop_assert_eq!(&followed, &in_force, "what was reported is what is in effect");
            let owned: Vec<IpAddr> = in_force.values().flat_map(manifest::owned_addresses).copied().collect();
            prop_assert_eq!(owned.iter().collect::<BTreeSet<_>>().len(), owned.len(), "an address has one pod: {:?}", owned);
            let all: Vec<_> = saved.iter().flatten().collect();
            let names: BTreeSet<_> = all.iter().map(|(name, ..)| name).collect();
            let addresses: BTreeSet<_> = all.iter().map(|(_, address, _)| address).collect();
            if names.len() == all.len() && addresses.len() == all.len() {
                let labels = |object: &Object| match object {
                    Object::Pod(pod) => Some((pod.addresses[0], pod.labels["l"].clone())),
                    _ => None,
                };
                let found: BTreeSet<_> = in_force.values().filter_map(labels).collect();
                let wanted = all.iter().map(|(_, address, label)| (IpAddr::from([10, 0, 0, *address]), label.to_string()));
                prop_assert_eq!(found, wanted.collect::<BTreeSet<_>>());
            }
        }
    }
}

#[test]
fn a_file_cut_in_place_keeps_its_objects_until_stable() {
    let both = pod("x", "10.0.0.1") + &pod("y", "10.0.0.2");
    let first = pod("x", "10.0.0.1");
    // Its text, how it was written, and what is gone at once.
    let cases: [(&str, Written, &[&str]); 3] = [
        (&first, Written::InPlace, &[]),
        (&first, Written::Whole, &["-y"]),
        (&both[..both.len() - 4], Written::InPlace, &[]),
    ];
    for (text, written, gone) in cases {
        let (mut files, now) = (files(), Instant::now());
        let path = Path::new("a.yaml");
        let after = |seconds| now + Duration::from_secs(seconds);
        files.set(path, Ok(both.clone()), Written::Whole, now);
        files.update(now);
        files.set(path, Ok(text.to_owned()), written, now);
        let batch = files.update(now);
        assert_eq!(reported(&batch), gone, "{text:?}");
        let is_held = gone.is_empty() && text.len() < both.len() - 4;
        assert_eq!((batch.refused, batch.problems.len()), (is_held.into(), is_held.into()), "{text:?}");
        // The same again, as its owner sees it.
        files.set(path, Ok(text.to_owned()), Written::InPlace, after(5));
        assert!(reported(&files.update(after(9))).is_empty(), "{text:?}");
        let batch = files.update(after(11));
        assert_eq!(batch.shortened.len(), usize::from(is_held), "{text:?}");
        assert_eq!((reported(&batch).is_empty(), batch.refused), (!is_held, 0), "{text:?}");
        assert!(files.update(after(30)).is_empty());
    }
}

#[test]
fn the_last_runs_objects_stand_for_refused_files() {
    let objects = |text: &str| {
        let read = manifest::parse_file(&Arc::from(Path::new("last")), text, &Options::default()).unwrap();
        read.documents.into_iter().map(|document| document.object).collect::<Vec<_>>()
    };
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.7")]);
    files.set(Path::new("b.yaml"), Ok("kind: Pod".to_owned()), Written::Whole, Instant::now());
    files.update(Instant::now());
    files.keep(objects(&(pod("x", "10.0.0.1") + &pod("y", "10.0.0.2") + &pod("z", "10.0.0.7"))));
    assert_eq!(files.update(Instant::now()).refused, 1);
    let pods: Vec<String> = files
        .objects()
        .filter_map(|object| match object {
            Object::Pod(pod) => Some(format!("{} {}", pod.key.name, pod.addresses[0])),
            _ => None,
        })
        .collect();
    assert_eq!(pods, ["x 10.0.0.7", "y 10.0.0.2"], "of one name or address is one");
    set(&mut files, "b.yaml", &[("w", "10.0.0.2")]);
    let batch = files.update(Instant::now());
    assert_eq!((reported(&batch), batch.refused), (vec!["-y".to_owned(), "+w 10.0.0.2".to_owned()], 0));
}

#[test]
fn a_file_can_be_renamed_over_another() {
    let mut files = files();
    set(&mut files, "a.yaml", &[("x", "10.0.0.1")]);
    files.update(Instant::now());
    files.remove(Path::new("a.yaml"));
    set(&mut files, "b.yaml", &[("x", "10.0.0.1")]);
    assert!(files.update(Instant::now()).is_empty(), "the object is the same");
    assert_eq!(files.objects().count(), 2);
}

//! Policy holds on real packets, and follows manifests and interfaces.

use std::fs;

use nix::sys::signal::Signal;

use crate::fixture::{
    Daemon, Files, NAMESPACE, assert_forwarded_by_kernel, assert_restored, pod_manifest, policy, reaches, reaches_node,
    reaches_node_at,
};
use crate::netns::{BRIDGE_GATEWAYS, Pod, node_state, on_a_node};

#[test]
fn policy_on_packets_follows_manifests_and_interfaces() {
    on_a_node(|| {
        // As a node is set, with reverse path filtering at its strictest.
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter"] {
            fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
        }
        let [web, db, job] = [5, 6, 7].map(Pod::new);
        let before = node_state();
        let objects = [
            NAMESPACE.to_owned(),
            pod_manifest("web", web.addresses()),
            pod_manifest("db", db.addresses()),
            pod_manifest("job", job.addresses()),
        ];
        let files = Files::new("", &[("pods.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&web, &db), [true; 2]);
        assert_eq!(reaches(&job, &db), [false; 2]);
        assert_eq!(reaches(&db, &job), [true; 2]);
        assert_eq!(reaches_node(&db), [true; 4], "a pod and its node always reach each other");

        // Another policy in its place.
        files.save("policies.yaml", &policy("db", "job"));
        let told = daemon.wait_for("published: NetworkPolicy shop/db");
        assert!(told.contains("epoch=2"), "{told}");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches(&job, &db), [true; 2]);

        // A manifest that is broken changes nothing.
        files.save("policies.yaml", "kind: NetworkPolicy\nspec: {podSelector: 3}\n");
        daemon.wait_for("policies.yaml");
        assert_eq!(reaches(&web, &db), [false; 2]);
        assert_eq!(reaches(&job, &db), [true; 2]);

        // Nor does one that claims another pod's address.
        files.save("clash.yaml", &pod_manifest("thief", web.addresses()));
        let told = daemon.wait_for("clash.yaml");
        assert!(told.contains("10.1.1.5"), "{told}");
        assert_eq!(reaches(&db, &web), [true; 2]);
        fs::remove_file(files.path("manifests/clash.yaml")).unwrap();

        // A pod that comes while running, its object before its interface.
        files.save("late.yaml", &pod_manifest("late", ("10.1.1.8", "fd00:1::8")));
        daemon.wait_for("no host route to 10.1.1.8");
        let late = Pod::new(8);
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);
        assert_eq!(reaches(&late, &db), [false; 2]);

        // Statistics, while it runs.
        daemon.signal(Signal::SIGUSR1);
        daemon.wait_for("PORT  INTERFACE");
        let line = daemon.wait_for("shop/web");
        assert!(line.contains("ingress_denied"), "{line}");
        assert!(line.contains("redirected"), "{line}");

        // It is made anew: another interface, with the same name and addresses.
        drop(late);
        daemon.wait_for("closed");
        let late = Pod::new(8);
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);

        // And it goes, its interface first.
        drop(late);
        daemon.wait_for("closed");
        fs::remove_file(files.path("manifests/late.yaml")).unwrap();
        daemon.wait_for("Pod shop/late deleted");

        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(said.contains("PORT  INTERFACE"), "statistics at the end: {said}");
        assert_restored(&before);
        assert_forwarded_by_kernel(&web, &db);
    });
}

#[test]
fn pods_on_a_bridge_are_found_by_neighbour_entries_and_enforced() {
    on_a_node(|| {
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter"] {
            fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
        }
        let [web, db] = [5, 6].map(Pod::on_bridge);
        let routed = Pod::new(7);
        let before = node_state();
        let objects = [
            NAMESPACE.to_owned(),
            pod_manifest("web", web.addresses()),
            pod_manifest("db", db.addresses()),
            pod_manifest("routed", routed.addresses()),
        ];
        let files = Files::new("", &[("pods.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
        let daemon = Daemon::start(&files);
        // Nobody may have sent yet: the daemon makes the kernel solicit them before it is ready.
        assert_eq!(reaches(&web, &db), [true; 2]);
        assert_eq!(reaches(&routed, &db), [false; 2]);
        assert_eq!(reaches(&db, &routed), [true; 2]);
        assert_eq!(reaches_node_at(&db, BRIDGE_GATEWAYS), [true; 4], "a pod and its node always reach each other");
        files.save("policies.yaml", &policy("db", "routed"));
        daemon.wait_for("published: NetworkPolicy shop/db");
        assert_eq!(reaches(&web, &db), [false; 2], "though they are on one network");
        assert_eq!(reaches(&routed, &db), [true; 2]);

        // One that comes while running is closed at first.
        let late = Pod::on_bridge(8);
        daemon.wait_for("closed until its pod is known");
        files.save("late.yaml", &pod_manifest("late", late.addresses()));
        daemon.wait_for("attached");
        daemon.wait_for("published");
        assert_eq!(reaches(&late, &web), [true; 2]);
        assert_eq!(reaches(&late, &db), [false; 2]);
        drop(late);
        daemon.wait_for("closed");
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
    });
}

#[test]
fn a_deleted_pod_stays_closed_while_its_interface_exists() {
    on_a_node(|| {
        let [web, db] = [5, 6].map(Pod::new);
        let before = node_state();
        let files = Files::new(
            "",
            &[
                ("web.yaml", NAMESPACE.to_owned() + &pod_manifest("web", web.addresses())),
                ("db.yaml", pod_manifest("db", db.addresses())),
            ],
        );
        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&db, &web), [true; 2]);
        fs::remove_file(files.path("manifests/db.yaml")).unwrap();
        daemon.wait_for("Pod shop/db deleted");
        assert_eq!(reaches(&db, &web), [false; 2]);
        assert_eq!(reaches(&web, &db), [false; 2]);
        files.save("db.yaml", &pod_manifest("db", db.addresses()));
        daemon.wait_for("published: Pod shop/db");
        assert_eq!(reaches(&db, &web), [true; 2]);
        let (status, _, said) = daemon.end(Signal::SIGINT);
        assert_eq!(status.code(), Some(0), "{said}");
        assert_restored(&before);
    });
}

#[test]
fn policy_holds_for_external_peers() {
    on_a_node(|| {
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
        }
        let [web, db, world] = [5, 6, 9].map(Pod::new);
        let before = node_state();
        let objects = [NAMESPACE.to_owned(), pod_manifest("web", web.addresses()), pod_manifest("db", db.addresses())];
        let files = Files::new("", &[("all.yaml", objects.concat()), ("policies.yaml", policy("db", "web"))]);
        let daemon = Daemon::start(&files);
        assert_eq!(reaches(&world, &web), [true; 2]);
        assert_eq!(reaches(&web, &world), [true; 2]);
        assert_eq!(reaches(&db, &world), [true; 2]);
        assert_eq!(reaches(&world, &db), [false; 2]);
        assert!(reaches_node(&world).iter().all(|&reached| reached), "what is for the node passes");
        let (status, _, said) = daemon.end(Signal::SIGTERM);
        assert_eq!(status.code(), Some(0), "{said}");
        let denied = said.lines().find(|line| line.contains("ingress_denied")).unwrap();
        assert!(denied.contains("(node)"), "{said}");
        assert_restored(&before);
    });
}

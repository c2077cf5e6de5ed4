//! Prints what staged policies would change.

use std::fmt::Write as _;

use penstock_admin::table::align_columns;
use penstock_admin::types::{StagedChange, StagedVerdict, TrialStatus};

use crate::flows::amount;

pub fn text(status: &TrialStatus) -> String {
    let TrialStatus { staged, since, problems, live_judged, opening_judged, unrecorded, ungrouped, changes, .. } =
        status;
    let Some(since) = since else { return "nothing is staged\n".to_owned() };
    let mut text = format!("staged since {since}: {}\n", staged.join(", "));
    for problem in problems {
        let _ = writeln!(text, "note: {problem}");
    }
    let _ = writeln!(text, "judged: {live_judged} open connections, {opening_judged} packets that open one");
    if !changes.is_empty() {
        let heading = ["FROM", "TO", "PORT", "LIVE", "OPENED", "PACKETS", "BYTES", "LAST SEEN", "NOW", "STAGED"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(changes.iter().map(row));
        let _ = write!(text, "\n{}", align_columns(&rows));
    }
    for (count, what) in [(unrecorded, "packets that came too fast"), (ungrouped, "connections beyond 1000 groups")] {
        if *count > 0 {
            let _ = writeln!(text, "not listed: {count} {what}, whose verdict would change");
        }
    }
    if !status.has_changes() {
        text.push_str("nothing would change\n");
    }
    text
}

fn row(change: &StagedChange) -> Vec<String> {
    let port = match change.port {
        0 => change.protocol.clone(),
        port => format!("{port}/{}", change.protocol),
    };
    vec![
        change.from.clone(),
        change.to.clone(),
        port,
        live(change),
        change.opened.to_string(),
        change.packets.to_string(),
        change.bytes.to_string(),
        change.last_seen.clone(),
        verdict(&change.present),
        promoted(change),
    ]
}

/// `2`, or with what they sent `2 (9 packets, 600 B)`.
fn live(change: &StagedChange) -> String {
    match &change.live_traffic {
        Some(traffic) => format!("{} ({})", change.live, amount(traffic)),
        None => change.live.to_string(),
    }
}

fn promoted(change: &StagedChange) -> String {
    match &change.isolating[..] {
        [] => verdict(&change.promoted),
        policies => format!("denied ({}, isolated by {})", change.promoted.reason, policies.join(", ")),
    }
}

fn verdict(StagedVerdict { allowed, reason }: &StagedVerdict) -> String {
    format!("{} ({reason})", if *allowed { "allowed" } else { "denied" })
}

#[cfg(test)]
mod tests {
    use penstock_admin::types::Traffic;

    use super::*;

    #[test]
    fn a_status_lists_the_groups_and_what_is_in_none() {
        assert_eq!(text(&TrialStatus::default()), "nothing is staged\n");
        let since = Some("2026-11-22T10:00:00Z".to_owned());
        let staged = vec!["NetworkPolicy shop/db".to_owned()];
        let mut status = TrialStatus { since, staged, live_judged: 3, ..TrialStatus::default() };
        assert!(text(&status).ends_with("judged: 3 open connections, 0 packets that open one\nnothing would change\n"));
        let verdict = |allowed, reason: &str| StagedVerdict { allowed, reason: reason.to_owned() };
        status.changes.push(StagedChange {
            from: "shop/web".to_owned(),
            to: "shop/db".to_owned(),
            protocol: "TCP".to_owned(),
            port: 5432,
            present: verdict(true, "no policy applies"),
            promoted: verdict(false, "ingress: no rule allows it"),
            isolating: vec!["shop/guard".to_owned()],
            live: 2,
            live_traffic: Some(Traffic { packets: 1200, bytes: 90_000 }),
            opened: 7,
            packets: 9,
            bytes: 600,
            first_seen: "2026-11-22T10:00:00Z".to_owned(),
            last_seen: "2026-11-22T10:00:05Z".to_owned(),
            example: "10.0.0.1:4000 to 10.0.0.2:5432".to_owned(),
        });
        status.ungrouped = 4;
        let listed = text(&status);
        let line = listed.lines().find(|line| line.starts_with("shop/web")).unwrap();
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let expected = [
            "shop/web",
            "shop/db",
            "5432/TCP",
            "2 (1200 packets, 87.89 KiB)",
            "7",
            "9",
            "600",
            "2026-11-22T10:00:05Z",
            "allowed (no policy applies)",
            "denied (ingress: no rule allows it, isolated by shop/guard)",
        ];
        assert_eq!(cells, expected);
        assert!(
            listed.ends_with("not listed: 4 connections beyond 1000 groups, whose verdict would change\n"),
            "{listed}"
        );
    }
}

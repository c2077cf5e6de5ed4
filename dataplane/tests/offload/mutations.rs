//! Mutation test of what the programs ask before they forward a packet: breaks one condition at a time in a copy of their source; the
//! tests of this program must then fail.
//!
//! Run by `make test-long`, or by `cargo test -p penstock-dataplane --features replaceable-programs --test offload -- --ignored
//! --nocapture`; with `PENSTOCK_MUTATION=TEXT` only mutants with this in their name, or of this file. Each is compiled by clang alone, and tested by
//! this very program, which loads it instead of the one that is built in.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use self::mutants::{Source, occurs_once};

#[path = "../../../xdp-redirect/tests/mutants/mod.rs"]
mod mutants;

/// A mutation: a part of the source, which occurs once, and its replacement.
pub(crate) struct Mutation {
    /// The test to ask first whether it notices.
    noticed_by: &'static str,
    breaks: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    /// Why no test can notice it.
    equivalent: Option<&'static str>,
}

pub(crate) const fn mutation(
    noticed_by: &'static str,
    breaks: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mutation {
    Mutation { noticed_by, breaks, file, from, to, equivalent: None }
}

const fn equivalent(because: &'static str, of: Mutation) -> Mutation {
    Mutation { equivalent: Some(because), ..of }
}

const TABLE: &str = "conntrack_maps.h";
const PACKET: &str = "packet.h";
pub(crate) const LOOKUP: &str = "established.h";
const FORWARD: &str = "forward.h";
const REWRITE: &str = "rewrite.h";
pub(crate) const REPEAT: &str = "repeat.h";

// Tests that notice mutants, of which each is asked first: to load the programs takes longer than to test them.
const OF_ENTRY: &str = "entry::a_packet_passes_only_if_each_field_of_its_connection_allows_it";
const GROUPS: &str = "entry::a_connection_is_found_in_either_of_its_two_groups_wherever_it_is_there";
const REREAD: &str = "entry::a_packet_never_passes_by_the_verdict_of_the_entrys_last_connection";
const CHANGED: &str = "entry::a_fin_never_brings_back_a_path_that_a_worker_has_just_changed";
const LINKS: &str = "entry::a_translated_packet_passes_only_if_both_entries_and_their_links_allow_it";
const NEXT_FLOW: &str = "entry::a_packet_never_leaves_with_the_flow_of_the_entrys_next_connection";
const HEADERS: &str = "headers::a_packet_passes_only_if_each_field_of_its_headers_allows_it";
const LAST_HOP: &str = "headers::a_packet_with_its_last_hop_or_a_wrong_checksum_meets_a_worker";
const MAPPED: &str = "headers::an_ipv6_packet_with_mapped_addresses_is_not_of_the_ipv4_connection";
const LENGTH: &str = "headers::what_is_too_long_for_a_pod_meets_a_worker_measured_by_its_segments";
const WRAP: &str = "epochs::a_stale_epoch_is_no_hit_across_the_wrap_of_its_numbers";
const HANDSHAKE: &str = "states::the_end_of_a_handshake_needs_no_worker_if_it_has_the_numbers_of_both_syns";
const ANSWER: &str = "states::of_a_handshake_only_the_syn_meets_a_worker";
const QUESTION: &str = "states::of_a_question_and_its_answer_only_the_question_meets_a_worker";
const OF_ANSWER: &str = "entry::an_answer_to_a_syn_passes_only_if_each_field_allows_it";
const LATE_ANSWER: &str = "entry::a_late_answer_leaves_the_window_of_the_entrys_next_connection";
const CLOSED: &str = "states::a_connection_that_its_ends_close_without_a_worker_has_ended_for_workers";
const UNEXPIRED: &str = "states::a_connection_whose_packets_the_kernel_forwards_does_not_expire";
const COUNTS: &str = "states::a_connection_counts_what_workers_and_programs_forward_in_each_direction";
const CAPTURED: &str = "hits::all_packets_of_a_captured_pod_are_left_to_workers_and_no_others";
const NEIGHBOURS: &str = "hits::between_neighbours_on_a_bridge_no_hop_is_spent";
const LEFT: &str = "hits::what_needs_a_worker_is_left_to_it";
const TRANSLATED: &str = "hits::packets_of_a_connection_to_a_service_are_translated_without_a_worker";
const CHECKSUM: &str = "hits::a_translated_packet_keeps_a_checksum_as_right_or_wrong_as_it_is";
const OF_REPEATED: &str = "repeat::a_connection_opens_only_if_each_field_of_an_answer_allows";
const OPENING: &str = "repeat::a_packet_opens_only_what_a_worker_has_opened_before";
const OPENED: &str = "repeat::a_connection_like_one_that_a_worker_opened_meets_no_worker";
const WRITTEN: &str = "repeat::what_a_program_opens_is_written_as_a_worker_writes_it";
const NO_ANSWER: &str = "repeat::what_a_program_does_not_repeat_has_no_answer_or_no_way";
const OF_STACK: &str = "repeat::of_the_nodes_stack_only_what_it_forwards_is_repeated";
const FLOOD: &str = "repeat::a_flood_ends_at_the_credit_of_its_pod_which_is_of_its_share";
const PAIR: &str = "repeat::an_answer_is_found_in_either_place_of_its_pair";
const FULL: &str = "repeat::a_connection_without_a_free_entry_in_its_group_is_a_workers";
const ALONE: &str = "repeat::answers_end_with_the_daemon_where_they_must_not_outlast_it";

/// Those of this file and of others, which have them beside their tests.
fn mutations() -> impl Iterator<Item = &'static Mutation> {
    MUTATIONS.iter().chain(super::ended::MUTATIONS)
}

const MUTATIONS: &[Mutation] = &[
    // The entry.
    mutation(
        OF_ENTRY,
        "a tentative entry counts",
        LOOKUP,
        "if (control & (TENTATIVE | REVOKED))",
        "if (control & REVOKED)",
    ),
    mutation(
        OF_ENTRY,
        "a revoked entry counts",
        LOOKUP,
        "if (control & (TENTATIVE | REVOKED))",
        "if (control & TENTATIVE)",
    ),
    mutation(OF_ENTRY, "an entry that was never evaluated counts", LOOKUP, "if (!EPOCH(found->control) || ", "if ("),
    mutation(
        OF_ENTRY,
        "an older epoch counts",
        LOOKUP,
        " || (EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000)",
        ")",
    ),
    mutation(
        WRAP,
        "epochs are compared as if they did not wrap",
        LOOKUP,
        "(EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000",
        "EPOCH(found->control) < epoch",
    ),
    mutation(
        WRAP,
        "the bits of two epochs are compared as if they did not wrap",
        LOOKUP,
        "(EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000",
        "EPOCH(found->control) < (epoch & EPOCH_MASK)",
    ),
    mutation(
        OF_ENTRY,
        "only the same epoch counts",
        LOOKUP,
        "(EPOCH(found->control) - epoch) & EPOCH_MASK & 0x400000",
        "(EPOCH(found->control) - epoch) & EPOCH_MASK",
    ),
    equivalent(
        "the bit that is tested is one of the mask",
        mutation(
            OF_ENTRY,
            "the difference of epochs has all bits",
            LOOKUP,
            "- epoch) & EPOCH_MASK & 0x400000",
            "- epoch) & 0x400000",
        ),
    ),
    mutation(OF_ENTRY, "the epoch has fewer bits", TABLE, "#define EPOCH_MASK 0x7fffff", "#define EPOCH_MASK 0x3fffff"),
    mutation(
        OF_ENTRY,
        "states of a TCP connection that ends count",
        LOOKUP,
        "if (state == TCP_ESTABLISHED)\n",
        "if (state >= TCP_ESTABLISHED)\n",
    ),
    mutation(
        OF_ENTRY,
        "a SYN-ACK on an established connection counts",
        LOOKUP,
        "return !(packet->flags & TCP_SYN);",
        "return 1;",
    ),
    mutation(
        HANDSHAKE,
        "a handshake is not completed by a program",
        LOOKUP,
        "return is_next_of_handshake(packet, slot, control, state);",
        "return packet->flags & TCP_SYN && is_next_of_handshake(packet, slot, control, state);",
    ),
    mutation(
        OF_ENTRY,
        "all states of UDP count",
        LOOKUP,
        "return state == UDP_ASSURED || state == UDP_REPLIED || state == UDP_UNREPLIED;",
        "return 1;",
    ),
    mutation(
        QUESTION,
        "an answer that is the first is for a worker",
        LOOKUP,
        "|| state == UDP_UNREPLIED;",
        "|| (state == UDP_UNREPLIED && from_opener);",
    ),
    mutation(
        OF_ENTRY,
        "an answer without a stream is for a worker",
        LOOKUP,
        "return state == UDP_ASSURED || state == UDP_REPLIED || ",
        "return state == UDP_ASSURED || ",
    ),
    // What programs have noted.
    mutation(
        OF_ENTRY,
        "what was noted of an answer counts in any state",
        LOOKUP,
        "if (state == (is_tcp ? TCP_SYN_SENT : UDP_UNREPLIED) && path & ANSWERED)",
        "if (path & ANSWERED)",
    ),
    mutation(
        ANSWER,
        "what was noted of an answer does not count",
        LOOKUP,
        "if (state == (is_tcp ? TCP_SYN_SENT : UDP_UNREPLIED) && path & ANSWERED)",
        "if (0)",
    ),
    mutation(
        OF_ENTRY,
        "what was noted of a handshake's end counts in any state",
        LOOKUP,
        "return is_tcp && state == TCP_SYN_RECEIVED && path & CONFIRMED ?",
        "return is_tcp && path & CONFIRMED ?",
    ),
    mutation(
        QUESTION,
        "the answer to a datagram is not noted",
        LOOKUP,
        "(state == UDP_UNREPLIED && packet->direction != ORIGINAL(control) ? ANSWERED : 0)",
        "0",
    ),
    mutation(
        QUESTION,
        "a second question is an answer",
        LOOKUP,
        "(state == UDP_UNREPLIED && packet->direction != ORIGINAL(control) ? ANSWERED : 0)",
        "(state == UDP_UNREPLIED ? ANSWERED : 0)",
    ),
    mutation(ANSWER, "the answer to a SYN is not noted", LOOKUP, "(state == TCP_SYN_SENT ? ANSWERED : ", "("),
    // The answer to a SYN.
    mutation(
        ANSWER,
        "the number of a SYN-ACK is not noted",
        LOOKUP,
        "if (packet->flags & TCP_SYN && !record_syn_ack(packet, slot))\n\t\treturn 0;",
        "",
    ),
    mutation(
        LATE_ANSWER,
        "a number is noted in any word",
        LOOKUP,
        "return entry && __sync_val_compare_and_swap(&entry->tracking[packet->direction & 1], before, window) == before;",
        // So late that tests meet the moment before it often enough.
        "__u64 sum = 0; for (int i = 0; i < 64; i++) sum += bpf_ktime_get_ns(); return entry && sum && (*(volatile __u64 *)&entry->tracking[packet->direction & 1] = window);",
    ),
    equivalent(
        "who notes the answer's number asks for the same once more",
        mutation(
            OF_ANSWER,
            "an answer may have any state of its window before",
            LOOKUP,
            "return entry->tracking[direction] == UNANSWERED(packet->acknowledged);",
            "return 1;",
        ),
    ),
    mutation(
        OF_ENTRY,
        "the opener never makes a stream",
        LOOKUP,
        "if (state != UDP_REPLIED || !from_opener)",
        "if (1)",
    ),
    mutation(
        OF_ENTRY,
        "the answering end makes a stream",
        LOOKUP,
        "if (state != UDP_REPLIED || !from_opener)",
        "if (state != UDP_REPLIED)",
    ),
    mutation(OF_ENTRY, "a stream begins late", LOOKUP, "& TICK_MASK) < STREAM;", "& TICK_MASK) < 1000 * STREAM;"),
    mutation(
        OF_ENTRY,
        "the opener is the end with the lower address",
        LOOKUP,
        "from_opener = packet->direction == ORIGINAL(control);",
        "from_opener = !packet->direction;",
    ),
    // The key.
    mutation(OF_ENTRY, "the lower address has half its bits", LOOKUP, "(entry->low[1] ^ packet->low[1])", "0ULL"),
    mutation(OF_ENTRY, "the lower address has the other half", LOOKUP, "(entry->low[0] ^ packet->low[0])", "0ULL"),
    mutation(OF_ENTRY, "the higher address has half its bits", LOOKUP, "(entry->high[1] ^ packet->high[1])", "0ULL"),
    mutation(OF_ENTRY, "the higher address has the other half", LOOKUP, "(entry->high[0] ^ packet->high[0])", "0ULL"),
    mutation(
        OF_ENTRY,
        "ports and protocol do not count",
        LOOKUP,
        "((entry->ports ^ packet->ports) & PORTS_MASK)",
        "0ULL",
    ),
    mutation(
        OF_ENTRY,
        "the protocol does not count",
        TABLE,
        "#define PORTS_MASK 0xffffffffffULL",
        "#define PORTS_MASK 0xffffffffULL",
    ),
    mutation(
        OF_ENTRY,
        "the owner counts",
        TABLE,
        "#define PORTS_MASK 0xffffffffffULL",
        "#define PORTS_MASK 0x1ffffffffffULL",
    ),
    mutation(
        GROUPS,
        "only one group is searched",
        LOOKUP,
        "return find_in_group(other, tag, packet, except, control);",
        "return NO_SLOT;",
    ),
    mutation(
        GROUPS,
        "a second group that is the first is not the next one",
        LOOKUP,
        "if (other == group)\n",
        "if (0)\n",
    ),
    mutation(
        GROUPS,
        "of a group's tags the first half counts",
        LOOKUP,
        "word < LANES / 4; word++",
        "word < LANES / 8; word++",
    ),
    mutation(
        REREAD,
        "what is read need not belong together",
        LOOKUP,
        "if (control_of(entry) != before)\n\t\treturn 0;",
        "",
    ),
    // Its path.
    mutation(
        OF_ENTRY,
        "a path that no worker has taken counts",
        LOOKUP,
        "TAKEN(path, direction) && (end == ingress",
        "(end == ingress",
    ),
    mutation(
        OF_ENTRY,
        "a path is taken in both directions at once",
        TABLE,
        "#define TAKEN(path, direction) ((path) >> (46 + (direction)) & 1)",
        "#define TAKEN(path, direction) ((path) >> 46 & 3)",
    ),
    mutation(
        OF_ENTRY,
        "a packet may come from any interface",
        LOOKUP,
        "if (!starts_at(path, direction, ingress) || ",
        "if (!TAKEN(path, direction) || ",
    ),
    mutation(
        OF_ENTRY,
        "a pod may send as the node",
        LOOKUP,
        "(end == ingress || (ingress",
        "(end == ingress || end == BY_NODE || (ingress",
    ),
    mutation(OF_ENTRY, "the node does not send by a path of its stack", LOOKUP, " || (ingress == BY_NODE && !end)", ""),
    mutation(
        OF_ENTRY,
        "a path of another epoch counts",
        LOOKUP,
        " || PATH_EPOCH(path) != (EPOCH(found->control) & 0xffff))",
        ")",
    ),
    mutation(
        WRAP,
        "the path's epoch is compared with all bits",
        LOOKUP,
        "PATH_EPOCH(path) != (EPOCH(found->control) & 0xffff)",
        "PATH_EPOCH(path) != EPOCH(found->control)",
    ),
    mutation(
        CHANGED,
        "a worker's change of the path is overwritten",
        LOOKUP,
        "__sync_val_compare_and_swap(&use->path, path, updated) == path;",
        // So late that tests meet the moment before it often enough.
        "({ __u64 sum = 0; for (int i = 0; i < 64; i++) sum += bpf_ktime_get_ns(); sum && (*(volatile __u64 *)&use->path = updated); });",
    ),
    mutation(
        CLOSED,
        "a FIN is not noted",
        LOOKUP,
        "(packet->flags & TCP_FIN ? FINISHED(packet->direction & 1) : 0)",
        "0",
    ),
    mutation(
        CLOSED,
        "a FIN is noted of the other direction",
        LOOKUP,
        "FINISHED(packet->direction & 1)",
        "FINISHED(!packet->direction)",
    ),
    mutation(
        HANDSHAKE,
        "the end of a handshake is not noted",
        LOOKUP,
        "state == TCP_SYN_RECEIVED ? CONFIRMED : 0",
        "0",
    ),
    // A handshake.
    mutation(
        HANDSHAKE,
        "any packet ends a handshake",
        LOOKUP,
        "if (!entry || state != (answers ? TCP_SYN_SENT : TCP_SYN_RECEIVED) || ",
        "if (!answers)\n\t\treturn 1;\n\tif (!entry || state != TCP_SYN_SENT || ",
    ),
    mutation(
        OF_ANSWER,
        "a handshake goes on in any state",
        LOOKUP,
        "state != (answers ? TCP_SYN_SENT : TCP_SYN_RECEIVED) || ",
        "",
    ),
    mutation(
        HANDSHAKE,
        "a handshake is ended again and again",
        LOOKUP,
        "&& path & CONFIRMED ? TCP_ESTABLISHED : state;",
        "&& 0 ? TCP_ESTABLISHED : state;",
    ),
    mutation(
        HANDSHAKE,
        "either end may send each part of a handshake",
        LOOKUP,
        " || (direction == ORIGINAL(control)) == !!answers ||",
        " ||",
    ),
    mutation(HANDSHAKE, "a handshake may have data", LOOKUP, "packet->length != packet->headers || ", ""),
    mutation(
        HANDSHAKE,
        "a handshake ends with any sequence number",
        LOOKUP,
        "return packet->sequence == (__u32)entry->tracking[direction] &&",
        "return",
    ),
    mutation(
        HANDSHAKE,
        "a handshake goes on with any acknowledgement",
        LOOKUP,
        " || packet->acknowledged != (__u32)entry->tracking[!direction])",
        ")",
    ),
    // Time.
    mutation(
        OF_ENTRY,
        "connections do not expire",
        LOOKUP,
        "if (!is_active(use, found->control, found->now, table->timeouts[kind]))",
        "if (0)",
    ),
    mutation(
        OF_ENTRY,
        "all have the timeout of an established TCP connection",
        LOOKUP,
        "found->now, table->timeouts[kind]))",
        "found->now, table->timeouts[0]))",
    ),
    mutation(
        OF_ANSWER,
        "a handshake has the timeout of an established connection",
        LOOKUP,
        "*timeout = state == TCP_ESTABLISHED ? 0 : 4;",
        "*timeout = 0;",
    ),
    mutation(
        OF_ENTRY,
        "UDP has the timeouts of other states",
        LOOKUP,
        "*timeout = (state - 1) & 3;",
        "*timeout = state & 3;",
    ),
    mutation(
        OF_ENTRY,
        "a connection that programs have never used is recent",
        LOOKUP,
        " || (one && is_recent(one, now, timeout)) || (other && is_recent(other, now, timeout));",
        " || is_recent(one, now, timeout) || is_recent(other, now, timeout) || !one || !other;",
    ),
    mutation(
        OF_ENTRY,
        "use in the lower end's direction does not count",
        LOOKUP,
        " || (one && is_recent(one, now, timeout))",
        "",
    ),
    mutation(
        OF_ENTRY,
        "use in the higher end's direction does not count",
        LOOKUP,
        " || (other && is_recent(other, now, timeout))",
        "",
    ),
    mutation(
        OF_ENTRY,
        "what is a tick ahead has expired",
        LOOKUP,
        "return age <= timeout || age > TICK_MASK - (1 << 16);",
        "return age <= timeout;",
    ),
    mutation(UNEXPIRED, "the time of use is not noted", LOOKUP, " | (found->now ? found->now : 1);", ";"),
    mutation(COUNTS, "packets are not counted", LOOKUP, "use->packets[direction] += packets;", ""),
    mutation(COUNTS, "bytes are not counted", LOOKUP, ">> 22) + packet->length) << 22", ">> 22)) << 22"),
    // Translated connections.
    equivalent(
        "there is no word behind the links",
        mutation(LINKS, "a link out of the table counts", LOOKUP, "if (other >= table->groups * LANES || ", "if ("),
    ),
    mutation(
        LINKS,
        "the entry that a packet leaves with need not be linked back",
        LOOKUP,
        "|| link_of(table, other) != LINK_TO(slot, control))",
        ")",
    ),
    mutation(LINKS, "a link of an ended connection counts", LOOKUP, "if (link != LINK_TO(other, leaving) || ", "if ("),
    mutation(
        LINKS,
        "a link has no generation",
        TABLE,
        "#define LINK_TO(slot, control) ((slot) | GENERATION(control) << 32 | 1ULL << 63)",
        "#define LINK_TO(slot, control) ((slot) | (link & 0x3ffULL << 32) | 1ULL << 63)",
    ),
    mutation(LINKS, "an entry that is not translated is left with", LOOKUP, "!(leaving & TRANSLATION) || ", ""),
    equivalent(
        "the state is one in which no packet is certain",
        mutation(LINKS, "an entry that is claimed is left with", LOOKUP, "!IS_WRITTEN(leaving) || ", ""),
    ),
    mutation(LINKS, "a tentative entry is left with", LOOKUP, "(control | leaving) & TENTATIVE", "control & TENTATIVE"),
    mutation(LINKS, "a tentative frontend counts", LOOKUP, "(control | leaving) & TENTATIVE", "leaving & TENTATIVE"),
    mutation(
        LINKS,
        "a client leaves by another frontend",
        LOOKUP,
        " ||\n\t    is_of_client == (STATE(leaving) == FRONTEND))",
        ")",
    ),
    mutation(
        LINKS,
        "a client may send as its Service",
        LOOKUP,
        "if (is_of_client != (packet->direction == ORIGINAL(control)))\n\t\treturn NO_SLOT;",
        "",
    ),
    // The packet.
    mutation(
        HEADERS,
        "a packet may have IP options",
        PACKET,
        "*(const __u8 *)ip4 != 0x45",
        "(*(const __u8 *)ip4 & 0xf0) != 0x40",
    ),
    mutation(
        HEADERS,
        "a packet of any IP version is one of 4",
        PACKET,
        "*(const __u8 *)ip4 != 0x45",
        "(*(const __u8 *)ip4 & 15) != 5",
    ),
    mutation(HEADERS, "a fragment counts", PACKET, " || ip4->frag_off & bpf_htons(0x3fff)", ""),
    mutation(
        HEADERS,
        "a first fragment counts",
        PACKET,
        "ip4->frag_off & bpf_htons(0x3fff)",
        "ip4->frag_off & bpf_htons(0x1fff)",
    ),
    mutation(
        HEADERS,
        "a later fragment counts",
        PACKET,
        "ip4->frag_off & bpf_htons(0x3fff)",
        "ip4->frag_off & bpf_htons(0x2000)",
    ),
    mutation(LAST_HOP, "a wrong header checksum counts", PACKET, " ||\n\t\t    !has_valid_checksum(ip4))", ")"),
    mutation(
        HEADERS,
        "a packet of any IP version is one of 6",
        PACKET,
        " || (*(const __u8 *)ip6 & 0xf0) != 0x60)",
        ")",
    ),
    mutation(
        MAPPED,
        "mapped addresses are those of IPv4",
        PACKET,
        "if ((!addresses->from[0] && addresses->from[1] >> 32 == 0xffff) || (!addresses->to[0] && addresses->to[1] >> 32 == 0xffff))\n\t\treturn 0;",
        "",
    ),
    mutation(HEADERS, "a packet may be longer than its frame", PACKET, "packet->length > skb->len - ETH_HLEN || ", ""),
    mutation(HEADERS, "a packet may be shorter than its header", PACKET, " || packet->length < network)", ")"),
    mutation(HEADERS, "a TCP header may be too short", PACKET, "if (header < 20 || ", "if (!header || "),
    mutation(HEADERS, "a TCP header may be longer than its segment", PACKET, " || header > length)", ")"),
    mutation(HEADERS, "a SYN is for no worker", PACKET, "#define TCP_DECIDES 0x17", "#define TCP_DECIDES 0x15"),
    mutation(HEADERS, "a RST is for no worker", PACKET, "#define TCP_DECIDES 0x17", "#define TCP_DECIDES 0x13"),
    mutation(
        HEADERS,
        "a segment without ACK is for no worker",
        PACKET,
        "(transport[13] & TCP_DECIDES) ^ TCP_ACK;",
        "transport[13] & TCP_DECIDES & ~TCP_ACK;",
    ),
    mutation(ANSWER, "a SYN-ACK may have a FIN", PACKET, " || packet->flags == (TCP_SYN | TCP_FIN))", ")"),
    mutation(
        HEADERS,
        "a datagram may be shorter than its header",
        PACKET,
        "if (udp_length < 8 || udp_length > length)",
        "if (!udp_length || udp_length > length)",
    ),
    mutation(
        HEADERS,
        "a datagram may be longer than its packet",
        PACKET,
        "if (udp_length < 8 || udp_length > length)",
        "if (udp_length < 8)",
    ),
    // Where it goes.
    mutation(
        OF_ENTRY,
        "what traverses the node's stack goes to the pod",
        FORWARD,
        "connection.control & VIA_HOST || ",
        "",
    ),
    mutation(LAST_HOP, "a packet's last hop counts", FORWARD, "(packet.ttl <= 1 && !bridged) || ", ""),
    mutation(NEIGHBOURS, "a neighbour's last hop is spent", FORWARD, "packet.ttl <= 1 && !bridged", "packet.ttl <= 1"),
    mutation(NEIGHBOURS, "neighbours are on any bridge", FORWARD, "iface->bridge == to->bridge && ", ""),
    mutation(
        NEIGHBOURS,
        "a translated packet spends no hop",
        FORWARD,
        "connection.nat_slot == NO_SLOT && is_to_bridge_neighbour",
        "is_to_bridge_neighbour",
    ),
    mutation(NEIGHBOURS, "a bridge spends no hop", FORWARD, " && !is_mac(&iface->node_mac, eth->h_dest);", ";"),
    mutation(
        NEIGHBOURS,
        "between no bridges no hop is spent",
        FORWARD,
        "return iface->bridge && (const",
        "return (const",
    ),
    mutation(HEADERS, "a packet's last hop but one does not count", FORWARD, "packet.ttl <= 1", "packet.ttl <= 2"),
    mutation(
        LENGTH,
        "a packet from a pod may have any length",
        FORWARD,
        " || longest_packet(skb, &packet) > to->mtu)",
        ")",
    ),
    mutation(
        LENGTH,
        "a packet to a pod may have any length",
        FORWARD,
        " ||\n\t    longest_packet(skb, &packet) > iface->mtu)",
        ")",
    ),
    mutation(
        LENGTH,
        "a long segment is measured as a whole",
        FORWARD,
        "return skb->gso_size ? packet->headers + skb->gso_size : packet->length;",
        "return packet->length;",
    ),
    mutation(
        LENGTH,
        "a long segment is measured without headers",
        FORWARD,
        "return skb->gso_size ? packet->headers + skb->gso_size : packet->length;",
        "return skb->gso_size ? skb->gso_size : packet->length;",
    ),
    mutation(
        CAPTURED,
        "a captured pod's packets are for no worker",
        FORWARD,
        "return iface->captured && ",
        "return 0 && ",
    ),
    mutation(
        CAPTURED,
        "packets to a captured pod are for no worker",
        FORWARD,
        "if (!to || is_captured(to) || ",
        "if (!to || ",
    ),
    mutation(
        LEFT,
        "packets to the node may have any source MAC",
        FORWARD,
        " ||\n\t\t    !is_mac(&iface->pod_mac, eth->h_source))",
        ")",
    ),
    mutation(
        LEFT,
        "packets to the node may have any destination MAC",
        FORWARD,
        "!is_mac(&iface->node_mac, eth->h_dest) ||\n",
        "\n",
    ),
    mutation(
        OF_ENTRY,
        "the node's packets to another pod come here",
        FORWARD,
        " || connection.to_ifindex != skb->ifindex ||",
        " ||",
    ),
    mutation(
        OF_STACK,
        "what the node itself sends opens a connection",
        FORWARD,
        "origin->ingress != BY_NODE && skb->ingress_ifindex, &connection",
        "1, &connection",
    ),
    equivalent(
        "frames of a test have a socket where they have no interface; the kernel itself sends without either",
        mutation(
            OF_STACK,
            "what has not entered the node opens a connection",
            FORWARD,
            "origin->ingress != BY_NODE && skb->ingress_ifindex, &connection",
            "origin->ingress != BY_NODE, &connection",
        ),
    ),
    mutation(
        OF_STACK,
        "nothing from the stack opens a connection",
        FORWARD,
        "origin->ingress != BY_NODE && skb->ingress_ifindex, &connection",
        "0, &connection",
    ),
    // How it leaves.
    mutation(
        HEADERS,
        "hops are not counted",
        REWRITE,
        "head.ip[4] -= bpf_htons(0x0100); /* TTL, which is at least 2, and protocol */\n\tsum",
        "sum",
    ),
    mutation(
        TRANSLATED,
        "an IPv6 packet's hops are not counted",
        REWRITE,
        "head.ip[3] -= bpf_htons(1); /* next header and hop limit, which is at least 2 */\n\t\treturn",
        "return",
    ),
    mutation(
        NEXT_FLOW,
        "an IPv4 packet leaves with the next connection's addresses",
        REWRITE,
        "change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 2);\n\tif (control_of(leaving) != connection->nat_control)\n\t\treturn CONNECTION_ENDED;",
        "change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 2);",
    ),
    mutation(
        NEXT_FLOW,
        "an IPv6 packet leaves with the next connection's addresses",
        REWRITE,
        "change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 8);\n\tif (control_of(leaving) != connection->nat_control)\n\t\treturn CONNECTION_ENDED;",
        "change = write_flow(leaving, connection->nat_direction, head.addresses[0], head.addresses[1], head.ports, 8);",
    ),
    mutation(
        CHECKSUM,
        "a datagram without checksum gets one",
        REWRITE,
        "BPF_F_PSEUDO_HDR | (is_udp ? BPF_F_MARK_MANGLED_0 : 0)",
        "BPF_F_PSEUDO_HDR",
    ),
    mutation(
        CHECKSUM,
        "ports are not in the checksum",
        REWRITE,
        "is_partial ? change.addresses : change.addresses + change.ports",
        "change.addresses",
    ),
    // Connections that programs open.
    mutation(OF_REPEATED, "answers count whatever the word says", REPEAT, "!(until & REPEATS_ON) || ", ""),
    mutation(OF_REPEATED, "answers count for ever", REPEAT, " || ((until - now) & TICK_MASK) > TICK_MASK / 2)", ")"),
    mutation(
        ALONE,
        "answers outlast a daemon that must run",
        REPEAT,
        "return !(until & REPEATS_WITH_DAEMON) || bpf_map_lookup_elem(&alive, &process);",
        "return 1;",
    ),
    mutation(
        ALONE,
        "no answer outlasts the daemon",
        REPEAT,
        "return !(until & REPEATS_WITH_DAEMON) || bpf_map_lookup_elem(&alive, &process);",
        "return !!bpf_map_lookup_elem(&alive, &process);",
    ),
    mutation(
        OPENING,
        "any segment opens a connection",
        REPEAT,
        "packet->flags == OPENING_SYN && packet->length",
        "packet->length",
    ),
    mutation(NO_ANSWER, "a SYN with data opens a connection", REPEAT, " && packet->length == packet->headers;", ";"),
    mutation(
        OPENED,
        "an answer is for one port of the opener",
        REPEAT,
        "ports & ~(direction ? 0xffff0000ULL : 0xffffULL)",
        "ports",
    ),
    mutation(PAIR, "only one answer of a pair is read", REPEAT, "lane < 2; lane++", "lane < 1; lane++"),
    mutation(
        OF_REPEATED,
        "an answer that is being written counts",
        REPEAT,
        "((version) && !((version) & 1))",
        "(version)",
    ),
    mutation(
        OF_REPEATED,
        "an answer that was never written counts",
        REPEAT,
        "((version) && !((version) & 1))",
        "(!((version) & 1))",
    ),
    mutation(
        OF_REPEATED,
        "an answer for another lower address counts",
        REPEAT,
        "(answer->low[0] ^ packet->low[0]) | ",
        "",
    ),
    mutation(
        OF_REPEATED,
        "an answer for the other half of it counts",
        REPEAT,
        "(answer->low[1] ^ packet->low[1]) | ",
        "",
    ),
    mutation(
        OF_REPEATED,
        "an answer for another higher address counts",
        REPEAT,
        "(answer->high[0] ^ packet->high[0]) |\n\t\t\t    (answer",
        "(answer",
    ),
    mutation(
        OF_REPEATED,
        "an answer for the other half of that counts",
        REPEAT,
        "(answer->high[1] ^ packet->high[1]) | ",
        "",
    ),
    mutation(
        OF_REPEATED,
        "an answer for another port counts",
        REPEAT,
        "(answer->ports ^ question))",
        "((answer->ports ^ question) & 0xff00000000ULL))",
    ),
    mutation(
        OF_REPEATED,
        "an answer for another protocol counts",
        REPEAT,
        "(answer->ports ^ question))",
        "((answer->ports ^ question) & 0xffffffffULL))",
    ),
    mutation(
        OF_REPEATED,
        "an answer for the other end counts",
        REPEAT,
        "VERDICT_ORIGINAL(decision->verdict) == direction &&\n",
        "1 &&\n",
    ),
    mutation(
        OF_REPEATED,
        "an answer for another interface counts",
        REPEAT,
        "END(decision->path, direction) == ingress &&\n",
        "(END(decision->path, direction) == ingress || ingress) &&\n",
    ),
    mutation(
        OF_REPEATED,
        "an answer of an older epoch counts",
        REPEAT,
        " &&\n\t\t       (__s32)(VERDICT_EPOCH(decision->verdict) - *(const volatile __u32 *)&table->epoch) >= 0;",
        ";",
    ),
    mutation(
        OF_REPEATED,
        "only an answer of the same epoch counts",
        REPEAT,
        "&table->epoch) >= 0;",
        "&table->epoch) == 0;",
    ),
    mutation(
        FLOOD,
        "credit has no end",
        REPEAT,
        "*(volatile __s64 *)left <= 0)\n\t\treturn 0;\n\tif ((__s64)__sync_fetch_and_add(left, -1) > 0)",
        "0)\n\t\treturn 0;\n\tif (1)",
    ),
    equivalent(
        "the exchange finds that there is none; to read it first saves locked instructions",
        mutation(
            FLOOD,
            "credit is not read before it is taken",
            REPEAT,
            "if (*(volatile __s64 *)left <= 0)\n\t\treturn 0;\n\tif",
            "if",
        ),
    ),
    mutation(
        FULL,
        "credit that was not used is lost",
        REPEAT,
        "if (slot == NO_SLOT)\n\t\treturn_credit(table, decision);\n",
        "",
    ),
    mutation(
        WRITTEN,
        "the owner is not written",
        REPEAT,
        "entry->ports = packet->ports | VERDICT_OWNER(decision->verdict) << OWNER_AT",
        "entry->ports = packet->ports",
    ),
    mutation(
        WRITTEN,
        "the direction is not written",
        REPEAT,
        "UDP_UNREPLIED | (packet->direction & 1) << 5 | ",
        "UDP_UNREPLIED | ",
    ),
    mutation(
        WRITTEN,
        "the epoch has fewer bits",
        REPEAT,
        "(VERDICT_EPOCH(decision->verdict) & EPOCH_MASK) << 30",
        "(VERDICT_EPOCH(decision->verdict) & 7) << 30",
    ),
    mutation(
        WRITTEN,
        "the next number is not written",
        REPEAT,
        "WINDOW_FROM((__u64)(__u32)(packet->sequence + 1))",
        "WINDOW_FROM((__u64)(__u32)(packet->sequence))",
    ),
    mutation(
        WRITTEN,
        "the other end's window is another's",
        REPEAT,
        "entry->tracking[!direction] = UNANSWERED((__u64)(__u32)(packet->sequence + 1));",
        "entry->tracking[!direction] = 0;",
    ),
    mutation(
        WRITTEN,
        "a datagram's time is not written",
        REPEAT,
        "entry->tracking[0] = now;",
        "entry->tracking[0] = 0;",
    ),
    mutation(
        WRITTEN,
        "the path is not written",
        REPEAT,
        "EMPTY_PATH(control), decision->path) == EMPTY_PATH(control);",
        "EMPTY_PATH(control), EMPTY_PATH(control)) == EMPTY_PATH(control);",
    ),
    mutation(OPENED, "no worker hears of it", REPEAT, "*(volatile __u64 *)&words[position & 7] = ", "(void)"),
    mutation(
        OPENED,
        "the event is of another generation",
        REPEAT,
        "((slot) | GENERATION(control) << 32 | ",
        "((slot) | ",
    ),
];

/// What tests say of programs.
enum Outcome {
    Passed,
    /// This test fails.
    Failed(String),
    /// The kernel does not load them, so that every test fails.
    NotLoaded(Vec<String>),
}

/// Runs tests of this program with these programs, until one fails.
fn run(objects: &[(&str, PathBuf)], tests: &[&str]) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(tests).envs(objects.iter().map(|(variable, object)| (variable, object)));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("this program runs");
    let mut lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines().map_while(Result::ok);
    let failed = lines.find(|line| line.starts_with("test ") && line.ends_with("FAILED"));
    if failed.is_some() && tests.is_empty() {
        // It may have ended.
        let _ = child.kill();
    }
    // What a failed test has printed comes at the end.
    let printed: Vec<String> = lines.collect();
    let status = child.wait().expect("it was started");
    if printed.iter().any(|line| line.contains(NOT_LOADED)) {
        return Outcome::NotLoaded(printed);
    }
    match failed {
        Some(test) => Outcome::Failed(test.trim_start_matches("test ").trim_end_matches(" ... FAILED").to_owned()),
        None if status.success() => Outcome::Passed,
        None => Outcome::Failed(format!("the test program: {status}")),
    }
}

/// The error of programs that do not pass the verifier.
const NOT_LOADED: &str = "the tcx programs";

/// The test that notices a mutant.
fn noticed_by(objects: &[(&str, PathBuf)], mutation: &Mutation) -> Option<String> {
    for tests in [&["--exact", mutation.noticed_by][..], &[]] {
        match run(objects, tests) {
            Outcome::Failed(test) => return Some(test),
            Outcome::NotLoaded(printed) => panic!("{}: the kernel does not load it: {printed:#?}", mutation.breaks),
            Outcome::Passed => {}
        }
    }
    None
}

#[test]
fn every_mutated_part_of_the_programs_occurs_exactly_once() {
    let others = mutations().filter(|mutation| !occurs_once(mutation.file, mutation.from));
    let others: Vec<_> = others.map(|mutation| (mutation.breaks, mutation.from)).collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
#[ignore = "tests each broken version of the programs: some minutes"]
fn the_tests_fail_for_each_broken_condition_of_the_programs() {
    let source = Source::new("mutations");
    let nothing = run(&[("PENSTOCK_TCX_OBJECT", Path::new("/dev/null").to_owned())], &[MAPPED]);
    assert!(
        matches!(nothing, Outcome::NotLoaded(_)),
        "built without --features replaceable-programs: no mutant is loaded"
    );
    let unbroken = run(&source.compile(FORWARD, "the unbroken programs"), &[]);
    assert!(matches!(unbroken, Outcome::Passed), "the tests fail for the unbroken programs");
    let wanted = std::env::var("PENSTOCK_MUTATION").unwrap_or_default();
    let is_wanted = |of: &&Mutation| of.equivalent.is_none() && (of.breaks.contains(&wanted) || of.file == wanted);
    let mut missed = Vec::new();
    for mutation in mutations().filter(is_wanted) {
        source.restore();
        source.replace(mutation.file, mutation.from, mutation.to);
        let objects = source.compile(mutation.file, mutation.breaks);
        match noticed_by(&objects, mutation) {
            Some(test) => println!("noticed {}: {test}", mutation.breaks),
            None => {
                println!("MISSED  {}", mutation.breaks);
                missed.push(mutation.breaks);
            }
        }
    }
    for mutation in mutations() {
        if let Some(reason) = mutation.equivalent {
            println!("not run {}: {reason}", mutation.breaks);
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}

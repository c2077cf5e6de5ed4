/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The outcomes that programs count for each interface, numbered as ProgramOutcome in dataplane/src/program_outcome.rs. */
#pragma once

enum outcome {
	REDIRECTED,
	NO_SOCKET,
	ARP,
	NEIGHBOUR_DISCOVERY,
	NOT_IP,
	NOT_LOCAL,
	VLAN_TAG,
	FORGED_NEIGHBOUR,
	SPOOFED_SOURCE,
	NOT_READY,
	FROM_STACK,
	SHARE_USED,
	NO_MEMORY,
	OUTCOMES
};

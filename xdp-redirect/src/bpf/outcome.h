/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a program did with a packet, and why. */

enum outcome { REDIRECTED, NO_SOCKET, ARP, NEIGHBOUR_DISCOVERY, NOT_IP, NOT_LOCAL, VLAN_TAG, FORGED_NEIGHBOUR, TOO_LONG,
	       SPOOFED_SOURCE, TRANSLATED, UNDECIDED, NOT_READY, OUTCOMES };

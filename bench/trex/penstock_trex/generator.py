"""What TRex says of itself: how long it may take, what it lost, how busy it was."""

# A trial may take this many times its length, and this many seconds more, before it is stopped.
PATIENCE, PATIENCE_S = 10, 60


def patience(seconds):
    """The time-out of a trial of this length: a generator that is too slow sends all of it, only later."""
    return PATIENCE * seconds + PATIENCE_S


def lost(stats, senders, receivers):
    """Packets that TRex itself lost: those it counted as sent and could not send, and those its receive rings had no room for."""
    return sum(stats[port]['oerrors'] for port in senders) + sum(stats[port]['ierrors'] for port in receivers)


def cpu_percent(client, elapsed):
    """The busiest core's busiest second of those in the last `elapsed` ones.

    Of the seconds that TRex keeps for each core, the newest first: `cpu_util` of its statistics is smoothed over many seconds,
    and falls as soon as the traffic ends.
    """
    newest = max(int(elapsed), 1)
    return max((max(core['history'][:newest], default=0) for core in client.get_util_stats()['cpu']), default=0)

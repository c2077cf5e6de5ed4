"""TRex's histogram of latencies: a range's lower end in µs, and how many packets took that long.

The ranges are 0 to 10, then nine for each power of ten: 10 to 20, 90 to 100, 100 to 200. A second or more is in none.
TRex's other figures do not say what a trial had: its maximum leaves out the first packets and, after `clear_stats`, all but the
last half second; its average is smoothed; its minimum is of all trials since the stream is there.
"""


def of_trial(histogram, received):
    """The histogram of a trial that received this many packets."""
    ranges = {start: count for start, count in sorted(histogram.items()) if count > 0}
    if 0 in ranges:
        # TRex does not set this one back for a new stream.
        ranges[0] = min(ranges[0], max(received - sum(count for start, count in ranges.items() if start), 0))
    return {start: count for start, count in ranges.items() if count}


def end(start):
    """Where the range ends."""
    return start + (10 ** (len(str(start)) - 1) if start else 10)


def figures(ranges):
    """Least, average, median, 99th percentile and most, as near as the ranges tell: nothing was below the least, or above the
    others. The average takes each packet for the middle of its range."""
    total = sum(ranges.values())
    if not total:
        return dict.fromkeys(('least_us', 'average_us', 'median_us', 'p99_us', 'most_us'))
    middles = sum((start + end(start)) / 2 * count for start, count in ranges.items())
    return {'least_us': min(ranges), 'average_us': round(middles / total, 1), 'median_us': quantile(ranges, 0.5),
            'p99_us': quantile(ranges, 0.99), 'most_us': end(max(ranges))}


def quantile(ranges, share):
    """The end of the range in which this share of the packets is reached."""
    wanted, seen = share * sum(ranges.values()), 0
    for start, count in ranges.items():
        seen += count
        if seen >= wanted:
            return end(start)
    raise ValueError('no packets, no quantile')

"""Search for the highest rate with at most a given share lost: short trials find it, long ones confirm it.

A trial whose result is the generator's own says nothing about what is measured: one that it could not send as fast as it was
asked to, or whose packets it lost itself. Such a trial bounds the search like a loss, and the result says that the generator was
its limit.
"""

import statistics
from dataclasses import dataclass, field

# If a trial sent less than this share of the requested rate, the generator is the limit.
SHORT_OF = 0.98
# Start and end of a trial take up to this many seconds more than its traffic.
OVERHEAD = 0.05


@dataclass
class Trial:
    """The counts of a trial at one rate. `sent` and `received` count only packets that policy allows."""

    offered: float
    # Its length, as asked for.
    seconds: float
    sent: int
    received: int
    denied_sent: int = 0
    denied_received: int = 0
    # From the start to the end of the traffic; as asked for, if not given.
    took: float = None
    # Packets that the generator itself lost.
    generator_lost: int = 0
    # First segments of connections that were sent again.
    again: int = 0
    details: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.took is None:
            self.took = self.seconds

    @property
    def lost(self):
        return max(self.sent - self.received, 0)

    @property
    def loss(self):
        """The share that was lost, or had to be sent again."""
        return self.share(self.lost + self.again) if self.sent else 1.0

    @property
    def loss_of_others(self):
        """The same without what the generator itself may have lost."""
        return self.share(max(self.lost + self.again - self.generator_lost, 0)) if self.sent else 0.0

    def share(self, number):
        # A first segment may be sent again several times.
        return min(number / self.sent, 1.0)

    @property
    def rate(self):
        """Packets or connections sent per second, denied ones included."""
        return (self.sent + self.denied_sent) / self.took

    @property
    def late(self):
        return self.took > self.seconds / SHORT_OF + OVERHEAD

    @property
    def short(self):
        return self.late or self.sent + self.denied_sent < SHORT_OF * self.offered * self.seconds

    def limit(self, allowed):
        """What kept this trial from passing with this share lost: loss, generator, or nothing."""
        if self.loss_of_others > allowed:
            return 'loss'
        return 'generator' if self.short or self.loss > allowed else None

    def as_json(self):
        return {'offered': self.offered, 'seconds': self.seconds, 'took_seconds': round(self.took, 3), 'sent': self.sent,
                'received': self.received, 'lost': self.lost, 'sent_again': self.again, 'loss': self.loss,
                'denied_sent': self.denied_sent, 'denied_received': self.denied_received, 'generator_short': self.short,
                'generator_lost': self.generator_lost, **self.details}


@dataclass
class Found:
    """The result of a search. `limited_by` is loss, generator or range (the highest rate of the range passed)."""

    rate: float
    limited_by: str
    trials: list


class Search:
    """Searches between two rates. `measure(rate, seconds)` runs a trial."""

    def __init__(self, measure, lowest, highest, precision=0.01, short=1.0, long=10.0):
        if not 0 < lowest < highest:
            raise ValueError(f'a search from {lowest} to {highest}: the first must be above 0 and below the second')
        self.measure, self.lowest, self.highest = measure, lowest, highest
        self.precision, self.short, self.long = precision, short, long

    def highest_with(self, allowed):
        """The highest confirmed rate with at most this share lost."""
        self.allowed, self.trials, self.limited_by = allowed, [], 'range'
        if self.passes(self.highest, self.short) and self.passes(self.highest, self.long):
            return Found(self.trials[-1].rate, 'range', self.trials)
        low, high = self.narrow(self.lowest, self.highest, self.short)
        low, high = self.confirm(low, high)
        if low is None:
            return Found(0.0, self.limited_by, self.trials)
        low, _ = self.narrow(low, high, self.long)
        # The rate that was sent, not the requested one.
        confirmed = [trial for trial in self.trials if trial.offered == low and trial.seconds >= self.long * 0.9]
        return Found(confirmed[-1].rate, self.limited_by, self.trials)

    def passes(self, rate, seconds):
        trial = self.measure(rate, seconds)
        # The key is the requested rate: the search compares its bounds.
        trial.offered = rate
        self.trials.append(trial)
        limit = trial.limit(self.allowed)
        self.limited_by = limit or self.limited_by
        return limit is None

    def narrow(self, low, high, seconds):
        """Bisects between a rate that passes and one that does not."""
        while high / low > 1 + self.precision:
            middle = (low * high) ** 0.5
            if self.passes(middle, seconds):
                low = middle
            else:
                high = middle
        return low, high

    def confirm(self, low, high):
        """Lowers the rate in growing steps until a long trial passes; `None` if even the lowest rate fails."""
        step = self.precision
        while True:
            if self.passes(low, self.long):
                return low, high
            if low <= self.lowest:
                return None, low
            high, low = low, max(low * (1 - step), self.lowest)
            step = min(step * 2, 0.5)


def summary(founds):
    """Median and spread of several searches."""
    rates = [found.rate for found in founds]
    limits = sorted({found.limited_by for found in founds})
    return {'median': statistics.median(rates), 'lowest': min(rates), 'highest': max(rates), 'repetitions': rates,
            'limited_by': limits,
            'trials': [[trial.as_json() for trial in found.trials] for found in founds]}

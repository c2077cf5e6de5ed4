"""The search finds the rate at which a device begins to lose."""

import random
import unittest

from penstock_trex.search import Search, Trial, summary


def device(capacity, generator=1e9, flaw=0.0, short_luck=None):
    """Loses what exceeds its capacity, and a share `flaw` at any rate; short trials may pass at a factor more."""
    def measure(rate, seconds):
        sent_rate = min(rate, generator)
        limit = capacity * (short_luck if short_luck and seconds < 5 else 1)
        sent = int(sent_rate * seconds)
        return Trial(rate, seconds, sent, int(min(sent, limit * seconds) * (1 - flaw)))
    return measure


def found(measure, allowed=0.0, lowest=1_000, highest=1_000_000, precision=0.01):
    return Search(measure, lowest, highest, precision, short=1, long=10).highest_with(allowed)


class SearchTest(unittest.TestCase):
    def test_the_no_drop_rate_is_found_within_the_precision(self):
        for capacity in (1_500, 33_333, 560_000, 985_000):
            with self.subTest(capacity=capacity):
                result = found(device(capacity))
                self.assertLessEqual(result.rate, capacity + 1)
                self.assertGreater(result.rate, capacity * 0.985)
                self.assertEqual(result.limited_by, 'loss')

    def test_an_allowed_share_of_loss_gives_a_higher_rate(self):
        result = found(device(100_000), allowed=0.05)
        self.assertGreater(result.rate, 100_000 * 1.03)
        self.assertLess(result.rate, 100_000 / 0.949)

    def test_a_rate_that_only_short_trials_pass_is_not_believed(self):
        result = found(device(200_000, short_luck=1.4))
        self.assertLessEqual(result.rate, 200_001)
        self.assertGreater(result.rate, 200_000 * 0.97)
        self.assertTrue(any(trial.seconds == 10 and trial.loss > 0 for trial in result.trials))

    def test_a_generator_that_is_slower_is_named_as_the_limit(self):
        result = found(device(500_000, generator=120_000))
        self.assertEqual(result.limited_by, 'generator')
        self.assertAlmostEqual(result.rate, 120_000, delta=120_000 * 0.03)

    def test_the_highest_rate_of_the_range_is_named_as_the_limit(self):
        result = found(device(5_000_000))
        self.assertEqual((result.limited_by, result.rate), ('range', 1_000_000))
        self.assertEqual(len(result.trials), 2)

    def test_a_device_that_always_loses_has_no_rate(self):
        result = found(device(1e9, flaw=0.01))
        self.assertEqual((result.rate, result.limited_by), (0.0, 'loss'))

    def test_it_ends_whatever_the_device_does(self):
        for seed in range(50):
            chance = random.Random(seed)
            result = found(lambda rate, seconds: Trial(rate, seconds, 1_000, chance.choice([1_000, 999])), precision=0.02)
            self.assertLess(len(result.trials), 200)

    def test_a_range_that_is_none_is_refused(self):
        for lowest, highest in ((0, 10), (10, 10), (20, 10)):
            with self.assertRaises(ValueError):
                Search(device(5), lowest, highest)

    def test_several_searches_are_summed_up_by_median_and_spread(self):
        result = summary([found(device(capacity)) for capacity in (90_000, 100_000, 110_000)])
        self.assertLess(result['lowest'], result['median'])
        self.assertLess(result['median'], result['highest'])
        self.assertEqual(len(result['trials']), 3)
        self.assertEqual(result['limited_by'], ['loss'])


if __name__ == '__main__':
    unittest.main()

"""Figures of TRex's latency histogram."""

import unittest

from penstock_trex import histogram


class HistogramTest(unittest.TestCase):
    def test_ranges_end_where_the_next_begins(self):
        starts = [0, *(digit * 10 ** power for power in range(1, 6) for digit in range(1, 10))]
        self.assertEqual([histogram.end(start) for start in starts[:-1]], starts[1:])
        self.assertEqual(histogram.end(starts[-1]), 1_000_000)

    def test_figures_are_within_the_ranges_of_the_packets(self):
        ranges = histogram.of_trial({700: 2, 10: 90, 0: 8}, 100)
        self.assertEqual(list(ranges), [0, 10, 700])
        self.assertEqual(histogram.figures(ranges), {
            'least_us': 0, 'average_us': 28.9, 'median_us': 20, 'p99_us': 800, 'most_us': 800})

    def test_the_most_is_never_below_the_average(self):
        for ranges in ({10: 1}, {0: 5}, {100: 3, 900_000: 1}):
            found = histogram.figures(ranges)
            self.assertLessEqual(found['least_us'], found['average_us'])
            self.assertLessEqual(found['average_us'], found['most_us'])
            self.assertLessEqual(found['median_us'], found['p99_us'])

    def test_packets_below_ten_microseconds_of_an_earlier_stream_are_left_out(self):
        self.assertEqual(histogram.of_trial({0: 5_000, 20: 40}, 100), {0: 60, 20: 40})
        self.assertEqual(histogram.of_trial({0: 5_000, 20: 100}, 100), {20: 100})

    def test_without_packets_there_are_no_figures(self):
        self.assertEqual(histogram.of_trial({}, 0), {})
        self.assertEqual(set(histogram.figures({}).values()), {None})


if __name__ == '__main__':
    unittest.main()

"""docs/trex.md: its commands are ones that the runner takes, with profiles that there are."""

import re
import shlex
import unittest

from penstock_trex import arguments, measure

from . import FOLDER

PAGE = FOLDER.parents[2] / 'docs' / 'trex.md'


def commands():
    """What follows run.py in each command of the page's shell blocks, as words."""
    for block in re.findall(r'^```sh\n(.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace('\\\n', ' ').splitlines():
            words = shlex.split(line, comments=True)
            for index, word in enumerate(words):
                if word.endswith('bench/trex/run.py'):
                    yield words[index + 1:]


class DocsTest(unittest.TestCase):
    def test_each_command_of_the_page_is_one_that_the_runner_takes(self):
        found = []
        for words in commands():
            with self.subTest(words=words):
                args = arguments.parser().parse_args(words)
                found.append(args.command)
                for text in getattr(args, 'profile', None) or []:
                    measure.named(args.command, text, {})
        self.assertEqual(sorted(found), ['astf', 'astf', 'check', 'stl', 'stl'])

    def test_the_server_is_started_without_the_helper_of_its_graphical_interface(self):
        started = [line for line in PAGE.read_text().splitlines() if './t-rex-64 ' in line]
        self.assertEqual(len(started), 3)
        for line in started:
            self.assertIn('--no-scapy-server', line)


if __name__ == '__main__':
    unittest.main()

"""scripts/soak.py in seconds: it finds nothing where nothing is, and finds a server that remembers too much, leaks
files or grows. Each run is a process of its own, since it forks."""

import json
import random
import subprocess
import sys

import pytest
from conftest import ROOT

from scripts import soak
from scripts.soak import Answer, difference, until, verdict

# After the fork, in the server alone: its caches hold whatever it is asked about, and every answer leaves a file open.
SABOTAGE = """
    generate.common_prefix = lambda a, b: len(a) if b else 0
    serve = soak.serve
    soak.serve = lambda *a: (kept.append(open("/dev/null")), serve(*a))[1]
"""
CODE = """
import sys, generate
from scripts import soak
honest, kept = soak.work, []
def work(*arguments):
    SABOTAGE
    honest(*arguments)
soak.work = work
sys.argv = ["soak", "--requests", "4", "--engines", "eager", "--seed", "969"]
soak.main()
"""


@pytest.mark.parametrize("sabotage", ["pass", SABOTAGE.strip()], ids=["as it is", "sabotaged"])
def test_a_soak_of_seconds(sabotage):
    code = CODE.replace("SABOTAGE", sabotage)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["requests"] == 4 and found["turns of chats"] > 5 and found["tokens"] > 30, found
    if sabotage == "pass":
        assert done.returncode == 0 and not found["wrong"] and not found["grown"], found
    else:
        assert done.returncode == 1 and "a fresh process's" in found["wrong"][0]["fresh"], found
        assert found["grown"] == ["files"]


def test_what_differs_is_said():
    got = [Answer([[1, 2], [3]], ["ab", "c"]), Answer([[4]], ["d"], interrupted=True)]
    assert difference(got, [Answer([[1, 2], [3]], ["ab", "c"]), Answer([[4]], ["", "e"], interrupted=True)]) is None
    others = [
        Answer([[1, 2], [5]], ["ab", "c"]), Answer([[1, 2], [3]], ["ab", "x"]),
        Answer([[1, 2], [3]], ["ab", "c"], interrupted=True), Answer([[1, 2], [3]], ["ab", "c"], error="no"),
    ]  # fmt: skip
    assert all(difference(got, [other, got[1]]) for other in others)
    assert difference(got, got[:1]) and difference(got, [got[0], Answer([[4, 5]], ["d"], interrupted=True)])
    fed = []
    feed = until(2, lambda *arguments: fed.append(arguments))
    feed(0, 7), feed(1, 8)
    with pytest.raises(KeyboardInterrupt):
        feed(0, 9)
    assert fed == [(0, 7), (1, 8)]


@pytest.mark.parametrize("leak, grown", [(0, []), (0.005, []), (0.1, ["memory"])])
def test_growth_of_memory(leak, grown):
    """1,000 requests and a leak of so many megabytes at each, under noise, after a first tenth that may grow."""
    held = [
        {"minute": n / 10, "mb": 800 + min(n, 100) + leak * n + n * 7919 % 5, "files": 9, "threads": 2}
        for n in range(1000)
    ]
    assert verdict(held)["grown"] == grown
    held[-1]["threads"] += 1
    assert verdict(held)["grown"] == [*grown, "threads"]


def test_requests_are_drawn_alike_and_of_every_kind():
    words = (soak.DEMO / "stories.txt").read_text().split()
    draws = [[soak.random_request(random.Random(seed), "x", rows, words) for seed in range(300)] for rows in (1, 3)]
    again = [[soak.random_request(random.Random(seed), "x", rows, words) for seed in range(300)] for rows in (1, 3)]
    assert draws == again
    singles, batches = draws
    assert {len(asked.texts) for asked in batches} == {1, 2, 3} and not any(asked.chat for asked in batches)
    assert 60 < sum(asked.chat for asked in singles) < 180 and any("/reset" in asked.texts for asked in singles)
    for asked in singles + batches:
        assert len(asked.new) == len(asked.texts) and len(asked.interrupts) == (len(asked.texts) if asked.chat else 1)
    assert any(any(asked.interrupts) for asked in batches) and any(asked.stop for asked in singles)

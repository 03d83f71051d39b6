"""Each attack of tests/attacks passes what is right in a short run, and still catches one sabotage.

A control that passes shows an attack that no longer bites. What must hold of the law does so with p
> 1e-6, what must fail fails with p < 1e-12; seeds are fixed.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT

import decoding.engine as engine_room
import speculative
from benchmarks import levels
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from decoding.scheduler import MIN_REUSED
from loading.checkpoint import load_model
from speculative import accept
from tests.attacks import drift, faults, fuzz, law, mutate, openai_suites, processors, serve_load

pytestmark = pytest.mark.attack
# -------------------------------------------------------------------------------------------- fuzz


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    (root := tmp_path_factory.mktemp("fuzz") / "good").mkdir()
    return fuzz.build(root)


def test_a_hundred_and_fifty_broken_folders(good):
    """In this process: no limit of memory, no watch over what is opened."""
    results = [fuzz.one_case(99, number, None, good) for number in range(150)]
    assert [found for found in results if found["failure"]] == []
    loaded = sum(not found["refused"] for found in results)
    assert 5 < loaded < 75 and {found["kind"] for found in results} == fuzz.ATTACKS.keys()


def test_workers_outlive_a_case_that_ends_them():
    """A folder that kills whoever loads it: the case is a failure, the others are not."""
    killed = fuzz.Worker(range(3), lambda number: os._exit(7) if number == 1 else {"failure": None})
    assert [killed.result()["failure"] for _ in range(3)] == [
        None,
        "the process ended with 7",
        None,
    ]


def other_weights(folder, **options):
    model = load_model(folder, **options)
    model.layers[1].ffn.down.weight[3, 3] += 1
    return model


def unnamed(folder):
    raise UserError("one key is wrong")


CARELESS = {  # what is replaced, by what, and what is to be said of it
    "another exception": ("load_config", lambda folder: {}["x"], "KeyError"),
    "a message without the folder": ("load_config", unnamed, "not one line"),
    "a bug": ("load_config", lambda folder: int("x"), "ValueError"),
    "a file outside": (
        "load_config",
        lambda folder: (folder.parent / "x").write_text("x"),
        "files changed",
    ),
    "other weights": ("load_model", other_weights, "down_proj.weight is not what the file holds"),
}


@pytest.mark.parametrize("case", CARELESS)
def test_a_careless_loader_is_caught(case, good, monkeypatch):
    name, loader, said = CARELESS[case]
    monkeypatch.setattr(fuzz, name, loader)
    monkeypatch.setitem(fuzz.ATTACKS, "config", (lambda rng, folder: "nothing", ("sentencepiece",)))
    assert said in fuzz.one_case(0, 0, "config", good)["failure"]


# ----------------------------------------------------------------------------------------- faults

# The first run says so and waits, for a signal, where it says `half`; the next one does not wait.
WRITER = """
import os, signal, subprocess, sys, time
file, first = sys.argv[1], not os.path.exists(sys.argv[1] + ".struck")
signal.signal(signal.SIGINT, signal.SIG_DFL)
def half():
    open(file + ".struck", "w").close()
    time.sleep(20 * first)
def write(name):
    with open(name, "w") as stream:
        stream.write("[1, "); stream.flush(); half(); stream.write("2]")
def whole():
    write(file + ".partial")
    os.replace(file + ".partial", file)
"""
KINDS = {  # what a writer does, and what is to be said of it
    "right": ("whole()", None),
    "in place": ("write(file)", "NEITHER OLD NOR WHOLE"),
    "all is well": (
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); whole()",
        "status 0, output: as before",
    ),
    "leaves a child": (
        "subprocess.Popen(['sleep', '9'], start_new_session=True); whole()",
        "left behind",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_writer_is_caught(kind, tmp_path, monkeypatch):
    code, said = KINDS[kind]
    (tmp_path / "writer.py").write_text(WRITER + code)
    (tmp_path / "right.json").write_text("[1, 2]")
    command = (str(tmp_path / "writer.py"), "OUT/made.json")
    program = faults.Program(kind, command, "made.json", before={"made.json": "{}"})
    whole = faults.Whole(0.1, "", faults.contents(tmp_path / "right.json"))

    def strike(case):
        while not (case.out / "made.json.struck").exists():
            time.sleep(0.005)
        faults.FAULTS["SIGINT"].strike(case)

    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    fault = faults.FAULTS["SIGINT"]._replace(strike=strike)
    found = faults.attempt(program, fault, 0, whole, tmp_path, tmp_path / "case")["problems"]
    assert found == [] if said is None else any(said in problem for problem in found), found


# -------------------------------------------------------------------------------------------- law


@pytest.fixture
def small(monkeypatch):
    """Rows of 160 positions instead of 1,600, and the roundings of such."""
    monkeypatch.setattr(law, "LONGEST", 160)
    monkeypatch.setattr(law, "BATCH", 64)
    law.rounding.cache_clear()


CASES = [
    law.Case("K 3", "model", 3, Sampling(1)),
    law.Case("blocks", "model", 3, Sampling(1), verification="block"),
    law.Case("auto", "layers:0,1", "auto", law.FILTERS),
    law.Case("come and go", "model", 3, law.MIXED, slots=4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_program_keeps_the_law(small, case):
    said, _ = law.examine(case, 1500, 5)
    assert said["tokens"] >= 1500 and min(p for _, p in said["tests"].values()) > 1e-6
    assert said["tokens_per_round"] > 1.1, "nothing was accepted: nothing is shown"


# One of each kind: the attack itself runs them all.
CONTROLS = {law.BROKEN[0], law.BROKEN[-1], "a slot keeps its first seed", law.KEEPS_THE_LAW}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in CONTROLS else pytest.mark.long)
        for name in (*law.BROKEN, law.KEEPS_THE_LAW)
    ],
)
def test_a_broken_program_breaks_the_law(small, name):
    n_tokens = 4000 if name not in law.IN_SLOTS else 9000 if "seed" in name else 1500
    assert law.control(name, n_tokens)["as_it_should_be"]


SHORT = [("suffix", 3), ("hybrid", "auto"), ("layers:0", "auto"), ("dspark", "auto"), ("pard", 3)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case[1:3] in SHORT else pytest.mark.long)
        for case in law.REPEATED
    ],
)
def test_a_seed_that_repeats_learns_nothing(case):
    """Its rounds are those of a new engine; where drafting learns, the rule before has others."""
    differing = [
        repeated["tests"]["as in a new engine"][0] > 0
        for repeated in (law.repeat(case, 8, 5), law.repeat(case, 8, 5, law.SharedByAll))
    ]
    assert differing == [False, law.learns(case)]


@pytest.mark.long
@pytest.mark.parametrize("rule", [law.Memories, law.SharedByAll])
@pytest.mark.parametrize("k", [3, "auto"])
def test_a_seed_that_repeats_keeps_the_law(k, rule):
    case = next(case for case in law.REPEATED if case[1:3] == ("suffix", k))
    _, p = law.repeat(case, law.SEEDS, 5, rule)["tests"]["joint law"]
    assert p > 1e-6 if rule is law.Memories else p < law.CAUGHT


def test_requests_come_and_go(small):
    model = law.target_of("tiny")
    engine = Engine(model, 4, 160, drafter=law.drafter_of("suffix", model), speculate_k=3)
    requests = law.come_and_go(engine, law.COOL, 1500, 5)
    assert {request.finish_reason for request in requests} == {"length", "abort"}
    assert {request.may_draft for request in requests} == {True, False}
    assert (
        len({request.sampling for request in requests}) == 2
        and len({request.seed for request in requests}) > 40
    )
    assert sum(request.num_reused >= MIN_REUSED for request in requests) > 10


# ------------------------------------------------------------------------------------------ drift


def keep_every_draft(*args, noise, block, **others):
    return accept(*args, noise=(noise[0] - 1, noise[1]), **others)


@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "keeps every draft"])
def test_drafting_does_not_drift(broken, monkeypatch):
    if broken:
        monkeypatch.setattr(speculative, "accept", keep_every_draft)
    args = (
        "--formats bfloat16 --kv_cache_dtype model --requests alike --drafters layers"
        " --speculate_k 3 --prompts 2"
    )
    (row,) = drift.measure(
        drift.parse_args([*args.split(), "--batch_sizes", "2", "--new_tokens", "40"])
    )
    assert row["bits"] == 0 and row["identical"]
    assert (
        row["flips"] == 2 and row["tokens"] < 80
        if broken
        else row["flips"] == 0 and row["tokens"] == 80
    )


@pytest.mark.parametrize("control", [None, "prefixes"])
def test_mixed_requests_do_not_drift(control):
    """The control is one that requests alike do not see."""
    args = (
        "--formats mxfp4 --kv_cache_dtype int8 --drafters suffix dflash --speculate_k 3"
        " --prompts 6 --new_tokens 16"
    )
    args = drift.parse_args(
        [*args.split(), "--slots", "2", *(["--control", control] if control else [])]
    )
    rows = drift.measure(args)
    assert [row["requests"] for row in rows] == ["alike"] * 2 + ["mixed"] * 3 and all(
        row["identical"] for row in rows
    )
    assert {row["requests"] for row in rows if drift.differs(row)} == (
        {"mixed"} if control else set()
    )
    assert all(
        row["tokens"] > 40 and row["accepted"] > 0 for row in rows if row["drafter"] != "none"
    )


def test_drift_without_a_promise_neither_passes_nor_fails(monkeypatch):
    monkeypatch.setattr(speculative, "accept", keep_every_draft)
    monkeypatch.setattr(engine_room, "batch_invariant_rows", lambda model: 0)
    args = (
        "--formats int8 --kv_cache_dtype fp8 --requests alike --drafters layers --speculate_k 3"
        " --prompts 2"
    )
    (row,) = drift.measure(drift.parse_args(args.split()))
    assert row["flips"] and not row["identical"] and not drift.differs(row)
    assert (
        drift.total([row])
        == "0 flips in 0 tokens, 0 settings (1 more are not promised); bits differ in 0"
    )


# ------------------------------------------------------------------------------------------- soak

# After the fork, in the server alone: its caches hold whatever it is asked about, and every answer
# leaves a file open.
SOAK = """
import sys
import decoding.scheduler as scheduler
from tests.attacks import soak
honest, serve, kept = soak.work, soak.serve, []
def work(*arguments):
    scheduler.common_prefix = lambda a, *b: len(a) if all(b) else 0
    soak.serve = lambda *given: (kept.append(open("/dev/null")), serve(*given))[1]
    honest(*arguments)
if SABOTAGED:
    soak.work = work
sys.argv = ["soak", "--requests", "4", "--engines", "eager", "--seed", "969"]
soak.main()
"""


@pytest.mark.parametrize("sabotaged", [False, True], ids=["as it is", "sabotaged"])
def test_a_server_of_seconds(sabotaged):
    code = SOAK.replace("SABOTAGED", str(sabotaged))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    found = json.loads(done.stdout)
    assert found["requests"] == 4 and found["turns of chats"] > 5 and found["tokens"] > 30, found
    if sabotaged:
        assert done.returncode == 1 and "a fresh process's" in found["wrong"][0]["fresh"], found
        assert found["grown"] == ["files"]
    else:
        assert done.returncode == 0 and not found["wrong"] and not found["grown"], found


SERVER = """
import decoding.scheduler as scheduler
from decoding.engine import Engine
from scripts.serve.serve import main
SABOTAGE
main()
"""
SABOTAGES = {  # what is done to a server, and what its clients see
    "as it is": ("", None),
    "lends what is not shared": (
        "scheduler.common_prefix = lambda a, *b: len(a) if all(b) else 0",
        "wrong",
    ),
    "keeps memory": (
        "add, kept = Engine.add_request, []\n"
        "Engine.add_request = lambda *a, **b: kept.append(b'x' * 2**24) or add(*a, **b)",
        "resident_mb",
    ),
}


@pytest.mark.one_in(2, len(SABOTAGES))
@pytest.mark.parametrize("name", SABOTAGES)
def test_clients_of_seconds(name, monkeypatch):
    sabotage, sign = SABOTAGES[name]
    monkeypatch.setattr(serve_load, "SERVER", ("-c", SERVER.replace("SABOTAGE", sabotage)))
    results = serve_load.load(argparse.Namespace(minutes=0.1, clients=6, batch_size=3))
    before, after = results["resident_mb"]
    signs = {"wrong": bool(results["wrong"]), "resident_mb": after > serve_load.GROWTH * before}
    assert results["counts"]["answered"] > 10 and {key for key in signs if signs[key]} == (
        {sign} - {None}
    ), results
    assert results["failed"] == (sign is not None), results


REQUEST = 'INFO:     127.0.0.1:40000 - "POST /v1/completions HTTP/1.1" '


@pytest.mark.parametrize(
    "line, is_expected",
    [
        ("INFO:     Started server process [7]", True),
        (REQUEST + "200 OK", True),
        (REQUEST + "400 Bad Request", True),
        (REQUEST + "500 Internal Server Error", False),
        (REQUEST + "503 Service Unavailable", False),
        ("WARNING:  POST /v1/completions: 400, max_tokens = -1", True),
        ("WARNING:  POST /v1/completions: 503, too many requests", False),
        ("ERROR:    POST /v1/completions: 500, the answer failed", False),
        ("ERROR:    Exception in ASGI application", False),
        ("Traceback (most recent call last):", False),
    ],
)
def test_a_line_of_a_servers_log_is_a_fault(line, is_expected):
    assert bool(re.match(serve_load.EXPECTED_LINE, line)) == is_expected


# ------------------------------------------------------------------------------------- processors

LEVEL_TESTS = """
import os
import torch

def test_the_level_has_arrived():
    found = {{name: os.environ[name] for name in {variables!r} if name in os.environ}}
    assert found == {settings!r}

def test_a_sum_on_one_processor():
    assert os.environ.get("ATEN_CPU_CAPABILITY") != "avx2"

def test_a_crash():
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE":
        os.abort()
"""
LEVEL_RESULTS = {
    "DEFAULT/default": ("passed", 3, []),
    "AVX2/avx2": ("failed", 2, ["test_a_sum_on_one_processor"]),
    "AVX512_CORE/default": ("crashed", 0, []),
}


@pytest.mark.parametrize("level", LEVEL_RESULTS)
def test_a_level_reports_what_fails_and_crashes(level, tmp_path, monkeypatch):
    """Under its own environment alone, whatever this process was held to."""
    monkeypatch.setenv("FBGEMM_ENABLE_INSTRUCTIONS", "AVX512_E1")
    settings = levels.LEVELS[level].environment
    test = LEVEL_TESTS.format(variables=sorted(levels.VARIABLES), settings=settings)
    (tmp_path / "test_level.py").write_text(test)
    result = processors.run_level(level, ["-p", "no:cacheprovider", str(tmp_path)])
    failed = [name.partition("::")[2] for name in result["failed"]]
    assert (result["status"], result["passed"], failed) == LEVEL_RESULTS[level]


# --------------------------------------------------------------------------- other people's tests

SUITE_FILE = """
import os
import urllib.request

import pytest

URL = os.environ["TEST_API_BASE_URL"]


def test_list():
    assert b"gpt-5.4" in urllib.request.urlopen(f"{URL}/models").read()


def test_fails():
    assert "data" in URL


def test_delete():
    raise AssertionError


def test_elsewhere():
    with pytest.raises(OSError, match="127.0.0.1 alone"):
        urllib.request.urlopen("http://192.0.2.1/")
"""


def test_a_suite_s_tests_are_sorted(tmp_path):
    """One that does not apply is not run, and none reaches another machine."""
    folder = tmp_path / "tests" / "api_resources"
    folder.mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (folder / "test_models.py").write_text(SUITE_FILE)
    (folder / "test_images.py").write_text("def test_edit():\n    pass\n")
    args = openai_suites.parse_args(["--checkpoint", "checkpoints/demo"])
    row = openai_suites.run_suite("openai-python", tmp_path, args)
    assert (row["apply"], row["passed"], row["ended"]) == (3, 2, "completed")
    assert [name.split("::")[1] for name in row["failed"]] == ["test_fails"]
    assert row["other"] == {"audio, images and video": 1, "deleting a model": 1}


# ----------------------------------------------------------------------------- mutants, emulation


def test_mutants_that_a_test_sees_are_killed(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "bounds.py").write_text(
        "def clamp(x, low, high):\n    return low if x < low else min(x, high)\n"
    )
    test = (
        "from bounds import clamp\n\n\ndef test():\n    assert (clamp(0, 1, 3), clamp(2, 1, 3))"
        " == (1, 2)\n"
    )
    (tmp_path / "tests" / "test_bounds.py").write_text(test)
    every = mutate.mutants(tmp_path, "bounds.py")
    assert {mutant.kind for mutant in every} == {
        "comparison",
        "exchanged branches",
        "swapped arguments",
    }
    (tmp_path / "broken.py").write_text("def f(x):\n    return x < 1\n")
    (tmp_path / "tests" / "test_broken.py").write_text("def test():\n    raise AssertionError\n")
    reports = []
    tests = {"broken.py": "broken -k test", "bounds.py": "bounds -k test"}
    results = mutate.measure(
        tmp_path, tests, workers=2, report=lambda results: reports.append(results["tried"])
    )
    assert results["untestable"] == ["broken.py"] and results["files"]["broken.py"]["tried"] == 0
    # At x = low both branches give the same: the one mutant that is the same program.
    counts = results["files"]["bounds.py"]
    kinds = sorted(survivor.split(": ")[1] for survivor in counts.pop("survivors"))
    assert kinds == ["comparison", "swapped arguments"] and reports == list(
        range(1, len(every) + 1)
    )
    assert (counts["mutants"], counts["tried"], counts["killed"]) == (
        len(every),
        len(every),
        len(every) - 2,
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_emulating_needs_a_build_for_cuda():
    command = [sys.executable, "-m", "tests.attacks.emulate", "generate.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert (
        done.stderr
        == "error: emulating a GPU needs a CUDA build of torch with its headers, and triton\n"
    )


REPLAYED = """
import sys, torch
x = torch.zeros(3, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
if sys.argv[1] == "replaced":
    x = torch.ones(3, device="cuda")
else:
    x.copy_(torch.ones(3))
graph.replay()
print(y.tolist())
"""
WAITING = REPLAYED.replace("y = x + 1", "y = x + x.sum().item()")
NOT_COMPUTED = """
import torch
print(torch.nn.LSTMCell(2, 2).cuda()(torch.ones(1, 2, device="cuda"))[0].tolist())
"""


@pytest.mark.attack
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize(
    "program, argument, output, status, message",
    [
        (REPLAYED, "copied", "[2.0, 2.0, 2.0]\n", 0, "1 CUDA graphs of 1 add.Tensor"),
        (REPLAYED, "replaced", "[1.0, 1.0, 1.0]\n", 0, "1 replay"),
        (WAITING, "copied", "", 1, "CUDA error"),
        (
            NOT_COMPUTED,
            "",
            "[[0.0, 0.0]]\n",
            1,
            "WRONG: a kernel of torch's own, called 1 times, computed nothing",
        ),
    ],
    ids=[
        "correct",
        "an input that the graph does not read",
        "a wait inside a graph",
        "a kernel without a CPU version",
    ],
)
def test_emulation_catches_mistakes_of_graphs_and_kernels(
    tmp_path, program, argument, output, status, message
):
    """A CUDA graph reads the addresses that it recorded: where an input moved, the replay gives the
    old value."""
    (tmp_path / "program.py").write_text(program)
    command = [
        sys.executable,
        "-m",
        "tests.attacks.emulate",
        str(tmp_path / "program.py"),
        argument,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (output, status) and message in done.stderr, (
        done.stderr
    )


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-compile",),
        ("--draft_checkpoint", "checkpoints/demo-draft"),
        ("--draft", "layers:0-2"),
        ("--quantize", "int8"),
        ("--quantize", "fp8"),
        ("--quantize", "mxfp6"),
        ("--prompt", "One day a small dog and a big cat ran to the park to play"),
    ],
    ids=" ".join,
)
def test_the_emulated_gpu_gives_a_cpu_s_tokens(options):
    """Wrong positions, masks, bits, static inputs or replays give others. One to three minutes
    each."""
    greedy = (
        "--temperature",
        "0",
        "--dtype",
        "float32",
        "--max_new_tokens",
        "6",
        "--max_seq_length",
        "64",
        "--json",
    )
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    emulated = ["-m", "tests.attacks.emulate", "generate.py", "--device", "cuda"]
    done = run([sys.executable, *emulated, *greedy, *options])
    assert done.returncode == 0 and "WRONG" not in done.stderr, done.stderr
    assert ("CUDA graphs of" in done.stderr) == ("--no-compile" not in options), done.stderr
    on_cpu = run(
        [sys.executable, "generate.py", "--device", "cpu", "--no-compile", *greedy, *options]
    )
    assert json.loads(done.stdout)["tokens"] == json.loads(on_cpu.stdout)["tokens"]

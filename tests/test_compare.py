"""scripts/compare.py: equal is equal, the first difference is the first one, and drift favours
nobody.

What can fail: a configuration may bleed into the other where they share weights; the position, its
tokens or the gap may belong to another place; the order of runs may hand a drift of the machine to
one side.
"""

import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, config_json
from reference import logits as reference_logits
from safetensors.torch import load_file

from cli.flags import parse_args as generate_args
from cli.main import main as run
from cli.prompts import Prompt
from loading.tokenizer import load_tokenizer
from scripts import compare as script
from scripts.compare import describe, main, parse_args, totals

DEMO, DRAFT = ROOT / "checkpoints" / "demo", ROOT / "checkpoints" / "demo-draft"
GREEDY = "--temperature 0 --dtype float32 --max_new_tokens 14 --device cpu"
SAMPLED = "--temperature 0.8 --dtype float32 --max_new_tokens 14 --device cpu"
PROMPTS = ["One day, Tom", "The big dog was sad because it"]


def run_main(monkeypatch, capsys, a: str, b: str, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["compare", "--a", a, "--b", b, *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return exit.value.code, out, err


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return str(file)


def alone(capsys, flags: str, file: str) -> list[list[int]]:
    """New ids of every prompt, from generate.py itself."""
    run(generate_args([*flags.split(), "--prompt_file", file, "--json"]))
    return [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.attack
@pytest.mark.parametrize(
    "a, b, num_pairs",
    [
        (GREEDY, f"{GREEDY} --draft ngram:2", 2),
        (
            f"{GREEDY} --draft_checkpoint {DRAFT} --speculate_k 3",
            f"{GREEDY} --draft layers:0-3,5 --batch_size 2",
            1,
        ),
        (f"{SAMPLED} --seed 5", f"{SAMPLED} --seed 5 --batch_size 3", 1),
    ],
    ids=["ngram", "two drafts", "sampled batch"],
)
def test_equal_configurations(monkeypatch, capsys, prompt_file, a, b, num_pairs):
    """Exit status 0, and each prompt equal, in as many pairs as batches need."""
    status, out, _ = run_main(monkeypatch, capsys, a, b, "--prompt_file", prompt_file, "--json")
    report = json.loads(out)
    assert status == 0 and report["equal"] == 2 and report["different"] == 0
    assert report["judged"] == a.startswith(GREEDY) and report["pairs"] == num_pairs
    assert [prompt["tokens"] for prompt in report["prompts"]] == [14, 14]
    assert 0 < report["ratio"]["min"] <= report["ratio"]["median"] <= report["ratio"]["max"]
    assert [side is not None for side in report["speculative"]] == [
        "--draft" in flags for flags in (a, b)
    ]


@pytest.mark.attack
@pytest.mark.parametrize(
    "a, b",
    [
        (GREEDY, f"{GREEDY} --quantize int4-g128"),
        (f"{SAMPLED} --seed 1", f"{SAMPLED} --seed 2"),
        (f"{SAMPLED} --max_new_tokens 60", f"{SAMPLED} --max_new_tokens 60 --kv_cache_dtype int8"),
    ],
    ids=["int4 weights", "other seeds", "int8 cache"],
)
def test_the_first_difference(monkeypatch, capsys, prompt_file, a, b):
    """Positions and tokens as counted here from generate.py's output; the gap as the naive float64
    twin has it."""
    status, out, _ = run_main(monkeypatch, capsys, a, b, "--prompt_file", prompt_file, "--json")
    report, is_greedy, tokenizer = json.loads(out), a == GREEDY, load_tokenizer(DEMO)
    assert status == int(is_greedy) and report["judged"] == is_greedy and report["different"] > 0
    rows = zip(alone(capsys, a, prompt_file), alone(capsys, b, prompt_file), strict=True)
    for number, (a_ids, b_ids) in enumerate(rows):
        pairs = enumerate(itertools.zip_longest(a_ids, b_ids))
        want = next(((position, *pair) for position, pair in pairs if pair[0] != pair[1]), None)
        difference = report["prompts"][number]["difference"]
        assert report["prompts"][number]["equal"] == (want is None) == (difference is None)
        if want is None:
            continue
        assert tuple(difference[key] for key in ("position", "a", "b", "against")) == (*want, "b")
        assert difference["a_text"] in difference["a_around"] and difference[
            "a_around"
        ] in " " + tokenizer.decode(a_ids)
        assert (difference["top_gap"] is not None) == is_greedy
        if is_greedy:
            ids = tokenizer.encode(PROMPTS[number]) + a_ids[: want[0]]
            top = reference_logits(config_json(DEMO), load_file(DEMO / "model.safetensors"), ids)[
                -1
            ].topk(2)
            # Logits agree within 1e-4 in float32 (tests/test_model.py), so a gap does within twice
            # that.
            assert difference["top_gap"] == pytest.approx(
                (top.values[0] - top.values[1]).item(), abs=2e-4
            )
            assert top.indices[0] == want[1]


@pytest.mark.slow
def test_a_prompt_has_settings_on_its_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "One day", "temperature": 0.9, "seed": 4, "max_new_tokens": 5}'
    )
    status, out, _ = run_main(
        monkeypatch, capsys, GREEDY, GREEDY, "--prompt_file", f"{tmp_path}/p.jsonl", "--json"
    )
    report = json.loads(out)
    assert status == 0 and report["judged"] is False and report["prompts"][0]["tokens"] == 5


def test_a_lines_own_setting_replaces_that_flag_of_a_side_alone(monkeypatch, capsys, tmp_path):
    """Both stay greedy, and one keeps its --prefill, unless the line has its own."""
    file, messages = tmp_path / "p.jsonl", [{"role": "user", "content": "One day"}]
    lines = [
        {"messages": messages, "max_new_tokens": 4} | settings
        for settings in ({"top_k": 2000}, {"tools": None}, {"prefill": "So"})
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    a = f"{GREEDY} --prefill Well"
    status, out, _ = run_main(monkeypatch, capsys, a, GREEDY, "--prompt_file", str(file), "--json")
    report = json.loads(out)
    assert status == 1 and report["judged"] is True
    assert [prompt["equal"] for prompt in report["prompts"]] == [False, False, True]


def test_a_side_begins_answers_of_conversations(monkeypatch, capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "One day"}], "max_new_tokens": 4}')
    status, out, _ = run_main(
        monkeypatch,
        capsys,
        f"{GREEDY} --prefill Well",
        GREEDY,
        "--prompt_file",
        str(file),
        "--json",
    )
    assert status == 1 and json.loads(out)["different"] == 1


def test_text_for_people(monkeypatch, capsys):
    common = ("--prompt", "The big dog was sad because it")
    status, out, _ = run_main(
        monkeypatch, capsys, GREEDY, f"{GREEDY} --quantize int4-g128 --draft ngram", *common
    )
    assert (
        status == 1
        and "0 of 1 equal\n" in out
        and "b/a" in out
        and "tok/s" in out
        and "not judged" not in out
    )
    assert (
        "a's two best logits lie" in out
        and "(float32)" in out
        and "b:\n  speculation, K = 5: " in out
    )
    status, out, _ = run_main(
        monkeypatch, capsys, "--max_new_tokens=1", "--max_new_tokens=3", *common
    )
    assert (
        status == 0
        and "token 1 differs: a ends, b " in out
        and "not judged" in out
        and "b/a" not in out
    )


class Drifting:
    """Two sides of a machine on which every run takes longer by `drift`; b takes half of a's
    time."""

    def __init__(self, drift: float):
        self.log, self.drift = [], drift

    def side(self, name: str, batch_size: int, num_rows: int):
        side = SimpleNamespace(batch_size=batch_size, rows=[*range(num_rows)], timings=[])

        def decode(rows: list[int]) -> list[list[int]]:
            slow = 1 + self.drift * len(self.log)
            self.log.append((name, rows[0], len(rows)))
            request = SimpleNamespace(token_steps=[*range(101)])
            decode_s = slow * (0.5 if name == "b" else 1)
            side.timings.append(SimpleNamespace(decode_s=decode_s, requests=[request] * len(rows)))
            return [[1] * 101 for _ in rows]

        side.decode = decode
        return side


def test_a_steady_drift_cancels():
    machine = Drifting(0.3)
    rates, runs = script.compare(machine.side("a", 1, 2), machine.side("b", 1, 2), rounds=2)
    assert [name for name, *_ in machine.log] == list("abba" * 4)
    assert [begin for _, begin, _ in machine.log] == [0] * 8 + [1] * 8 and len(runs[0]) == len(
        runs[1]
    ) == 8
    assert rates[0] == pytest.approx((200 / 2.9, 200 / 1.45)) and [
        b / a for a, b in rates
    ] == pytest.approx([2.0] * 4)


def test_rows_go_in_groups_that_fill_both_batches():
    machine = Drifting(0.0)
    script.compare(machine.side("a", 2, 13), machine.side("b", 3, 13), rounds=1)
    assert machine.log[::4] == [("a", 0, 6), ("a", 6, 6), ("a", 12, 1)]


def test_totals_by_hand():
    """Ratios of 2, 4 and 1; where nothing was decoded after the first token there is none."""
    assert totals([(10, 20), (4, 16), (7, 7), (0, 7)]) == {
        "pairs": 3,
        "a_tok_s": {"median": 7, "min": 4, "max": 10},
        "b_tok_s": {"median": 16, "min": 7, "max": 20},
        "ratio": {"median": 2, "min": 1, "max": 4},
    }
    assert totals([(0, 7)]) == {"pairs": 0, "a_tok_s": None, "b_tok_s": None, "ratio": None}


@pytest.mark.parametrize(
    "others, want",
    [
        ("b1,2,3 b1,2,3 a1,2,3", None),
        ("b1,2 b1,9,3 a1,2,3", ("b", 2, 3, None)),
        ("b1,2,3,4 b1,2,3 a1,2,3", ("b", 3, None, 4)),
        ("b1,2,3 b1,2,3 a1,2,4", ("a", 2, 3, 4)),
        ("a4 b1,2,3 b1,9", ("b", 1, 2, 9)),
    ],
)
def test_the_first_difference_of_any_run(others, want):
    """Also where a contradicts itself; b's differences go first."""
    side = SimpleNamespace(llm=SimpleNamespace(tokenizer=load_tokenizer(DEMO)))
    runs = [(run[0], [int(id) for id in run[1:].split(",")]) for run in f"a1,2,3 {others}".split()]
    report = describe(0, "text", runs, side, greedy=False)
    assert report["equal"] == (want is None) == (report["difference"] is None)
    if want:
        assert tuple(report["difference"][key] for key in ("against", "position", "a", "b")) == want
        assert ("a in another run" in script.outcome(report, "float32")) == (want[0] == "a")


@pytest.mark.slow
def test_equal_weights_are_loaded_once_and_defaults_are_shared(tmp_path):
    """A context of one side holds for both, where no flag says how many tokens. One draft ends
    before it."""
    short = shutil.copytree(DRAFT, tmp_path / "draft")
    (short / "config.json").write_text(
        json.dumps(config_json(DRAFT) | {"max_position_embeddings": 20})
    )
    flags = "--temperature 0 --dtype float32 --device cpu"
    drafted = f"{flags} --max_seq_length 30 --draft_checkpoint {short}"
    a, b = (script.side_options(name, text) for name, text in (("a", flags), ("b", drafted)))
    a, b = script.load_sides(a, b, [Prompt(text) for text in PROMPTS])
    assert a.llm.engine.model is b.llm.engine.model
    assert [len(row.ids) + row.max_new_tokens for row in a.rows + b.rows] == [30] * 4
    ids = a.decode(a.rows)
    # between runs, of the model that both engines decode with
    script.top_gap(a, a.rows[0].ids + ids[0][:9])
    assert b.decode(b.rows) == a.decode(a.rows) == ids


def test_both_sides_have_the_seeds_that_nobody_chose():
    a, b, chosen = (script.side_options("a", f"--seed {seed}") for seed in (-1, -1, 7))
    a, b = script.share_random_seeds(a, b)
    assert a.requests.seed == b.requests.seed >= 0
    a, chosen = script.share_random_seeds(script.side_options("a", "--seed -1"), chosen)
    assert a.requests.seed >= 0 and chosen.requests.seed == 7


def test_flags_of_one_word_reach_their_side():
    args = parse_args(["--a", "--compile", "--b", "", "--rounds", "3"])
    assert args.a == "--compile" and args.b == "" and args.rounds == 3
    assert parse_args(["--a=--x", "--b", "--a --b"]).b == "--a --b"


@pytest.mark.parametrize(
    "a, arguments, message",
    [
        ("--interactive", [], "--a: --interactive has no meaning here"),
        ("--prompt 'Once upon a time'", [], "--a: --prompt has no meaning here"),
        ("--num 2", [], "--a: --num_samples has no meaning here"),
        ("--draft ngram --show_drafts", [], "--a: --show_drafts has no meaning here"),
        ("--quantize 'int8", [], "--a --quantize 'int8: No closing quotation"),
        ("--magic", [], "unrecognized arguments: --magic"),
        ("--quantize int3", [], "quantization scheme 'int3' does not exist"),
        ("--speculate_k 3", [], "--speculate_k and --show_drafts need"),
        ("--checkpoint nowhere", [], "nowhere: no such folder"),
        ("--max_new_tokens 9999", [], "over the limit of 512 positions"),
        ("--max_seq_length 0", [], "--max_seq_length 0 must lie between 2"),
        ("", ["--prompt", ""], "--prompt is empty"),
        ("", ["--prompt_file", "nowhere.txt"], "nowhere.txt"),
        ("", ["--rounds", "0"], "--rounds: 0 must be at least 1"),
    ],
)
def test_user_errors(monkeypatch, capsys, a, arguments, message):
    status, out, err = run_main(monkeypatch, capsys, a, "--device cpu", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and out == "" and len(lines) == 1 and message in lines[0]


def test_other_tokenizers_and_broken_lines_are_refused(monkeypatch, capsys, text_folder, tmp_path):
    status, out, err = run_main(
        monkeypatch, capsys, "--device cpu", f"--device cpu --checkpoint {text_folder}"
    )
    assert status == 2 and out == "" and f"error: {text_folder}: its tokenizer differs" in err
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    status, out, err = run_main(
        monkeypatch, capsys, "", "", "--prompt_file", str(tmp_path / "broken.jsonl")
    )
    assert status == 2 and out == "" and "line 2: 'text': no such key" in err

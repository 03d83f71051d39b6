"""A fork of this project, made in a copy of it."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def copied(folder):
    """A copy of the project."""
    folder.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, folder)
    for name in (
        "decoding",
        "drafts",
        "exact",
        "loading",
        "loading/quantized",
        "weights",
        "cli",
        "scripts",
    ):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    return folder


# Locally typical sampling (arXiv:2202.00666): a function, a row of FILTERS, a row of SETTINGS and a
# field.
PENALTIES_HEADING = "# " + "-" * 86 + " penalties\n"
FILTER = (
    """def typical_filter(p, mass):
    surprise = -p.log()
    distance = (surprise - torch.special.entr(p).sum(-1, keepdim=True)).abs()
    order = distance.argsort(dim=-1)
    sorted_p = p.gather(-1, order)
    kept = sorted_p.cumsum(-1) - sorted_p < mass
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, kept)


"""
    + PENALTIES_HEADING
)
CHANGES = {  # file -> pairs of old and new text, each old one there once
    "decoding/sampling.py": [
        (
            PENALTIES_HEADING,
            FILTER,
        ),
        ('"min_p": min_p_filter}', '"min_p": min_p_filter, "typical_p": typical_filter}'),
        (
            "    logit_bias: tuple",
            '    typical_p: float | None = SETTINGS["typical_p"].default\n    logit_bias: tuple',
        ),
    ],
    "decoding/settings.py": [
        (
            '    "repetition_penalty": Setting(',
            '    "typical_p": Setting("keep typical tokens", "lie in (0, 1]", lambda x: 0 < x <='
            " 1, None, 1.0),\n"
            '    "repetition_penalty": Setting(',
        )
    ],
}
TYPICAL_CODE = """
import contextlib, io, json, sys
import pytest, torch
from cli.flags import parse_args
from cli.main import run
from decoding.sampling import Sampling, distribution
from scripts.openai_form import Refusal, read_request


def texts(*flags):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(
            parse_args(
                [
                    "--checkpoint",
                    sys.argv[1],
                    "--json",
                    "--ordered",
                    "--device",
                    "cpu",
                    "--temperature",
                    "1.2",
                    "--max_new_tokens",
                    "16",
                    *flags,
                ]
            )
        )
    return [json.loads(line)["tokens"] for line in out.getvalue().splitlines()]


(typical,), (usual,) = texts("--typical_p", "0.2"), texts()
lines = [
    {"prompt": "Once upon a time", **own}
    for own in ({"typical_p": 0.2}, {}, {"typical_p": 1}, {"top_k": 3})
]
open("lines.jsonl", "w").write("\\n".join(map(json.dumps, lines)))
rows = texts("--prompt_file", "lines.jsonl", "--batch_size", "4")
assert rows[:3] == [typical, usual, usual] and typical != usual != rows[3], rows
request = read_request({"prompt": "a", "typical_p": 0.25}, False, "m", Sampling(0.5, top_p=0.9))
assert (
    request.sampling == Sampling(0.5, top_p=0.9, typical_p=0.25)
    and request.sampling.path == "filtered"
)
with pytest.raises(Refusal, match="typical_p = 2.0 must lie in"):
    read_request({"prompt": "a", "typical_p": 2}, False, "m", Sampling())
samplings = [
    Sampling(0),
    Sampling(),
    Sampling(top_p=0.5),
    Sampling(typical_p=0.5),
    Sampling(typical_p=0.5, top_k=9),
]
logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(len(samplings), -1)
together = distribution(
    logits, "filtered", torch.stack([sampling.values for sampling in samplings])
)
for p, sampling in zip(together, samplings):
    assert torch.equal(p, sampling.probs(logits[0]))
assert len({tuple(p.tolist()) for p in together}) == len(samplings)
"""


@pytest.mark.readme
def test_a_filter_is_a_function_two_rows_and_a_field(tmp_path):
    """A fork's filter has a flag, a key of JSONL and one of requests; rows without it keep their
    bits."""
    folder = copied(tmp_path / "quickdraft")
    for file, pairs in CHANGES.items():
        text = (folder / file).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / file).write_text(text)
    command = [sys.executable, "-c", TYPICAL_CODE, str(ROOT / "checkpoints" / "demo")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

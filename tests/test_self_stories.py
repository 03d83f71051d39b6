"""A model that learns stories and writes more: its tokens are theirs, and its figures mean what
they say."""

import argparse
import json

import pytest
import torch
from conftest import ROOT

from benchmarks import self_stories
from loading.checkpoint import load_model
from loading.tokenizer import load_tokenizer

DEMO = ROOT / "checkpoints" / "demo"
END = "<|endoftext|>\n"


def test_a_restricted_vocabulary_leaves_the_other_logits():
    """Token i of the restricted model is token ids[i] of the model, on the way in and on the way
    out."""
    model, ids = load_model(DEMO, dtype=torch.float32), torch.tensor([2, 5, 40, 41, 900, 2047])
    tokens, pos = torch.tensor([[0, 4, 1, 5, 2]]), torch.arange(5)
    expected = model(ids[tokens], pos)[..., ids]  # (1, 5, 6)
    restricted = self_stories.restrict_vocabulary(model, ids)
    torch.testing.assert_close(restricted(tokens, pos), expected)
    assert restricted.config.vocab_size == 6


@pytest.mark.parametrize(
    "story, is_plain",
    [
        ("Tom had a dog. " * 13 + "The end.", True),
        ("Tom had a dog. " * 13 + "The end", False),  # it breaks off
        ("Tom had a dog. " * 3 + "The end.", False),  # too short
        ("Tom had a dog. " * 13 + "The cat.", True),  # one word of 54 is not one of the stories'
        ("Tom had a dog. " * 13 + "The cat purrs.", False),
        ("Tom had a dog. " * 13 + "“The end.", False),  # not ASCII
    ],
)
def test_plain_stories(story, is_plain):
    assert self_stories.is_plain(story, {"tom", "had", "a", "dog", "the", "end"}) == is_plain


@pytest.mark.long
def test_the_demo_learns_and_writes_stories(tmp_path, monkeypatch):
    """It loads and learns with the stories' tokens alone, and what it then writes passes as plain.
    The loss per character is that of the demo, computed by hand."""
    for name, value in {"CONTEXT": 32, "SLOTS": 8, "MAX_TOKENS": 160, "MIN_WORDS": 10}.items():
        monkeypatch.setattr(self_stories, name, value)
    text, heldout, output = (
        tmp_path / "stories.txt",
        tmp_path / "heldout.txt",
        tmp_path / "more.txt",
    )
    text.write_text((ROOT / "checkpoints" / "stories.txt").read_text())
    heldout.write_text(
        "Once upon a time, there was a little girl named Lily. She loved to play with her toys.\n"
        * 8
    )
    options = {"checkpoint": DEMO, "text": text, "heldout": heldout, "output": tmp_path / "writer"}
    options |= {"steps": 2, "layers": 1, "lr": 1e-3, "seed": 0, "tokens": 800, "compile": False}
    messages = []
    monkeypatch.setattr(self_stories, "log", messages.append)
    self_stories.learn(argparse.Namespace(**options))
    tokenizer, ids = (
        load_tokenizer(DEMO),
        json.loads((tmp_path / "writer" / self_stories.IDS).read_text()),
    )
    used = torch.cat(
        [ids for file in (text, heldout) for ids in self_stories.story_documents(file, tokenizer)]
    )
    assert ids == used.unique().tolist() and load_model(
        tmp_path / "writer"
    ).config.vocab_size == len(ids)

    model, (document,) = (
        load_model(DEMO, dtype=torch.float32),
        self_stories.story_documents(heldout, tokenizer),
    )
    rows = self_stories.Windows([document], 32, None, "by hand").consecutive()
    logits = model(rows[:, :-1], torch.arange(32))[..., ids]  # (N, 32, V of the stories)
    loss = (
        -logits.log_softmax(-1)
        .gather(2, torch.searchsorted(torch.tensor(ids), rows[:, 1:].contiguous())[..., None])
        .mean()
    )
    expected = loss.item() * len(document) / len(heldout.read_text())
    # autocast rounds to bfloat16
    assert float(messages[0].split()[3]) == pytest.approx(expected, rel=0.01)

    options |= {"checkpoint": tmp_path / "writer", "output": output}
    self_stories.write(argparse.Namespace(**options))
    stories = output.read_text().split(END)[:-1]
    words = self_stories.words_of(text)
    assert stories and all(self_stories.is_plain(story.rstrip("\n"), words) for story in stories)
    first = output.read_text()
    self_stories.write(argparse.Namespace(**options))
    assert output.read_text() == 2 * first  # the same seeds write the same stories

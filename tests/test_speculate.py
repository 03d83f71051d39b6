"""`speculate`, the drafted twin of `decode`: an engine's rounds at a fixed K give its tokens."""

import pytest
import test_drafts
import test_speculative
import torch
from test_speculative import PROMPTS, pair

from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import decode
from loading.checkpoint import load_model
from speculative import accept, speculate
from tests.conformance.drafters import OneRow
from weights.walker import pack_model

SAMPLINGS = {
    "greedy": Sampling(0),
    "plain": Sampling(1.0),
    "filtered": Sampling(1.2, top_k=20, top_p=0.9),
}
KINDS = {
    **dict.fromkeys(("model", "itself", "layers", "window", "ngram1", "suffix"), test_speculative),
    **dict.fromkeys(("eagle", "pard", "dflash", "mtp", "shared"), test_drafts),
}


def by_token(*args, block: bool, **options):
    return accept(*args, **options)


@pytest.mark.parametrize("max_new_tokens", [None, "ten", float("inf"), 0])
def test_a_number_of_tokens_that_is_none_is_refused(max_new_tokens):
    target, _ = pair()
    options = {"k": 2, "sampling": Sampling(0), "max_new_tokens": max_new_tokens}
    with pytest.raises(UserError, match="max_new_tokens"):
        next(speculate(target, None, [1, 2], **options))


@pytest.mark.parametrize("stop_ids", [2, ["</s>"], [None]])
def test_stop_ids_that_are_none_are_refused(stop_ids):
    target, _ = pair()
    options = {"sampling": Sampling(0), "max_new_tokens": 5, "stop_ids": stop_ids}
    for tokens in (decode(target, [1], **options), speculate(target, None, [1], k=2, **options)):
        with pytest.raises(UserError, match="must be token ids"):
            next(tokens)


@pytest.mark.one_in(52, 7)
@pytest.mark.parametrize("k", [4, 1])
@pytest.mark.parametrize("block", [True, False], ids=["block", "token"])
@pytest.mark.parametrize("path", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_its_tokens(kind, path, block, k, monkeypatch):
    """Up to a number of tokens, to the context's end, and to a stop id within a round."""
    target, draft = pair()
    S = target.config.max_seq_length
    if not block:
        monkeypatch.setattr("speculative.accept", by_token)

    def new_drafter():
        return KINDS[kind].any_drafter(kind, target, draft)

    def tokens_of_both(prompt: list[int], **options) -> list[int]:
        options |= {"sampling": SAMPLINGS[path], "seed": 5}
        drafter = OneRow(target, new_drafter(), prompt, k, S)
        tokens = [*speculate(target, drafter, prompt, k=k, **options)]
        verification = "block" if block else "token"
        engine = Engine(
            target, 1, S, drafter=new_drafter(), speculate_k=k, verification=verification
        )
        request = engine.requests[engine.add_request(prompt, **options)]
        while engine.has_unfinished():
            engine.step()
        assert tokens == request.tokens
        if path == "greedy":
            assert tokens == [*decode(target, prompt, **options)]
        return tokens

    tokens = tokens_of_both(PROMPTS[0], max_new_tokens=40)
    assert tokens_of_both(PROMPTS[0], max_new_tokens=40, stop_ids=tokens[7:8])[-1] == tokens[7]
    tokens_of_both(PROMPTS[3], max_new_tokens=S - len(PROMPTS[3]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["glm-4.5", "gpt-oss"])
def test_its_text_is_the_plain_loops_in_every_dtype(family, dtype, folder_of):
    """Attention over other lengths, or a prompt in another shape, parts the greedy texts of random
    models."""
    target = pack_model(load_model(folder_of(family), dtype=dtype))
    for prompt in ([5, 9, 17], [40, 3, 99, 12, 7, 61, 20]):
        drafter = OneRow(target, NgramDraft(1), prompt, 3, 60)
        options = {"sampling": Sampling(0), "max_new_tokens": 40}
        tokens = [*speculate(target, drafter, prompt, k=3, **options)]
        assert tokens == [*decode(target, prompt, **options)]

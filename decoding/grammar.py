"""Grammars of answers as bit masks, so that a request decodes JSON that obeys a schema.

    JsonGrammars    JSON schemas, and texts with JSON in them -> Grammar, for one tokenizer; the
                    library llguidance reads both
    Grammar         the state of one answer; `masks` says which tokens may follow, also behind
                    drafted ones

A drafter may propose any token: the masks change the target's logits, and verification decides by
these. The engine (add_request) takes any object with such a `masks`. This file knows the bytes of
tokens, and no model.
"""

import json
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from decoding.errors import UserError

# A space, or a new line with its indent: models repeat whitespace to the end of their context where
# they may.
OPTIONS = {"whitespace_pattern": r"\x20|\n[\x20\t]{0,16}"}


class JsonGrammars:
    """Grammars for the answers of a loading.tokenizer.Tokenizer, which one of stop_ids ends.
    UserError without llguidance or without stop_ids."""

    def __init__(self, tokenizer, stop_ids: Collection[int]):
        try:
            import llguidance
        except ImportError:
            raise UserError("JSON answers need llguidance: pip install llguidance") from None
        stop_ids = {id for id in stop_ids if id < tokenizer.vocab_size}
        if not stop_ids:
            raise UserError(
                "JSON answers need an end token: the model has none, or --ignore_eos ignores it"
            )
        self.matcher_type = llguidance.LLMatcher
        self.stop_ids = sorted(stop_ids)
        self.runtime = tokenizer.runtime
        # Attributes that TokenizerWrapper reads.
        self.tokens = tokenizer.pieces()
        self.special_token_ids = sorted(tokenizer.specials.values())
        self.bos_token_id = None
        self.eos_token_id = self.stop_ids[0]
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(wrapper, eos_token=self.stop_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of text inside an answer. The control character keeps sentencepiece from putting a
        space in front."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        num_control_ids = len(self.runtime.encode("\x02"))
        return self.runtime.encode("\x02" + text)[num_control_ids:]

    def compile(self, schema: dict) -> "Grammar":
        """UserError for a schema that is broken, contradictory, too large, or has unsupported
        keys."""
        try:
            text = json.dumps(schema)
            source = self.matcher_type.grammar_from_json_schema(text, defaults=OPTIONS)
        except ValueError as error:  # such as NaN, which JSON lacks
            raise UserError(f"the schema: {error}") from None
        return self.from_source(source)

    def compile_lark(self, source: str) -> "Grammar":
        """A grammar in llguidance's form of Lark, whose rules may hold JSON schemas. UserError as
        of `compile`."""
        return self.from_source(self.matcher_type.grammar_from_lark(source))

    def from_source(self, source: str) -> "Grammar":
        """The Grammar of a source in llguidance's own form."""
        matcher = self.matcher_type(self.tokenizer, source, log_level=0)
        if matcher.is_error():
            raise grammar_error(matcher.get_error())
        if not Grammar(matcher.deep_copy(), self.stop_ids).mask().any():
            raise UserError("the schema: it allows no text")
        return Grammar(matcher, self.stop_ids)


def grammar_error(message: str) -> UserError:
    """llguidance's message in one line, without the state that it prints after it."""
    return UserError("the schema: " + " ".join(message.partition("<state>")[0].split())[:300])


class Grammar:
    def __init__(self, matcher, stop_ids: Collection[int]):
        self.matcher = matcher
        self.stop_ids = stop_ids
        self.num_consumed = 0

    def copy(self) -> "Grammar":
        """The same grammar for another answer; call it before the first `masks`."""
        return Grammar(self.matcher.deep_copy(), self.stop_ids)

    def masks(self, tokens: Sequence[int], draft_tokens: Sequence[int] = ()) -> Tensor:
        """int32 (n, W), n <= 1 + K: bit i of word w allows token 32 w + i after `tokens`, the
        answer so far, and then after each of K draft_tokens, before the first that is forbidden or
        ends the answer. Zeros if the grammar failed."""
        self.matcher.consume_tokens(tokens[self.num_consumed :])
        self.num_consumed = len(tokens)
        rows = [self.mask()]
        for id in draft_tokens:
            if id in self.stop_ids or not self.matcher.try_consume_tokens([id]):
                break
            rows.append(self.mask())
        self.matcher.rollback(len(rows) - 1)
        return torch.stack(rows)

    @property
    def error(self) -> UserError | None:
        """Why the grammar failed, in llguidance's words."""
        return grammar_error(self.matcher.get_error()) if self.matcher.is_error() else None

    def mask(self) -> Tensor:
        mask = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)
        return torch.zeros_like(mask) if self.matcher.is_error() else mask

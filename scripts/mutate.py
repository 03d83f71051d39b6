"""Do the tests notice a slip? Small mistakes put into the code one at a time, each against the tests that should fail.

    python -m scripts.mutate [--only NAME ...] [--list] [--write benchmarks/mutation.json] [--jobs 1]

    MUTATIONS   the mistakes as data: name, file, text that stands there once, text in its place, tests that should fail
    check       are names unique, texts in the code exactly once, tests where they are said to be?
    Runner      pytest in a tree, forked from a process that has the libraries in memory
    measure     the tests without a mutation, which must pass; then every mutation by itself
    show        the table

Everything happens in a temporary copy: code and tests are copied, whatever else there is (checkpoints, benchmarks) is
linked, because tests only read it. A mutation whose text is no longer found is an error: this list follows the code. A
mutant that nothing notices is either the same program in other words, and then no mutation for this list, or it shows
a test that is missing. A test that is skipped notices nothing. This script knows no test by content, and measures
neither coverage nor the tests' time. Seen: 140 mutations in five to six minutes on two busy cores.
"""

import argparse
import ast
import contextlib
import json
import os
import queue
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from generate import Parser, ending_plainly, positive
from scripts.record import record

ROOT = Path(__file__).parent.parent
LIMIT_S = 300  # a mutant may run for ever; the slowest tests named here take a tenth of it
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LIBRARIES = ("torch", "hypothesis", *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES))


class Mutation(NamedTuple):
    """A slip that somebody could make."""

    name: str
    file: str
    old: str  # stands in the file exactly once
    new: str
    tests: str  # pytest's node ids from tests/ on, as few and fast as suffice; parted as in a shell


class Result(NamedTuple):
    mutation: Mutation
    outcome: str
    seconds: float


KILLED, SURVIVED, ENDLESS = "killed", "survived", "killed: without end"

# Tests that are named often.
TWIN = "test_model.py::test_float64_twin"
ENGINE = "test_engine.py::"
SAMPLING = "test_sampling.py::"
WARPERS = "test_sampling.py::'test_probs_equal_transformers_warpers[5000]'"
SPEC = "test_speculative.py::"
BY_HAND = "test_speculative.py::test_accept_by_hand"
GREEDY = "test_speculative.py::test_greedy_equals_plain_greedy"
QUANTIZE = "test_quantize.py::"
BOUND = "test_quantize.py::test_errors_stay_within_the_derived_bound"
GPTQ = "test_quantize.py::test_gptq_equals_its_definition"
TP = "test_tp.py::"
JOIN = "test_tp.py::test_parts_join_to_every_tensor"
CHECKPOINT = "test_checkpoint.py::"
PACKED = "test_packed.py::"
DIGITS = "test_packed.py::test_digits_stand_for_the_nearest_step"
GENERATE = "test_generate.py::"
INTERRUPTS = "test_interrupts.py::"
NUMBERS = "test_numbers.py::"
TOKENIZER = "test_tokenizer.py::"

MUTATIONS = (
    # ----------------------------------------------------------------------------------------- fused.py
    Mutation(
        "codes that span two words lose their upper bits", "fused.py",
        " | (word[index + 1] << (32 - shift))", "",
        "'test_fused.py::test_words_hold_every_code_where_its_input_is[mxfp6]'",
    ),
    Mutation(
        "a group's factor forgotten", "fused.py",
        " * factor * scale[..., None]", " * scale[..., None]",
        "'test_fused.py::test_fused_products_multiply_with_the_stored_weights[mxfp6-1]'",
    ),
    Mutation(
        "a prompt's open length bound to few rows", "quantize.py",
        "return compiled and statically_known_true(x.size(0) <= KERNEL_ROWS)",
        "return compiled and x.size(0) <= KERNEL_ROWS",
        "'test_fused.py::test_few_rows_are_fused_and_prompts_are_not[int8]'",
    ),
    Mutation(
        "a GPU without a number", "generate.py",
        "torch.cuda.set_device(device.index or 0)", "torch.cuda.set_device(device)",
        f"{GENERATE}test_a_gpu_without_a_number_is_the_first_one",
    ),
    # ----------------------------------------------------------------------------------------- model.py
    Mutation(
        "a query sees the next token", "model.py",
        "return distance >= 0 if window is None", "return distance >= -1 if window is None",
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "a window of one more", "model.py",
        "(distance < window)", "(distance <= window)",
        f"{TWIN}[mistral-v0.1]",
    ),
    Mutation(
        "keys before the first are seen", "model.py",
        " & (key >= 0)", "",
        f"{ENGINE}test_a_window_bounds_what_is_read",
    ),
    Mutation(
        "the window gathered one position early", "model.py",
        "pos[:, :1] - (window - 1) + offset", "pos[:, :1] - window + offset",
        f"{ENGINE}test_a_window_bounds_what_is_read",
    ),
    Mutation(
        "keys cached one position late", "model.py",
        "self.k[row, :, pos] = k", "self.k[row, :, pos + 1] = k",
        "'test_model.py::test_whole_chunked_and_token_by_token_equal_transformers[llama-3]'",
    ),
    Mutation(
        "a smaller batch reads the cache's last rows", "model.py",
        "self.k[:B, :, :S], self.v[:B, :, :S]", "self.k[-B:, :, :S], self.v[-B:, :, :S]",
        "test_model.py::test_a_smaller_batch_uses_the_first_rows_of_the_cache",
    ),
    Mutation(
        "a gathered batch reads other rows", "model.py",
        "row = torch.arange(B, device=q.device)[:, None]", "row = torch.arange(B, device=q.device).flip(0)[:, None]",
        "'test_model.py::test_rows_at_different_positions_equal_transformers[mistral-v0.1]'",
    ),
    Mutation(
        "the mask repeated token by token", "model.py",
        "mask.repeat(1, 1, R, 1)", "mask.repeat_interleave(R, dim=2)",
        "test_model.py::test_attention_shares_kv_heads_without_repeating_them",
    ),
    Mutation(
        "RoPE turns neighbours", "model.py",
        "x.float().chunk(2, dim=-1)", "x.float().unflatten(-1, (-1, 2)).unbind(-1)",
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "RoPE turns the other way", "model.py",
        "a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin",
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "RoPE's frequencies in the weights' type", "model.py",
        "rope_frequencies(self.config).to(self.inv_freq.device)", "rope_frequencies(self.config).to(self.inv_freq)",
        "test_model.py::test_rope_stays_float32_through_casts_and_moves",
    ),
    Mutation(
        "linear RoPE multiplied", "model.py",
        "    return inv_freq / factor\n", "    return inv_freq * factor\n",
        f"{TWIN}[llama-linear]",
    ),
    Mutation(
        "Llama 3's ramp without its width", "model.py",
        "((rotations - low) / (high - low)).clamp(0, 1)", "((rotations - low) / high).clamp(0, 1)",
        f"{TWIN}[llama-3.1]",
    ),
    Mutation(
        "YaRN's attention factor forgotten", "model.py",
        "return angle.cos() * scale, angle.sin() * scale", "return angle.cos(), angle.sin()",
        f"{TWIN}[qwen2.5-yarn]",
    ),
    Mutation(
        "eps outside the root", "model.py",
        "return F.rms_norm(x, self.weight.shape, self.weight, self.eps)",
        "return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight",
        "test_model.py::test_a_norm_is_its_definition",
    ),
    Mutation(
        "every norm with one eps", "model.py",
        "self.eps = eps", "self.eps = 1e-5",
        "test_model.py::test_a_norm_is_its_definition",
    ),
    Mutation(
        "keys not normed", "model.py",
        "torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)", "torch.cat((self.q_norm(q), k), dim=1)",
        f"{TWIN}[qwen3]",
    ),
    Mutation(
        "gate and up swapped", "model.py",
        "F.silu(gate) * up", "F.silu(up) * gate",
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "logits in the weights' type", "model.py",
        "return self.lm_head(h).float()", "return self.lm_head(h)",
        f"{CHECKPOINT}test_dtype_is_cast_on_the_way",
    ),
    Mutation(
        "attention over one position too few", "model.py",
        "self.key_pos = self.positions[:length]", "self.key_pos = self.positions[: length - 1]",
        "'test_model.py::test_bounding_the_attended_length_changes_nothing[llama-3]'",
    ),
    Mutation(
        "Qwen slides one layer late", "model.py",
        "window if i >= first else None", "window if i > first else None",
        "test_config.py::test_qwen_window_is_off_unless_used",
    ),
    Mutation(
        "theta of one spelling alone", "model.py",
        '_number(rope, "rope_theta", 10000.0 if theta is None else theta, where)', '_number(hf, "rope_theta", 10000.0)',
        "'test_config.py::test_v4_and_v5_spelling_agree[llama-3]'",
    ),
    # -------------------------------------------------------------------------------------- sampling.py
    Mutation(
        "temperature multiplies", "sampling.py",
        "/ temperature).softmax", "* temperature).softmax",
        WARPERS,
    ),
    Mutation(
        "temperature after top-p", "sampling.py",
        "    p = p * (bits >= _cut(bits, p, mass))\n",
        "    q = (logits - top.values).softmax(dim=-1) * (p > 0)\n"
        "    mass = torch.where(top_p < 1, top_p * q.sum(dim=-1, keepdim=True), math.inf)\n"
        "    p = p * (bits >= _cut(bits, q, mass))\n",
        WARPERS,
    ),
    Mutation(
        "top-p of the mass before top-k", "sampling.py",
        "top_p * p.sum(dim=-1, keepdim=True), math.inf)", "top_p * torch.ones_like(p[..., :1]), math.inf)",
        WARPERS,
    ),
    Mutation(
        "top-p of 1 as a mass to reach", "sampling.py",
        "torch.where(top_p < 1, top_p * p.sum(dim=-1, keepdim=True), math.inf)", "top_p * p.sum(dim=-1, keepdim=True)",
        f"{SAMPLING}test_no_limit_keeps_the_whole_tail",
    ),
    Mutation(
        "filters keep one more", "sampling.py",
        "((reached >= left).sum", "((reached > left).sum",
        WARPERS,
    ),
    Mutation(
        "min-p relative to 1", "sampling.py",
        "(p >= min_p * p.amax(dim=-1, keepdim=True))", "(p >= min_p)",
        WARPERS,
    ),
    Mutation(
        "what filters leave is not normed", "sampling.py",
        "return p / p.sum(dim=-1, keepdim=True)", "return p",
        WARPERS,
    ),
    Mutation(
        "greedy shares ties", "sampling.py",
        "torch.zeros_like(logits).scatter(-1, top.indices, 1.0)", "(logits == top.values).float()",
        f"{SAMPLING}test_greedy_is_the_lowest_argmax_as_a_one_hot",
    ),
    Mutation(
        "the mass reaches the noise", "sampling.py",
        "reached = cumulative > noise", "reached = cumulative >= noise",
        f"{SAMPLING}test_zero_probability_is_never_drawn",
    ),
    Mutation(
        "noise times 1, not times the total", "sampling.py",
        "noise[..., None] * cumulative.amax(dim=-1, keepdim=True)", "noise[..., None]",
        f"{SAMPLING}test_a_total_below_one_loses_nothing",
    ),
    Mutation(
        "a NaN is a token", "sampling.py",
        "return torch.where(top.isfinite(), token, INVALID)", "return token",
        f"{SAMPLING}test_not_finite_logits_are_named_not_sampled",
    ),
    Mutation(
        "large seeds are cut", "sampling.py",
        " ^ ((seed >> 32) & 0xFFFFFFFF)", "",
        f"{SAMPLING}test_every_bit_of_seed_and_position_counts",
    ),
    Mutation(
        "one number for every purpose", "sampling.py",
        "(0x9E3779B9 * (purpose + 1) & 0xFFFFFFFF)", "0x9E3779B9",
        f"{SAMPLING}test_uniform_is_uniform_and_independent_in_every_argument",
    ),
    Mutation(
        "noise may be 1", "sampling.py",
        "(state >> 8).float() * 2.0**-24", "state.float() * 2.0**-32",
        f"{SAMPLING}test_the_largest_number_is_below_one",
    ),
    # ----------------------------------------------------------------------------------- speculative.py
    Mutation(
        "accepted at u <= p / q", "speculative.py",
        "(noise[0] < a)", "(noise[0] <= a)",
        BY_HAND,
    ),
    Mutation(
        "p and q swapped", "speculative.py",
        "(p / q).clamp(max=1)", "(q / p).clamp(max=1)",
        BY_HAND,
    ),
    Mutation(
        "accepted where q is 0", "speculative.py",
        "return torch.where(q > 0, (p / q).clamp(max=1), 0)", "return (p / q).clamp(max=1)",
        BY_HAND,
    ),
    Mutation(
        "residual not normed", "speculative.py",
        "torch.where(total > 0, rest / total, p)", "torch.where(total > 0, rest, p)",
        f"'{SPEC}test_identity_of_distributions[7-temperature=1]'",
    ),
    Mutation(
        "residual of what the draft has too much", "speculative.py",
        "rest = (p - q).clamp(min=0)", "rest = (q - p).clamp(min=0)",
        BY_HAND,
    ),
    Mutation(
        "a residual of nothing", "speculative.py",
        "torch.where(total > 0, rest / total, p)", "rest / total.clamp(min=1e-30)",
        f"{SPEC}test_what_is_not_a_number",
    ),
    Mutation(
        "accepted behind a rejection", "speculative.py",
        ".long().cumprod(dim=1).sum(dim=1)", ".long().sum(dim=1)",
        BY_HAND,
    ),
    Mutation(
        "the token after K acceptances is the last draft's", "speculative.py",
        "at = n[:, None, None]", "at = n.clamp(max=K - 1)[:, None, None]",
        BY_HAND,
    ),
    Mutation(
        "one number whichever position is next", "speculative.py",
        "noise[1].gather(1, n[:, None])[:, 0]", "noise[1][:, 0]",
        f"{SPEC}test_the_next_token_takes_its_own_positions_number",
    ),
    Mutation(
        "the draft draws with the target's number", "speculative.py",
        "uniform(state.seed, last + 1, DRAFT_DRAW)", "uniform(state.seed, last + 1)",
        f"'{SPEC}test_sequences_have_the_targets_joint_law"
        "[model-Sampling(temperature=1, top_k=None, top_p=None, min_p=None)-3]'",
    ),
    Mutation(
        "a draft's cache one token behind", "speculative.py",
        "self._draw(state, fed=2)", "self._draw(state, fed=1)",
        f"{GREEDY}[itself-5]",
    ),
    Mutation(
        "a drafted token over the last decided one", "speculative.py",
        "state.tokens.scatter_(1, last[:, None] + 1, token[:, None])",
        "state.tokens.scatter_(1, last[:, None], token[:, None])",
        f"{GREEDY}[model-5]",
    ),
    Mutation(
        "every drafted token at one position", "speculative.py",
        "last = state.pos + self.drawn", "last = state.pos + 0 * self.drawn",
        f"{GREEDY}[itself-5]",
    ),
    Mutation(
        "ids that a shorter draft lacks", "speculative.py",
        "state.tokens.gather(1, pos).clamp(max=self.model.config.vocab_size - 1)", "state.tokens.gather(1, pos)",
        f"{SPEC}test_padded_vocabularies_may_differ[52]",
    ),
    Mutation(
        "the newest chunk filled first", "speculative.py",
        "reversed(range(math.ceil(missed / self.CHUNK)))", "range(math.ceil(missed / self.CHUNK))",
        f"{SPEC}test_coming_back_from_plain_steps_fills_the_drafts_cache[True]",
    ),
    Mutation(
        "an n-gram matches itself", "speculative.py",
        "(end < pos)", "(end <= pos)",
        f"{SPEC}test_prompt_lookup_finds_the_last_match_and_repeats_it",
    ),
    Mutation(
        "what was found is not repeated", "speculative.py",
        "pos - period + 1 + ahead % period", "pos - period + 1 + ahead",
        f"{SPEC}test_prompt_lookup_finds_the_last_match_and_repeats_it",
    ),
    Mutation(
        "finished rows ask for drafts", "speculative.py",
        " & ~state.done[:, None]", "",
        f"{SPEC}test_prompt_lookup_finds_the_last_match_and_repeats_it",
    ),
    Mutation(
        "layers without the last", "speculative.py",
        "int(found[2] or found[1]) + 1)", "int(found[2] or found[1]))",
        f"{SPEC}test_layers_are_parsed_and_checked",
    ),
    Mutation(
        "verifying costs a plain step", "speculative.py",
        "expected_tokens(alpha, k) / (k * c + v)", "expected_tokens(alpha, k) / (k * c + 1)",
        f"{SPEC}test_theory_against_simulation_and_sums",
    ),
    Mutation(
        "patience does not grow", "speculative.py",
        "0, 2 * self.patience, PROBE_ROUNDS", "0, self.patience, PROBE_ROUNDS",
        f"{SPEC}test_draft_length_leaves_and_comes_back",
    ),
    Mutation(
        "a corrected token counts as accepted", "speculative.py",
        "self.accepted[index] += index < n_accepted", "self.accepted[index] += index <= n_accepted",
        f"{SPEC}test_statistics_by_hand",
    ),
    # -------------------------------------------------------------------------------------- quantize.py
    Mutation(
        "scales rounded down", "quantize.py",
        "((bits + 0xFFFF) & ~0xFFFF)", "(bits & ~0xFFFF)",
        f"{QUANTIZE}test_scales_round_up",
    ),
    Mutation(
        "int8 reaches 128", "quantize.py",
        "scale_of(row_max / 127, self.stored)", "scale_of(row_max / 128, self.stored)",
        f"{BOUND}[int8]",
    ),
    Mutation(
        "the zero point's sign", "quantize.py",
        "zero = (low + 8 * scale.float())", "zero = (low - 8 * scale.float())",
        f"{BOUND}[int4-g32]",
    ),
    Mutation(
        "sixteen steps between sixteen codes", "quantize.py",
        "(high - low) / 15", "(high - low) / 16",
        f"{BOUND}[int4-g32]",
    ),
    Mutation(
        "a group is every n-th input", "quantize.py",
        'unpack_bits(parts["codes"], 4).unflatten(1, (-1, self.group)) - 8',
        'unpack_bits(parts["codes"], 4).unflatten(1, (self.group, -1)).mT - 8',
        f"{BOUND}[int4-g32]",
    ),
    Mutation(
        "the first code in the highest bits", "quantize.py",
        "word = (word << _shifts(per, bits, word))", "word = (word.flip(-1) << _shifts(per, bits, word))",
        f"{QUANTIZE}test_bits_pack_as_documented",
    ),
    Mutation(
        "a scale of 0 divides", "quantize.py",
        "return torch.where(scale > 0, scale, 1.0)", "return scale",
        f"{BOUND}[fp8]",
    ),
    Mutation(
        "a block's exponent one too large", "quantize.py",
        "exponent - 1 - self.emax", "exponent - self.emax",
        f"{QUANTIZE}test_mx_blocks_by_definition[mxfp6]",
    ),
    Mutation(
        "the largest elements overflow", "quantize.py",
        "code.clamp(max=self.code_of_largest)", "code",
        f"{QUANTIZE}test_mx_blocks_by_definition[mxfp6]",
    ),
    Mutation(
        "elements cut, not rounded", "quantize.py",
        "self.mantissa - exponent).round()", "self.mantissa - exponent).floor()",
        f"{QUANTIZE}test_mx_blocks_by_definition[mxfp6]",
    ),
    Mutation(
        "subnormal elements half as large", "quantize.py",
        "field.clamp(min=1) - self.bias", "field - self.bias",
        f"{QUANTIZE}test_every_mx_code_decodes_to_the_specifications_value[mxfp4]",
    ),
    Mutation(
        "a part's row by its own maximum", "quantize.py",
        "FORMATS[scheme].with_max(w, row_max[rows])", "FORMATS[scheme].quantize(w)",
        f"{TP}test_codes_of_a_rank_are_a_slice_of_the_whole_rows",
    ),
    Mutation(
        "every shard the first", "quantize.py",
        "part.chunk(world, dim)[rank]", "part.chunk(world, dim)[0]",
        f"{QUANTIZE}test_shards_put_together_are_the_whole[int8]",
    ),
    Mutation(
        "a shard's bias on every rank", "quantize.py",
        "bias = self.bias is not None and (dim == 0 or rank == 0)", "bias = self.bias is not None",
        f"{QUANTIZE}test_shards_put_together_are_the_whole[int8]",
    ),
    Mutation(
        "a quantized Linear loses its bias", "quantize.py",
        "found.bias.copy_(linear.bias.detach())", "found.bias.zero_()",
        f"{QUANTIZE}test_a_quantized_linear_is_the_dequantized_product[int8-48-dtype0]",
    ),
    Mutation(
        "int4's padding rows not cut", "quantize.py",
        "return y[:, : self.out_features]", "return y",
        f"{QUANTIZE}test_a_quantized_linear_is_the_dequantized_product[int4-g32-40-dtype0]",
    ),
    Mutation(
        "the quantized self swaps its norms", "quantize.py",
        "block.attention_norm, block.ffn_norm = layer.attention_norm, layer.ffn_norm",
        "block.attention_norm, block.ffn_norm = layer.ffn_norm, layer.attention_norm",
        f"{QUANTIZE}test_drafting_with_the_quantized_self[int8]",
    ),
    Mutation(
        "a search that takes what comes last", "quantize.py",
        "better = error < best", "better = error < math.inf",
        f"{QUANTIZE}test_a_searched_range_never_loses",
    ),
    Mutation(
        "GPTQ's error unscaled", "quantize.py",
        "- zero[:, column]) / inner[i, i]", "- zero[:, column])",
        GPTQ,
    ),
    Mutation(
        "GPTQ's blocks keep their errors", "quantize.py",
        "w[:, rest] -= torch.stack(errors, 1)", "w[:, rest] -= 0 * torch.stack(errors, 1)",
        GPTQ,
    ),
    # -------------------------------------------------------------------------------------------- tp.py
    Mutation(
        "rank 0's share on every rank", "tp.py",
        "return Share(rank * n // world, (rank + 1) * n // world, n // world)",
        "return Share(0, n // world, n // world)",
        f"{JOIN}[llama-3-2]",
    ),
    Mutation(
        "a vocabulary's rest belongs to nobody", "tp.py",
        "size = -(-n // world)", "size = n // world",
        f"{JOIN}[llama-3-2]",
    ),
    Mutation(
        "KV heads dealt round", "tp.py",
        "Share(rank * n // world, rank * n // world + 1, 1)", "Share(rank % n, rank % n + 1, 1)",
        f"{JOIN}[llama-3-4]",
    ),
    Mutation(
        "a bias added on every rank", "tp.py",
        "kept = cut.dim == 0 or ranks.rank == 0", "kept = True",
        f"{TP}test_parts_of_a_product_add_up",
    ),
    Mutation(
        "a group cut in two", "tp.py",
        "if inputs // world % (group or 1):", "if inputs % (group or 1):",
        f"{TP}test_what_cannot_be_divided_is_refused_with_both_numbers",
    ),
    Mutation(
        "an id at a part's end is inside", "tp.py",
        "(tokens >= begin) & (tokens < end)", "(tokens >= begin) & (tokens <= end)",
        f"{TP}test_parts_of_a_product_add_up",
    ),
    Mutation(
        "embeddings of other ranks' ids", "tp.py",
        "return torch.where(inside[..., None], rows, 0)", "return rows",
        f"{TP}test_parts_of_a_product_add_up",
    ),
    Mutation(
        "padding of the last ranks stays among the logits", "tp.py",
        "return self.ranks.gather(local)[..., : self.vocab_size]", "return self.ranks.gather(local)",
        f"{TP}test_what_ranks_say_to_each_other",
    ),
    Mutation(
        "the padding's logit may win", "tp.py",
        ">= self.filled, -torch.inf)", ">= self.filled, 0)",
        f"{TP}test_the_largest_logit_is_found_over_ranks[131-2]",
    ),
    Mutation(
        "logits gathered row by row", "tp.py",
        "both.view(self.world, *x.shape).movedim(0, -2).flatten(-2)",
        "both.view(*x.shape[:-1], self.world * x.size(-1))",
        f"{TP}test_what_ranks_say_to_each_other",
    ),
    Mutation(
        "broadcast left out", "tp.py",
        "return x if self.world == 1 else self._wait(torch.ops._c10d_functional.broadcast(x, 0, self.group))",
        "return x",
        f"{TP}test_what_ranks_say_to_each_other",
    ),
    Mutation(
        "down's parts not summed", "tp.py",
        '"ffn.down": Cut(1, ("ffn_dim",), SUM)', '"ffn.down": Cut(1, ("ffn_dim",))',
        f"{TP}test_parts_of_a_product_add_up",
    ),
    Mutation(
        "the global rank chooses the GPU", "tp.py",
        """f"cuda:{os.environ['LOCAL_RANK']}\"""", """f"cuda:{os.environ['RANK']}\"""",
        f"{TP}test_devices_by_local_rank",
    ),
    # ------------------------------------------------------------------------------------ checkpoint.py
    Mutation(
        "keys and values swapped", "checkpoint.py",
        '"self_attn.k_proj", "self_attn.v_proj"', '"self_attn.v_proj", "self_attn.k_proj"',
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "up before gate", "checkpoint.py",
        '["mlp.gate_proj", "mlp.up_proj"]', '["mlp.up_proj", "mlp.gate_proj"]',
        f"{TWIN}[llama-3]",
    ),
    Mutation(
        "a tied head of its own", "checkpoint.py",
        "model.lm_head.weight = model.embed.weight",
        "model.lm_head.weight = torch.nn.Parameter(model.embed.weight.clone())",
        f"{CHECKPOINT}test_tied_head_is_one_memory",
    ),
    Mutation(
        "a stored tied head is unexpected", "checkpoint.py",
        '        and not (config.tie_embeddings and name == "lm_head.weight")\n', "",
        f"{CHECKPOINT}test_stored_frequencies_and_a_stored_tied_head_are_ignored",
    ),
    Mutation(
        "types are not looked at", "checkpoint.py",
        "elif header.get_dtype() not in types:", "elif header.get_dtype() is None:",
        f"{CHECKPOINT}test_tensors_that_do_not_fit_are_listed",
    ),
    Mutation(
        "the third stacked matrix over the second", "checkpoint.py",
        "        begin += len(weight)\n", "        begin = len(weight)\n",
        f"{QUANTIZE}test_quantized_on_the_way_in_from_disk_and_in_memory_agree[int8-None]",
    ),
    Mutation(
        "a vocabulary's padding not cleared", "checkpoint.py",
        "part[len(stored) :].zero_()", "pass",
        f"{JOIN}[llama-3-2]",
    ),
    Mutation(
        "a row's scale is the rank's own", "checkpoint.py",
        "row_max = ranks.largest(weight.abs().amax(1).float())", "row_max = weight.abs().amax(1).float()",
        f"{TP}test_codes_of_a_rank_are_a_slice_of_the_whole_rows",
    ),
    # ---------------------------------------------------------------------------------------- packed.py
    Mutation(
        "a digit dropped", "packed.py",
        "n = 2 if x.dtype == torch.bfloat16 else 3", "n = 2",
        DIGITS,
    ),
    Mutation(
        "the largest digit overflows", "packed.py",
        "largest = sum(127 * 256**i", "largest = sum(128 * 256**i",
        DIGITS,
    ),
    Mutation(
        "digits added up the wrong way round", "packed.py",
        "for digit in reversed(lower):", "for digit in lower:",
        f"{PACKED}test_int8_products_are_those_of_the_stored_weights[dtype1]",
    ),
    Mutation(
        "the digits' offset forgotten", "packed.py",
        "x, 1.0, 128, self.data", "x, 1.0, 0, self.data",
        f"{QUANTIZE}test_a_processor_that_adds_exactly_is_found_to",
    ),
    Mutation(
        "padding rows not cut", "packed.py",
        "return y[:M]", "return y",
        f"{PACKED}test_padding_rows_reach_no_result",
    ),
    Mutation(
        "a packed Linear loses its bias", "packed.py",
        "return y if self.bias is None else y + self.bias", "return y",
        f"{PACKED}test_a_packed_linear_is_the_linear[dtype0-shape0]",
    ),
    # -------------------------------------------------------------------------------------- generate.py
    Mutation(
        "a shorter row continues its padding", "generate.py",
        "last[row] = h[row, length - 1 - begin]", "last[row] = h[row, -1]",
        f"{GENERATE}test_prefill_gives_the_logits_after_each_prompt",
    ),
    Mutation(
        "a chunk without its last token", "generate.py",
        "if begin < length <= end:", "if begin < length < end:",
        f"{GENERATE}test_prefill_in_chunks_equals_whole",
    ),
    Mutation(
        "every row with the first one's seed", "generate.py",
        "self.seed.copy_(torch.tensor(seeds))", "self.seed.fill_(seeds[0])",
        f"{GENERATE}test_seeds",
    ),
    Mutation(
        "plain steps draw with the last position's number", "generate.py",
        "uniform(state.seed, state.pos + 1))", "uniform(state.seed, state.pos))",
        f"{SPEC}test_a_sampled_row_equals_its_prompt_alone[ngram]",
    ),
    Mutation(
        "each rank acts on its own token", "generate.py",
        "commit(state, state.agree(token)[:, None], None)", "commit(state, token[:, None], None)",
        f"{ENGINE}test_what_ranks_agree_on_is_what_counts",
    ),
    Mutation(
        "each rank acts on its own acceptances", "generate.py",
        "    decision = state.agree(decision)\n", "",
        f"{ENGINE}test_what_ranks_agree_on_is_what_counts",
    ),
    Mutation(
        "a finished row goes on", "generate.py",
        "state.done.logical_or_((keep & last).any(dim=1))", "state.done.logical_or_((keep & last).all(dim=0).all())",
        f"{ENGINE}test_finished_rows_freeze",
    ),
    Mutation(
        "a row is full one token late", "generate.py",
        "(position >= state.end[:, None])", "(position > state.end[:, None])",
        f"{ENGINE}test_finished_rows_freeze",
    ),
    Mutation(
        "tokens behind a stop are kept", "generate.py",
        "last.cumsum(dim=1) - last.long() > 0", "last.cumsum(dim=1) > 1",
        f"{SPEC}test_every_length_and_stop_inside_a_round[itself]",
    ),
    Mutation(
        "no token after the accepted ones", "generate.py",
        "(index <= n_accepted[:, None])", "(index < n_accepted[:, None].clamp(min=1))",
        f"{GREEDY}[itself-5]",
    ),
    Mutation(
        "overlap with the next position's law", "generate.py",
        "torch.minimum(p[:, :K], draft_probs)", "torch.minimum(p[:, 1:], draft_probs)",
        f"{GREEDY}[itself-5]",
    ),
    Mutation(
        "a row without a draft counts as drafted", "generate.py",
        "torch.where(draft_probs[:, 0].amax(dim=-1) != 0, n, -1)", "n",
        f"{GREEDY}[ngram-5]",
    ),
    Mutation(
        "drafted positions are not attended", "generate.py",
        "attend(self.model, self.attended(length + k), self.compile)",
        "attend(self.model, self.attended(length), self.compile)",
        f"{GREEDY}[itself-5]",
    ),
    Mutation(
        "a stale draft cache is trusted", "generate.py",
        "max(0, cached - 1 - engine.missed)", "cached",
        f"{SPEC}test_turns_keep_both_caches",
    ),
    Mutation(
        "what was not fed counts as kept", "generate.py",
        "cached = (prompt + printer.ids[0])[:-1]", "cached = (prompt + printer.ids[0])",
        f"{GENERATE}test_chat_equals_the_conversation_without_kept_caches[True]",
    ),
    Mutation(
        "a missing token is embedded", "generate.py",
        "state.tokens.scatter_(1, position, tokens.clamp(min=0))", "state.tokens.scatter_(1, position, tokens)",
        f"{GENERATE}test_logits_that_are_not_finite_are_named[2]",
    ),
    Mutation(
        "the last position stays empty", "generate.py",
        "if len(prompt) + new > limit:", "if len(prompt) + new >= limit:",
        f"{GENERATE}test_lengths_are_checked_before_anything_runs",
    ),
    Mutation(
        "a window's bytes as if it had none", "generate.py",
        "min(length, window or length) * size", "length * size",
        f"{GENERATE}test_byte_accounting_by_hand",
    ),
    Mutation(
        "a stop token is text", "generate.py",
        "        if id not in self.stop_ids:\n", "        if id >= 0:\n",
        f"{GENERATE}test_stop_token_ends_a_row_and_is_no_text",
    ),
    Mutation(
        "what is not finite stays in the caches", "generate.py",
        "                    engine.clear()\n", "",
        f"{NUMBERS}test_after_an_error_an_engine_is_as_before",
    ),
    Mutation(
        "rows are padded with id 0", "generate.py",
        "self.tokens[row] = prompt[-1]", "self.tokens[row] = 0",
        f"{NUMBERS}test_an_id_that_no_row_holds_may_be_anything",
    ),
    Mutation(
        "every length of a prompt is its own", "generate.py",
        "min(begin + rounded_up(end - begin), engine.positions)", "min(max(end, begin + 2), engine.positions)",
        f"{GENERATE}test_prompts_run_at_few_lengths",
    ),
    Mutation(
        "a held back interrupt is forgotten", "generate.py",
        "    if came:\n", "    if not came:\n",
        f"{INTERRUPTS}test_compiled_code_is_interrupted_while_it_compiles_and_then_between_calls",
    ),
    Mutation(
        "caches are in place if the first layer's is", "generate.py",
        "if [layer.attention.cache for layer in self.model.layers] != self.caches:",
        "if self.model.layers[0].attention.cache is not self.caches[0]:",
        f"{INTERRUPTS}test_engines_that_change_places_do_so_whole_or_again",
    ),
    Mutation(
        "caches before the positions that go with them", "model.py",
        "        self.key_pos = None\n        if caches:\n",
        "        for layer, cache in zip(self.layers, caches or ()):\n"
        "            layer.attention.cache = cache\n        self.key_pos = None\n        if caches:\n",
        f"{INTERRUPTS}test_engines_that_change_places_do_so_whole_or_again",
    ),
    # ------------------------------------------------------------------------------------- tokenizer.py
    Mutation(
        "BOS twice in a chat", "tokenizer.py",
        "            return self._parse(text)\n", '            return self.encode("", bos=True) + self._parse(text)\n',
        f"{TOKENIZER}test_chat_equals_apply_chat_template[mistral]",
    ),
    Mutation(
        "BOS against the folder's policy", "tokenizer.py",
        "with_bos = self.add_bos if bos is None else bos", "with_bos = bos is None or bos",
        f"{TOKENIZER}test_bos_policy_is_the_folders",
    ),
    Mutation(
        "the stop string is printed", "tokenizer.py",
        'self.stopped = self.held[:found], "", True', 'self.stopped = self.held, "", True',
        f"{TOKENIZER}test_stop_strings_cut_exactly_however_text_arrives",
    ),
    Mutation(
        "too little held back", "tokenizer.py",
        "longest = min(len(stop) - 1, len(self.held))", "longest = min(len(stop) - 1, len(self.held) - 1)",
        f"{TOKENIZER}test_stop_strings_cut_exactly_however_text_arrives",
    ),
    Mutation(
        "the last stop string wins", "tokenizer.py",
        "found = min((i for i in", "found = max((i for i in",
        f"{TOKENIZER}test_stop_strings_cut_exactly_however_text_arrives",
    ),
    Mutation(
        "characters split", "tokenizer.py",
        "return self._utf8.decode(piece)", 'return piece.decode(errors="replace")',
        f"{TOKENIZER}test_an_unfinished_character_is_flushed_as_a_replacement",
    ),
    Mutation(
        "an answer loses its first space", "tokenizer.py",
        "self._strip_first_space and not continues", "self._strip_first_space",
        f"{TOKENIZER}test_a_continuation_keeps_its_leading_space",
    ),
    Mutation(
        "generation_config.json is not read", "tokenizer.py",
        'for name in ("config.json", "generation_config.json"):', 'for name in ("config.json",):',
        f"{TOKENIZER}test_stop_ids_come_from_every_place",
    ),
    Mutation(
        "Llama 3.1 read as 3.0", "tokenizer.py",
        "LLAMA30_NAMES if config and not scaled else", "LLAMA30_NAMES if config else",
        f"{TOKENIZER}test_llama_30_and_31_special_tokens",
    ),
    Mutation(
        "a message's special token is one", "tokenizer.py",
        "if hidden == messages:", "if hidden:",
        f"{TOKENIZER}test_special_text_in_a_message_stays_text[qwen2.5]",
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------- checking


def mutated(root: Path, mutation: Mutation) -> str:
    """The file's text with the mutation. ValueError where the text to replace does not stand there exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: {mutation.old!r} stands {found} times in {mutation.file} instead of once;"
            " this list must follow the code"
        )
    return text.replace(mutation.old, mutation.new)


def tests_of(mutation: Mutation) -> list[str]:
    return [f"tests/{test}" for test in shlex.split(mutation.tests)]


def check(root: Path, mutations: Sequence[Mutation]) -> None:
    """ValueError for two mutations of one name, for a text that `mutated` refuses, and for tests that do not exist,
    parameters aside: those pytest knows."""
    names = [mutation.name for mutation in mutations]
    if len(set(names)) < len(names):
        raise ValueError(f"two mutations are called {next(name for name in names if names.count(name) > 1)!r}")
    files = {file_of(test) for mutation in mutations for test in tests_of(mutation)}
    known = {file: functions(root / file) for file in files}
    for mutation in mutations:
        mutated(root, mutation)
        for test in tests_of(mutation):
            if test.partition("[")[0].partition("::")[2] not in known[file_of(test)]:
                raise ValueError(f"mutation {mutation.name!r}: there is no test {test}")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def functions(file: Path) -> set[str]:
    """Names of a file's functions; none of a file that does not exist."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ()
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


# --------------------------------------------------------------------------------------------- measuring


def copy(root: Path, into: Path) -> Path:
    """A tree that may be changed: code, tests and settings are copied, the rest is linked."""
    into.mkdir()
    for entry in root.iterdir():
        if entry.name in ("scripts", "tests"):
            shutil.copytree(entry, into / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.suffix in (".py", ".toml"):
            shutil.copy(entry, into)
        elif not entry.name.startswith(".") and entry.name != "__pycache__":
            (into / entry.name).symlink_to(entry.resolve())
    return into


class Runner:
    """pytest in one tree, from a process that has the libraries in memory and forks for every run: importing them takes
    longer than most tests. It never imports a file of the tree before the fork."""

    SERVER = """
import contextlib, importlib, json, os, sys
import pytest
log, *libraries = sys.argv[1:]
for name in libraries:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        status = pytest.main(json.loads(line))
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

    def __init__(self, tree: Path, libraries: Sequence[str]):
        self.tree, self.log = tree, tree.with_suffix(".log")
        self.command = [sys.executable, "-c", self.SERVER, str(self.log), *libraries]
        self.start()

    def start(self) -> None:
        # No compiled files: two texts of one length, written within a second, would be taken for the same.
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(self.command, cwd=self.tree, env=env, start_new_session=True, **pipes)

    def run(self, tests: Iterable[str], limit_s: float | None) -> tuple[int | None, str]:
        """(exit status of pytest, negative after a crash, None when it did not end in time; what it printed)."""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={self.tree.with_suffix('.tmp')}", *tests]
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], limit_s)[0]:
            self.stop()
            self.start()
            return None, ""
        answer = self.process.stdout.readline()
        if not answer:
            raise ValueError("the process that runs pytest has ended; what it said stands above")
        return int(answer), self.log.read_text(errors="replace")

    def stop(self) -> None:
        """With whatever it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def try_one(runner: Runner, mutation: Mutation) -> Result:
    """Put the mutation into the tree, run its tests, take it out again. ValueError where pytest could run none."""
    start, file = time.perf_counter(), runner.tree / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(mutated(runner.tree, mutation), encoding="utf-8")
    try:
        status, out = runner.run(tests_of(mutation), LIMIT_S)
    finally:
        file.write_text(text, encoding="utf-8")
    if status is not None and status > 1:  # a mutant that does not even import is no slip; nor is an unknown test
        raise ValueError(f"mutation {mutation.name!r}: no test could run: {' '.join(out.split()[-40:])}")
    outcome = {None: ENDLESS, 0: SURVIVED}.get(status, KILLED)
    return Result(mutation, outcome, time.perf_counter() - start)


def unchanged(runner: Runner, mutations: Sequence[Mutation]) -> None:
    """ValueError unless all tests that are named pass as the code stands."""
    status, out = runner.run(dict.fromkeys(test for mutation in mutations for test in tests_of(mutation)), None)
    if status != 0:
        said = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))] or out.splitlines()[-3:]
        raise ValueError(f"the tests do not pass without a mutation: {' '.join(said)}")


def measure(
    root: Path, mutations: Sequence[Mutation], jobs: int = 1, libraries: Sequence[str] = LIBRARIES
) -> list[Result]:
    """All mutations, `jobs` at a time, each in a tree of its own. ValueError where `check` finds one, or where tests
    fail without a mutation."""
    check(root, mutations)
    free: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def one(mutation: Mutation) -> Result:
        runner = free.get()
        try:
            return try_one(runner, mutation)
        finally:
            free.put(runner)
            bar.update()

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutate-")))
        for number in range(jobs):
            runner = Runner(copy(root, folder / f"tree{number}"), libraries)
            stack.callback(runner.stop)
            free.put(runner)
        unchanged(runner, mutations)
        bar = stack.enter_context(tqdm(total=len(mutations), desc="mutants"))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        pending = [pool.submit(one, mutation) for mutation in mutations]
        try:
            return [future.result() for future in pending]
        finally:
            pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------- command line


def summary(results: Sequence[Result], seconds: float) -> dict:
    survivors = [result.mutation.name for result in results if result.outcome == SURVIVED]
    killed = len(results) - len(survivors)
    return {
        "mutations": len(results), "killed": killed, "score": round(killed / len(results), 4), "survivors": survivors,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def show(results: Sequence[Result]) -> None:
    width = max(len(result.mutation.name) for result in results)
    for mutation, outcome, seconds in results:
        print(f"{mutation.file:14}  {mutation.name:{width}}  {seconds:5.1f} s  {outcome}")


def write(file: Path, results: Sequence[Result], seconds: float) -> None:
    """The summary with every mutation's outcome."""
    each = {result.mutation.name: result.outcome for result in results}
    record(file, summary(results, seconds) | {"results": each})


def chosen(names: Sequence[str] | None) -> list[Mutation]:
    """The mutations whose name or file holds one of the names. ValueError for none."""
    found = [m for m in MUTATIONS if not names or any(name in m.name or name == m.file for name in names)]
    if not found:
        raise ValueError(f"--only {' '.join(names)}: no mutation is called so; --list shows their names")
    return found


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Do the tests notice a slip? Mutations of the code against the tests that should fail.")
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="mutations whose name holds this, or of this file")
    add("--list", action="store_true", help="show the mutations and their tests, run nothing")
    add("--write", metavar="FILE", help="results as JSON")
    add("--jobs", type=positive, default=1, metavar="N", help="mutants at a time; default: 1")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with ending_plainly():
        mutations = chosen(args.only)
        if args.list:
            check(ROOT, mutations)
            for mutation in mutations:
                print(f"{mutation.file:14}  {mutation.name}\n    {' '.join(tests_of(mutation))}")
            return
        start = time.perf_counter()
        results = measure(ROOT, mutations, args.jobs)
        seconds = time.perf_counter() - start
        show(results)
        print(json.dumps(summary(results, seconds), ensure_ascii=False))
        if args.write:
            write(Path(args.write), results, seconds)


if __name__ == "__main__":
    main()

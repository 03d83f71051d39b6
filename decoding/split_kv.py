"""Attention of a few queries over a long cache on a GPU, with the keys split into chunks that run
in parallel (flash-decoding).

    GraphKernel             the attention of steps that are CUDA graphs
    split_attend            `model.attend`, by chunks of keys
    merge_chunks            the chunks' attentions and log-sum-exps -> attention over all keys
    efficient_attention     torch's memory-efficient kernel, which returns the log-sum-exp
    has_efficient_kernel    does it run here?

That kernel starts one thread block for each row of a batch and KV head, however long the cache is:
8 in a step of Llama 3.1 8B, on a GPU with 132 multiprocessors. A chunk is one more row to it, at a
stride in the cache, so keys and values are not copied.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model import AttentionKernel, AttentionMask, attend
from weights.compiling import is_small_batch

CHUNK = 256  # keys, as many as the shortest CUDA graph attends to
# Fewer keys do not make up for the launch that merges the chunks. This is an odd number of chunks,
# and a window gathers an even one (key_block) where a cache is longer: between the two conditions
# lie several lengths or none. Dynamo would make a single one a constant, and refuse that.
MIN_KEYS = 3 * CHUNK
QUERY_BLOCK = 64  # query rows that a thread block of the kernel takes
MAX_BLOCKS = 128  # so many thread blocks fill a GPU without chunks
# Keys at which a row of a mask begins for a GPU's attention kernel. Compiled code copies a mask for
# each layer unless it knows that rows do.
MASK_MULTIPLE = 8


class GraphKernel(AttentionKernel):
    """Attention with masks whose rows have memory for `num_positions` keys, whatever S is. It may
    split keys into chunks."""

    key_block = 2 * CHUNK

    def __init__(self, num_positions: int, is_split: bool):
        self.mask_length = math.ceil(num_positions / MASK_MULTIPLE) * MASK_MULTIPLE
        if is_split:
            self.run = split_attend

    def prepare(self, keys: AttentionMask, R: int, dtype: torch.dtype) -> AttentionMask:
        keys = super().prepare(keys, R, dtype)
        if keys.index is not None:
            return keys
        S = keys.mask.size(-1)
        bias = F.pad(keys.mask, (0, self.mask_length - S))
        return keys._replace(mask=bias[..., :S])


def has_efficient_kernel(E: int, like: Tensor) -> bool:
    """Does torch's memory-efficient kernel run heads of E channels in the dtype and on the device
    of `like`? False on an AMD GPU, whose version of it is another one."""
    if like.device.type != "cuda" or torch.version.hip:
        return False
    x = like.new_zeros(1, 1, CHUNK, E)
    bias = like.new_zeros(1, 1, CHUNK, CHUNK)
    params = torch.backends.cuda.SDPAParams(x, x, x, bias, 0.0, False, False)
    return torch.backends.cuda.can_use_efficient_attention(params)


def efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """`model.attend_with_logsumexp` by torch's memory-efficient kernel. The log-sum-exp of a query
    that sees no key is -inf."""
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    y, logsumexp, *_ = run(q, k, v, bias, compute_log_sumexp=True)
    return y, logsumexp[..., : q.size(2)]  # its rows are padded to a multiple of 32


def split_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    sinks: Tensor | None = None,
    operator: Callable[..., tuple[Tensor, Tensor]] = efficient_attention,
) -> Tensor:
    """`model.attend`, up to rounding, where few queries attend to many keys by chunks. q (B, H, T,
    E), k and v (B, G, S, E), bias (B, 1, R * T, S) -> (B, H, T, E).

    operator: has the signature of `model.attend_with_logsumexp`.
    """
    B, H, T, E = q.shape
    G, S = k.shape[1:3]
    rows = H // G * T
    num_blocks = B * G * ((rows + QUERY_BLOCK - 1) // QUERY_BLOCK)
    has_few_blocks = is_small_batch(num_blocks, MAX_BLOCKS - 1)  # first: never in compiled prompts
    # Compiled steps, where S is dynamic, have a variant for either answer, and check S before each
    # call.
    if not (has_few_blocks and S >= MIN_KEYS and S % CHUNK == 0):
        return attend(q, k, v, bias, sinks)
    n = S // CHUNK
    q = q.reshape(1, B * G, rows, E).expand(n, -1, -1, -1)  # (B, H, T, E) -> (n, B*G, R*T, E)
    k = k.reshape(B * G, n, CHUNK, E).transpose(0, 1)  # (B, G, S, E) -> (n, B*G, CHUNK, E)
    v = v.reshape(B * G, n, CHUNK, E).transpose(0, 1)
    bias = bias.expand(B, G, rows, S).reshape(B * G, rows, n, CHUNK)
    bias = bias.permute(2, 0, 1, 3)  # (n, B*G, R*T, CHUNK)
    y, logsumexp = operator(q, k, v, bias)  # (n, B*G, R*T, E), (n, B*G, R*T)
    if sinks is not None:
        sinks = sinks.float()[:, None].expand(B, H, T).reshape(B * G, rows, 1)
    y = merge_chunks(y, logsumexp[..., None], sinks)
    return y.to(q.dtype).view(B, H, T, E)  # (B*G, R*T, E) -> (B, H, T, E)


def merge_chunks(
    y: Tensor,
    logsumexp: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attentions y (n, …, E) over n chunks and the log-sum-exps (n, …, 1) of their scores -> the
    attention (…, E) float32 over all chunks, 0 for a query that sees no key. sinks (…, 1) float32:
    a score of each query that takes part in the softmax without a value."""
    logsumexp = logsumexp.expand(y.shape)  # with reductions of one shape Inductor makes one kernel
    largest = logsumexp.amax(0)
    weights = (logsumexp - largest).exp()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    # The attention over a chunk of which a query sees nothing may be NaN.
    parts = torch.where(weights > 0, weights * y, 0)
    # A value of three reads: one of two Inductor computes again in each output of the next product.
    return torch.where(largest > -math.inf, parts.sum(0) / total, 0)

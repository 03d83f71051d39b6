"""The naive twin: one Llama-family forward pass in float64, straight from the papers.

No cache, no fused matrices, no shared code with model.py: it reads Hugging Face's config keys and tensor names
itself and loops over heads and positions. Slow on purpose; it is the thing one checks by reading.
"""

import math

import torch


def angles(hf: dict, E: int, n: int) -> tuple[torch.Tensor, float]:
    """Rotation angles (n, E/2) and the factor on cos and sin."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor, scale, frequencies = rope.get("factor", 1.0), 1.0, []
    for pair in range(E // 2):
        frequency = theta ** (-2 * pair / E)
        if kind == "linear":
            frequency /= factor
        if kind == "llama3":
            original = rope["original_max_position_embeddings"]
            wavelength = 2 * math.pi / frequency
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                frequency /= factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings") or hf["max_position_embeddings"]
            dims = [
                E * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
            ]
            if rope.get("truncate") is not False:
                dims = [math.floor(dims[0]), math.ceil(dims[1])]
            low, high = max(dims[0], 0), min(dims[1], E - 1)
            ramp = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
            frequency = ramp * frequency / factor + (1 - ramp) * frequency
            scale = rope.get("attention_factor") or 0.1 * math.log(factor) + 1
        frequencies.append(frequency)
    return torch.arange(n, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64), scale


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, angle: torch.Tensor, scale: float) -> torch.Tensor:
    """x (n, E) as complex pairs (x[i], x[i + E/2]) turned by angle (n, E/2)."""
    half = x.size(-1) // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.full_like(angle, scale), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def window_of(hf: dict, layer: int) -> int | None:
    if hf["model_type"] in ("qwen2", "qwen3"):
        slides = hf.get("use_sliding_window") and layer >= hf["max_window_layers"]
        return hf["sliding_window"] if slides else None
    if hf["model_type"] == "gpt_oss":
        return hf["sliding_window"] if layer % 2 == 0 else None
    if hf["model_type"] == "qwen3_moe" and not hf.get("use_sliding_window"):
        return None
    return hf.get("sliding_window") if hf["model_type"] in ("mistral", "mixtral", "qwen3_moe") else None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + (-gate).exp()) * up


def gpt_oss_expert(w: dict, p: str, number: int, h: torch.Tensor) -> torch.Tensor:
    """One expert on h (D,): gate's and up's columns in turn, both clamped."""
    both = h @ w[p + "experts.gate_up_proj"][number] + w[p + "experts.gate_up_proj_bias"][number]
    gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    y = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    return y @ w[p + "experts.down_proj"][number] + w[p + "experts.down_proj_bias"][number]


def experts(hf: dict, w: dict, p: str, h: torch.Tensor) -> torch.Tensor | None:
    """What the sparse feed-forward of the layer with names p makes of h (n, D), token by token; None: it is dense."""
    routers = {f"{p}block_sparse_moe.gate": "mixtral", f"{p}mlp.router": "gpt_oss", f"{p}mlp.gate": "qwen"}
    name = next((name for name in routers if f"{name}.weight" in w), None)
    if name is None:
        return None
    kind, rows = routers[name], []
    for x in h:
        scores = w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))[: hf["num_experts_per_tok"]]
        shares = scores.softmax(0)
        if kind != "qwen" or hf["norm_topk_prob"]:
            shares = shares / shares[order].sum()
        y = torch.zeros_like(x)
        for number in order:
            if kind == "gpt_oss":
                y += shares[number] * gpt_oss_expert(w, f"{p}mlp.", number, x)
                continue
            names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            room = f"{p}{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}.experts.{number}"
            gate, up, down = (w[f"{room}.{matrix}.weight"] for matrix in names)
            y += shares[number] * (down @ swiglu(gate @ x, up @ x))
        if f"{p}mlp.shared_expert_gate.weight" in w:
            gate, up, down = (w[f"{p}mlp.shared_expert.{matrix}_proj.weight"] for matrix in ("gate", "up", "down"))
            y += down @ swiglu(gate @ x, up @ x) / (1 + (-w[f"{p}mlp.shared_expert_gate.weight"] @ x).exp())
        rows.append(y)
    return torch.stack(rows)


def logits(hf: dict, weights: dict[str, torch.Tensor], tokens: list[int], entering: list | None = None) -> torch.Tensor:
    """Logits (n, V) in float64 for one sequence. What enters each layer (n, D) is put on the list `entering`."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    n, H, eps = len(tokens), hf["num_attention_heads"], hf["rms_norm_eps"]
    G = hf.get("num_key_value_heads") or H
    E = hf.get("head_dim") or hf["hidden_size"] // H
    angle, scale = angles(hf, E, n)

    def linear(x, name):
        bias = w.get(f"{name}.bias")
        return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        entering is None or entering.append(x)
        h = norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"{p}self_attn.{c}_proj") for c in "qkv")
        window, heads = window_of(hf, layer), []
        for head in range(H):
            group = head // (H // G)
            qh, kh, vh = q[:, head * E :][:, :E], k[:, group * E :][:, :E], v[:, group * E :][:, :E]
            if p + "self_attn.q_norm.weight" in w:
                qh = norm(qh, w[p + "self_attn.q_norm.weight"], eps)
                kh = norm(kh, w[p + "self_attn.k_norm.weight"], eps)
            qh, kh = rotate(qh, angle, scale), rotate(kh, angle, scale)
            rows = []
            for i in range(n):
                first = 0 if window is None else max(0, i - window + 1)
                scores = kh[first : i + 1] @ qh[i] / math.sqrt(E)
                sinks = w.get(p + "self_attn.sinks", torch.empty(0))  # a score more, which brings no value
                shares = torch.cat((scores, sinks[head : head + 1])).softmax(0)[: len(scores)]
                rows.append(shares @ vh[first : i + 1])
            heads.append(torch.stack(rows))
        x = x + linear(torch.cat(heads, dim=-1), f"{p}self_attn.o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        y = experts(hf, w, p, h)
        if y is None:
            y = linear(swiglu(linear(h, f"{p}mlp.gate_proj"), linear(h, f"{p}mlp.up_proj")), f"{p}mlp.down_proj")
        x = x + y
    x = norm(x, w["model.norm.weight"], eps)
    return x @ (w["model.embed_tokens.weight"] if hf.get("tie_word_embeddings") else w["lm_head.weight"]).T

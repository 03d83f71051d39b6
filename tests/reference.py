"""The naive twin: one Llama-family forward pass in float64, straight from the papers.

No cache, no fused matrices, no shared code with model.py: it reads Hugging Face's config keys and
tensor names itself and loops over heads and positions. Slow on purpose; it is the thing one checks
by reading.
"""

import math

import torch


def angles(hf: dict, E: int, n: int, window: int | None = None) -> tuple[torch.Tensor, float]:
    """Rotation angles (n, E/2) and the factor on cos and sin, in a layer with this window."""
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    rope = rope.get("sliding_attention" if window else "full_attention") or rope  # OLMo 3
    E = int(E * (rope.get("partial_rotary_factor") or 1))
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor, scale, frequencies = rope.get("factor", 1.0), 1.0, []
    for pair in range(E // 2):
        frequency = theta ** (-2 * pair / E)
        if kind == "dynamic":  # Hunyuan's
            frequency = (theta * rope["alpha"] ** (E / (E - 2))) ** (-2 * pair / E)
        if kind == "longrope":
            original = hf["original_max_position_embeddings"]
            frequency /= rope["long_factor" if n > original else "short_factor"][pair]
            scale = math.sqrt(
                1 + math.log(hf["max_position_embeddings"] / original) / math.log(original)
            )
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
            scale = (
                1.0
                if rope.get("mscale_all_dim")
                else rope.get("attention_factor") or 0.1 * math.log(factor) + 1
            )
        frequencies.append(frequency)
    return torch.arange(n, dtype=torch.float64)[:, None] * torch.tensor(
        frequencies, dtype=torch.float64
    ), scale


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, angle: torch.Tensor, scale: float) -> torch.Tensor:
    """x (n, E) as complex pairs (x[i], x[i + E/2]) turned by angle (n, E/2)."""
    half = x.size(-1) // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(
        torch.full_like(angle, scale), angle
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotate_pairs(hf: dict, x: torch.Tensor, angle: torch.Tensor, scale: float) -> torch.Tensor:
    """`rotate` of the leading dimensions that have an angle; ERNIE's pairs are neighbours."""
    n = 2 * angle.size(1)
    if hf["model_type"].startswith(("ernie4_5", "glm")) and hf["model_type"] != "glm4_moe":
        # a rotation of both q and k that their product does not see
        x = torch.cat((x[:, :n:2], x[:, 1:n:2], x[:, n:]), dim=-1)
    return torch.cat((rotate(x[:, :n], angle, scale), x[:, n:]), dim=-1)


def rotates(hf: dict, layer: int) -> bool:
    if hf.get("layer_rope_theta"):  # Granite SWA
        return hf["layer_rope_theta"][layer] != 0
    if hf["model_type"] == "smollm3":
        return bool(hf["no_rope_layers"][layer])
    return (
        not hf["model_type"].startswith("exaone")
        or not hf["sliding_window"]
        or window_of(hf, layer) is not None
    )


LISTED_WINDOWS = (
    "granite_swa",
    "granitemoe_swa",
    "mellum",
    "cwm",
    "ministral",
    "gemma3_text",
    "exaone_moe",
)


def window_of(hf: dict, layer: int) -> int | None:
    if hf["model_type"] in LISTED_WINDOWS:
        return hf["sliding_window"] if "sliding" in hf["layer_types"][layer] else None
    if hf["model_type"] == "dots1":
        return hf["sliding_window"] if layer >= hf["max_window_layers"] else None
    if hf["model_type"] in ("olmo3", "exaone4"):
        return hf["sliding_window"] if (layer + 1) % 4 else None
    if hf["model_type"] in ("qwen2", "qwen3"):
        slides = hf.get("use_sliding_window") and layer >= hf["max_window_layers"]
        return hf["sliding_window"] if slides else None
    if hf["model_type"] == "gpt_oss":
        return hf["sliding_window"] if layer % 2 == 0 else None
    if hf["model_type"] == "qwen3_moe" and not hf.get("use_sliding_window"):
        return None
    return (
        hf.get("sliding_window")
        if hf["model_type"] in ("mistral", "mixtral", "qwen3_moe", "phi3")
        else None
    )


FULL_NORMS = ("olmo", "minimax")  # of all heads as one vector
SIGMOID_ROUTERS = ("glm4_moe", "minimax_m2", "solar_open", "exaone_moe", "dots1", "hy_v3")
# Where its keys and tensors are called otherwise, by the names of most.
EXPERT_NAMES = {
    "block_sparse_moe.e_score_correction_bias": "bias",
    "mlp.gate.e_score_correction_bias": "bias",
    "mlp.e_score_correction_bias": "bias",
    "mlp.moe_statics.e_score_correction_bias": "bias",
    "mlp.expert_bias": "bias",
}


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + (-gate).exp()) * up


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) / 2 * up


def gpt_oss_expert(w: dict, p: str, number: int, h: torch.Tensor) -> torch.Tensor:
    """One expert on h (D,): gate's and up's columns in turn, both clamped."""
    both = h @ w[p + "experts.gate_up_proj"][number] + w[p + "experts.gate_up_proj_bias"][number]
    gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    y = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    return y @ w[p + "experts.down_proj"][number] + w[p + "experts.down_proj_bias"][number]


def experts(hf: dict, w: dict, p: str, h: torch.Tensor) -> torch.Tensor | None:
    """What the sparse feed-forward of the layer with names p makes of h (n, D), token by token;
    None: it is dense."""
    routers = {
        f"{p}block_sparse_moe.gate": "mixtral",
        f"{p}block_sparse_moe.router.layer": "granitemoe",
        f"{p}block_sparse_moe.router": "granitemoe",
        f"{p}mlp.router": "gpt_oss",
        f"{p}mlp.gate": "qwen",
        f"{p}mlp.gate.wg": "hunyuan",
        f"{p}mlp.router.gate": "hy3",
    }
    name = next((name for name in routers if f"{name}.weight" in w), None)
    if name is None:
        return None
    kind, rows = routers[name], []
    for x in h:
        scores = w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)
        k = hf.get("num_experts_per_tok") or hf.get("moe_k") or hf["moe_topk"]
        k = k[0] if isinstance(k, list) else k
        sigmoid = hf["model_type"] in SIGMOID_ROUTERS
        shares = 1 / (1 + (-scores).exp()) if sigmoid else scores.softmax(0)
        biases = [w[p + key].flatten() for key in EXPERT_NAMES if p + key in w]
        ranks = shares + sum(biases) if biases else scores
        order = sorted(range(len(scores)), key=lambda i: (-ranks[i].item(), i))[:k]
        if kind != "qwen" or hf.get("norm_topk_prob", True):
            shares = shares / shares[order].sum()
        shares = shares * (hf.get("routed_scaling_factor") or hf.get("router_scaling_factor") or 1)
        y = torch.zeros_like(x)
        for number in order:
            if kind == "gpt_oss":
                y += shares[number] * gpt_oss_expert(w, f"{p}mlp.", number, x)
                continue
            merged = [
                w.get(f"{p}block_sparse_moe.{side}put_linear.weight") for side in ("in", "out")
            ]
            if merged[0] is None:  # as transformers 5 saves Qwen3-VL-MoE and Granite MoE SWA
                room = f"{p}{'block_sparse_moe' if kind == 'granitemoe' else 'mlp'}.experts"
                merged = [w.get(f"{room}.{part}_proj") for part in ("gate_up", "down")]
            if merged[0] is not None:
                gate, up = (merged[0][number] @ x).chunk(2)
                y += shares[number] * (merged[1][number] @ swiglu(gate, up))
                continue
            names = (
                ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            )
            room = f"{p}{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}.experts.{number}"
            gate, up, down = (w[f"{room}.{matrix}.weight"] for matrix in names)
            y += shares[number] * (down @ swiglu(gate @ x, up @ x))
        for room in ("shared_experts", "shared_mlp"):  # without a gate
            if f"{p}mlp.{room}.up_proj.weight" in w:
                gate, up, down = (
                    w[f"{p}mlp.{room}.{matrix}_proj.weight"] for matrix in ("gate", "up", "down")
                )
                y += down @ swiglu(gate @ x, up @ x)
        if f"{p}shared_mlp.input_linear.weight" in w:  # Granite
            gate, up = (w[f"{p}shared_mlp.input_linear.weight"] @ x).chunk(2)
            y += w[f"{p}shared_mlp.output_linear.weight"] @ swiglu(gate, up)
        if f"{p}mlp.shared_expert_gate.weight" in w:
            gate, up, down = (
                w[f"{p}mlp.shared_expert.{matrix}_proj.weight"] for matrix in ("gate", "up", "down")
            )
            y += (
                down
                @ swiglu(gate @ x, up @ x)
                / (1 + (-w[f"{p}mlp.shared_expert_gate.weight"] @ x).exp())
            )
        rows.append(y)
    return torch.stack(rows)


def named(w: dict[str, torch.Tensor], hf: dict) -> dict[str, torch.Tensor]:
    """Phi-3's and Hunyuan's tensors by Llama's names."""
    found, H = {}, hf["num_attention_heads"]
    E = hf.get("head_dim") or hf["hidden_size"] // H
    sizes = [H * E, *[(hf.get("num_key_value_heads") or H) * E] * 2]
    for name, x in w.items():
        for fused, parts in (
            ("qkv_proj", x.split(sizes) if "qkv_proj" in name else ()),
            ("gate_up_proj", x.chunk(2)),
        ):
            if fused in name and hf["model_type"] in ("phi3", "glm", "glm4"):
                names = (
                    ("q_proj", "k_proj", "v_proj")
                    if fused == "qkv_proj"
                    else ("gate_proj", "up_proj")
                )
                found |= {
                    name.replace(fused, own): part for own, part in zip(names, parts, strict=True)
                }
        found[name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")] = x
    return found


def logits(
    hf: dict, weights: dict[str, torch.Tensor], tokens: list[int], entering: list | None = None
) -> torch.Tensor:
    """Logits (n, V) in float64 for one sequence. What enters each layer, and what leaves the last
    one, both (n, D), is put on the list `entering`."""
    if "text_config" in hf:
        hf = {**hf["text_config"], "tie_word_embeddings": hf["tie_word_embeddings"]}
        weights = {name.replace("language_model.", ""): x for name, x in weights.items()}
    w = named({name: tensor.double() for name, tensor in weights.items()}, hf)
    granite, rope = hf["model_type"].startswith("granite"), hf.get("rope_parameters") or {}
    gemma = hf["model_type"] == "gemma3_text"
    if gemma:
        w = {name: 1 + x if "norm" in name else x for name, x in w.items()}
    residual = hf["residual_multiplier"] if granite else 1
    n, H, eps = len(tokens), hf["num_attention_heads"], hf["rms_norm_eps"]
    G = hf.get("num_key_value_heads") or H
    E = hf.get("head_dim") or hf["hidden_size"] // H
    root = hf["attention_multiplier"] if granite else 1 / math.sqrt(E)
    root = hf["query_pre_attn_scalar"] ** -0.5 if gemma else root

    def linear(x, name):
        bias = w.get(f"{name}.bias")
        return x @ w[f"{name}.weight"].T + (0 if bias is None else bias)

    x = w["model.embed_tokens.weight"][tokens] * (hf["embedding_multiplier"] if granite else 1)
    x = x * math.sqrt(x.size(1)) if gemma else x
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        entering is None or entering.append(x)
        after = p + "input_layernorm.weight" not in w  # OLMo 2, EXAONE 4
        h = x if after else norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"{p}self_attn.{c}_proj") for c in "qkv")
        window, heads = window_of(hf, layer), []
        angle, scale = angles(hf, E, n, window)
        normed = p + "self_attn.q_norm.weight" in w
        if hf["model_type"].startswith(FULL_NORMS):
            q, k = (
                norm(x, w[f"{p}self_attn.{c}_norm.weight"], eps) for x, c in ((q, "q"), (k, "k"))
            )
        for head in range(H):
            group = head // (H // G)
            qh, kh, vh = q[:, head * E :][:, :E], k[:, group * E :][:, :E], v[:, group * E :][:, :E]
            if normed and not hf["model_type"].startswith((*FULL_NORMS, "hunyuan")):
                qh = norm(qh, w[p + "self_attn.q_norm.weight"], eps)
                kh = norm(kh, w[p + "self_attn.k_norm.weight"], eps)
            if rotates(hf, layer):
                qh, kh = rotate_pairs(hf, qh, angle, scale), rotate_pairs(hf, kh, angle, scale)
            if hf["model_type"].startswith("hunyuan"):
                qh = norm(qh, w[p + "self_attn.q_norm.weight"], eps)
                kh = norm(kh, w[p + "self_attn.k_norm.weight"], eps)
            if rope.get("llama_4_scaling_beta"):
                steps = torch.arange(n) // rope["original_max_position_embeddings"]
                qh = qh * (1 + rope["llama_4_scaling_beta"] * (1 + steps).double().log())[:, None]
            rows = []
            for i in range(n):
                first = 0 if window is None else max(0, i - window + 1)
                scores = kh[first : i + 1] @ qh[i] * root
                # a score more, which brings no value
                sinks = w.get(p + "self_attn.sinks", torch.empty(0))
                shares = torch.cat((scores, sinks[head : head + 1])).softmax(0)[: len(scores)]
                rows.append(shares @ vh[first : i + 1])
            heads.append(torch.stack(rows))
        y = linear(torch.cat(heads, dim=-1), f"{p}self_attn.o_proj")
        # names of norms behind attention, before and behind the feed-forward
        around = ("post_self_attn", "post_attention", "post_mlp")  # GLM-4-0414
        if gemma:
            around = ("post_attention", "pre_feedforward", "post_feedforward")
        around = [f"{p}{name}_layernorm.weight" for name in around]
        around = around if all(name in w for name in around) else None
        if around:
            y = norm(y, w[around[0]], eps)
        x = x + (norm(y, w[p + "post_attention_layernorm.weight"], eps) if after else y * residual)
        before = around[1] if around else p + "post_attention_layernorm.weight"
        h = x if after else norm(x, w[before], eps)
        y = experts(hf, w, p, h)
        if y is None:
            gate, up = linear(h, f"{p}mlp.gate_proj"), linear(h, f"{p}mlp.up_proj")
            y = linear((geglu if gemma else swiglu)(gate, up), f"{p}mlp.down_proj")
        if around:
            y = norm(y, w[around[2]], eps)
        x = x + (
            norm(y, w[p + "post_feedforward_layernorm.weight"], eps) if after else y * residual
        )
    entering is None or entering.append(x)
    x = norm(x, w["model.norm.weight"], eps)
    head = w["model.embed_tokens.weight"] if hf.get("tie_word_embeddings") else w["lm_head.weight"]
    return x @ head.T / (hf["logits_scaling"] if granite else 1)


def naive_penalties(
    logits: torch.Tensor, text: list[int], num_prompt: int, sampling
) -> torch.Tensor:
    """logits (V,) after `text`, by definition: bias, then the three penalties in float32, token by
    token."""
    result, output = logits.clone(), text[num_prompt:]
    for id, bias in sampling.logit_bias:
        result[id] += bias
    for id in {*text}:
        x, penalty = result[id], sampling.repetition_penalty
        result[id] = x / penalty if x > 0 else x * penalty
    for id in {*output}:
        result[id] -= sampling.presence_penalty
        result[id] -= sampling.frequency_penalty * output.count(id)
    return result

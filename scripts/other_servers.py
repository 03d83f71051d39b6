"""Keys of other OpenAI-compatible servers: which values change nothing, and which equal another.

    NEUTRAL       key -> the values at which a request is as without it
    EQUIVALENT    key -> pairs of a value and the value that this server reads in its place
    RENAMED       key -> the key that this server reads in its place
    translated    the keys of a request's body that scripts/openai_form.py is to read or to refuse

A key at a neutral value is left out: clients send their defaults. What would change an answer stays
in the body, and the request's type refuses it by name. The keys are those of OpenAI's API, of
vLLM's and SGLang's request types (vllm/entrypoints/openai, sglang/srt/entrypoints/openai), and of
llama.cpp's tools/server/README.md.
"""

from collections.abc import Iterable

from decoding.sampling import PENALTIES, SETTINGS

UNLIMITED = 2**31  # max_tokens beyond any context

ANY = ("any value",)
OFF = (False, 0, "", [], {})

OPENAI = {
    "user": ANY,
    "metadata": ANY,
    "store": ANY,
    "service_tier": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "parallel_tool_calls": (True,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "echo": OFF,
    "logprobs": (False,),
    "top_logprobs": (0,),
}
VLLM = {
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": ANY,  # matters only where skip_special_tokens is false
    "include_stop_str_in_output": OFF,
    "use_beam_search": OFF,
    "length_penalty": ANY,  # of a beam search
    "early_stopping": ANY,  # of a beam search
    "bad_words": OFF,
    "logits_processors": OFF,
    "return_tokens_as_token_ids": OFF,
    "return_token_ids": OFF,
    "return_token_offsets": OFF,
    "return_prompt_text": OFF,
    "add_generation_prompt": (True,),
    "continue_final_message": OFF,
    "documents": OFF,
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "priority": (0,),
    "request_id": ANY,
    "session_id": ANY,
    "cache_salt": ANY,
    "watermarking": OFF,
    "vllm_xargs": OFF,
    "kv_transfer_params": OFF,
    "ec_transfer_params": OFF,
    "mm_processor_kwargs": OFF,
    "media_io_kwargs": OFF,
    "routed_experts_prompt_start": (0,),
    "truncation_side": ANY,  # of truncate_prompt_tokens
}
SGLANG = {
    "no_stop_trim": OFF,
    "return_hidden_states": OFF,
    "return_routed_experts": OFF,
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": OFF,
    "return_prompt_token_ids": OFF,
    "return_meta_info": OFF,
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "stop_regex": OFF,
    "use_audio_in_video": OFF,
    "rid": ANY,
    "extra_key": ANY,
    "custom_labels": ANY,
    "custom_params": OFF,
}
LLAMA_CPP = {
    "repeat_penalty": (1.0,),
    "typical_p": (1.0,),
    "dynatemp_range": (0.0,),
    "dynatemp_exponent": ANY,  # of dynatemp_range
    "dry_multiplier": (0.0,),
    "dry_base": ANY,  # this and the next three of dry_multiplier
    "dry_allowed_length": ANY,
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "xtc_probability": (0.0,),
    "xtc_threshold": ANY,  # of xtc_probability
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "mirostat_tau": ANY,  # of mirostat
    "mirostat_eta": ANY,
    "grammar": ("",),
    "n_probs": (0,),
    "n_indent": (0,),
    "n_keep": ANY,  # this and the next of a context that shifts
    "n_discard": ANY,
    "n_cache_reuse": ANY,
    "min_keep": (0, 1),
    "t_max_predict_ms": (-1, 0),
    "id_slot": (-1,),
    "cache_prompt": (True,),
    "return_tokens": OFF,
    "return_progress": OFF,
    "timings_per_token": OFF,
    "post_sampling_probs": OFF,
    "response_fields": OFF,
    "sse_ping_interval": ANY,
    "reasoning_format": ("none", "auto", "deepseek"),
    "parse_tool_calls": (True,),
    "thinking_forced_open": OFF,
    "lora": OFF,
}
NEUTRAL = OPENAI | VLLM | SGLANG | LLAMA_CPP
EQUIVALENT = {
    "top_k": [(-1, 0)],
    "max_tokens": [(-1, UNLIMITED)],
    "max_completion_tokens": [(-1, UNLIMITED)],
    "logit_bias": [([], {})],
}
RENAMED = {"n_predict": "max_tokens"}
LIMITS = ("max_tokens", "max_completion_tokens")


def translated(body: dict, is_chat: bool, defaults: dict) -> dict:
    """The body without null and neutral values, and with this server's keys and values in place of
    equal ones. `defaults`: the server's own settings, which the body's replace."""
    body = dict(body)
    if is_among(body.get("repeat_penalty"), (1.0,)) and body.get("repetition_penalty") is None:
        body["repetition_penalty"] = 1.0  # none, also where the server has one by default
    if body.get("tool_choice") == "none":
        body["tools"] = None  # a prompt without tools asks for no call
    if is_chat and body.get("reasoning_format") == "none":
        body["separate_reasoning"] = False
    for name, own_name in RENAMED.items():
        if name in body and own_name not in body:
            body[own_name] = body.pop(name)
    drop_unlimited(body)
    neutral = neutral_values(body, is_chat, defaults)
    result = {}
    for name, value in body.items():
        is_neutral = name not in SETTINGS and is_among(value, neutral.get(name, ()))
        if value is not None and not is_neutral:
            result[name] = equivalent(value, EQUIVALENT.get(name, ()))
    return result


def drop_unlimited(body: dict) -> None:
    """Where a request has two different limits, remove one of -1, which is none."""
    limits = [body.get(name) for name in LIMITS]
    if None in limits or limits[0] == limits[1]:
        return
    for name in LIMITS:
        if body[name] == -1:
            del body[name]


def neutral_values(body: dict, is_chat: bool, defaults: dict) -> dict:
    """NEUTRAL, and the keys whose neutral values depend on the rest of the request."""
    settings = defaults | {name: value for name, value in body.items() if value is not None}
    is_penalized = any(
        settings.get(name, SETTINGS[name].neutral) != SETTINGS[name].neutral for name in PENALTIES
    )
    return NEUTRAL | {
        "best_of": (body.get("n") or 1,),
        "add_special_tokens": (not is_chat,),  # what a server adds by itself
        "repeat_last_n": (-1,) if is_penalized else ANY,
    }


def is_among(value: object, others: Iterable) -> bool:
    """Is it one of the others? False is no 0, and 1.0 is 1: clients write numbers either way."""
    if others is ANY:
        return True
    is_bool = isinstance(value, bool)
    return any(value == other for other in others if isinstance(other, bool) == is_bool)


def equivalent(value: object, pairs: Iterable[tuple]) -> object:
    """The value that this server reads in place of `value`."""
    for other, own_value in pairs:
        if is_among(value, [other]):
            return own_value
    return value

"""Keys of other OpenAI-compatible servers: which values change nothing, and which equal another.

    LABELS        keys that name a request or its sender, at any value
    DEFAULTS      key -> the values at which a request is as without it
    EQUIVALENT    key -> pairs of a value and the value that this server reads in its place
    RENAMED       key -> the key that this server reads in its place
    translated    the keys of a request's body that openai_form.py is to read or to refuse

Clients send the defaults of the server that they were written for. A key that this server does not
have is left out where its value asks for nothing: null, false, 0, empty, 1.0 of a factor or a
share, or its value in DEFAULTS. At any other it stays in the body, and the request's type refuses
it by name, so that nothing that was asked for is dropped without a word.
"""

from collections.abc import Collection, Iterable

UNLIMITED = 2**31  # max_tokens beyond any context
EMPTY = (False, 0, "", [], {})
FACTORS = ("penalty", "_p", "exponent")  # ends of their names; 1.0 of them changes nothing
LABELS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "session_id",
    "cache_salt",
    "rid",
}
DEFAULTS = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "cache_prompt": (True,),
    "reasoning_format": ("none", "auto", "deepseek"),
}  # and best_of and add_special_tokens, which depend on the rest of the request
EQUIVALENT = {
    "top_k": [(-1, 0)],
    "max_tokens": [(-1, UNLIMITED)],
    "max_completion_tokens": [(-1, UNLIMITED)],
    "logit_bias": [([], {})],
}
RENAMED = {"n_predict": "max_tokens"}
LIMITS = ("max_tokens", "max_completion_tokens")


def translated(body: dict, is_chat: bool, own_keys: Collection[str]) -> dict:
    """The body without null and neutral values, and with this server's keys and values in place of
    equal ones. `own_keys`: those that the request's type reads."""
    body = with_own_names(body, is_chat)
    drop_unlimited(body)
    defaults = DEFAULTS | {
        "best_of": (body.get("n") or 1,),
        "add_special_tokens": (not is_chat,),  # what a server adds by itself
    }
    result = {}
    for name, value in body.items():
        neutral = () if name in own_keys else neutral_values(name)
        neutral = defaults.get(name, neutral)
        if value is not None and name not in LABELS and not is_among(value, neutral):
            result[name] = equivalent(value, EQUIVALENT.get(name, ()))
    return result


def with_own_names(body: dict, is_chat: bool) -> dict:
    """The body with the keys here in place of those that say the same elsewhere."""
    body = dict(body)
    if is_among(body.get("repeat_penalty"), (1.0,)) and body.get("repetition_penalty") is None:
        body["repetition_penalty"] = 1.0  # none, also where the server has one by default
    if body.get("tool_choice") == "none" or body.get("tools") == []:
        body["tools"] = None  # a prompt without tools asks for no call
    if is_chat and body.get("reasoning_format") == "none":
        body["separate_reasoning"] = False
    for name, own_name in RENAMED.items():
        if name in body and own_name not in body:
            body[own_name] = body.pop(name)
    return body


def drop_unlimited(body: dict) -> None:
    """Where a request has two different limits, remove one of -1, which is none."""
    limits = [body.get(name) for name in LIMITS]
    if None in limits or limits[0] == limits[1]:
        return
    for name in LIMITS:
        if body[name] == -1:
            del body[name]


def neutral_values(name: str) -> tuple:
    """The values at which a key that nobody here knows asks for nothing."""
    return (*EMPTY, 1.0) if name.endswith(FACTORS) else EMPTY


def is_among(value: object, others: Iterable) -> bool:
    """Is it one of the others? False is no 0, and 1.0 is 1: clients write numbers either way."""
    is_bool = isinstance(value, bool)
    return any(value == other for other in others if isinstance(other, bool) == is_bool)


def equivalent(value: object, pairs: Iterable[tuple]) -> object:
    """The value that this server reads in place of `value`."""
    for other, own_value in pairs:
        if is_among(value, [other]):
            return own_value
    return value

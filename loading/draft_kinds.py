"""The kind of a draft folder, by the keys of its config.json. drafts/registry.py loads them."""

from loading.config import Section

KINDS = ("model", "pard", "eagle3", "dflash")
# A key of config.json -> the kind of its folder. The first key that is there decides.
KIND_BY_KEY = {"dflash_config": "dflash", "draft_vocab_size": "eagle3", "pard_token": "pard"}
UNSUPPORTED_BY_KEY = {"medusa_num_heads": "Medusa", "markov_rank": "DSpark", "ptd_token_id": "P-EAGLE"}


def kind_of(hf: dict) -> str:
    """One of KINDS. ValueError names the key and value that mark a draft of another kind."""
    hf = Section(hf)
    speculator = hf.get("speculators_model_type")
    kind_by_key = {"speculators_model_type": str(speculator), **UNSUPPORTED_BY_KEY, **KIND_BY_KEY}
    marks = {key: kind for key, kind in kind_by_key.items() if hf.get(key) is not None}
    for key, kind in marks.items():
        if kind not in KINDS:
            raise hf.refused(key, f"makes it a {kind} draft; supported: {', '.join(KINDS)}")
    is_eagle = any("eagle3" in str(name).lower() for name in hf.get("architectures") or [])
    return "eagle3" if is_eagle else next(iter(marks.values()), "model")

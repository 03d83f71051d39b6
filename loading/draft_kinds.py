"""The kind of a draft folder, by the keys of its config.json. drafts/registry.py loads them."""

from loading.config import Section

KINDS = ("model", "pard", "eagle3", "dflash")
# A key of config.json -> the kind of its folder. The first key that is there decides.
KIND_BY_KEY = {
    "medusa_num_heads": "Medusa",
    "markov_rank": "DSpark",
    "ptd_token_id": "P-EAGLE",
    "dflash_config": "dflash",
    "draft_vocab_size": "eagle3",
    "pard_token": "pard",
}


def kind_of(hf: dict) -> str:
    """One of KINDS. ValueError names the key and value that mark a draft of another kind."""
    hf = Section(hf)
    if hf.get("architectures") == ["Qwen3DSparkModel"]:
        return "dflash"  # in DeepSpec's layout
    kind_by_key = {"speculators_model_type": hf.get("speculators_model_type"), **KIND_BY_KEY}
    for key, kind in kind_by_key.items():
        if hf.get(key) is None:
            continue
        if kind not in KINDS:
            raise hf.refused(key, f"makes it a {kind} draft; supported: {', '.join(KINDS)}")
        return kind
    is_eagle = "eagle3" in str(hf.get("architectures")).lower()
    return "eagle3" if is_eagle else "model"

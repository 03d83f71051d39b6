"""The type of a draft folder, by the keys of its config.json. drafts/registry.py loads them."""

from loading.config import Section

DRAFT_TYPES = ("model", "pard", "eagle3", "dflash")
# A key of config.json -> the type of its folder. The first key that is there decides.
TYPE_BY_KEY = {
    "medusa_num_heads": "Medusa",
    "markov_rank": "DSpark",
    "ptd_token_id": "P-EAGLE",
    "dflash_config": "dflash",
    "draft_vocab_size": "eagle3",
    "pard_token": "pard",
}


def draft_type_of(hf: dict) -> str:
    """One of DRAFT_TYPES. UserError names the key and value that mark a draft of another type."""
    hf = Section(hf)
    if hf.get("architectures") == ["Qwen3DSparkModel"]:
        return "dflash"  # in DeepSpec's layout
    type_by_key = {"speculators_model_type": hf.get("speculators_model_type"), **TYPE_BY_KEY}
    for key, draft_type in type_by_key.items():
        if hf.get(key) is None:
            continue
        if draft_type not in DRAFT_TYPES:
            supported = ", ".join(DRAFT_TYPES)
            raise hf.refused(key, f"makes it a {draft_type} draft; supported: {supported}")
        return draft_type
    is_eagle = "eagle3" in str(hf.get("architectures")).lower()
    return "eagle3" if is_eagle else "model"

"""What a draft folder's config.json says that it is, and the two published layouts of an EAGLE-3 draft.

    kind_of         model | pard | eagle3, by keys alone; other kinds of draft are refused
    Eagle           what an EAGLE-3 draft computes, read by
    eagle_of        from SafeAILab's layout (github.com/SafeAILab/EAGLE, one tensor tree `midlayer.*`) or that of
                    speculators (github.com/vllm-project/speculators, `layers.0.*`, the layer's own config nested)

This file sees a parsed config.json and names of tensors. It does not know models.
"""

from typing import NamedTuple

from loading.config import Section

OTHERS = {"medusa_num_heads": "Medusa", "dflash_config": "DFlash", "ptd_token_id": "P-EAGLE"}  # nothing here runs them


class Eagle(NamedTuple):
    layer: dict  # the config.json of a Llama with one layer
    vocab_size: int  # of the draft
    aux_layer_ids: tuple[int, ...]  # the target's layers whose inputs go into `fc`
    target_dim: int
    norm_before_residual: bool  # the residual stream begins with the normed state
    norm_before_fc: bool  # one norm over all of these inputs
    fc_norm: bool  # a norm for each
    norm_output: bool  # later steps are fed the state behind the last norm


def kind_of(hf: dict) -> str:
    """ValueError names the key and value of a draft that is none of these."""
    hf = Section(hf)
    model = hf.get("speculators_model_type")
    if model not in (None, "eagle3"):
        raise hf.refused("speculators_model_type", "is not supported; supported: 'eagle3'")
    for key, name in OTHERS.items():
        if hf.get(key) is not None:
            raise hf.refused(key, f"makes it a {name} draft; a model, a PARD draft and an EAGLE-3 draft are supported")
    named = any("eagle3" in str(name).lower() for name in hf.get("architectures") or [])
    if model or named or hf.get("draft_vocab_size") is not None:
        return "eagle3"
    return "model" if hf.get("pard_token") is None else "pard"


def pard_token(hf: dict) -> int:
    """The mask's id. ValueError where it is none of the model's."""
    mask, V = hf["pard_token"], Section(hf).size("vocab_size")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < V:
        raise Section(hf).refused("pard_token", f"must be a token's id below vocab_size = {V}")
    return mask


def eagle_of(hf: dict, n_layers: int, dim: int) -> Eagle:
    """For a target of so many layers and this D. ValueError names the key and value that cannot be honoured."""
    hf = Section(hf)
    for key in ("transformer_layer_config", "eagle_config"):
        if not isinstance(hf.get(key) or {}, dict):
            raise hf.refused(key, "must be an object")
    layer = Section(hf.get("transformer_layer_config") or hf)
    layer.where = "transformer_layer_config." if layer.keys() != hf.keys() else ""
    layer["tie_word_embeddings"] = False  # the draft's head is stored
    if layer.size("num_hidden_layers", 1) != 1:
        raise layer.refused("num_hidden_layers", "is not supported; an EAGLE-3 draft of 1 layer is")
    if layer.setdefault("model_type", "llama") != "llama":
        raise layer.refused("model_type", "is not supported as an EAGLE-3 draft; supported: 'llama'")
    target_dim = hf.size("target_hidden_size", dim)
    if target_dim != dim:
        raise hf.refused("target_hidden_size", f"is of another target: this one has hidden_size = {dim}")
    said = hf.get("eagle_config") or {}
    if said.get("use_aux_hidden_state") is False:
        raise ValueError("config.json: eagle_config.use_aux_hidden_state = False is not supported; only true is")
    return Eagle(
        dict(layer), hf.size("draft_vocab_size", layer.size("vocab_size")), aux_layer_ids_of(hf, said, n_layers),
        target_dim,
        *(hf.flag(key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")),
    )  # fmt: skip


def aux_layer_ids_of(hf: Section, said: dict, n_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are tapped: those that the file names, or 2, L // 2 and L - 3.

    Files name the same three by what enters a layer or by what leaves one, with nothing to tell which: one less than
    the usual ones means the usual ones.
    """
    usual, key = (2, n_layers // 2, n_layers - 3), "eagle_aux_hidden_state_layer_ids"
    found = hf.get(key) or said.get(key) or usual
    if not isinstance(found, list | tuple) or not all(type(i) is int and 0 <= i < n_layers for i in found):
        raise ValueError(f"config.json: {key} = {found!r} must be layers of the target, 0 to {n_layers - 1}")
    return usual if tuple(found) == tuple(i - 1 for i in usual) else tuple(found)

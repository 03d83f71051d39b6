"""Folders and files <-> models. A user's program imports these names from here; other files import
from the file.

checkpoint.py       a folder or GGUF file, opened once: Checkpoint -> Transformer
stored.py           what fills a model, in whatever file: Stored, Source;  folder.py  of a folder
models.py           Config -> Transformer, built, filled and quantized;  saving.py  Transformer ->
                    folder
families.py         READ FIRST: what differs between model_types, as tables
config.py           config.json -> model.Config
tokenizer.py        text <-> ids;  tokenizers/  one class a tokenizer library
chat_templates.py   templates in jinja's sandbox;  chat_messages.py  messages in a template's form
options.py          which models a run loads;  hub.py  a name on the hub -> its path
target.py           options -> the model and tokenizer of a run;  draft_types.py  kinds of drafts
adapter.py          LoRA, merged while weights are read
plain_files.py      are files there, plain, of bounded size?
files.py            JSON and safetensors, written in full or not at all
quantization.py     the scheme of every matrix;  quantized/  other programs' formats
gguf.py             llama.cpp's files;  gguf_metadata.py  their keys as a config.json;
                    gguf_vocabulary.py  as the tokenizer's files
weight_names.py     our parameters <-> the tensors of a checkpoint
"""

import importlib

MODULES = {
    "Checkpoint": "loading.checkpoint",
    "config_from_hf": "loading.config",
    "load_drafter": "drafts.registry",
    "load_model": "loading.checkpoint",
    "load_tokenizer": "loading.tokenizer",
    "save_model": "loading.saving",
}
__all__ = list(MODULES)


def __getattr__(name: str):
    """A name of __all__ at its first use (PEP 562): loading/hub.py, which flags need, then imports
    no torch."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)

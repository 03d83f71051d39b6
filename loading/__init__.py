"""Folders and files <-> models. A user's program imports these names from here; other files import
from the file.

From a folder to a model, in the order in which it happens. Start at checkpoint.py; of families.py
read Field, Family and the record of "llama", and look the others up:

families.py         what differs between model_types: a record for each, and tables of keys
checkpoint.py       a folder or GGUF file, opened once: Checkpoint, with all that follows
config.py           its config.json -> model.Config, by the tables of families.py
weight_names.py     a parameter of ours -> the stored tensors that fill it
stored.py           a tensor as it is stored, and a Source of them, which fills a model
folder.py           the stored tensors of a folder, all headers checked -> a Source;
                    quantized/  in the formats of other programs;  adapter.py  with a LoRA merged
quantization.py     the scheme of every matrix, by what is stored and what the user asks for
models.py           an empty Transformer, filled from the Source tensor by tensor
saving.py           and back: Transformer -> folder

A GGUF file takes the same way: gguf.py reads it, gguf_folder.py gives it a folder's config.json and
tensors, gguf_vocabulary.py the files of its tokenizer.

tokenizer.py        text <-> ids;  tokenizers/  one class a tokenizer library
chat_templates.py   templates in jinja's sandbox;  chat_messages.py  messages in a template's form

target.py           the options of a run (options.py) -> its model and its tokenizer
hub.py              a name on the hub -> its path;  draft_types.py  what a draft's folder holds
files.py            JSON and safetensors, written in full or not at all;  plain_files.py  is a file
                    there, plain, of bounded size?
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
    """Import a name of __all__ at its first use (PEP 562), so that the flags, which import
    loading/hub.py, do not import torch."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)

"""Drafters with a file each.

    base.py             what a drafter is, and drafts by a model; every other file needs it
    target_layers.py    the target itself: some of its layers, on a part of the keys, or quantized
    suffix.py           the continuation of the longest repeated suffix, from this request or
                        earlier answers
    ngram.py            prompt lookup, on suffix.py: the continuation of the last N tokens' latest
                        earlier occurrence
    hybrid.py           two of these as one, in each step the one that promises more
    translated.py       a folder's smaller model, also with another tokenizer (vocabulary.py)
    pard.py             all K tokens from one pass over mask tokens
    eagle.py            EAGLE-3: one layer over the target's hidden states
    mtp.py              MTP heads: one layer in the target's own files
    dflash.py           DFlash, DSpark: a block of tokens from one pass over the target's hidden
                        states
    hidden_states.py    the target's hidden states, for eagle.py, mtp.py and dflash.py; published.py
                        reads their folders

registry.py chooses one for a folder or a spec; speculative.py verifies what they propose.
"""

"""Drafters with a file each. Delete one, and the rest runs.

    base.py             what a drafter is, and drafts by a model; every other file needs it
    target_layers.py    the target's own layers, some of them or quantized
    suffix.py           the continuation of the longest repeated suffix, from this request or
                        earlier answers
    hybrid.py           the suffix draft and a folder's, row by row the one that promises more
    ngram.py            prompt lookup: the continuation of the last N tokens' latest earlier
                        occurrence
    pard.py             all K tokens from one pass over mask tokens
    eagle.py            EAGLE-3: one layer over the target's hidden states
    dflash.py           DFlash, DSpark: a block of tokens from one pass over the target's hidden
                        states
    hidden_states.py    the target's hidden states, for eagle.py and dflash.py
    vocabulary.py       drafts whose tokenizer is not the target's

registry.py chooses one for a folder or a spec; speculative.py verifies what they propose.
"""

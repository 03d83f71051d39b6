"""Drafters with a file each. Delete one, and the rest runs.

    suffix.py           the longest suffix that stood before, in this request or in earlier answers
    ngram.py            prompt lookup, without a model
    pard.py             all K tokens from one pass over mask tokens
    eagle.py            EAGLE-3: one layer over the target's hidden states
    dflash.py           DFlash: a block of tokens from one pass over the target's hidden states
    hidden_states.py    the target's hidden states, for eagle.py and dflash.py
    vocabulary.py       drafts with another tokenizer than the target's

loading/drafts.py maps a folder or a spec to one of them; speculative.py has the rounds.
"""

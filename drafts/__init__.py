"""Drafters that were trained for their target.

    pard.py             all K tokens from one pass, with mask tokens in place of those that are still to come
    eagle.py            EAGLE-3: one layer over what the target knew before each token
    vocabulary.py       a draft whose tokens are not all the target's

What their folders look like stands in loading/draft_configs.py; the rounds that they take part in, in speculative.py.
"""

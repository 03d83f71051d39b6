"""`python -m scripts.distill_draft`: a small model, trained to draft for any target.

distill_flags.py     the flags, which are answered before torch is imported
distill_draft.py     training, what it predicts, and the folder that it writes
draft_kinds.py       the kinds of drafts
draft_start.py       their sizes and first weights
draft_text.py        the text that they learn
"""

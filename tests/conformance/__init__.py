"""A conformance kit for forks: what a drafter, a cache, a format, a family and a rule of acceptance
promise, as one call each.

    check_drafter       drafters.py: the text is the target's, and drafts are what they say
    check_cache         caches.py: keys and values against attention in float64
    check_format        formats.py: parts, shards, files and products of quantized weights
    check_family        families.py: a config's logits against a naive twin, in every shape of pass
    check_rule          rules.py: what a rule of acceptance keeps, and the law of its text

Each takes a few seconds on two CPU cores and raises an AssertionError that says what differs and
where to look. targets.py has the tiny models that they run on. `python -m pytest
tests/test_conformance.py` runs them over all kinds of this project, and over deliberate mistakes
that they must catch.
"""

from tests.conformance.caches import check_cache
from tests.conformance.drafters import check_drafter
from tests.conformance.families import check_family
from tests.conformance.formats import check_format
from tests.conformance.rules import check_rule

__all__ = ["check_cache", "check_drafter", "check_family", "check_format", "check_rule"]

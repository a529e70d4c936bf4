"""When two engines may disagree: floats are added in another order, so two tokens whose logits are almost equal may change places.

Where a request runs alone at float32 nothing of the kind is allowed. At bfloat16, or with other requests in the same batch, the
first token that differs must be one of the reference's two best, at a step where these two are closer than the noise that the
reference alone shows between two ways to run the same text.
"""

import math
from dataclasses import dataclass

from .process import Answer

MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


@dataclass
class Difference:
    """Where two answers part, and how far apart the reference's two best logits were there."""

    step: int
    margin: float
    among_best_two: bool


def difference(reference: Answer, answer: Answer) -> Difference | None:
    """The first step at which the answers differ; None if they are the same."""
    if answer.tokens == reference.tokens:
        return None
    pairs = zip(reference.tokens, answer.tokens)
    step = next((index for index, (wanted, found) in enumerate(pairs) if wanted != found), None)
    assert step is not None, f"one answer is shorter: {len(answer.tokens)} of {len(reference.tokens)} tokens"
    (_, first), (_, second) = reference.best[step]
    return Difference(step, first - second, answer.tokens[step] in [token for token, _ in reference.best[step]])


def noise(reference: Answer, answer: Answer) -> float:
    """The largest difference of a best token's logit between two answers, over the steps before which they agree."""
    largest = 0.0
    for step, (ours, theirs) in enumerate(zip(reference.best, answer.best)):
        theirs_by_token = dict(theirs)
        for token, logit in ours:
            if token in theirs_by_token:
                largest = max(largest, abs(theirs_by_token[token] - logit))
        if reference.tokens[step] != answer.tokens[step]:
            break
    return largest


def unit(reference: Answer, dtype: str) -> float:
    """The distance of two neighbouring numbers of the dtype at the size of the largest logit."""
    largest = max(abs(logit) for step in reference.best for _, logit in step)
    return 2.0 ** (math.floor(math.log2(largest)) - MANTISSA_BITS[dtype])

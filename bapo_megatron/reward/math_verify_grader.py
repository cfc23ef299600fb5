"""The reward function ``math_verify``: math-verify as it comes, for figures that compare."""

import threading

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from bapo_megatron.reward.base import Score
from bapo_megatron.reward.math_answer import accepted_answers

_LIMIT_S = 5
"""math-verify's default, for each call."""


def grade_by_math_verify(response: str, answer: str) -> Score:
    r"""Score 1 if math-verify's defaults find an accepted answer in the response, else 0.

    ``parse`` reads the response as it is and each reference in ``\boxed{}``, as verl does. Nothing
    is raised: what math-verify fails on is 0, with the error's name as ``reason``. Its limits are
    signals, which only the main thread can set; elsewhere there are none.
    """
    is_main = threading.current_thread() is threading.main_thread()
    limit_s = _LIMIT_S if is_main else None
    try:
        parsed = parse(response, parsing_timeout=limit_s)
        if not parsed:
            return Score(0.0, answer_found=False, reason="no_answer")
        boxes = (rf"\boxed{{{text}}}" for text in accepted_answers(answer))
        references = (parse(box, parsing_timeout=limit_s) for box in boxes)
        is_right = any(verify(gold, parsed, timeout_seconds=limit_s) for gold in references)
    except (Exception, TimeoutException) as error:  # noqa: BLE001 - sympy raises many kinds
        return Score(0.0, answer_found=False, reason=type(error).__name__)
    extracted = str(parsed[-1])  # the text, or a value where there is none
    return Score(float(is_right), extracted=extracted, reason="equal" if is_right else "different")

"""Every call has somebody who answers it."""

from __future__ import annotations

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.rollout import messages
from bapo_megatron.rollout.collector import Collector
from bapo_megatron.runtime.calls import Answers, Call
from bapo_megatron.weight_sync import receive
from bapo_megatron.weight_sync.receive import WeightReceiver
from tests.weight_sync.setting import StubPool


def test_the_collector_answers_all_of_its_calls_and_those_of_weight_sync() -> None:
    answers = Answers()
    WeightReceiver(StubPool([]), RolloutConfig(), None).bind_to(answers)
    for module, bound in ((messages, Collector(print).answers), (receive, answers)):
        calls = [value for value in vars(module).values() if isinstance(value, Call)]
        assert len(calls) >= 7
        # An interrupt is taken while another call is answered, and has no answer.
        answered = {call.name for call in calls} - {messages.INTERRUPT.name}
        assert answered == bound._bound.keys()

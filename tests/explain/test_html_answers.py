"""Sentences of the HTML page agree with the plan and with the alternative plans."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.explain.html.answers import PageAnswers
from autopar.explain.scaling import ScalingStep
from autopar.plan.tables import time_rows
from tests.explain.page_models import explained


def test_why_a_step_is_slow_is_said_by_kernels_and_waiting() -> None:
    found = explained(2, "fsdp")
    plan = found.plan
    said = PageAnswers(plan=plan, compared=(), sweep=(), scaling=()).slow
    shares = {name: int(share) for share, name in re.findall(r"(\d+)% (?!of )([a-z ]+?)(?: at |;|\.)", said)}
    for group in plan.breakdown.simulated.kernels:
        assert abs(shares.pop(group.name) - 100 * group.seconds / plan.step_time) <= 1
    computing = sum(row.seconds for row in time_rows(plan) if not row.number and row.seconds > 0)
    assert abs(shares.pop("waiting for messages") - 100 * (1 - computing / plan.step_time)) <= 1
    assert not shares
    assert all(int(rate) <= 100 for rate in re.findall(r"at (\d+)%", said))


def test_what_fills_the_memory_of_stages_is_of_the_one_that_holds_most() -> None:
    plan = explained(2, "fsdp").plan
    small, large = (
        replace(plan, peak_memory=peak, breakdown=replace(plan.breakdown, memory={name: peak}))
        for name, peak in (("gradients", 10), ("saved activations", 20))
    )
    staged = replace(plan, stages=(small, large))
    assert PageAnswers(plan=staged, compared=(), sweep=(), scaling=()).memory == "100% saved activations at the peak."


def test_a_faster_mesh_of_as_many_devices_is_said() -> None:
    plan = explained(2, "fsdp").plan
    same = ScalingStep(devices=4, mesh=(4,), step_time=plan.step_time / 2, samples=1)
    more = replace(same, devices=8, mesh=(8,), step_time=plan.step_time / 4)
    said = PageAnswers(plan=plan, compared=(), sweep=(), scaling=(same, more)).devices
    assert said.startswith("8 devices take")
    assert "4.00 times as fast. On a mesh of 4 these 4 take" in said
    slower = replace(same, step_time=plan.step_time)
    assert "On a mesh" not in PageAnswers(plan=plan, compared=(), sweep=(), scaling=(slower, more)).devices

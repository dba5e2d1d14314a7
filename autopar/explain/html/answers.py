"""One-sentence answers to the questions that users ask about every plan; a click leads to the details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.explain.budget_sweep import SweepStep
from autopar.explain.comparison import Compared, auto_of
from autopar.explain.scaling import ScalingStep
from autopar.plan.breakdown import KernelGroup
from autopar.plan.plan import Plan
from autopar.plan.tables import exposed, mfu, throughput
from autopar.plan.text import joined, milliseconds, size_text

FSDP = "fsdp"
LITTLE = 0.01  # the share of a step from which a part of it is named


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswers:
    """Sentences about a plan, compared with others."""

    plan: Plan
    compared: Sequence[Compared]
    sweep: Sequence[SweepStep]
    scaling: Sequence[ScalingStep]

    @property
    def questions(self) -> list[tuple[str, str, str]]:
        """Questions with their answers, and the place on the page with the details."""
        return [
            ("Why is it slow?", self.slow, "time"),
            ("What fills the memory?", self.memory, "memory"),
            ("What if I had more devices?", self.devices, "devices"),
            ("What if I had less memory?", self.budget, "budget"),
            ("Why not FSDP?", self.fsdp, f"why-not-{FSDP}" if self._fsdp else "strategies"),
        ]

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The figures that users compare: names and values, from `plan.tables`."""
        plan = self.plan
        found = [("step time", f"{milliseconds(plan.step_time)} ms")]
        found += [(unit, f"{rate:,.0f}") for unit, rate in reversed(throughput(plan).items())]
        found += [("MFU", f"{mfu(plan):.1%}"), ("memory per device", size_text(plan.peak_memory))]
        return [*found, ("devices", f"{plan.mesh.size} x {plan.device}")]

    @property
    def slow(self) -> str:
        """What takes most of the step."""
        pipeline, total = self.plan.pipeline, self.plan.step_time
        if pipeline:
            slowest = max(range(len(self.plan.stages)), key=lambda stage: self.plan.stages[stage].step_time)
            return f"Ranks are idle for {pipeline.timeline.bubble:.0%} of the step; {pipeline.title(slowest)}, takes longest."
        if not total:
            return "The step takes no time under this cost model."
        said = [(group.seconds / total, f"{group.name} at {_rate(group)}") for group in self.plan.breakdown.simulated.kernels]
        said.append((exposed(self.plan) / total, "waiting for messages"))
        most = sorted(said, reverse=True)[:3]
        return f"{'; '.join(f'{share:.0%} {what}' for share, what in most if share >= LITTLE)}."

    @property
    def memory(self) -> str:
        """What takes most of the memory at the peak; with stages, of the one that holds most."""
        fullest = max(self.plan.stages or (self.plan,), key=lambda part: part.peak_memory)
        peak, parts = fullest.peak_memory, fullest.breakdown.memory
        most = sorted(parts.items(), key=lambda pair: -pair[1])[:3]
        if not most or not peak:
            return "Nothing is held."
        total = sum(parts.values())
        return f"{joined(f'{size / total:.0%} {name}' for name, size in most)} at the peak."

    @property
    def devices(self) -> str:
        """The fastest step on more devices than the plan's."""
        more = [step for step in self.scaling if not step.refusal and step.devices > self.plan.mesh.size]
        if not more:
            return "Not asked: --devices plans for other numbers of devices."
        best = min(more, key=lambda step: step.step_time)
        speed = self.plan.step_time / best.step_time if best.step_time else 1.0
        said = f"{best.devices} devices take {milliseconds(best.step_time)} ms per step, {speed:.2f} times as fast."
        return said + self._other_mesh

    @property
    def _other_mesh(self) -> str:
        """A mesh of as many devices on which the step is faster, if one is known."""
        plan, same = self.plan, [step for step in self.scaling if step.devices == self.plan.mesh.size and not step.refusal]
        if not same or same[0].step_time >= (1 - LITTLE) * plan.step_time:
            return ""
        mesh = " x ".join(map(str, same[0].mesh))
        return f" On a mesh of {mesh} these {plan.mesh.size} take {milliseconds(same[0].step_time)} ms."

    @property
    def budget(self) -> str:
        """The least memory among the known plans, and what it costs."""
        known = [(step.peak_memory, step.step_time, "") for step in self.sweep]
        known += [
            (entry.plan.peak_memory, entry.plan.step_time, f" as {entry.strategy}") for entry in self.compared if entry.plan
        ]
        known = [one for one in known if one[0] < self.plan.peak_memory]
        if not known:
            return "No plan here needs less; --budget-sweep looks for others."
        size, seconds, name = min(known)
        slower = f"{seconds / self.plan.step_time - 1:.0%} slower" if self.plan.step_time else "as fast"
        return f"{size_text(size)} per device are enough{name}: {slower}."

    @property
    def fsdp(self) -> str:
        """How FSDP compares."""
        found = self._fsdp
        if self.plan.options["strategy"] == FSDP:
            return "This plan is FSDP."
        if found is None and self.plan.pipeline:
            return "Not compared beside stages: strategy='fsdp' plans them so."
        if found is None:
            return "Not compared: name the model, not a saved plan."
        said = found.relative(auto_of(self.compared)) if found.plan else found.refusal
        return f"FSDP: {said}."

    @property
    def _fsdp(self) -> Compared | None:
        own = self.plan.options["strategy"] == FSDP
        return None if own else next((entry for entry in self.compared if entry.strategy == FSDP), None)


def _rate(group: KernelGroup) -> str:
    """The rate of the device that kernels come closest to, and how close."""
    if group.at_peak >= group.at_bandwidth:
        return f"{group.at_peak / group.seconds:.0%} of the FLOPs' peak"
    return f"{group.at_bandwidth / group.seconds:.0%} of the memory bandwidth"


__all__ = ["PageAnswers"]

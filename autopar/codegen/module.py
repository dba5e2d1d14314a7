"""The module that the user gets: an `fx.GraphModule` that is called, saved and trained like the original.

Parameters have their original names (ties, unused parameters and non-persistent buffers included). A call is checked against
the planned one, and its results have the structure of the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from autopar.codegen.call_checks import aspects_of, check_gradients, checked_call, on_meta
from autopar.codegen.compiled import (
    Untraced,
    around,
    eager,
    inductor_options,
    shared_weights,
    traceable,
    uses,
    with_own_code,
)
from autopar.codegen.graph_module import Submodule
from autopar.codegen.module_state import ModuleState
from autopar.codegen.program_module import ProgramModule, run_program
from autopar.codegen.variants import combinations
from autopar.errors import InputError
from autopar.ir.program import Program
from autopar.runtime.async_collectives import wait_for_abandoned
from autopar.runtime.computed_gradients import hooks_once
from autopar.runtime.gradient_norm import norm_of, number_of
from autopar.runtime.input_parts import BatchSampler
from autopar.runtime.storage import full_tensor, given_like, to_local, with_dtype, with_own_storage
from autopar.runtime.streamed_load import fill


class ParallelModule(ProgramModule):
    """One rank's part of a parallel model, built by `autopar.parallelize`. Its attribute `autopar` holds the rest."""

    def __init__(self, graph: fx.Graph, program: Program, tensors: Mapping[str, torch.Tensor], state: ModuleState) -> None:
        super().__init__(graph, "ParallelModule")
        self.autopar = state
        state.draws, state.recomputes = uses(graph, "rng_state"), uses(graph, "rematerializer")
        state.program = with_own_code(run_program)
        state.traceable, state.shared_weights = traceable(graph), shared_weights(graph)
        held = (*program.parameters, *program.buffers)
        state.constant = frozenset(
            name for stored in held if stored.used and not stored.value.requires_grad for name in stored.names
        )
        named = [(name, stored) for stored in held for name in stored.names]
        for name, stored in sorted(
            named, key=lambda pair: pair[0] != pair[1].names[0]
        ):  # other names of tied tensors last, which keeps the order
            self.hold(name, tensors[stored.value.name], persistent=stored.persistent)

    @around
    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward of a training or evaluation step on the *global* batch; every rank passes the same arguments.

        A module parallelized with `inputs="sharded"` takes this rank's parts, as returned by `shard`, or DTensors. Scalars are
        returned as plain tensors, split outputs as DTensors.

        Raises:
            InputError: the arguments do not match the planned call, or an attribute was set since the model was captured.
        """
        with Untraced(partial(self.autopar.rng_state.repeatable, self.training)):
            serving, tensors = self._agreed("a forward", lambda: self._bound(args, kwargs))
            return serving._rebuilt(serving._outputs(tensors, self.autopar.agreement))

    @around
    def step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Forward and backward of a training step on the *global* batch, one micro-batch after the other; returns the loss.

        Gradients are accumulated in `.grad`. The loss is the output named "loss", or else the only scalar. Calling the module
        and then `backward()` gives the same gradients, but runs all forwards first and needs the memory of all micro-batches.
        A step is not a call, so hooks of the module do not run; hooks of parameters see the gradient of the batch.

        Args:
            args, kwargs: those of the module's own call.

        Raises:
            InputError: the arguments do not match the planned call, or no output is clearly the loss.
        """
        run = self.autopar.compiled_step or self._step
        return run(*args, **kwargs)

    @around
    def _step(self, *args: object, **kwargs: object) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if self.autopar.plan is not None and self.autopar.plan.inference:
            raise InputError(
                "a module that was planned for inference takes no step", fix='call it; or plan with mode="training"'
            )
        serving, tensors = self._agreed("a step", lambda: self._bound(args, kwargs))

        def loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
            found = serving._loss(outputs)
            losses.append(found.detach())
            return self._scaled(found)

        with Untraced(self._hooks_once):
            serving._accumulate(tensors, loss, self.autopar.agreement)
        return torch.stack(losses).sum()

    def _hooks_once(self) -> AbstractContextManager[None]:
        """Around a step: hooks of parameters see the gradients of the batch, not those of micro-batches."""
        state = self.autopar
        return hooks_once(self.parameters(), state.stepped) if state.steps else nullcontext()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile calls and steps in place, by `torch.compile` with these arguments.

        The program of one micro-batch is compiled as a whole, with its backward; call checks, weights shared by micro-batches
        and the structure of results stay outside. Plans that cannot be traced run eagerly: those that offload activations or
        have weights on the host.

        Args:
            args, kwargs: those of `torch.compile`: `backend`, `mode`, `fullgraph`, `options`, ... For Inductor on CUDA, without
                `mode` and `options`, the options are `autopar.inductor_options()`.
        """
        kwargs = self._compiling(args, kwargs)
        super().compile(*args, **kwargs)
        self.autopar.compiled_step = torch.compile(self._step, *args, **kwargs)

    def _compiling(self, args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of `torch.compile`, with our options for Inductor if there are none."""
        ours = kwargs.get("backend", "inductor") == "inductor" and not args and not kwargs.keys() & {"mode", "options"}
        return kwargs | ({"options": inductor_options()} if ours and self.autopar.context.device.type == "cuda" else {})

    @eager
    def _rebuilt(self, outputs: Sequence[object]) -> object:
        return self.autopar.signature.rebuild(outputs)

    def shard(self, batch: object, *, samples: bool = False) -> object:
        """This rank's arguments of a call for the whole batch: its parts, or all of it if the module takes inputs whole.

        Args:
            batch: the whole batch: a tensor, a tuple of arguments, or a mapping of keywords.
            samples: the batch has only this rank's samples, as loaded by `sampler`, and is cut in its other dims.

        Raises:
            InputError: a tensor cannot be cut as the plan splits it.
        """
        state = self.autopar
        return state.signature.mapped(batch, lambda path, tensor: state.inputs.part(path, tensor, samples=samples))

    def gather(self, results: object) -> Any:
        """Gather the results of a call without gradients, whole on every rank; every rank calls it.

        DTensors become plain tensors, and all ranks of a pipeline get the results of its last stage.

        Args:
            results: tensors in any containers: everything returned, or a part of it.
        """
        return pytree.tree_map_only(torch.Tensor, full_tensor, results)

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the samples, out of `data_world`; 0 if the module takes inputs whole."""
        return self.autopar.inputs.rank

    @property
    def data_world(self) -> int:
        """The number of shares of a batch's samples; 1 if the module takes inputs whole."""
        return self.autopar.inputs.world

    def sampler(self, dataset: Sized, *, shuffle: bool = False, seed: int = 0) -> BatchSampler:
        """A `batch_sampler` for a DataLoader that loads this rank's samples of every batch, which has the planned size.

        Args:
            dataset: the data set; only its length is used.
            shuffle: draw a new order for every epoch (`set_epoch`), the same on every rank.
            seed: of that order.

        Raises:
            InputError: the data set is smaller than a batch, or has no length.
        """
        return BatchSampler(self.autopar.inputs, dataset, shuffle=shuffle, seed=seed)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """Load whole tensors, of which each rank takes its part, or DTensors; otherwise as for every module.

        Args:
            state_dict: tensors by name; unknown and missing names are handled as for every module.
            strict: as for every module.
            assign: replace parameters by the given tensors, in the plan's dtype; those on meta are created where the plan
                stores them.

        Raises:
            InputError: a tensor is on meta, and `assign` is not set.
        """
        if not isinstance(state_dict, Mapping):
            return super().load_state_dict(state_dict, strict, assign)  # raises what every module does
        stored = self.state_dict(keep_vars=True)
        known = {name: held for name, held in state_dict.items() if name in stored and _alike(held, stored[name])}
        empty = {name: held for name, held in known.items() if stored[name].is_meta and not held.is_meta}
        if empty and not assign:
            raise on_meta([*empty], "into which load_state_dict copies nothing")
        given = {name: given_like(held, stored[name]) for name, held in known.items() if name not in empty} | fill(self, empty)
        if assign:
            given = {name: with_own_storage(with_dtype(held, stored[name].dtype)) for name, held in given.items()}
        loaded: _IncompatibleKeys = super().load_state_dict({**state_dict, **given}, strict, assign)
        return loaded

    def prewarm(self, **sizes: Sequence[int] | int) -> None:
        """Capture and emit the modules for these dynamic sizes now instead of at their first call; all ranks call it.

        Args:
            sizes: the values of each dynamic size that will occur, in every combination: `sequence=(64, 128, 256)`.

        Raises:
            InputError: the plan has no such size, or does not allow a value.
        """
        for found in [*combinations(self.autopar.signature.sizes, sizes)]:
            self._variant(found)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; every rank calls it, and gets the previous norm.

        Like `torch.nn.utils.clip_grad_norm_`, but over all stages of a pipeline. With `parameters` only theirs: in a pipeline
        pass those that this rank stores, if any.

        Raises:
            InputError: other ranks make a different call, which would deadlock; a parameter is not the module's; or a norm is
                not a number, or is negative.
            RuntimeError: the norm is not finite, if asked to.
        """
        max_norm, norm_type = number_of("max_norm", max_norm, least=0.0), number_of("norm_type", norm_type)
        self.autopar.agreement.same("clip_grad_norm_")
        clipped = dict(self.named_parameters())
        if parameters is not None:
            chosen = {parameters} if isinstance(parameters, torch.Tensor) else set(parameters)
            if not chosen.issubset(clipped.values()):
                raise InputError("a parameter to be clipped does not belong to the module", fix="those of parameters()")
            clipped = {name: parameter for name, parameter in clipped.items() if parameter in chosen}
        norm = self._gradient_norm(clipped, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the gradients have a norm of {float(norm)} (norm_type={norm_type}), and cannot be clipped")
        nn.utils.clip_grads_with_norm_(clipped.values(), max_norm, norm)
        return norm

    def _gradient_norm(self, parameters: Mapping[str, nn.Parameter], norm_type: float) -> torch.Tensor:
        return norm_of(parameters.values(), norm_type)

    @property
    def local_buffers(self) -> dict[str, torch.Tensor]:
        """This rank's part of every buffer, under every name."""
        return {name: to_local(buffer) for name, buffer in self.named_buffers(remove_duplicate=False)}

    def _loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output that a step differentiates."""
        paths = self.autopar.signature.returned.paths
        scalars = {path: o for path, o in zip(paths, outputs, strict=False) if o.requires_grad and not o.ndim}
        if len(scalars) != 1 and "loss" not in scalars:
            fix = "call the module, compute the loss from its outputs, and call backward()"
            raise InputError(
                f"no output is clearly the loss: {len(scalars)} of them are scalars", results=", ".join(paths), fix=fix
            )
        return scalars["loss"] if "loss" in scalars else next(iter(scalars.values()))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a step, scaled for its backward."""
        scaler = self.autopar.scaler
        return loss if scaler is None else scaler.scale(loss)

    @around
    def accumulate(self, inputs: Sequence[torch.Tensor], loss: Callable[[Sequence[torch.Tensor]], torch.Tensor | None]) -> None:
        """Run forward and backward of one micro-batch after the other; `loss` maps outputs to the differentiated value."""
        serving, tensors = self._agreed("a step", lambda: inputs)
        serving._accumulate(tensors, loss, self.autopar.agreement)

    @around
    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The program's outputs for its inputs, both in the program's order."""
        serving, tensors = self._agreed("a forward", lambda: inputs)
        outputs: list[Any] = serving._outputs(tensors, self.autopar.agreement)
        return outputs

    @eager
    def _agreed(self, kind: str, bind: Callable[[], Sequence[torch.Tensor]]) -> tuple[ParallelModule, Sequence[torch.Tensor]]:
        """The module that serves a call, and its checked inputs, after the ranks have compared their calls."""
        refused: Exception | None = None
        inputs: Sequence[torch.Tensor] = ()
        try:
            inputs = checked_call(self, bind())
        except Exception as error:  # the other ranks must hear of it, or they wait
            refused = error
        paths = (planned.path for planned in self.autopar.signature.tensors)
        named = {} if refused else dict(zip(paths, inputs, strict=True))
        random = self.autopar.rng_state
        undo = partial(random.load_state_dict, random.state_dict())
        wait_for_abandoned(self.autopar.context.known_axes)
        self.autopar.agreement.begin(aspects_of(self, kind, named), named, refused, undo)
        serving = self._serving(inputs)
        if serving is not self:
            check_gradients(serving, inputs)
        return serving._sized(inputs), inputs  # the module of the other mode has variants of its own

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """The inputs of a call, in the program's order."""
        self.autopar.settings.check(self, Submodule)
        if self.autopar.stepped:
            self.autopar.stepped.check_call()
        if self.autopar.decided.values:
            self.autopar.decided.check(self.local_buffers)
        return self.autopar.signature.bind(args, kwargs, self.autopar.inputs.local)

    def _serving(self, inputs: Sequence[torch.Tensor]) -> ParallelModule:
        """The module for the current mode and the inputs' sizes, over the same parameters; often this one."""
        state = self.autopar
        if self.training == state.mode or state.other is None:
            return self._sized(inputs)
        if state.twin is None or not self._shares(state.twin):
            state.twin = state.other(self) or self
        return self._sized(inputs) if state.twin is self else state.twin.train(self.training)

    def _sized(self, inputs: Sequence[torch.Tensor]) -> ParallelModule:
        """The module for the inputs' sizes, built when they first occur."""
        return self._variant(self.autopar.signature.numbers(inputs))

    def _variant(self, found: tuple[int, ...]) -> ParallelModule:
        state, sized = self.autopar, self.autopar.sized
        if sized is None or found == tuple(size.sample for size in state.signature.sizes):
            return self
        return state.variants.at(found, self._shares, lambda: sized(self, found)).train(self.training)

    def _shares(self, other: ParallelModule) -> bool:
        """Whether another module still has this one's parameters and buffers, which the user may have replaced."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return all(own[name] is held for name, held in (*other.named_parameters(), *other.named_buffers()) if name in own)


def _alike(given: object, stored: torch.Tensor) -> bool:
    """Whether the value given for a stored tensor is a tensor of its shape."""
    return isinstance(given, torch.Tensor) and given.shape == stored.shape

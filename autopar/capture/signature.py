"""The signature of a model: maps the user's nested arguments to the program's flat tensors."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.meta_copy import refuse_made
from autopar.capture.nested import STATIC, distinct, known, walk
from autopar.capture.returned import ReturnSpec
from autopar.capture.static_inputs import StaticInput, read_static
from autopar.errors import InputError
from autopar.ir.dynamic_dims import InputDim, Shape, Size, numbers
from autopar.ir.program import Static

ANOTHER_CALL = "call the model as it was planned, or plan this call too, over the same weights: parallelize(..., over=parallel)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor argument: its path among the arguments ("input_ids", "batch.0"), shape, dtype, and whether it gets a gradient.

    `parts` is the number of parts of each dim if each rank passes only its own part; it is empty if ranks pass the whole
    tensor.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    parts: tuple[int, ...] = ()

    @property
    def given(self) -> tuple[int, ...]:
        """The shape of what a rank passes."""
        return tuple(size // count for size, count in zip(self.shape, self.parts or (1,) * len(self.shape), strict=True))

    def whole(self, given: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of one rank's part."""
        return tuple(size * count for size, count in zip(given, self.parts or (1,) * len(self.shape), strict=True))

    def __str__(self) -> str:
        part = f", a part of {list(self.shape)}" if self.given != self.shape else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.given)}{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The planned call of a model.

    `names` are the parameters of `forward` that may be passed by position, `rest` the name of its `*args`; `tensors` are in the
    order of `Program.inputs`, and `static` are tensors that are not program inputs; other arguments must equal `constants`, or,
    if the sample left them out, `defaults`.
    """

    names: tuple[str, ...]
    rest: str
    tensors: tuple[TensorSpec, ...]
    constants: tuple[tuple[str, Static], ...]
    defaults: tuple[tuple[str, Static], ...]
    returned: ReturnSpec
    sizes: tuple[Size, ...] = ()  # sizes that may differ from the planned ones
    static: tuple[StaticInput, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The planned shape of every tensor."""
        return {planned.path: planned.shape for planned in self.tensors}

    def numbers(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The values of the dynamic sizes in a call; raises InputError for one that the plan does not allow."""
        return numbers(self.sizes, {p.path: p.whole(t.shape) for p, t in zip(self.tensors, tensors, strict=True)})

    def bind(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        local: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The tensors of a call, in the order of `Program.inputs`; raises InputError if it is not the planned call.

        `local` maps the tensor at each path to the one to use.
        """
        given = dict(_leaves(named(self.names, self.rest, args, kwargs)))
        for planned in self.tensors:
            if local and isinstance(tensor := given.get(planned.path), torch.Tensor):
                given[planned.path] = local(planned.path, tensor)
        for planned in self.tensors:
            if any(path.startswith(f"{planned.path}.") for path in given):
                what = f"argument {planned.path} is not a tensor but a container of tensors"
                raise InputError(what, planned=planned, fix="give the tensor itself")
        varying = {place for size in self.sizes for place in size.places}
        tensors = [_checked(planned, given.pop(planned.path, None), varying) for planned in self.tensors]
        self.numbers(tensors)
        for fixed in self.static:
            spec = TensorSpec(path=fixed.path, shape=fixed.shape, dtype=fixed.dtype)
            fixed.check(_checked(spec, given.pop(fixed.path, None), frozenset()))
        expected = dict(self.defaults) | dict(self.constants)
        for path, value in given.items():
            if path not in expected:
                fix = "plan with a sample that has it"
                raise InputError(f"argument {path} is not in the plan", planned=self._text(), fix=fix)
            if not _same(value, expected[path]):
                raise InputError(
                    f"argument {path} is not the planned one",
                    given=_describe(value),
                    planned=repr(expected[path]),
                    fix="plan again with this sample",
                )
        defaults = dict(self.defaults)
        for path, value in self.constants:
            if path not in given and not (path in defaults and _same(value, defaults[path])):
                raise InputError(f"argument {path} is missing", planned=repr(value), fix=ANOTHER_CALL)
        return tensors

    def mapped(self, sample: object, function: Callable[[str, torch.Tensor], torch.Tensor]) -> object:
        """A sample, as `autopar.plan` takes it, with each planned tensor replaced by `function(path, tensor)`."""
        args, kwargs = _split(sample)
        known(sample)
        given = named(self.names, self.rest, args, kwargs)
        paths = iter(_leaves(given))

        def change(leaf: object) -> object:
            path, _ = next(paths)
            return function(path, leaf) if isinstance(leaf, torch.Tensor) and path in self.shapes else leaf

        changed = {name: pytree.tree_map(change, value) for name, value in given.items()}
        if isinstance(sample, Mapping):
            return changed
        rest = changed.pop(self.rest, ())
        flat = (*changed.values(), *(rest if isinstance(rest, tuple) else (rest,)))
        return flat if isinstance(sample, (tuple, list)) else flat[0]

    def rebuild(self, outputs: Sequence[object]) -> object:
        """The return value of the user's model, from the program's outputs in order."""
        return self.returned.rebuild(outputs)

    def _text(self) -> str:
        return ", ".join(f"{planned.path}: {planned}" for planned in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A sample as `forward` takes it: `args` and `kwargs`, and its leaves by path in the order of `forward`'s parameters."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    leaves: tuple[tuple[str, object], ...]
    names: tuple[str, ...]
    rest: str
    defaults: tuple[tuple[str, Static], ...]
    static: tuple[StaticInput, ...] = ()

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are program inputs, by path."""
        fixed = {one.path for one in self.static}
        return [(path, leaf) for path, leaf in self.leaves if isinstance(leaf, torch.Tensor) and path not in fixed]

    @property
    def static_places(self) -> dict[int, StaticInput]:
        """The static inputs by their position among the leaves of `args` and `kwargs`."""
        fixed, held = {one.path: one for one in self.static}, dict(self.leaves)
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {place: one for place, leaf in enumerate(leaves) for path, one in fixed.items() if held[path] is leaf}

    def to(self, dtype: torch.dtype) -> ModelCall:
        """This call with its floating tensors cast to a dtype."""

        def cast(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else leaf

        args, kwargs, leaves = pytree.tree_map_only(torch.Tensor, cast, (self.args, self.kwargs, self.leaves))
        return replace(self, args=args, kwargs=kwargs, leaves=leaves)

    def at(self, places: Mapping[InputDim, int]) -> ModelCall:
        """This call with the sizes of some dims of its tensors replaced."""
        tensors = dict(self.tensors)
        other: dict[int, torch.Tensor] = {}
        for path, leaf in tensors.items():
            shape = [places.get((path, dim), size) for dim, size in enumerate(leaf.shape)]
            if shape != list(leaf.shape):
                other[id(leaf)] = leaf.new_empty(shape).requires_grad_(leaf.requires_grad)

        def change(leaf: torch.Tensor) -> torch.Tensor:
            return other.get(id(leaf), leaf)

        args, kwargs, leaves = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs, self.leaves))
        return replace(self, args=args, kwargs=kwargs, leaves=leaves)

    def signature(self, returned: ReturnSpec) -> Signature:
        """The signature of a model with this call and return value."""
        return Signature(
            names=self.names,
            rest=self.rest,
            tensors=tuple(
                TensorSpec(path=path, shape=tuple(leaf.shape), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
                for path, leaf in self.tensors
            ),
            constants=tuple((path, leaf) for path, leaf in self.leaves if isinstance(leaf, STATIC)),
            defaults=self.defaults,
            returned=returned,
            static=self.static,
        )


def refuse_model(model: object) -> None:
    """Raise InputError for anything but a module, CaptureError for a module that is already parallel, or TorchScript."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}", fix="give a torch.nn.Module")
    refuse_made("the model", model)


def read_call(model: nn.Module, sample_input: object, static: Sequence[str] = ()) -> ModelCall:
    """A sample (a tensor, a tuple or list of positional arguments, or a mapping of keywords) as a call on the meta device.

    `use_cache=False` is added if `forward` takes it and the sample does not set it. `static` names inputs that are constants.
    Raises InputError for arguments that are neither tensors nor constants, and for those that `forward` does not take, and
    CaptureError for a model that is already parallel, or TorchScript.
    """
    refuse_model(model)
    known(sample_input)
    args, kwargs = _split(sample_input)
    taken = inspect.signature(model.forward)
    defaults = {p.name: p.default for p in taken.parameters.values() if isinstance(p.default, STATIC)}
    if "use_cache" in taken.parameters:
        kwargs.setdefault("use_cache", False)
        defaults["use_cache"] = False
    try:
        own = _arguments(taken, args, kwargs)[2]
        args, kwargs = pytree.tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        bound, extra, leaves = _arguments(taken, args, kwargs)
    except TypeError as error:
        raise InputError(f"the sample does not fit {type(model).__name__}.forward: {error}", takes=f"forward{taken}") from error
    for path, leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *STATIC)):
            fix = "pass tensors, constants, or containers of them"
            raise InputError(f"argument {path} is a {type(leaf).__name__}", fix=fix)
    fixed = read_static(static, dict(own))
    if sum(isinstance(leaf, torch.Tensor) for _, leaf in leaves) == len(fixed):
        raise InputError(
            f"the sample contains no tensor: it is {_describe(sample_input)}",
            fix="the global batch: a tensor, a tuple of arguments, or a mapping of keywords",
        )
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return ModelCall(
        args=bound.args,
        kwargs={name: value for name, value in bound.kwargs.items() if name not in extra} | extra,
        leaves=leaves,
        names=tuple(p.name for p in taken.parameters.values() if p.kind in by_position),
        rest=next((p.name for p in taken.parameters.values() if p.kind is p.VAR_POSITIONAL), ""),
        defaults=tuple(defaults.items()),
        static=fixed,
    )


def _arguments(
    taken: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[inspect.BoundArguments, dict[str, object], tuple[tuple[str, object], ...]]:
    """The arguments of a call bound to `forward`'s parameters, those that its `**kwargs` takes, and all leaves."""
    bound = taken.bind(*args, **kwargs)
    extras = next((p.name for p in taken.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    arguments = {name: value for name, value in bound.arguments.items() if name != extras}
    extra = dict(sorted(bound.arguments.get(extras, {}).items()))
    return bound, extra, tuple(_leaves(arguments | extra))


def named(names: Sequence[str], rest: str, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call by name; raises InputError if there are too many or one is given twice."""
    if len(args) > len(names) and not rest:
        raise InputError(f"{len(args)} positional arguments, but forward takes {len(names)}", takes=", ".join(names))
    arguments = dict(zip(names, args, strict=False))
    for name in kwargs:
        if name in arguments:
            raise InputError(f"argument {name} is given twice", fix="give it by position or by name")
    return arguments | ({rest: tuple(args[len(names) :])} if len(args) > len(names) else {}) | dict(kwargs)


def on_meta(sample: object, signature: Signature) -> object:
    """The sample with its tensors, except static ones, on the meta device."""
    return signature.mapped(sample, lambda _, tensor: _to_meta(tensor))


def _split(sample: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(sample, Mapping):
        return (), {str(name): value for name, value in sample.items()}
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), {}


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        fix = "torch.nested.to_padded_tensor(x, 0.0), and a mask of what is padding"
        raise InputError("an input is a nested tensor, whose rows have no common length to split", fix=fix)
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _leaves(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return distinct(leaf for name, value in arguments.items() for leaf in walk(name, value))


def _same(value: object, planned: Static) -> bool:
    return type(value) is type(planned) and value == planned


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return textwrap.shorten(repr(value), 100, placeholder=" ...")


def _checked(planned: TensorSpec, given: object, varying: Set[InputDim]) -> torch.Tensor:
    if given is None:
        raise InputError(f"argument {planned.path} is missing", planned=planned, fix=ANOTHER_CALL)
    if not isinstance(given, torch.Tensor):
        raise InputError(
            f"argument {planned.path} is not a tensor", given=_describe(given), planned=planned, fix="give a tensor"
        )
    if given.dtype != planned.dtype:
        raise InputError(
            f"argument {planned.path} has another dtype than planned", given=_describe(given), planned=planned, fix="convert it"
        )
    pairs = enumerate(zip(given.shape, planned.given, strict=False))
    wrong = {d: sizes for d, sizes in pairs if sizes[0] != sizes[1] and (planned.path, d) not in varying}
    if wrong or given.dim() != len(planned.shape):
        raise _other_shape(planned, given, wrong)
    return given


def _other_shape(planned: TensorSpec, given: torch.Tensor, wrong: Mapping[int, tuple[int, int]]) -> InputError:
    dims = [f"dim {dim} is {size}, planned {wanted}" for dim, (size, wanted) in wrong.items()]
    rank = f"{given.dim()} dims, planned {len(planned.shape)}" if given.dim() != len(planned.shape) else ""
    return InputError(
        f"argument {planned.path} has another shape than planned: {rank or '; '.join(dims)}",
        given=_describe(given),
        planned=planned,
        fix='a plan is made for one shape: dynamic={"batch": 0} lets a size vary; or plan again with this sample, or pad it '
        "(for a last batch: drop_last=True)",
    )

"""Sizes that may vary from call to call: what the user declares of them, and what a call has.

dynamic={"batch": 0}                              dim 0 of every input that is as long there as the first one
dynamic={"batch": {"x": 0, "labels": 0}}          these dims of these inputs
dynamic={"sequence": Dynamic(1, least=16, most=512)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import ConstraintError, InputError
from autopar.ir.layout import Shape

InputDim = tuple[str, int]  # (path of an input, dim)
DimSizes = int | Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A size that may vary: its dims (one number, or a dim for each input by name) and bounds, if any."""

    dims: DimSizes
    least: int = 2
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size that may vary: where the inputs have it, its value in the sample, and the values that a plan allows."""

    name: str
    places: tuple[InputDim, ...]
    sample: int
    least: int
    most: int | None
    multiple: int = 1  # the allowed values are multiples of this, as the plan's layouts divide them

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        least = -(-self.least // self.multiple) * self.multiple
        end = f" up to {self.most}" if self.most is not None else ""
        if self.multiple == 1:
            return f"{least} or more" if self.most is None else f"{least} to {self.most}"
        return f"multiples of {self.multiple}{f' from {least}' if least > self.multiple else ''}{end}"

    @property
    def where(self) -> str:
        """The dims that have this size, in words."""
        dims: dict[int, list[str]] = {}
        for path, dim in self.places:
            dims.setdefault(dim, []).append(path)
        return "; ".join(f"dim {dim} of {', '.join(paths)}" for dim, paths in dims.items())

    def __str__(self) -> str:
        return f"{self.name} ({self.where}): {self.allowed}, planned at {self.sample}"


def declared(dynamic: Mapping[str, DimSizes | Dynamic], shapes: Mapping[str, Shape]) -> tuple[Size, ...]:
    """The sizes that a user declares for a sample with these shapes. Raises ConstraintError for dims that it does not have."""
    if not isinstance(dynamic, Mapping):
        raise ConstraintError(f"dynamic={dynamic!r} names no sizes", fix='a mapping of names to dims, such as {"batch": 0}')
    found: dict[InputDim, str] = {}
    sizes = []
    for name, given in dynamic.items():
        if not isinstance(name, str):
            raise ConstraintError(f"dynamic names {name!r}, which is not text", fix='a name of its own: {"batch": 0}')
        wanted = given if isinstance(given, Dynamic) else Dynamic(given)
        places = _places(name, wanted.dims, shapes)
        for place in places:
            if other := found.get(place):
                raise ConstraintError(f"dim {place[1]} of {place[0]} is declared twice: as {other!r} and as {name!r}")
            found[place] = name
        sizes.append(_size(name, places, wanted, shapes))
    return tuple(sizes)


def _places(name: str, dims: DimSizes, shapes: Mapping[str, Shape]) -> tuple[InputDim, ...]:
    what, fix = f"dynamic[{name!r}]", "a dim, a mapping of inputs to dims, or autopar.Dynamic(dims, least=..., most=...)"
    if isinstance(dims, bool) or not isinstance(dims, (int, Mapping)):
        raise ConstraintError(f"{what} is {dims!r}", fix=fix)
    if isinstance(dims, int):
        lengths = {path: shape[dims] for path, shape in shapes.items() if -len(shape) <= dims < len(shape)}
        first = next(iter(lengths.values()), 0)
        dims = {path: dims for path, length in lengths.items() if length == first}
    if not dims:
        raise ConstraintError(f"{what} is not a dim of any input", inputs=_text(shapes), fix=fix)
    for path, dim in dims.items():
        if path not in shapes:
            raise ConstraintError(f"{what} names {path!r}, which is not a tensor of the sample", inputs=_text(shapes))
        if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shapes[path]) <= dim < len(shapes[path]):
            raise ConstraintError(f"{what} names dim {dim!r} of {path}, which it does not have", inputs=_text(shapes))
    return tuple((path, dim % len(shapes[path])) for path, dim in dims.items())


def _size(name: str, places: tuple[InputDim, ...], wanted: Dynamic, shapes: Mapping[str, Shape]) -> Size:
    lengths = {f"dim {dim} of {path}": shapes[path][dim] for path, dim in places}
    sample, *more = dict.fromkeys(lengths.values())
    if more:
        said = ", ".join(f"{place} is {length}" for place, length in lengths.items())
        raise ConstraintError(f"{name!r} has several sizes in the sample: {said}", fix="a name for each of them")
    least, most = wanted.least, wanted.most
    whole = isinstance(least, int) and isinstance(most, int | None)
    if (
        not whole
        or least < 2
        or (most is not None and most <= least)
        or not least <= sample <= (sample if most is None else most)
    ):
        raise ConstraintError(
            f"{name!r} is {sample} in the sample, and may be {least} {f'to {most}' if most is not None else 'or more'}",
            fix="bounds of 2 or more, and a sample between them: a dim of size 1 is broadcast, which is another program",
        )
    return Size(name=name, places=places, sample=sample, least=least, most=most)


def numbers(sizes: Sequence[Size], shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """The values of the sizes in a call; raises InputError if inputs disagree on one, or if the plan does not allow it."""
    found = []
    for size in sizes:
        lengths = {place: shapes[place[0]][place[1]] for place in size.places}
        number, *more = dict.fromkeys(lengths.values())
        if more:
            said = ", ".join(f"dim {dim} of {path} is {length}" for (path, dim), length in lengths.items())
            raise InputError(f"the arguments disagree on {size.name}: {said}", fix="one size for all of them")
        wrong = number % size.multiple or number < size.least or (size.most is not None and number > size.most)
        if wrong:
            raise InputError(
                f"{size.name} is {number} ({size.where}), but the plan takes {size.allowed}",
                planned=size.sample,
                fix="pad the batch or drop its rest (drop_last=True), or plan with other bounds, or for fewer devices",
            )
        found.append(number)
    return tuple(found)


def dim_sizes(sizes: Sequence[Size], found: Sequence[int] | None = None) -> dict[InputDim, int]:
    """The size of every dim that varies, for the values `found`; by default those of the sample."""
    given = [size.sample for size in sizes] if found is None else found
    return {place: number for size, number in zip(sizes, given, strict=True) for place in size.places}


def describe_sizes(sizes: Sequence[Size], found: Sequence[int]) -> str:
    """The sizes that differ from the sample, in words: "batch=16"."""
    return ", ".join(f"{size.name}={number}" for size, number in zip(sizes, found, strict=True) if number != size.sample)


def _text(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{path} {list(shape)}" for path, shape in shapes.items())


__all__ = ["DimSizes", "Dynamic", "InputDim", "Shape", "Size", "declared", "describe_sizes", "dim_sizes", "numbers"]

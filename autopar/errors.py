"""Errors of autopar: each says what happened, with which values, where in the user's model, and how to fix it."""

from __future__ import annotations


def printable(line: str) -> str:
    r"""Escape the unprintable characters of a line as `repr` does: line breaks, control characters, lone surrogates.

    >>> print(printable("h.0" + chr(10) + "w"))
    h.0\nw
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)


class AutoparError(Exception):
    """The base of every error that autopar raises on purpose.

    The first line is complete by itself; each named detail follows on a line of its own. Names print literally.

    >>> print(LayoutError("cannot split dim 0 of w over mesh axis tp", shape="(3, 4)", fix="leave it whole"))
    cannot split dim 0 of w over mesh axis tp
      shape  (3, 4)
      fix    leave it whole
    """

    def __init__(self, what: str, /, **details: object) -> None:
        self.what = printable(what)
        shown = {name: "\n".join(map(printable, str(text).split("\n"))) for name, text in details.items() if text is not None}
        self.details = {name: text for name, text in shown.items() if text}
        width = max(map(len, self.details), default=0)
        rows = (f"  {name:<{width}}  {text}" for name, text in self.details.items())
        super().__init__("\n".join([self.what, *rows]))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with its class, whatever its constructor takes, so that other ranks can raise it."""
        return _made_again, (type(self), self.what, self.details), {**self.__dict__}


def _made_again(kind: type[AutoparError], what: str, details: dict[str, str]) -> AutoparError:
    error = kind.__new__(kind)
    AutoparError.__init__(error, what, **details)
    return error


class CaptureError(AutoparError):
    """The model cannot be captured as a graph."""


class RuleError(AutoparError):
    """A sharding rule does not fit its operator, or an operator has none."""


class LayoutError(AutoparError):
    """A layout does not fit its tensor or the mesh."""


class MeshError(AutoparError):
    """The mesh does not fit the number of processes, or is not a valid mesh."""


class ConstraintError(AutoparError):
    """A constraint names nothing, or contradicts itself or another."""


class BudgetError(AutoparError):
    """No plan fits into the memory budget."""


class PlanError(AutoparError):
    """A plan is damaged, or was made for another model or mesh."""


class DerivativeError(AutoparError):
    """A second derivative (`create_graph=True`) of an operator that has none."""


class AllocationError(AutoparError):
    """Jobs cannot share a cluster as described."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, is damaged, or belongs to another training run."""


class DiskError(AutoparError):
    """A weight on the disk cannot be written, or is damaged."""

    another = 'disk="FOLDER" of parallelize names a folder on another disk'  # a way out


class InputError(AutoparError):
    """The arguments of a call differ from the planned ones, or from those of other ranks."""


class RankError(AutoparError):
    """A collective failed because another rank died or does not answer."""

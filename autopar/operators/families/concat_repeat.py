"""Rules of operators that join, repeat and turn: what they place by position stays whole there."""

from __future__ import annotations

from autopar.ir.program import Argument
from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Alias, Autocast
from autopar.operators.pattern_text import dims, term, without
from autopar.operators.rule import OpSharding, Rule, op


def cat(call: Call) -> OpSharding:
    """The dim along which k equal tensors are joined is `(k! c)`; it stays whole if they are unequal."""
    return joined(call, call.number("dim") % len(call.result))


def joined(call: Call, dim: int) -> OpSharding:
    """Tensors joined along a dim."""
    shapes = [value.shape for value in call.operands]
    count = len(shapes)
    words = without(len(call.result), dim)
    if any(shape != shapes[0] for shape in shapes):  # an operand of shape (0,) is allowed anywhere
        held = [term(words) if len(shape) == len(words) else "_" for shape in shapes]
        return call.fit(f"{', '.join(held)} -> {term(words)}")
    whole, piece = list(words), list(words)
    whole[dim], piece[dim] = ("(k! c)", "c") if count > 1 else ("c", "c")
    text = f"{', '.join(term(piece) for _ in range(count))} -> {term(whole)}"
    return call.fit(text, sizes={"k": count}, asks="result")


def stack(call: Call) -> OpSharding:
    """The new dim stays whole."""
    return call.fit(f"{', '.join('...' for _ in call.operands)} -> ... _@dim ...")


def repeat(call: Call) -> OpSharding:
    """A repeated dim is `(r d)`: the repeats r are the outer factor."""
    repeats, rank = call.numbers("repeats") or call.numbers("dims"), call.rank("self")
    words = dims(rank)
    repeats = (1,) * (rank - len(repeats)) + repeats
    lead = len(repeats) - rank
    sizes = {f"r{i}": n for i, n in enumerate(repeats)} | {f"d{i}": n for i, n in enumerate(call.shape("self"))}
    result = [f"(r{i} d{i - lead})" if i >= lead else f"r{i}" for i in range(len(repeats))]
    return call.fit(f"{term(words)} -> {term(result)}", sizes=sizes)


def repeats(call: Call, local: Local) -> dict[str, Argument]:
    """The repeats on one rank."""
    name = "repeats" if "repeats" in call.arguments else "dims"
    given = call.numbers(name)
    lead = len(local.results[0]) - len(given)
    return {name: tuple(n // local.split(f"r{i + lead}") for i, n in enumerate(given))}


def repeat_interleave(call: Call) -> OpSharding:
    """A repeated dim is `(d r)`: the repeats r are the inner factor. Without a dim elements repeat, and all stays whole."""
    words, sizes = dims(call.rank("self")), {"r": call.number("repeats")}
    if not isinstance(call.arguments["dim"], int):  # over all elements
        return call.fit(f"{term('_' for _ in words)} -> _")
    dim = call.number("dim") % len(words)
    result = [f"({word} r)" if d == dim else word for d, word in enumerate(words)]
    return call.fit(f"{term(words)} -> {term(result)}", sizes=sizes)


def interleaves(call: Call, local: Local) -> dict[str, Argument]:
    """The repeats of each row on one rank; the output size, if given, is dropped."""
    return {"repeats": call.number("repeats") // local.split("r"), "output_size": None}


def meshgrid(call: Call) -> OpSharding:
    """`a, b, c -> a b c, a b c, a b c`, for any number of vectors; indexing="xy" swaps the first two dims."""
    words = dims(len(call.operands))
    swapped = [words[1], words[0], *words[2:]] if call.arguments.get("indexing") == "xy" and len(words) > 1 else words
    held = ", ".join(word if value.shape else "()" for word, value in zip(words, call.operands, strict=True))
    return call.fit(f"{held} -> {', '.join(term(swapped) for _ in words)}")


def side_by_side(call: Call) -> OpSharding:
    """Tensors are joined along dim 1, vectors along their only dim."""
    return joined(call, min(len(call.result) - 1, 1))


def one_below_the_other(call: Call) -> OpSharding:
    """Tensors of two or more dims are joined along dim 0; vectors become rows, and the dim that counts them stays whole."""
    if len(call.operands[0].shape) < 2:
        return call.fit(f"{', '.join('d1' if value.shape else '()' for value in call.operands)} -> _ d1")
    return joined(call, 0)


TABLE: dict[str, Rule] = {
    # joined
    "aten.cat.default": op(cat, linear="tensors", padding=padding.arranged, autocast=Autocast.WIDEST),
    "aten.concat.default": op(cat, linear="tensors", padding=padding.arranged, autocast=Autocast.WIDEST),
    "aten.concatenate.default": op(cat, linear="tensors", padding=padding.arranged, autocast=Autocast.WIDEST),
    "aten.hstack.default": op(side_by_side, linear="tensors"),
    "aten.vstack.default": op(one_below_the_other, linear="tensors"),
    "aten.row_stack.default": op(one_below_the_other, linear="tensors"),
    "aten.stack.default": op(stack, linear="tensors", padding=padding.arranged, autocast=Autocast.WIDEST),
    # repeated
    "aten.repeat.default": op(repeat, linear="self", local=repeats),
    "aten.tile.default": op(repeat, linear="self", local=repeats),
    "aten.repeat_interleave.self_int": op(repeat_interleave, linear="self", local=interleaves),
    "aten.meshgrid.default": op(meshgrid, alias=Alias.ALWAYS),
    "aten.meshgrid.indexing": op(meshgrid, alias=Alias.ALWAYS),
    "aten.unfold.default": op("... _@dimension ... -> ... _@dimension ... _", linear="self", alias=Alias.ALWAYS),
    # turned
    "aten.rot90.default": op("... _@dims ... -> ... _@dims ...", linear="self"),
    "aten.flipud.default": op("_ ... -> _ ...", linear="self"),
    "aten.fliplr.default": op("d _ ... -> d _ ...", linear="self"),
}

"""Rules of operators that join, repeat, look up and write: what they place by position stays whole there."""

from __future__ import annotations

import torch

from autopar.ir import Argument, Ref
from autopar.rules.call import Call, Local
from autopar.rules.rule import Fitted, Rule, rule
from autopar.rules.views import dims, term, without


def cat(call: Call) -> Fitted:
    """... c ..., k times -> ... (k! c) ...; unequal pieces keep the dim whole"""
    shapes = [value.shape for value in call.operands]
    dim, count = call.number("dim") % len(call.result), len(shapes)
    words = without(len(call.result), dim)
    if any(shape != shapes[0] for shape in shapes):  # an operand of shape (0,) is allowed anywhere
        held = [term(words) if len(shape) == len(words) else "_" for shape in shapes]
        return call.fit(f"{', '.join(held)} -> {term(words)}")
    whole, piece = list(words), list(words)
    whole[dim], piece[dim] = ("(k! c)", "c") if count > 1 else ("c", "c")
    text = f"{', '.join(term(piece) for _ in range(count))} -> {term(whole)}"
    return call.fit(text, sizes={"k": count}, asks="result")


def stack(call: Call) -> Fitted:
    """the new dim stays whole"""
    words = without(len(call.result), call.number("dim"))
    piece = term(word for word in words if word != "_")
    return call.fit(f"{', '.join(piece for _ in call.operands)} -> {term(words)}")


def repeat(call: Call) -> Fitted:
    """... d ... -> ... (r d) ...; the repeats r are the outer factor"""
    repeats, rank = call.numbers("repeats") or call.numbers("dims"), call.rank("self")
    words = dims(rank)
    repeats = (1,) * (rank - len(repeats)) + repeats
    lead = len(repeats) - rank
    sizes = {f"r{i}": n for i, n in enumerate(repeats)} | {f"d{i}": n for i, n in enumerate(call.shape("self"))}
    result = [f"(r{i} d{i - lead})" if i >= lead else f"r{i}" for i in range(len(repeats))]
    return call.fit(f"{term(words)} -> {term(result)}", sizes=sizes)


def repeats(call: Call, local: Local) -> dict[str, Argument]:
    """How often one rank repeats."""
    name = "repeats" if "repeats" in call.arguments else "dims"
    given = call.numbers(name)
    lead = len(local.results[0]) - len(given)
    return {name: tuple(n // local.split(f"r{i + lead}") for i, n in enumerate(given))}


def repeat_interleave(call: Call) -> Fitted:
    """... d ... -> ... (d r) ...; the repeats r are the inner factor"""
    words, sizes = dims(call.rank("self")), {"r": call.number("repeats")}
    if not isinstance(call.arguments["dim"], int):  # over all elements
        return call.fit(f"{term('_' for _ in words)} -> _")
    dim = call.number("dim") % len(words)
    result = [f"({word} r)" if d == dim else word for d, word in enumerate(words)]
    return call.fit(f"{term(words)} -> {term(result)}", sizes=sizes)


def interleaves(call: Call, local: Local) -> dict[str, Argument]:
    """How often one rank repeats each row; the size of its output, if given, is dropped."""
    return {"repeats": call.number("repeats") // local.split("r"), "output_size": None}


def index(call: Call) -> Fitted | None:
    """indexed dims stay whole, the indices' dims stand in their place: first if the indices are not neighbours"""
    if any(call.operands[p].dtype in (torch.bool, torch.uint8) for p in call.positions("indices")):
        return None  # a mask: the number of rows depends on the data
    indices = call.arguments["indices"]
    assert isinstance(indices, tuple)
    taken = [d for d, part in enumerate(indices) if isinstance(part, Ref)]
    words = without(call.rank("self"), *taken)
    place = taken[0] if taken == list(range(taken[0], taken[-1] + 1)) else 0
    result = [word for word in words[:place] if word != "_"] + ["..."] + [word for word in words[place:] if word != "_"]
    return call.fit(f"{term(words)}, {', '.join('...' for _ in taken)} -> {term(result)}")


def index_put(call: Call) -> Fitted | None:
    """..., ..., () -> ...; a mask of the tensor's own shape and one value, else no rule"""
    masks = call.positions("indices")
    mask = len(masks) == 1 and call.operands[masks[0]].dtype == torch.bool and call.shape("indices") == call.shape("self")
    if not mask or call.rank("values") or call.arguments["accumulate"]:
        return None
    return call.fit("..., ..., () -> ...")


def meshgrid(call: Call) -> Fitted:
    """a, b, c -> a b c, each; "xy" swaps the first two"""
    words = dims(len(call.operands))
    swapped = [words[1], words[0], *words[2:]] if call.arguments.get("indexing") == "xy" and len(words) > 1 else words
    held = ", ".join(word if value.shape else "()" for word, value in zip(words, call.operands, strict=True))
    return call.fit(f"{held} -> {', '.join(term(swapped) for _ in words)}")


def unfold(call: Call) -> Fitted:
    """the dim over which a window moves stays whole, the window is a new last dim"""
    words = without(call.rank("self"), call.number("dimension"))
    return call.fit(f"{term(words)} -> {term([*words, '_'])}")


def index_select(call: Call) -> Fitted:
    """the dim stays whole, the index stands in its place"""
    words = without(call.rank("self"), call.number("dim"))
    result = ["i" if word == "_" else word for word in words]
    return call.fit(f"{term(words)}, {'i' if call.rank('index') else '()'} -> {term(result)}")


def gather(call: Call) -> Fitted | None:
    """the dim stays whole in the source and may be split in the index; other dims go together where they are equal"""
    if not isinstance(call.arguments["dim"], int):
        return None  # over all elements
    shape, picked = (call.operands[p].shape for _, p in call.slots if p is not None)
    dim = call.number("dim") % max(len(shape), 1)
    together = [d for d in range(len(shape)) if d != dim and shape[d] == picked[d]]
    source = term(f"d{d}" if d in together else "_" for d in range(len(shape)))
    free = [f"d{d}" if d in together or d == dim else "_" for d in range(len(shape))]
    # an index shorter than its source there is taken from the front: both stay whole
    return call.fit(f"{source}, {term(free)} -> {term(free)}")


def scatter(call: Call) -> Fitted:
    """the dim stays whole; other dims go together where all are equal"""
    shapes = [value.shape for value in call.operands]
    dim = call.number("dim") % max(len(shapes[0]), 1)
    same = [d != dim and len({shape[d] for shape in shapes}) == 1 for d in range(len(shapes[0]))]
    words = term(f"d{d}" if together else "_" for d, together in enumerate(same))
    return call.fit(f"{', '.join(words for _ in shapes)} -> {words}")


def index_add(call: Call) -> Fitted:
    """the dim stays whole in all three tensors"""
    words = term(without(call.rank("self"), call.number("dim")))
    return call.fit(f"{words}, _, {words} -> {words}")


def slice_scatter(call: Call) -> Fitted:
    """the written dim stays whole"""
    words = term(without(call.rank("self"), call.number("dim")))
    return call.fit(f"{words}, {words} -> {words}")


def select_scatter(call: Call) -> Fitted:
    """the written dim stays whole"""
    words = without(call.rank("self"), call.number("dim"))
    return call.fit(f"{term(words)}, {term(word for word in words if word != '_')} -> {term(words)}")


def diagonal(call: Call) -> Fitted:
    """both dims of the diagonal stay whole"""
    words = without(call.rank("self"), call.number("dim1", 0), call.number("dim2", 1))
    return call.fit(f"{term(words)} -> {term([*(word for word in words if word != '_'), '_'])}")


def pad(call: Call) -> Fitted:
    """padded dims stay whole"""
    amounts, rank = call.numbers("pad") or call.numbers("padding"), call.rank("self")
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    words = term("_" if d in padded else f"d{d}" for d in range(rank))
    return call.fit(f"{words} -> {words}")


def pixel_shuffle(call: Call) -> Fitted:
    """... (c r s) y x -> ... c (y r) (x s)"""
    factor = call.number("upscale_factor")
    return call.fit("... (c r! s!) y x -> ... c (y r!) (x s!)", sizes={"r": factor, "s": factor})


def plane(call: Call) -> Fitted:
    """... y! x! -> ... y! x!; a window looks beyond its own place, so both stay whole"""
    space = {"1d": "_", "2d": "_ _", "3d": "_ _ _"}[call.op.target.split(".")[1].removesuffix("_with_indices")[-2:]]
    return call.fit(f"... {space} -> {', '.join(f'... {space}' for _ in call.op.results)}")


MAX_POOLS = (
    "max_pool1d.default",
    "max_pool2d.default",
    "max_pool3d.default",
    "max_pool2d_with_indices.default",
    "adaptive_max_pool2d.default",
)
POOLS = [f"{kind}pool{n}d.default" for kind in ("avg_", "adaptive_avg_") for n in (1, 2, 3)]
RESIZES = ("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")

TABLE: dict[str, Rule] = {
    "aten.cat.default": rule(cat, linear="tensors"),
    "aten.stack.default": rule(stack, linear="tensors"),
    "aten.repeat.default": rule(repeat, linear="self", local=repeats),
    "aten.tile.default": rule(repeat, linear="self", local=repeats),
    "aten.repeat_interleave.self_int": rule(repeat_interleave, linear="self", local=interleaves),
    "aten.index.Tensor": rule(index, linear="self"),
    "aten.index_put.default": rule(index_put, linear="self values"),
    "aten.meshgrid.default": rule(meshgrid, view=True),
    "aten.meshgrid.indexing": rule(meshgrid, view=True),
    "aten.unfold.default": rule(unfold, linear="self", view=True),
    "aten.index_select.default": rule(index_select, linear="self"),
    "aten.gather.default": rule(gather, linear="self"),
    "aten.take_along_dim.default": rule(gather, linear="self"),
    "aten.scatter.src": rule(scatter, linear="self src"),
    "aten.scatter.value": rule(scatter, linear="self value"),
    "aten.scatter_add.default": rule(scatter, linear="self src"),
    "aten.index_add.default": rule(index_add, linear="self source"),
    "aten.slice_scatter.default": rule(slice_scatter, linear="self src"),
    "aten.select_scatter.default": rule(select_scatter, linear="self src"),
    "aten.diagonal.default": rule(diagonal, linear="self", view=True),
    "aten.pad.default": rule(pad, linear="self value"),
    "aten.constant_pad_nd.default": rule(pad, linear="self value"),
    "aten.reflection_pad1d.default": rule(pad, linear="self"),
    "aten.reflection_pad2d.default": rule(pad, linear="self"),
    "aten.replication_pad2d.default": rule(pad, linear="self"),
    "aten.pixel_shuffle.default": rule(pixel_shuffle, linear="self"),
    **{f"aten.{name}": rule(plane) for name in MAX_POOLS},
    **{f"aten.{name}": rule(plane, linear="self") for name in POOLS},
    **{f"aten.{name}.{form}": rule(plane, linear="self input") for name in RESIZES for form in ("default", "vec")},
}

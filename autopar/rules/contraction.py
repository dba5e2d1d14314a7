"""Rules of products that sum over a factor: linear layers, matrix products, convolutions, embeddings."""

from __future__ import annotations

import string
from dataclasses import replace

from autopar.ir import Argument
from autopar.rules.call import Call, Local
from autopar.rules.rule import Distributed, Fitted, Rule, rule


def linear(call: Call) -> Fitted:
    """... k, n k, +n -> ... n"""
    return call.fit("... k, n k, +n -> ... n" if call.rank("weight") == 2 else "... k, k, +() -> ...")


def matmul(call: Call) -> Fitted:
    """... m k, ... k n -> ... m n; a vector lacks m or n"""
    left = "k" if call.rank("self") == 1 else "... m k"
    right = "k" if call.rank("other") == 1 else "... k n"
    result = " ".join(w for w, there in (("...", left != right), ("m", left != "k"), ("n", right != "k")) if there)
    return call.fit(f"{left}, {right} -> {result or '()'}")


def added_to(result: str, product: str, arguments: tuple[str, str]) -> Rule:
    """A product of two arguments with a tensor added that broadcasts against the result."""

    def shapes(call: Call) -> Fitted:
        words = result.split()
        held = words[len(words) - call.rank("self") :]
        return call.fit(f"+{' '.join(held) or '()'}, {product} -> {result}")

    shapes.__doc__ = f"+{result}, {product} -> {result}; what is added may lack dims"
    return rule(shapes, linear=", ".join(f"self {argument}" for argument in arguments))


def einsum(call: Call) -> Fitted:
    """as its equation says; a letter that stands twice in one tensor takes a diagonal, and stays whole"""
    equation = str(call.arguments["equation"]).replace(" ", "").replace("...", "*")
    sources, _, result = equation.partition("->")
    letters = [c for c in string.ascii_uppercase + string.ascii_lowercase if sources.count(c) == 1]
    result = result if "->" in equation else ("*" if "*" in sources else "") + "".join(letters)

    whole = {c for term in sources.split(",") for c in term if term.count(c) > 1}

    def dims(term: str) -> str:
        return " ".join("..." if c == "*" else "_" if c in whole else c for c in term) or "()"

    fitted = call.fit(f"{', '.join(map(dims, sources.split(',')))} -> {dims(result)}")
    each = tuple(frozenset({position}) for position in call.positions("tensors"))  # linear in each tensor
    return replace(fitted, linear=each if call.continuous else ())


def embedding(call: Call) -> Fitted:
    """v! h, ... -> ... h; the rows looked up stay on one device when gradients are counted or sparse"""
    return call.fit("v! h, ... -> ... h" if plain_rows(call) else "v! h, ...! -> ...! h")


def plain_rows(call: Call) -> bool:
    """Whether the gradient of a table is the sum over the rows looked up."""
    return not call.arguments["scale_grad_by_freq"] and not call.arguments["sparse"]


VOCABULARY = Distributed(name="vocabulary", factors=("v",), able=plain_rows)  # a rank adds nothing for rows that lie elsewhere


def convolution(call: Call) -> Fitted:
    """b i space!, o i window!, +o -> b o space!; groups split instead of channels where there are several"""
    space = " ".join("_" for _ in range(call.rank("weight") - 2))
    batch = "b " if call.rank("input") == call.rank("weight") else ""
    groups = call.number("groups", 1)
    transposed = "transpose" in call.op.target or bool(call.arguments.get("transposed"))
    weight = "i o" if transposed else "o i"
    if groups == 1:
        return call.fit(f"{batch}i {space}, {weight} {space}, +o -> {batch}o {space}")
    weight = "(g i!) o!" if transposed else "(g o!) i!"
    text = f"{batch}(g i!) {space}, {weight} {space}, +(g o!) -> {batch}(g o!) {space}"
    return call.fit(text, sizes={"g": groups})


def convolution_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    groups = call.number("groups", 1)
    return {"groups": groups // local.split("g")} if groups > 1 else {}


CONVOLUTION = rule(convolution, linear="input bias, weight bias", local=convolution_groups)

TABLE: dict[str, Rule] = {
    "aten.linear.default": rule(linear, linear="input bias, weight bias"),
    "aten.matmul.default": rule(matmul, linear="self, other"),
    "aten.mm.default": rule("m k, k n -> m n", linear="self, mat2"),
    "aten.bmm.default": rule("b m k, b k n -> b m n", linear="self, mat2"),
    "aten.mv.default": rule("m k, k -> m", linear="self, vec"),
    "aten.dot.default": rule("k, k -> ()", linear="self, tensor"),
    "aten.outer.default": rule("m, n -> m n", linear="self, vec2"),
    "aten.addmm.default": added_to("m n", "m k, k n", ("mat1", "mat2")),
    "aten.addmv.default": added_to("m", "m k, k", ("mat", "vec")),
    "aten.addbmm.default": added_to("m n", "b m k, b k n", ("batch1", "batch2")),
    "aten.baddbmm.default": added_to("b m n", "b m k, b k n", ("batch1", "batch2")),
    "aten.bilinear.default": rule("... i, ... j, o i j, +o -> ... o", linear="input1 bias, input2 bias, weight bias"),
    "aten.einsum.default": rule(einsum),
    "aten.embedding.default": rule(embedding, linear="weight", distributed=[VOCABULARY]),
    **{
        f"aten.{name}": CONVOLUTION
        for name in (
            "conv1d.default",
            "conv2d.default",
            "conv3d.default",
            "conv1d.padding",
            "conv2d.padding",
            "conv3d.padding",
            "conv_transpose1d.default",
            "conv_transpose2d.input",
            "conv_transpose3d.input",
            "convolution.default",
        )
    },
}

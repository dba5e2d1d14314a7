"""What autograd keeps for the backward of an operator.

The operator is run once on meta tensors of its global shapes, and saved tensor hooks show what it keeps. A saved tensor that
shares its storage with an operand or a result counts as that operand or result (a linear saves a transposed view of its weight,
say); others are internal: statistics, masks, the log-softmax of a loss. Operands are assumed contiguous. The same run and
its backward show how much workspace the operator needs, and which gradients alias the incoming one.

Two operators are described by formula, since on meta tensors they take a different path than on the device:

    attention    the fused kernels keep q, k, v, the mask, the result and one logarithm per row of scores
                 (T. Dao, FlashAttention-2, 2023; torch's CPU kernel likewise); if no fused kernel applies, the run decides
    dropout      the fused kernel keeps a mask of one byte per element; on the CPU one element of the operand's dtype
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.analysis.traffic import Traffic
from autopar.ir.builder import Keywords
from autopar.ir.device import Bytes
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Ref, Static, Value, elements, filled, overload, substitute, text
from autopar.operators import row_of
from autopar.operators.call import Call
from autopar.operators.facts import OpKind
from autopar.runtime.memory_tracker import MemoryTracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Bytes at the global shapes that scale with one of the op's tensors: a rank has the same share of both."""

    bytes: Bytes
    follows: int  # the tensor's position among operands, then results
    elements: int  # of that tensor, global

    def local(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Bytes:
        """The bytes on one rank, whose local shapes are given."""
        return self.bytes * math.prod((*operands, *results)[self.follows]) // max(1, self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """What one op saves for the backward: positions of its operands and results, and internal tensors.

    `forward` is the forward's peak workspace in addition to operands, results and internal tensors. `backward` is the
    backward's, in addition to these and all gradients; it is negative if they are never all alive at once. `traffic` has the
    bytes that each of the backward's `kernels` reads and writes, None if unknown. `strided` has those of kernels that compute
    addresses (`analysis.traffic`), and `computed` the numbers of elements for which they do.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    internal: tuple[Share, ...] = ()
    forward: Share | None = None
    backward: Share | None = None
    traffic: tuple[Share, ...] | None = None
    strided: tuple[Share, ...] = ()
    computed: tuple[Share, ...] = ()
    kernels: int = 0
    through: tuple[int, ...] = ()  # positions of operands whose gradient aliases a result's gradient

    @property
    def internal_bytes(self) -> Bytes:
        """Total bytes of internal tensors, at the global shapes."""
        return sum(share.bytes for share in self.internal)

    def local_internal(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Bytes:
        """Bytes of internal tensors on one rank with these local shapes."""
        return sum(share.local(operands, results) for share in self.internal)

    def local_forward(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Bytes:
        """Bytes of workspace of the forward on one rank with these local shapes."""
        return self.forward.local(operands, results) if self.forward else 0

    def local_backward(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Bytes:
        """Bytes of workspace of the backward on one rank with these local shapes."""
        return self.backward.local(operands, results) if self.backward else 0

    def local_traffic(self, operands: Sequence[Shape], results: Sequence[Shape]) -> tuple[Bytes, Bytes, int]:
        """The backward's memory traffic on one rank with these local shapes: all bytes, the bytes of kernels that compute
        addresses, and the elements of the latter."""
        total, strided, computed = (
            sum(share.local(operands, results) for share in shares)
            for shares in (self.traffic or (), self.strided, self.computed)
        )
        return total, strided, computed


NOTHING = SavedTensors()


def saved(op: Op, values: Mapping[str, Value], *, cpu: bool = False) -> SavedTensors:
    """What autograd saves for `op` on an accelerator, or on the CPU.

    An op whose results need no gradient saves nothing. An op that does not run on meta tensors is assumed to save all operands
    and its first result.
    """
    if not op.requires_grad:
        return NOTHING
    operands = tuple(values[name] for name in op.operands)
    tensors = [_empty(value.shape, value) for value in operands]
    return _formula(op, operands, cpu) or _copied(op, _ran(op, tensors)[0], tensors, cpu)


def workspace(op: Op, values: Mapping[str, Value], *, cpu: bool = False) -> SavedTensors:
    """The memory that an op needs while it runs if nothing is saved: its workspace, and the internal tensors."""
    operands = tuple(values[name] for name in op.operands)
    fused = _formula(op, operands, cpu)
    if fused is None:
        return SavedTensors(forward=_ran(op, [_empty(value.shape, value) for value in operands])[0].forward)
    size = elements(op.results[0].shape)
    return SavedTensors(forward=Share(bytes=fused.internal_bytes, follows=len(operands), elements=size))


def saved_here(
    op: Op,
    values: Mapping[str, Value],
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[Shape],
    *,
    cpu: bool,
    parallel: bool = False,
) -> tuple[SavedTensors, list[torch.Tensor]]:
    """What autograd saves for an op on one rank, and the op's results, as meta tensors with local shapes and strides.

    Strides matter because a kernel may copy a non-contiguous operand, and autograd then saves the copy. The arguments of `op`
    are for local shapes; `shapes` are the local shapes of the results. In a `parallel` form an op keeps its arguments and saves
    what it saves at global shapes, because its operator may not accept the local ones (an LSTM without a row of each gate
    crashes with a segmentation fault).
    """
    fused = _formula(op, [values[name] for name in op.operands], cpu)
    # the result of a fused kernel has the query's strides
    if fused and row_of(op).kind is OpKind.ATTENTION and tensors[0].shape == shapes[0]:
        return fused if op.requires_grad else NOTHING, [torch.empty_like(tensors[0]).requires_grad_(op.requires_grad)]
    found, kinds = (NOTHING, ()) if parallel else _ran(op, tensors)
    if not kinds:
        found, _ = _ran(op, [_empty(values[name].shape, values[name]) for name in op.operands])
    as_given = [shape for shape, _ in kinds] == list(shapes)
    results = [
        torch.empty_strided(*kind, dtype=r.dtype, device="meta") for kind, r in zip(kinds, op.results, strict=True)
    ] if as_given else [_empty(shape, result) for shape, result in zip(shapes, op.results, strict=True)]  # fmt: skip
    if not op.requires_grad:
        return NOTHING, results
    return fused or _copied(op, found, tensors, cpu), [
        tensor.detach().requires_grad_(result.requires_grad) for tensor, result in zip(results, op.results, strict=True)
    ]


def fused_attention(op: Op, values: Mapping[str, Value], *, cpu: bool) -> bool:
    """Whether a fused attention kernel, which keeps no scores, computes an op."""
    operands = [values[name] for name in op.operands]
    return row_of(op).kind is OpKind.ATTENTION and _attention(op, operands, cpu) is not None


def _empty(shape: Shape, value: Value) -> torch.Tensor:
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def _ran(op: Op, tensors: Sequence[torch.Tensor]) -> Ran:
    """Run an op on meta tensors; ops that differ only in names run once."""
    args, kwargs = _numbered(op)
    specs = tuple((tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for x in tensors)
    # 1, 1.0 and True are equal as keys but not as arguments, so the key includes the text.
    return _run(op.target, args, kwargs, f"{text(args)}{kwargs}", specs)


def _numbered(op: Op) -> tuple[tuple[Argument, ...], Keywords]:
    """The op's arguments with operands named by position and devices left out: equal for ops that differ only in names."""
    positions = iter(range(len(op.operands)))

    def number(leaf: Ref | Static) -> Argument:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return Ref(str(next(positions))) if isinstance(leaf, Ref) else leaf

    args = tuple(substitute(argument, number) for argument in op.args)
    return args, tuple((name, substitute(argument, number)) for name, argument in op.kwargs)


MetaSpec = tuple[Shape, Shape, torch.dtype, bool]  # shape, strides, dtype, requires_grad
Ran = tuple["SavedTensors", tuple[tuple[Shape, Shape], ...]]  # the kept tensors; shape and strides of every result


@functools.cache
def _run(target: str, args: tuple[Argument, ...], kwargs: Keywords, _: str, specs: tuple[MetaSpec, ...]) -> Ran:
    """Run the operator on meta tensors and record what autograd keeps."""
    operands = [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=grad)
        for shape, strides, dtype, grad in specs
    ]
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    given, named = filled(args, kwargs, lambda ref: operands[int(ref.name)])
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks, sdpa_kernel(SDPBackend.MATH), MemoryTracker(operands, "meta") as live:
        try:
            out = overload(target)(*given, **named)
        except Exception:  # it has no meta kernel, or rejects these shapes
            return SavedTensors(operands=tuple(range(len(operands))), results=(0,)), ()
        forward = live.peak().bytes - live.now
    results = list(_tensors(out))
    found = replace(_sort(kept, operands, results), forward=_share(forward, 0, operands, results))
    strides = tuple((tuple(x.shape), x.stride()) for x in results)
    return _with_backward(found, kept, operands, results), strides


def _with_backward(
    found: SavedTensors, kept: list[torch.Tensor], operands: list[torch.Tensor], results: list[torch.Tensor]
) -> SavedTensors:
    """The backward's workspace, and the gradients that it passes through; saved tensors are freed as the backward proceeds."""
    wanted = [place for place, operand in enumerate(operands) if operand.requires_grad]
    differentiable = [result for result in results if result.requires_grad]
    if not differentiable:
        return found
    given = [torch.empty_like(result) for result in differentiable]
    tracker = MemoryTracker([*operands, *results, *given, *kept], "meta")
    with warnings.catch_warnings(), tracker as live, Traffic() as traffic:
        kept.clear()
        before = live.now
        try:
            warnings.simplefilter("ignore")  # torch reports a missing autograd kernel only when the backward runs
            made = torch.autograd.grad(differentiable, [operands[place] for place in wanted], given, allow_unused=True)
        except (NotImplementedError, RuntimeError):  # the backward has no meta kernel
            return found
        most = live.peak().bytes
    gradients = {place: gradient for place, gradient in zip(wanted, made, strict=True) if gradient is not None}
    passed = {_storage(gradient) for gradient in given}
    fresh = {_storage(gradient): gradient.untyped_storage().nbytes() for gradient in gradients.values()}
    new = sum(size for storage, size in fresh.items() if storage not in passed)
    through = tuple(place for place, gradient in gradients.items() if _storage(gradient) in passed)
    return replace(
        found,
        backward=_share(most - before - new, 0, operands, results),
        traffic=tuple(_together(_share(size, numel, operands, results) for size, numel in traffic.moved)),
        strided=tuple(_together(_share(size, numel, operands, results) for size, numel in traffic.strided)),
        computed=tuple(_together(_share(numel, numel, operands, results) for numel in traffic.computed)),
        kernels=traffic.kernels,
        through=through,
    )


def _together(shares: Iterable[Share | None]) -> Iterator[Share]:
    """Merge the shares that follow the same tensor."""
    found: dict[int, Share] = {}
    for share in shares:
        if share:
            before = found.get(share.follows)
            found[share.follows] = replace(share, bytes=share.bytes + before.bytes) if before else share
    yield from found.values()


def _tensors(out: object) -> Iterator[torch.Tensor]:
    """Every tensor among an operator's results, in order."""
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for part in out:
            yield from _tensors(part)


def _sort(kept: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> SavedTensors:
    """Sort the kept tensors into operands, results and neither."""
    home = {_storage(tensor): place for place, tensor in reversed(list(enumerate((*operands, *results))))}
    places = sorted({home[_storage(tensor)] for tensor in kept if _storage(tensor) in home})
    internal = {_storage(tensor): tensor for tensor in kept if _storage(tensor) not in home}
    shares = (_share(t.untyped_storage().nbytes(), t.numel(), operands, results) for t in internal.values())
    return SavedTensors(
        operands=tuple(place for place in places if place < len(operands)),
        results=tuple(place - len(operands) for place in places if place >= len(operands)),
        internal=tuple(share for share in shares if share),
    )


def _share(count: Bytes, numel: int, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Share | None:
    """A share that follows the tensor with as many elements, if there is one, else the largest tensor."""
    sizes = [tensor.numel() for tensor in (*operands, *results)]
    if not count or not sizes:
        return None
    follows = sizes.index(numel if numel in sizes else max(sizes))
    return Share(bytes=count, follows=follows, elements=sizes[follows])


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _formula(op: Op, operands: Sequence[Value], cpu: bool) -> SavedTensors | None:
    """What an op keeps if the device takes a different path than meta tensors; None if it takes the same."""
    row = row_of(op)
    if row.kind is OpKind.ATTENTION:
        return _attention(op, operands, cpu)
    if row.kind is OpKind.DROPOUT and not cpu:
        if not row.is_random(Call.of(op)):
            return NOTHING
        count = elements(operands[0].shape)
        return SavedTensors(internal=(Share(bytes=count, follows=0, elements=count),))
    return None


def _copied(op: Op, found: SavedTensors, tensors: Sequence[torch.Tensor], cpu: bool) -> SavedTensors:
    """On the CPU a recurrent network multiplies all steps at once; if they are not contiguous, it keeps a copy of them."""
    if not cpu or row_of(op).kind is not OpKind.RECURRENT or 0 not in found.operands:
        return found
    steps = tensors[0].transpose(0, 1) if Call.of(op).arguments["batch_first"] else tensors[0]
    if steps.is_contiguous():
        return found
    copy = Share(bytes=steps.numel() * steps.element_size(), follows=0, elements=steps.numel())
    return replace(found, operands=tuple(p for p in found.operands if p), internal=(*found.internal, copy))


def _attention(op: Op, operands: Sequence[Value], cpu: bool) -> SavedTensors | None:
    """What a fused attention kernel keeps; None if none applies: it needs four dims each, equal batches and equal heads."""
    call = Call.of(op)
    query, value = operands[0], operands[2]
    outer = {operand.shape[: 1 if call.arguments["enable_gqa"] else 2] for operand in operands[:3]}
    if len(outer) > 1 or any(len(operand.shape) != 4 for operand in operands[:3]):
        return None
    masks = [operands[position] for position in call.positions("attn_mask")]
    if cpu and (call.arguments["dropout_p"] or query.shape[-1] != value.shape[-1] or any(mask.requires_grad for mask in masks)):
        return None
    if not cpu and query.dtype == torch.float64:
        return None
    result, scalar = op.results[0], 8 if query.dtype == torch.float64 else 4
    rows = Share(bytes=elements(result.shape[:-1]) * scalar, follows=len(operands), elements=elements(result.shape))
    # Boolean masks are converted to additive ones, which are saved instead.
    boolean = [p for p in call.positions("attn_mask") if operands[p].dtype == torch.bool]
    additive_masks = (
        Share(bytes=elements(operands[p].shape) * query.dtype.itemsize, follows=p, elements=elements(operands[p].shape))
        for p in boolean
    )
    return SavedTensors(
        operands=(0, 1, 2, *(p for p in call.positions("attn_mask") if p not in boolean)),
        results=(0,),
        internal=(rows, *additive_masks),
    )
